"""Runs a decoder through the runtime's own loop and compares every logit with PyTorch's.

V vocabulary
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from ...runtime.backends.backend import Program
from ...runtime.backends.ort_backend import OrtCpuBackend
from ...runtime.bundle.bundle import Bundle
from ...runtime.bundle.manifest import Artifact
from ...runtime.decoding.decoder import Decoder, pad
from ...runtime.text.tokenizer import Tokenizer
from .decoder_samples import Expectation, Sample, expect, from_arrays, gaps, limits, run_texts, to_arrays
from .divergence import follow, with_divergence
from .gate import COUNTED, Comparison, Logits, Metrics, Outcome, judged, measure
from .node_executor import ExecutedProgram, NotFiniteError, rounded_engine
from .passages import measure_text, read_passages
from .trial import Step, Trial, positions_of

if TYPE_CHECKING:
    from ...models import GPT2

MAX_BATCH = 8  # of the padded cases, or the graph's largest
PART = 7  # tokens of a step on top of a past; divides no round length
WHOLE_TEXTS = 3  # passages of a whole trial
TRIAL_TOKENS = (24, 13)  # at most, of the two texts of a trial


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
    tokenizer = Tokenizer.from_file(bundle.path(str(bundle.manifest.tokenizer["files"][0])))
    decoder = Decoder(backend.open(bundle, artifact), artifact)
    comparisons = []
    try:
        for case, run in cases(decoder, expected, limits, tokenizer).items():
            progress(f"{artifact.id}: {case}")
            comparisons.append(
                Comparison(artifact=artifact.id, backend=backend.name, case=case, **vars(run()))
            )
    finally:
        decoder.close()
    if artifact.precision == "fp16":
        engine = rounded_engine(artifact.precision)
        for case, run in rounded_cases(bundle, artifact, expected, limits).items():
            progress(f"{artifact.id}: {case}, {engine}")
            comparisons.append(Comparison(artifact=artifact.id, backend=engine, case=case, **vars(run())))
    return comparisons


ENOUGH = 500  # tokens of real text; what is counted in fewer says no more of an engine than of the text
Case = Callable[[], Outcome]


def cases(
    decoder: Decoder, expected: Expectation, limits: Mapping[str, float], tokenizer: Tokenizer
) -> dict[str, Case]:
    """What is compared, by name."""
    samples = expected.samples
    most = min(MAX_BATCH, decoder.artifact.axis("batch").max)
    sizes = sorted({min(2, most), most})

    def forced() -> Outcome:
        parts = [teacher_forced(decoder, sample) for sample in samples]
        return judged(measure_parts(parts), limits, errors=errors_of_steps(parts))

    def in_pieces() -> Outcome:
        return judged(measure_parts(in_parts(decoder, samples[-most:])), limits)

    def at_edges() -> Outcome:
        got = [decoder.start(1, edge).prefill([expected.context[:edge]]) for edge in expected.edges]
        return judged(measure(np.concatenate(got), expected.edge_logits), limits)

    def full() -> Outcome:
        return judged(measure(*full_context(decoder, expected)), limits)

    def real_text() -> Outcome:
        got = read_passages(decoder, expected.passages)
        found = measure_text(got, expected.passages)
        few = [name for name in found.LIMITED if name not in COUNTED] if found.rows < ENOUGH else None
        return judged(found, limits, names=few)

    found: dict[str, Case] = {"prefill and decode, batch 1": forced}
    for size in sizes:
        found[f"greedy, batch {size}, padded"] = greedy_case(
            decoder, batch_of(samples, size), limits, tokenizer
        )
    found[f"parts of {PART} tokens, batch 1 and {len(samples[-most:])}"] = in_pieces
    if expected.edges:
        found[f"prompts of {', '.join(map(str, expected.edges))} tokens"] = at_edges
    found["full context"] = full
    if expected.passages and "text_kl" in limits:
        found["real text, every token"] = real_text
    return found


def batch_of(samples: Sequence[Sample], size: int) -> list[Sample]:
    """So many rows, the last of a single token; samples come again where there are fewer."""
    *texts, single = samples
    return [*(texts[i % len(texts)] for i in range(size - 1)), single]


def measure_parts(parts: Sequence[tuple[Logits, Logits]]) -> Metrics:
    got, want = zip(*parts, strict=True)
    return measure(np.concatenate(got), np.concatenate(want))


def errors_of_steps(parts: Sequence[tuple[Logits, Logits]]) -> list[float]:
    """The largest error of each known step over all samples."""
    steps = min(len(want) for _, want in parts)
    return [
        measure_parts([(got[i : i + 1], want[i : i + 1]) for got, want in parts]).max_error
        for i in range(steps)
    ]


def greedy_case(
    decoder: Decoder, samples: Sequence[Sample], limits: Mapping[str, float], tokenizer: Tokenizer
) -> Case:
    """The engine chooses its own tokens, all samples as one padded batch."""

    def run() -> Outcome:
        steps = min(len(s.continuation) for s in samples)
        batch = decoder.start(len(samples), max(len(s.prompt) for s in samples) + steps)
        followed = follow(batch, batch.prefill([s.prompt for s in samples]), samples, limits)
        outcome = judged(measure_parts(followed.parts), limits, failures=followed.failures)
        prompts = [tokenizer.decode(sample.prompt) for sample in samples]
        return with_divergence(outcome, followed, prompts, samples, tokenizer.decode)

    return run


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
    last = decoder.start(len(texts), max(map(len, texts))).prefill(texts, PART)
    return [*parts, *((last[row : row + 1], s.logits[-1:]) for row, s in enumerate(samples))]


def full_context(decoder: Decoder, expected: Expectation) -> tuple[Logits, Logits]:
    """Fills the cache to its last slot: the prompt in chunks, then token by token."""
    tokens, rows = expected.context, len(expected.context_logits)
    run = decoder.start(1, len(tokens))
    out = [run.prefill([tokens[: len(tokens) - rows + 1]])]
    out += [run.decode([token]) for token in tokens[len(tokens) - rows + 1 :]]
    return np.concatenate(out), expected.context_logits


def rounded_cases(
    bundle: Bundle, artifact: Artifact, expected: Expectation, limits: Mapping[str, float]
) -> dict[str, Case]:
    """What is compared through `NodeExecutor`: what an engine that computes in fp16 would do."""
    graph, sample = ir.load(bundle.path(artifact.file)), expected.samples[0]

    def every_position(decoder: Decoder) -> Logits:
        ids = np.array([[*sample.prompt, *sample.continuation[:-1]]])
        rows = [len(sample.prompt) - 1 + step for step in sample.steps]
        return decoder.start(1, ids.size).step(ids, np.ones_like(ids, bool), rows)

    def case(run: Callable[[Decoder], Logits], want: Logits) -> Case:
        def outcome() -> Outcome:
            try:
                got = run(Decoder(ExecutedProgram(graph, artifact), artifact))
            except NotFiniteError as error:
                return judged(measure(np.full_like(want, np.nan), want), limits, failures=[str(error)])
            return judged(measure(got, want), limits)

        return outcome

    return {
        "prefill of every position": case(every_position, sample.logits),
        "full context": case(lambda decoder: full_context(decoder, expected)[0], expected.context_logits),
    }


def trial(
    bundle: Bundle,
    artifact: Artifact,
    expected: Expectation,
    whole: bool = False,
    opened: Callable[[Artifact], Program] | None = None,
) -> Trial:
    """Two texts of unequal length as a padded batch, then a token for each on top of them."""
    del bundle, opened
    if whole and expected.passages:
        texts = [list(passage.tokens) for passage in expected.passages[:WHOLE_TEXTS]]
    else:
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


# An Examiner:
__all__ = ["compare", "expect", "from_arrays", "gaps", "limits", "run_texts", "to_arrays", "trial"]
