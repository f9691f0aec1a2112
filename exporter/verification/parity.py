"""Runs an artifact through the runtime's own decoder and compares every logit with PyTorch's.

V vocabulary
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from ...runtime.backends.ort_backend import OrtCpuBackend
from ...runtime.bundle.bundle import Bundle
from ...runtime.bundle.manifest import Artifact
from ...runtime.decoding.decoder import Decoder
from ...runtime.text.tokenizer import Tokenizer
from ..errors import VerificationError
from .gate import Comparison, Logits, Metrics, judge, measure, scale_of
from .node_executor import NodeExecutor, NotFiniteError

if TYPE_CHECKING:
    from .reference import Reference

PROMPTS = Path(__file__).with_name("prompts.txt")
DECODE_STEPS = 32
PROMPT_TOKENS = 48  # at most; several lengths below that are used
CONTEXT_ROWS = 8  # positions compared at the end of a full context


@dataclass(frozen=True)
class Sample:
    """A prompt, and how PyTorch continues it.

    Attributes:
        prompt: token ids.
        continuation: PyTorch's greedy tokens.
        steps: the steps whose logits are known; step 0 follows the prompt, step i the i-th new token.
        logits: (len(steps), V) PyTorch's, computed at once and without a cache.
    """

    prompt: tuple[int, ...]
    continuation: tuple[int, ...]
    steps: tuple[int, ...]
    logits: Logits

    def thinned(self, count: int) -> Sample:
        """Only `count` of the steps, the first and last among them."""
        keep = np.unique(np.linspace(0, len(self.steps) - 1, count).round().astype(int))
        return replace(self, steps=tuple(self.steps[i] for i in keep), logits=self.logits[keep])


@dataclass(frozen=True)
class Expectation:
    """What every engine must reproduce.

    Attributes:
        samples: one of them has a prompt of a single token, so that past 0 and past 1 are seen.
        context: tokens that fill the whole context.
        context_logits: (CONTEXT_ROWS, V) PyTorch's at its last positions.
    """

    samples: tuple[Sample, ...]
    context: tuple[int, ...]
    context_logits: Logits


def read_prompts(path: Path | None) -> list[str]:
    r"""One prompt a line; \n stands for a line break. The built-in ones when no file is given.

    Raises:
        VerificationError: the file is empty, cannot be read, or is not UTF-8.
    """
    try:
        lines = (path or PROMPTS).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise VerificationError(f"the prompts of {path} cannot be read: {error}") from error
    prompts = [line.replace("\\n", "\n") for line in lines if line.strip()]
    if not prompts:
        raise VerificationError(f"{path} holds no prompts; write one a line")
    return prompts


def expect(reference: Reference, tokenizer: Tokenizer, prompts: Sequence[str], context: int) -> Expectation:
    """Asks PyTorch.

    Args:
        prompts: real text. Each prompt gets a length of its own, so that batches are padded.
        context: the model's, in tokens.
    """
    encoded = [tokenizer.encode(text) for text in prompts]
    steps = min(DECODE_STEPS + 1, context // 2)
    longest = min(PROMPT_TOKENS, context - steps)
    lengths = (longest, max(1, longest // 3), 1)
    chosen = [encoded[i % len(encoded)][:length] for i, length in enumerate(lengths)]
    samples = []
    for prompt, continuation in zip(chosen, reference.greedy(chosen, steps), strict=True):
        logits = reference.logits([*prompt, *continuation[:-1]], slice(len(prompt) - 1, None))
        samples.append(Sample(tuple(prompt), tuple(continuation), tuple(range(steps)), logits))
    text = [token for tokens in encoded for token in tokens]
    filled = (text * (context // len(text) + 1))[:context]
    last = reference.logits(filled, slice(-min(CONTEXT_ROWS, context - 1), None))
    return Expectation(tuple(samples), tuple(filled), last)


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
    backend = OrtCpuBackend(verify=True)
    decoder = Decoder(backend.open(bundle, artifact), artifact)
    comparisons = []

    def add(case: str, engine: str, metrics: Metrics, failures: Sequence[str] = ()) -> None:
        found = (*judge(metrics, limits), *failures)
        comparisons.append(Comparison(artifact.id, engine, case, metrics.to_json(), limits, found))

    try:
        samples, count = expected.samples, len(expected.samples)
        progress(f"{artifact.id}: prompts one by one")
        parts = [teacher_forced(decoder, sample) for sample in samples]
        add("prefill and decode, batch 1", backend.name, measure_parts(parts))
        progress(f"{artifact.id}: greedy, batch {count}")
        parts, failures = greedy(decoder, samples, limits)
        add(f"greedy, batch {count}, padded", backend.name, measure_parts(parts), failures)
        progress(f"{artifact.id}: full context")
        add("full context", backend.name, measure(*full_context(decoder, expected)))
    finally:
        decoder.close()
    if artifact.precision != "fp32":
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
    known = [dict(zip(s.steps, s.logits, strict=True)) for s in samples]
    following = set(range(len(samples)))
    parts, failures = [], []
    logits = run.prefill([s.prompt for s in samples])
    for step in range(steps):
        chosen = logits.argmax(-1)
        for row in sorted(following):
            want = known[row].get(step)
            if want is not None:
                parts.append((logits[row : row + 1], want[None]))
            token = samples[row].continuation[step]
            if chosen[row] != token:
                following.discard(row)
                if want is not None:
                    failures += divergence(step, token, int(chosen[row]), want, limits)
        logits = run.decode([int(token) for token in chosen])
    return parts, failures


def divergence(step: int, token: int, chosen: int, want: Logits, limits: Mapping[str, float]) -> list[str]:
    """A failure, if two logits inside their limit could not have changed places."""
    margin = float(want[token] - want[chosen])
    allowed = 2 * limits["max_error"] * scale_of(want)
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
