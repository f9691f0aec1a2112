"""A decoder's golden data, and the runtime's own decoding loop compared with it.

V vocabulary
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ...bundle.manifest import Artifact
from ...decoding.decoder import Decoder
from ...text.tokenizer import Tokenizer
from . import draws
from .cases import Case, Skipped, find_room, skip_too_long
from .divergence import add_divergence, follow
from .draws import Draws, find_skipped_draws, make_draw_cases
from .files import Arrays, choose_evenly
from .metrics import Logits, Metrics, Outcome, judge_outcome, measure, measure_max_error

GOLDEN_STEPS = 3  # logits kept per sample: a row of GPT-2's has 200 KB
MAX_BATCH = 8  # of the padded cases, or the graph's largest
PART = 7  # tokens of a step on top of a past; divides no round length


@dataclass(frozen=True)
class Sample:
    """A prompt, and how PyTorch continues it."""

    prompt: tuple[int, ...]  # token ids
    continuation: tuple[int, ...]  # PyTorch's greedy tokens
    margins: tuple[float, ...]  # by how much PyTorch preferred each of them to the next best, in logits
    steps: tuple[int, ...]  # whose logits are known; step 0 follows the prompt, step i the i-th new token
    logits: Logits  # (len(steps), V) PyTorch's, computed at once and without a cache

    def __len__(self) -> int:
        return len(self.prompt) + len(self.continuation)

    def thin(self) -> Sample:
        """Return the sample with only `GOLDEN_STEPS` of the steps, the first and last among them."""
        keep = list(choose_evenly(len(self.steps), GOLDEN_STEPS))
        return replace(self, steps=tuple(self.steps[i] for i in keep), logits=self.logits[keep])


@dataclass(frozen=True)
class Context:
    """Tokens that fill the whole context, or do so together with the next two."""

    tokens: tuple[int, ...] = ()
    repeats: int = 1  # how often the keys and values of `tokens` are there, one behind the other
    tail: tuple[int, ...] = ()  # tokens behind those that are there more than once

    def __len__(self) -> int:
        return self.repeats * len(self.tokens) + len(self.tail)


@dataclass(frozen=True)
class Golden:
    """What every engine must reproduce."""

    samples: tuple[Sample, ...]  # the last has a prompt of a single token, so that past 0 and 1 are seen
    context: Context
    context_logits: Logits  # (N, V) PyTorch's at the context's last positions
    edges: tuple[int, ...]  # lengths of prompts at which a plan's tuning or a chunk of the prefill changes
    edge_logits: Logits  # (len(edges), V) that follow so many tokens of the context
    # Batches of random shapes; None in golden data of earlier versions, and where a decoder of a few texts is
    # all that is compared.
    draws: Draws | None = field(default=None, kw_only=True)


def to_arrays(golden: Golden, whole: bool = False) -> dict[str, npt.NDArray[Any]]:
    """Return samples, tokens and some of the logits, as golden data stores them; all logits if `whole`."""
    arrays: dict[str, npt.NDArray[Any]] = {
        "context.tokens": np.array(golden.context.tokens),
        "context.repeats": np.array(golden.context.repeats),
        "context.tail": np.array(golden.context.tail, np.int64),
        "context.logits": golden.context_logits if whole else golden.context_logits[-GOLDEN_STEPS:],
        "edges": np.array(golden.edges, np.int64),
        "edges.logits": golden.edge_logits,
    }
    for i, sample in enumerate(golden.samples):
        stored = sample if whole else sample.thin()
        arrays |= {f"sample.{i}.{name}": np.asarray(value) for name, value in vars(stored).items()}
    return arrays | draws.to_arrays(golden.draws)


def from_arrays(arrays: Arrays) -> Golden:
    """Return the golden data that `to_arrays` stored; a KeyError names an array that is missing."""
    samples = tuple(
        Sample(
            prompt=tuple(arrays[f"sample.{i}.prompt"].tolist()),
            continuation=tuple(arrays[f"sample.{i}.continuation"].tolist()),
            margins=tuple(float(margin) for margin in arrays[f"sample.{i}.margins"]),
            steps=tuple(arrays[f"sample.{i}.steps"].tolist()),
            logits=arrays[f"sample.{i}.logits"],
        )
        for i in range(sum(name.endswith(".prompt") for name in arrays))
    )
    return Golden(
        samples=samples,
        context=Context(
            tokens=tuple(arrays["context.tokens"].tolist()),
            repeats=int(arrays.get("context.repeats", 1)),  # earlier bundles have none
            tail=tuple(arrays.get("context.tail", np.array([], np.int64)).tolist()),
        ),
        context_logits=arrays["context.logits"],
        edges=tuple(arrays["edges"].tolist()),
        edge_logits=arrays["edges.logits"],
        draws=draws.from_arrays(arrays),
    )


def make_cases(
    decoder: Decoder, golden: Golden, limits: Mapping[str, float], tokenizer: Tokenizer
) -> dict[str, Case]:
    """Return what is compared, by name, as far as the decoder takes so many tokens."""
    room = find_room(decoder.artifact)
    samples = [sample for sample in golden.samples if len(sample) <= room]
    known = [edge <= room for edge in golden.edges]
    edges = [edge for edge in golden.edges if edge <= room]
    most = min(MAX_BATCH, decoder.artifact.axis("batch").max)

    def compare_steps() -> Outcome:
        parts = [force_tokens(decoder, sample) for sample in samples]
        return judge_outcome(measure_parts(parts), limits, errors=measure_steps(parts))

    def compare_parts() -> Outcome:
        return judge_outcome(measure_parts(run_in_parts(decoder, samples[-most:])), limits)

    def compare_batch_in_parts() -> Outcome:
        metrics = measure_parts(run_batch_in_parts(decoder, samples[-most:]))
        return judge_outcome(metrics, limits, names=["max_error"])  # the mean of so few rows says no more

    def compare_edges() -> Outcome:
        got = [decoder.start(1, edge).prefill([golden.context.tokens[:edge]]) for edge in edges]
        return judge_outcome(measure(np.concatenate(got), golden.edge_logits[known]), limits)

    def compare_full_context() -> Outcome:
        return judge_outcome(measure(*fill_context(decoder, golden)), limits)

    cases: dict[str, Case] = {}
    if samples:
        cases["prefill and decode, batch 1"] = compare_steps
        for size in sorted({min(2, most), most}):
            batch = make_batch(samples, size)
            cases[f"greedy, batch {size}, padded"] = make_greedy_case(decoder, batch, limits, tokenizer)
        cases[f"parts of {PART} tokens, batch 1"] = compare_parts
        if (size := len(samples[-most:])) > 1:
            cases[f"parts of {PART} tokens, batch {size}, padded"] = compare_batch_in_parts
    if edges:
        cases[name_prompts(edges)] = compare_edges
    if 0 < len(golden.context) <= room:
        cases["full context"] = compare_full_context
    if golden.draws is not None:
        cases |= make_draw_cases(decoder, golden.draws, limits)
    return cases


def find_skipped(artifact: Artifact, golden: Golden) -> list[Skipped]:
    """Return what `make_cases` leaves out."""
    room = find_room(artifact)
    skipped = []
    if long := [len(sample) for sample in golden.samples if len(sample) > room]:
        skipped.append(skip_too_long(artifact, f"{len(long)} of {len(golden.samples)} samples", max(long)))
    if beyond := [edge for edge in golden.edges if edge > room]:
        skipped.append(skip_too_long(artifact, name_prompts(beyond), max(beyond)))
    if len(golden.context) > room:
        skipped.append(skip_too_long(artifact, "full context", len(golden.context)))
    return skipped + find_skipped_draws(artifact, golden.draws)


def name_prompts(edges: Sequence[int]) -> str:
    return f"prompts of {', '.join(map(str, edges))} tokens"


def make_batch(samples: Sequence[Sample], size: int) -> list[Sample]:
    """Return so many samples, the last of a single token; samples repeat where there are fewer."""
    *texts, single = samples
    texts = texts or [single]
    return [*(texts[i % len(texts)] for i in range(size - 1)), single]


def measure_parts(parts: Sequence[tuple[Logits, Logits]]) -> Metrics:
    """Measure all parts together; each is what an engine got and what it should have got."""
    got, want = zip(*parts, strict=True)
    return measure(np.concatenate(got), np.concatenate(want))


def measure_steps(parts: Sequence[tuple[Logits, Logits]]) -> list[float]:
    """Return the largest error of each known step over all samples."""
    steps = min(len(want) for _, want in parts)
    got, want = (np.stack([rows[:steps] for rows in side], axis=1) for side in zip(*parts, strict=True))
    return [measure_max_error(*rows) for rows in zip(got, want, strict=True)]


def make_greedy_case(
    decoder: Decoder, samples: Sequence[Sample], limits: Mapping[str, float], tokenizer: Tokenizer
) -> Case:
    """Return the case in which the engine chooses its own tokens, all samples as one padded batch."""

    def run() -> Outcome:
        steps = min(len(s.continuation) for s in samples)
        batch = decoder.start(len(samples), max(len(s.prompt) for s in samples) + steps)
        followed = follow(batch, batch.prefill([s.prompt for s in samples]), samples, limits)
        outcome = judge_outcome(measure_parts(followed.parts), limits, failures=followed.failures)
        prompts = [tokenizer.decode(sample.prompt) for sample in samples]
        return add_divergence(outcome, followed, prompts, samples, tokenizer.decode_known)

    return run


def force_tokens(decoder: Decoder, sample: Sample) -> tuple[Logits, Logits]:
    """Feed PyTorch's tokens through the cache; return got and want, a row per known step."""
    run = decoder.start(1, len(sample))
    out = [run.prefill([sample.prompt])]
    out += [run.decode([token]) for token in sample.continuation[:-1]]
    return np.concatenate(out)[list(sample.steps)], sample.logits


def run_in_parts(decoder: Decoder, samples: Sequence[Sample]) -> list[tuple[Logits, Logits]]:
    """Run several tokens at a time on top of a past, each text alone; return every known step."""
    parts: list[tuple[Logits, Logits]] = []
    for sample in samples:
        tokens = [*sample.prompt, *sample.continuation[:-1]]
        logits = np.concatenate(list(decoder.start(1, len(tokens)).extend(tokens, PART)))
        rows = [len(sample.prompt) - 1 + step for step in sample.steps]
        parts.append((logits[rows], sample.logits))
    return parts


def run_batch_in_parts(decoder: Decoder, samples: Sequence[Sample]) -> list[tuple[Logits, Logits]]:
    """Run several tokens at a time on top of a past, as a padded batch; return the last step of each."""
    texts = [[*s.prompt, *s.continuation[:-1]] for s in samples]
    last = decoder.start(len(texts), max(map(len, texts))).prefill(texts, PART)
    return [(last[row : row + 1], sample.logits[-1:]) for row, sample in enumerate(samples)]


def fill_context(decoder: Decoder, golden: Golden) -> tuple[Logits, Logits]:
    """Fill the cache to its last slot: the prompt in chunks, then token by token."""
    context = golden.context
    tokens = context.tokens
    rows = len(golden.context_logits)
    run = decoder.start(1, len(context))
    if context.repeats > 1:
        run.prefill([tokens])
        run.repeat(context.repeats)
        tokens = context.tail
    out = [run.prefill([tokens[: len(tokens) - rows + 1]])]
    out += [run.decode([token]) for token in tokens[len(tokens) - rows + 1 :]]
    return np.concatenate(out), golden.context_logits
