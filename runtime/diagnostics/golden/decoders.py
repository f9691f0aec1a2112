"""A decoder's golden data, and the runtime's own decoding loop compared with it.

V vocabulary
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ...bundle.manifest import Artifact
from ...decoding.decoder import Decoder
from ...text.tokenizer import Tokenizer
from ..metrics import Logits, Metrics, Outcome, judge_outcome, max_error, measure
from .cases import Case, Skipped, longest, too_long
from .divergence import follow, with_divergence
from .evenly import evenly
from .files import Arrays

GOLDEN_STEPS = 3  # logits kept per sample: a row of GPT-2's has 200 KB
MAX_BATCH = 8  # of the padded cases, or the graph's largest
PART = 7  # tokens of a step on top of a past; divides no round length


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

    def __len__(self) -> int:
        return len(self.prompt) + len(self.continuation)

    def thin(self, count: int) -> Sample:
        """Return the sample with only `count` of the steps, the first and last among them."""
        keep = list(evenly(len(self.steps), count))
        return replace(self, steps=tuple(self.steps[i] for i in keep), logits=self.logits[keep])


@dataclass(frozen=True)
class Golden:
    """What every engine must reproduce.

    Attributes:
        samples: the last has a prompt of a single token, so that past 0 and past 1 are seen.
        context: tokens that fill the whole context.
        context_logits: (N, V) PyTorch's at its last positions.
        edges: lengths of prompts at which something changes: a plan's tuning, a chunk of the prefill.
        edge_logits: (len(edges), V) logits that follow so many tokens of the context.
    """

    samples: tuple[Sample, ...]
    context: tuple[int, ...]
    context_logits: Logits
    edges: tuple[int, ...]
    edge_logits: Logits


def to_arrays(golden: Golden) -> dict[str, npt.NDArray[Any]]:
    """Return samples, tokens and some of the logits, as golden data stores them."""
    arrays: dict[str, npt.NDArray[Any]] = {
        "context.tokens": np.array(golden.context),
        "context.logits": golden.context_logits[-GOLDEN_STEPS:],
        "edges": np.array(golden.edges, np.int64),
        "edges.logits": golden.edge_logits,
    }
    for i, sample in enumerate(golden.samples):
        thin = sample.thin(GOLDEN_STEPS)
        arrays |= {
            f"sample.{i}.prompt": np.array(thin.prompt),
            f"sample.{i}.continuation": np.array(thin.continuation),
            f"sample.{i}.margins": np.array(thin.margins),
            f"sample.{i}.steps": np.array(thin.steps),
            f"sample.{i}.logits": thin.logits,
        }
    return arrays


def from_arrays(arrays: Arrays) -> Golden:
    """Return the golden data that `to_arrays` stored.

    Raises:
        KeyError: an array is missing.
    """

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
    return Golden(
        samples=samples,
        context=integers("context.tokens"),
        context_logits=arrays["context.logits"],
        edges=integers("edges"),
        edge_logits=arrays["edges.logits"],
    )


def cases(
    decoder: Decoder, golden: Golden, limits: Mapping[str, float], tokenizer: Tokenizer
) -> dict[str, Case]:
    """Return what is compared, by name, as far as the decoder takes so many tokens."""
    room = longest(decoder.artifact)
    samples = [sample for sample in golden.samples if len(sample) <= room]
    known = [edge <= room for edge in golden.edges]
    edges = [edge for edge in golden.edges if edge <= room]
    most = min(MAX_BATCH, decoder.artifact.axis("batch").max)

    def force_tokens() -> Outcome:
        parts = [teacher_forced(decoder, sample) for sample in samples]
        return judge_outcome(measure_parts(parts), limits, errors=errors_of_steps(parts))

    def in_pieces() -> Outcome:
        return judge_outcome(measure_parts(run_in_parts(decoder, samples[-most:])), limits)

    def at_edges() -> Outcome:
        got = [decoder.start(1, edge).prefill([golden.context[:edge]]) for edge in edges]
        return judge_outcome(measure(np.concatenate(got), golden.edge_logits[known]), limits)

    def full() -> Outcome:
        return judge_outcome(measure(*full_context(decoder, golden)), limits)

    found: dict[str, Case] = {}
    if samples:
        found["prefill and decode, batch 1"] = force_tokens
        for size in sorted({min(2, most), most}):
            batch = batch_of(samples, size)
            found[f"greedy, batch {size}, padded"] = greedy_case(decoder, batch, limits, tokenizer)
        found[f"parts of {PART} tokens, batch 1 and {len(samples[-most:])}"] = in_pieces
    if edges:
        found[prompts_of(edges)] = at_edges
    if len(golden.context) <= room:
        found["full context"] = full
    return found


def find_skipped(artifact: Artifact, golden: Golden) -> list[Skipped]:
    """Return what `cases` leaves out."""
    room = longest(artifact)
    found = []
    if long := [len(sample) for sample in golden.samples if len(sample) > room]:
        found.append(too_long(artifact, f"{len(long)} of {len(golden.samples)} samples", max(long)))
    if beyond := [edge for edge in golden.edges if edge > room]:
        found.append(too_long(artifact, prompts_of(beyond), max(beyond)))
    if len(golden.context) > room:
        found.append(too_long(artifact, "full context", len(golden.context)))
    return found


def prompts_of(edges: Sequence[int]) -> str:
    return f"prompts of {', '.join(map(str, edges))} tokens"


def batch_of(samples: Sequence[Sample], size: int) -> list[Sample]:
    """Return so many samples, the last of a single token; samples repeat where there are fewer."""
    *texts, single = samples
    texts = texts or [single]
    return [*(texts[i % len(texts)] for i in range(size - 1)), single]


def measure_parts(parts: Sequence[tuple[Logits, Logits]]) -> Metrics:
    """Measure all parts together; each is what an engine got and what it should have got."""
    got, want = zip(*parts, strict=True)
    return measure(np.concatenate(got), np.concatenate(want))


def errors_of_steps(parts: Sequence[tuple[Logits, Logits]]) -> list[float]:
    """Return the largest error of each known step over all samples."""
    steps = min(len(want) for _, want in parts)
    got, want = (np.stack([rows[:steps] for rows in side], axis=1) for side in zip(*parts, strict=True))
    return [max_error(*rows) for rows in zip(got, want, strict=True)]


def greedy_case(
    decoder: Decoder, samples: Sequence[Sample], limits: Mapping[str, float], tokenizer: Tokenizer
) -> Case:
    """Return the case in which the engine chooses its own tokens, all samples as one padded batch."""

    def run() -> Outcome:
        steps = min(len(s.continuation) for s in samples)
        batch = decoder.start(len(samples), max(len(s.prompt) for s in samples) + steps)
        followed = follow(batch, batch.prefill([s.prompt for s in samples]), samples, limits)
        outcome = judge_outcome(measure_parts(followed.parts), limits, failures=followed.failures)
        prompts = [tokenizer.decode(sample.prompt) for sample in samples]
        return with_divergence(outcome, followed, prompts, samples, tokenizer.decode_known)

    return run


def teacher_forced(decoder: Decoder, sample: Sample) -> tuple[Logits, Logits]:
    """Feed PyTorch's tokens through the cache; return got and want, a row per known step."""
    run = decoder.start(1, len(sample))
    out = [run.prefill([sample.prompt])]
    out += [run.decode([token]) for token in sample.continuation[:-1]]
    return np.concatenate(out)[list(sample.steps)], sample.logits


def run_in_parts(decoder: Decoder, samples: Sequence[Sample]) -> list[tuple[Logits, Logits]]:
    """Run several tokens at a time on top of a past: each known step alone, the last as a padded batch."""
    texts = [[*s.prompt, *s.continuation[:-1]] for s in samples]
    parts: list[tuple[Logits, Logits]] = []
    for sample, tokens in zip(samples, texts, strict=True):
        logits = np.concatenate(list(decoder.start(1, len(tokens)).extend(tokens, PART)))
        rows = [len(sample.prompt) - 1 + step for step in sample.steps]
        parts.append((logits[rows], sample.logits))
    last = decoder.start(len(texts), max(map(len, texts))).prefill(texts, PART)
    parts += [(last[row : row + 1], sample.logits[-1:]) for row, sample in enumerate(samples)]
    return parts


def full_context(decoder: Decoder, golden: Golden) -> tuple[Logits, Logits]:
    """Fill the cache to its last slot: the prompt in chunks, then token by token."""
    tokens = golden.context
    rows = len(golden.context_logits)
    run = decoder.start(1, len(tokens))
    out = [run.prefill([tokens[: len(tokens) - rows + 1]])]
    out += [run.decode([token]) for token in tokens[len(tokens) - rows + 1 :]]
    return np.concatenate(out), golden.context_logits
