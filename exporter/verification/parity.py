"""Runs an artifact through the runtime's own decoder and compares every logit with PyTorch's.

V vocabulary
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from .gate import Comparison, Logits, Metrics, judge, measure
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
    for prompt in chosen:
        continuation = reference.greedy(prompt, steps)
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
    limits: dict[str, float],
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
        progress(f"{artifact.id}: prompts one by one")
        alone, batch = expected.samples, f"batch {len(expected.samples)}, padded"
        add("prefill and decode, batch 1", backend.name, measure_samples([teacher_forced(decoder, [s]) for s in alone]))
        progress(f"{artifact.id}: {batch}")
        add(f"prefill and decode, {batch}", backend.name, measure_samples([teacher_forced(decoder, alone)]))
        progress(f"{artifact.id}: full context")
        add("full context", backend.name, measure(*full_context(decoder, expected)))
        progress(f"{artifact.id}: greedy")
        add("free-running greedy", backend.name, *greedy(decoder, alone, limits))
    finally:
        decoder.close()
    if artifact.precision != "fp32":
        progress(f"{artifact.id}: node by node")
        engine = f"node by node, rounded to {artifact.precision}"
        try:
            add("prefill of every position", engine, measure(*rounded_prefill(bundle, artifact, alone[0])))
        except NotFiniteError as error:
            nothing = measure(np.full_like(alone[0].logits[:1], np.nan), alone[0].logits[:1])
            add("prefill of every position", engine, nothing, [str(error)])
    return comparisons


def measure_samples(parts: Sequence[tuple[Logits, Logits]]) -> Metrics:
    got, want = zip(*parts, strict=True)
    return measure(np.concatenate(got), np.concatenate(want))


def teacher_forced(decoder: Decoder, samples: Sequence[Sample]) -> tuple[Logits, Logits]:
    """Feeds PyTorch's tokens through the cache, all samples as one batch; got and want, row by row."""
    steps = min(len(s.continuation) for s in samples)
    capacity = max(len(s.prompt) for s in samples) + steps
    run = decoder.start(len(samples), capacity)
    out = [run.prefill([s.prompt for s in samples])]
    out += [run.decode([s.continuation[i] for s in samples]) for i in range(steps - 1)]
    logits = np.stack(out)  # (steps, samples, V)
    got = [logits[list(s.steps), row] for row, s in enumerate(samples)]
    return np.concatenate(got), np.concatenate([s.logits for s in samples])


def full_context(decoder: Decoder, expected: Expectation) -> tuple[Logits, Logits]:
    """Fills the cache to its last slot: the prompt in chunks, then token by token."""
    tokens, rows = expected.context, len(expected.context_logits)
    run = decoder.start(1, len(tokens))
    out = [run.prefill([tokens[: len(tokens) - rows + 1]])]
    out += [run.decode([token]) for token in tokens[len(tokens) - rows + 1 :]]
    return np.concatenate(out), expected.context_logits


def greedy(
    decoder: Decoder, samples: Sequence[Sample], limits: dict[str, float]
) -> tuple[Metrics, list[str]]:
    """Lets the engine choose its own tokens until it leaves PyTorch's; says where, and by what margin."""
    got, want, failures = [], [], []
    for sample in samples:
        logits_at = dict(zip(sample.steps, sample.logits, strict=True))
        run = decoder.start(1, len(sample.prompt) + len(sample.continuation))
        logits = run.prefill([sample.prompt])
        for step, token in enumerate(sample.continuation):
            reference = logits_at.get(step)
            if reference is not None:
                got.append(logits[0])
                want.append(reference)
            chosen = int(logits[0].argmax())
            if chosen != token:
                failures += divergence(step, token, chosen, reference, limits)
                break
            logits = run.decode([token])
    return measure(np.stack(got), np.stack(want)), failures


def divergence(
    step: int, token: int, chosen: int, reference: Logits | None, limits: dict[str, float]
) -> list[str]:
    """A failure, if the reference preferred its token by more than two logits inside the limit can move."""
    if reference is None:
        return []
    margin = float(reference[token] - reference[chosen])
    allowed = 2 * limits["max_error"] * max(1.0, float(reference.std()))
    if margin <= allowed:
        return []
    return [f"token {step} is {chosen}, PyTorch's is {token} by a margin of {margin:.3g} (allowed {allowed:.3g})"]


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
