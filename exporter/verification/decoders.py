"""Runs a decoder through the runtime's own loop and compares every logit with PyTorch's.

V vocabulary
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from ...runtime.backends.backend import Program
from ...runtime.backends.ort_backend import OrtCpuBackend
from ...runtime.bundle.bundle import Bundle
from ...runtime.bundle.manifest import Artifact
from ...runtime.decoding.decoder import Decoder, DecoderRun, pad
from ...runtime.text.tokenizer import Tokenizer
from . import passages
from .evenly import evenly
from .gate import CAPS, Comparison, Gaps, Logits, Measured, Metrics, judge, limits_for, measure, scale_of
from .node_executor import NodeExecutor, NotFiniteError
from .passages import Passage, TextMetrics, measure_text, passage_of, read_passages, windows
from .trial import Step, Trial, positions_of

if TYPE_CHECKING:
    from ...models import GPT2
    from .decoder_reference import Reference
    from .rounding import Rounding

DECODE_STEPS = 32
PROMPT_TOKENS = 48  # at most; several lengths below that are used
MAX_BATCH = 8  # of the padded cases
PART = 7  # tokens of a step on top of a past; divides no round length
CONTEXT_ROWS = 8  # positions compared at the end of a full context
TRIAL_TOKENS = (24, 13)  # at most, of the two texts of a trial
GOLDEN_STEPS = 3  # logits kept per sample: a row of GPT-2's has 200 KB


@dataclass(frozen=True)
class Sample:
    """A prompt, and how PyTorch continues it.

    Attributes:
        prompt: token ids.
        continuation: PyTorch's greedy tokens.
        margins: by how much PyTorch preferred each of them to the next best, in logits.
        steps: the steps whose logits are known; step 0 follows the prompt, step i the i-th new token.
        logits: (len(steps), V) PyTorch's, computed at once and without a cache.
    """

    prompt: tuple[int, ...]
    continuation: tuple[int, ...]
    margins: tuple[float, ...]
    steps: tuple[int, ...]
    logits: Logits

    def thinned(self, count: int) -> Sample:
        """Only `count` of the steps, the first and last among them."""
        keep = list(evenly(len(self.steps), count))
        return replace(self, steps=tuple(self.steps[i] for i in keep), logits=self.logits[keep])


@dataclass(frozen=True)
class Expectation:
    """What every engine must reproduce.

    Attributes:
        samples: one of them has a prompt of a single token, so that past 0 and past 1 are seen.
        passages: real text, of which every token is predicted; none where no graph has whole numbers.
        context: tokens that fill the whole context.
        context_logits: (CONTEXT_ROWS, V) PyTorch's at its last positions.
        texts: real text beside the passages, to calibrate with; golden data does without.
    """

    samples: tuple[Sample, ...]
    passages: tuple[Passage, ...]
    context: tuple[int, ...]
    context_logits: Logits
    texts: tuple[tuple[int, ...], ...] = ()


def expect(model: GPT2, bundle: Bundle, prompts: Sequence[str]) -> Expectation:
    """Asks PyTorch.

    Args:
        prompts: real text, cut to unequal lengths, so that batches are padded; all of it fills the context.
    """
    from .decoder_reference import Reference

    manifest = bundle.manifest
    tokenizer = Tokenizer.from_file(bundle.path(str(manifest.tokenizer["files"][0])))
    return expectation_of(
        Reference(model), tokenizer, prompts, manifest.max_length, loses_in_text(manifest.artifacts)
    )


def loses_in_text(artifacts: Sequence[Artifact]) -> bool:
    """Whether any graph has to show what it loses on whole passages."""
    return any("text_kl" in CAPS[artifact.precision] for artifact in artifacts)


def gaps(model: GPT2, bundle: Bundle, expected: Expectation, rounding: Rounding) -> Gaps:
    """What rounding does in PyTorch."""
    del bundle
    from .decoder_reference import Reference

    return Reference(model).gaps(expected, rounding)


def run_texts(model: GPT2, expected: Expectation) -> None:
    """Runs PyTorch over the texts to calibrate with."""
    from .decoder_reference import Reference

    for tokens in expected.texts:
        Reference(model).logits(tokens, slice(None))


def limits(bundle: Bundle, expected: Expectation, precision: str, gaps: Gaps) -> dict[str, float]:
    """The limits of a precision, from the one table and from what rounding does in PyTorch.

    Raises:
        ValueError: the rounded model is not finite.
    """
    del bundle, expected
    found = limits_for(precision, gaps.get(""))
    if "text_kl" in CAPS[precision]:
        found |= limits_for(precision, gaps.get("text"), TextMetrics.LIMITED)
    return found


def expectation_of(
    reference: Reference, tokenizer: Tokenizer, prompts: Sequence[str], context: int, with_text: bool = True
) -> Expectation:
    """Samples of unequal length, one of a single token, and a full context of `context` tokens."""
    encoded = [tokens for tokens in map(tokenizer.encode, prompts) if tokens]
    steps = min(DECODE_STEPS + 1, context // 2)
    longest = min(PROMPT_TOKENS, context - steps)
    chosen = [tokens[: max(1, longest // (1 + i % 3))] for i, tokens in enumerate(encoded)]
    chosen.append(encoded[0][:1])
    samples = []
    for prompt, continuation in zip(chosen, reference.greedy(chosen, steps), strict=True):
        logits = reference.logits([*prompt, *continuation[:-1]], slice(len(prompt) - 1, None))
        best = np.sort(logits, axis=-1)[:, -2:]
        margins = tuple(float(margin) for margin in best[:, 1] - best[:, 0])
        steps_known = tuple(range(steps))
        samples.append(Sample(tuple(prompt), tuple(continuation), margins, steps_known, logits))
    text = [token for tokens in encoded for token in tokens]
    filled = (text * (context // len(text) + 1))[:context]
    last = reference.logits(filled, slice(-min(CONTEXT_ROWS, context - 1), None))
    judged, texts = windows(encoded, context) if with_text else ([], [])
    passages = tuple(
        passage_of(tokens, reference.logits(tokens[:-1], slice(None)), len(judged)) for tokens in judged
    )
    return Expectation(tuple(samples), passages, tuple(filled), last, tuple(texts))


def compare(
    bundle: Bundle,
    artifact: Artifact,
    expected: Expectation,
    limits: Mapping[str, float],
    progress: Callable[[str], None] = lambda _: None,
) -> list[Comparison]:
    """Every case of one artifact on ONNX Runtime; fp16 also node by node.

    Returns:
        A comparison per case, passed or not.
    """
    backend = OrtCpuBackend()  # verify() hashed every file, export() has just written them
    decoder = Decoder(backend.open(bundle, artifact), artifact)
    comparisons = []

    def add(case: str, engine: str, metrics: Measured, failures: Sequence[str] = ()) -> None:
        own = {name: limits[name] for name in metrics.LIMITED}
        found = (*judge(metrics, own), *failures)
        comparisons.append(Comparison(artifact.id, engine, case, metrics.to_json(), own, found))

    try:
        samples = expected.samples
        batch = samples[-MAX_BATCH:]  # the last has a single token
        progress(f"{artifact.id}: prompts one by one")
        parts = [teacher_forced(decoder, sample) for sample in samples]
        add("prefill and decode, batch 1", backend.name, measure_parts(parts))
        progress(f"{artifact.id}: greedy, batch {len(batch)}")
        parts, failures = greedy(decoder, batch, limits)
        add(f"greedy, batch {len(batch)}, padded", backend.name, measure_parts(parts), failures)
        progress(f"{artifact.id}: parts of {PART} tokens")
        add(
            f"parts of {PART} tokens, batch 1 and {len(batch)}",
            backend.name,
            measure_parts(in_parts(decoder, batch)),
        )
        progress(f"{artifact.id}: full context")
        add("full context", backend.name, measure(*full_context(decoder, expected)))
        if expected.passages and "text_kl" in limits:
            progress(f"{artifact.id}: real text")
            got = read_passages(decoder, expected.passages)
            add("real text, every token", backend.name, measure_text(got, expected.passages))
    finally:
        decoder.close()
    if artifact.precision == "fp16":
        progress(f"{artifact.id}: node by node")
        engine = f"node by node, rounded to {artifact.precision}"
        try:
            add(
                "prefill of every position",
                engine,
                measure(*rounded_prefill(bundle, artifact, samples[0])),
            )
        except NotFiniteError as error:
            nothing = measure(np.full_like(samples[0].logits, np.nan), samples[0].logits)
            add("prefill of every position", engine, nothing, [str(error)])
    return comparisons


def measure_parts(parts: Sequence[tuple[Logits, Logits]]) -> Metrics:
    got, want = zip(*parts, strict=True)
    return measure(np.concatenate(got), np.concatenate(want))


def teacher_forced(decoder: Decoder, sample: Sample) -> tuple[Logits, Logits]:
    """Feeds PyTorch's tokens through the cache; got and want, a row per known step."""
    run = decoder.start(1, len(sample.prompt) + len(sample.continuation))
    out = [run.prefill([sample.prompt])]
    out += [run.decode([token]) for token in sample.continuation[:-1]]
    return np.concatenate(out)[list(sample.steps)], sample.logits


def in_parts(decoder: Decoder, samples: Sequence[Sample]) -> list[tuple[Logits, Logits]]:
    """Several tokens at a time on top of a past: every known step alone, the last one as a padded batch."""
    texts = [[*s.prompt, *s.continuation[:-1]] for s in samples]
    parts = []
    for sample, tokens in zip(samples, texts, strict=True):
        logits = np.concatenate(list(decoder.start(1, len(tokens)).extend(tokens, PART)))
        rows = [len(sample.prompt) - 1 + step for step in sample.steps]
        parts.append((logits[rows], sample.logits))
    run = decoder.start(len(texts), max(map(len, texts)))
    last = run.prefill(texts, PART)
    parts += [(last[row : row + 1], s.logits[-1:]) for row, s in enumerate(samples)]
    return parts


def full_context(decoder: Decoder, expected: Expectation) -> tuple[Logits, Logits]:
    """Fills the cache to its last slot: the prompt in chunks, then token by token."""
    tokens, rows = expected.context, len(expected.context_logits)
    run = decoder.start(1, len(tokens))
    out = [run.prefill([tokens[: len(tokens) - rows + 1]])]
    out += [run.decode([token]) for token in tokens[len(tokens) - rows + 1 :]]
    return np.concatenate(out), expected.context_logits


def greedy(
    decoder: Decoder, samples: Sequence[Sample], limits: Mapping[str, float]
) -> tuple[list[tuple[Logits, Logits]], list[str]]:
    """Lets the engine choose its own tokens, all samples as one padded batch.

    Returns:
        Got and want of every known step until a row leaves PyTorch's tokens; and a failure for each row
        that does so where PyTorch preferred its own by more than the limits explain.
    """
    steps = min(len(s.continuation) for s in samples)
    run = decoder.start(len(samples), max(len(s.prompt) for s in samples) + steps)
    return follow(run, run.prefill([s.prompt for s in samples]), samples, limits)


class Continued(Protocol):
    """What PyTorch continues with: tokens, margins, and the logits of the steps that are known."""

    @property
    def continuation(self) -> tuple[int, ...]: ...
    @property
    def margins(self) -> tuple[float, ...]: ...
    @property
    def steps(self) -> tuple[int, ...]: ...
    @property
    def logits(self) -> Logits: ...


def follow(
    run: DecoderRun, logits: Logits, samples: Sequence[Continued], limits: Mapping[str, float]
) -> tuple[list[tuple[Logits, Logits]], list[str]]:
    """`greedy` from the logits of the first step on."""
    steps = min(len(s.continuation) for s in samples)
    known = [dict(zip(s.steps, s.logits, strict=True)) for s in samples]
    following = set(range(len(samples)))
    parts, failures = [], []
    for step in range(steps):
        chosen = logits.argmax(-1)
        for row in sorted(following):
            want = known[row].get(step)
            if want is not None:
                parts.append((logits[row : row + 1], want[None]))
            token = samples[row].continuation[step]
            if chosen[row] != token:
                following.discard(row)
                margin = (
                    samples[row].margins[step] if want is None else float(want[token] - want[chosen[row]])
                )
                failures += divergence(step, token, int(chosen[row]), margin, samples[row], limits)
        if step + 1 < steps:
            logits = run.decode([int(token) for token in chosen])
    return parts, failures


def divergence(
    step: int, token: int, chosen: int, margin: float, sample: Continued, limits: Mapping[str, float]
) -> list[str]:
    """A failure, if two logits inside their limit could not have changed places.

    Args:
        margin: by how much PyTorch preferred its token to the chosen one, or to the next best at least.
    """
    allowed = 2 * limits["max_error"] * scale_of(sample.logits)
    if margin <= allowed:
        return []
    text = f"new token {step} is {chosen}, PyTorch's is {token} by a margin of {margin:.3g}"
    return [f"{text} (at most {allowed:.3g} is rounding)"]


def rounded_prefill(bundle: Bundle, artifact: Artifact, sample: Sample) -> tuple[Logits, Logits]:
    """Prompt and continuation through `NodeExecutor`: what an engine that computes in fp16 would do."""
    executor = NodeExecutor(ir.load(bundle.path(artifact.file)))
    tokens = [*sample.prompt, *sample.continuation[:-1]]
    T = len(tokens)
    by_role = {
        "ids": np.array([tokens]),
        "mask": np.ones((1, T), np.int64),
        "positions": np.arange(T)[None],
        "past_lengths": np.zeros(1, np.int32),
        "logit_rows": len(sample.prompt) - 1 + np.array(sample.steps),
    }
    lengths = {"batch": 1, "past": 0, "slots": T}
    feeds = {}
    for spec in artifact.inputs:
        if spec.role.startswith("past."):
            shape = [lengths[a] if isinstance(a, str) else a for a in spec.axis_names()]
            feeds[spec.name] = np.zeros(shape, spec.dtype)
        else:
            feeds[spec.name] = by_role[spec.role]
    return executor.run(feeds)["logits"], sample.logits


def trial(bundle: Bundle, artifact: Artifact, expected: Expectation) -> Trial:
    """Two prompts of unequal length as a padded batch, then a token for each on top of them."""
    del bundle
    longest_first = sorted(expected.samples, key=lambda s: -len(s.prompt))
    texts = [
        [*sample.prompt, *sample.continuation][: most + 1]
        for sample, most in zip((longest_first[0], longest_first[-1]), TRIAL_TOKENS, strict=True)
    ]
    prompts, last = [text[:-1] for text in texts], [text[-1] for text in texts]
    prefill = positions_of(pad(prompts, artifact.padding_side)[1])
    decode = np.array([[len(prompt)] for prompt in prompts])

    def drive(program: Program) -> None:
        run = Decoder(program, artifact).start(len(texts), max(map(len, texts)))
        run.prefill(prompts)
        run.decode(last)

    def reading(text: Sequence[int]) -> Callable[[Any], object]:
        def read(model: GPT2) -> object:
            from .decoder_reference import Reference

            return Reference(model).logits(text, slice(None))

        return read

    steps = (Step("prefill", prefill), Step("decode", decode))
    return Trial(drive, steps, tuple(reading(text) for text in texts))


def to_arrays(expected: Expectation) -> dict[str, npt.NDArray[Any]]:
    """Samples, tokens and some of the logits, as golden data keeps them."""
    arrays: dict[str, npt.NDArray[Any]] = {
        "context.tokens": np.array(expected.context),
        "context.logits": expected.context_logits[-GOLDEN_STEPS:],
    }
    for i, sample in enumerate(expected.samples):
        thin = sample.thinned(GOLDEN_STEPS)
        arrays |= {
            f"sample.{i}.prompt": np.array(thin.prompt),
            f"sample.{i}.continuation": np.array(thin.continuation),
            f"sample.{i}.margins": np.array(thin.margins),
            f"sample.{i}.steps": np.array(thin.steps),
            f"sample.{i}.logits": thin.logits,
        }
    return arrays | passages.to_arrays(expected.passages)


def from_arrays(arrays: Mapping[str, npt.NDArray[Any]]) -> Expectation:
    """What `to_arrays` made."""

    def integers(name: str) -> tuple[int, ...]:
        return tuple(int(number) for number in arrays[name])

    samples = tuple(
        Sample(
            prompt=integers(f"sample.{i}.prompt"),
            continuation=integers(f"sample.{i}.continuation"),
            margins=tuple(float(margin) for margin in arrays[f"sample.{i}.margins"]),
            steps=integers(f"sample.{i}.steps"),
            logits=arrays[f"sample.{i}.logits"],
        )
        for i in range(sum(name.endswith(".prompt") for name in arrays))
    )
    found = passages.from_arrays(arrays)
    return Expectation(samples, found, integers("context.tokens"), arrays["context.logits"])
