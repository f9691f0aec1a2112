"""Finds where an engine that chooses its own tokens leaves PyTorch's, and whether rounding explains it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from ...text.tokenizer import Tokenizer
from .case import CaseSet, Row
from .failures import OtherToken
from .metrics import Logits, Metrics, measure, measure_max_error, measure_scale
from .outcome import Outcome, judge_outcome


@dataclass(frozen=True)
class Sample:
    """A prompt, and how PyTorch continues it."""

    prompt: tuple[int, ...]  # token ids
    continuation: tuple[int, ...]  # PyTorch's greedy tokens
    margins: tuple[float, ...]  # by how much PyTorch preferred each of them to the next best, in logits
    steps: tuple[int, ...]  # whose logits are known; step 0 follows the prompt, step i the i-th new token
    logits: Logits  # (len(steps), V) PyTorch's, computed at once and without a cache
    source: tuple[int, ...] = ()  # what a translator's encoder reads
    adapter: int = 0  # the slot of the one that continues it

    def __len__(self) -> int:
        return len(self.prompt) + len(self.continuation)


def list_samples(case_set: CaseSet) -> list[Sample]:
    """Return the prompts that PyTorch has continued, the last of a single token."""
    rows: dict[int, Row] = {}
    for case in case_set.cases:
        for row in case.rows:
            if row.text in case_set.answers["margin"]:
                rows.setdefault(row.text, row)  # the first case reads a prompt, then token by token
    return [read_sample(case_set, row) for row in rows.values()]


def list_batches(case_set: CaseSet) -> list[list[Sample]]:
    """Return the padded batches of prompts that an engine continues by itself."""
    greedy = [case for case in case_set.cases if case.runner == "greedy"]
    return [[read_sample(case_set, row) for row in case.rows] for case in greedy]


def read_sample(case_set: CaseSet, row: Row) -> Sample:
    """Return the prompt of a row that an engine continues, with how PyTorch does."""
    length = row.ends[0]
    text = case_set.texts[row.text]
    tokens = text.tokens
    source = () if text.source is None else case_set.texts[text.source].tokens
    logits = case_set.answers["logits"][row.text]
    margins = case_set.answers["margin"][row.text].values
    steps = tuple(int(position) - length + 1 for position in logits.positions)
    return Sample(
        tokens[:length],
        tokens[length:],
        tuple(map(float, margins)),
        steps,
        logits.values,
        source,
        text.adapter,
    )


class Decodes(Protocol):
    """Rows that go on step by step: an engine's, or those that another runtime has made."""

    def decode(self, tokens: Sequence[int]) -> Logits:
        """Read a token in each row; return the logits (B, V) that follow."""


@dataclass(frozen=True)
class Divergence:
    """The first token of a row that is not PyTorch's."""

    row: int  # of the batch
    step: int  # how many tokens were the same before
    want: int  # PyTorch's token
    got: int  # the engine's
    margin: float  # by how much PyTorch preferred its own, or to the next best at least, in logits
    allowed: float  # that rounding explains: two logits inside their limit may have changed places


@dataclass(frozen=True)
class Followed:
    """A batch that was decoded freely."""

    parts: tuple[tuple[Logits, Logits], ...]  # got and want of known steps until a row leaves PyTorch's
    divergences: tuple[Divergence, ...]  # of the rows that do
    steps: int  # tokens that each row was given

    @property
    def common_prefix(self) -> int:
        """How many tokens all rows share with PyTorch's, of `steps`."""
        return min((divergence.step for divergence in self.divergences), default=self.steps)

    @property
    def failures(self) -> list[OtherToken]:
        """What rounding does not explain."""
        return [
            OtherToken(
                f"new token {one.step} is {one.got}, PyTorch's is {one.want} by a margin of {one.margin:.3g}"
                f" (at most {one.allowed:.3g} is rounding)"
            )
            for one in self.divergences
            if not one.margin <= one.allowed  # NaN is not
        ]


def follow(run: Decodes, logits: Logits, samples: Sequence[Sample], limits: Mapping[str, float]) -> Followed:
    """Let the engine choose its own tokens, a sample in each row.

    The run has taken in the samples' prompts; the logits (B, V) are those of the first new token.
    """
    steps = min(len(s.continuation) for s in samples)
    known = [dict(zip(s.steps, s.logits, strict=True)) for s in samples]
    following = set(range(len(samples)))
    parts = []
    divergences = []
    for step in range(steps):
        chosen = logits.argmax(-1)
        for row in sorted(following):
            want = samples[row].continuation[step]
            got = int(chosen[row])
            reference = known[row].get(step)
            if reference is not None:
                parts.append((logits[row : row + 1], reference[None]))
            if got != want:
                following.discard(row)
                margin = samples[row].margins[step]
                if reference is not None:
                    margin = float(reference[want] - reference[got])
                allowed = 2 * limits["max_error"] * measure_scale(samples[row].logits)
                divergences.append(Divergence(row, step, want, got, margin, allowed))
        if step + 1 < steps:
            logits = run.decode([int(token) for token in chosen])
    return Followed(tuple(parts), tuple(divergences), steps)


def measure_parts(parts: Sequence[tuple[Logits, Logits]]) -> Metrics:
    """Measure all parts together; each is what an engine got and what it should have got."""
    got, want = zip(*parts, strict=True)
    return measure(np.concatenate(got), np.concatenate(want))


def measure_steps(parts: Sequence[tuple[Logits, Logits]]) -> list[float]:
    """Return the largest error of each known step over all samples."""
    steps = min(len(want) for _, want in parts)
    got, want = (np.stack([rows[:steps] for rows in side], axis=1) for side in zip(*parts, strict=True))
    return [measure_max_error(*rows) for rows in zip(got, want, strict=True)]


def judge_followed(
    followed: Followed,
    samples: Sequence[Sample],
    prompts: Sequence[str],
    tokenizer: Tokenizer,
    limits: Mapping[str, float],
) -> Outcome:
    """Return the outcome of a batch that was decoded freely, with where it left PyTorch's tokens."""
    outcome = judge_outcome(measure_parts(followed.parts), limits, failures=followed.failures)
    prefix = {"common_prefix": followed.common_prefix, "common_prefix_of": followed.steps}
    outcome = replace(outcome, metrics={**outcome.metrics, **prefix})
    if not followed.divergences:
        return outcome
    worst = max(followed.divergences, key=lambda divergence: divergence.margin)
    text = {
        "prompt": prompts[worst.row],
        "common": tokenizer.decode_known(samples[worst.row].continuation[: worst.step]),
        "common_tokens": worst.step,
        "want": tokenizer.decode_known([worst.want]),
        "got": tokenizer.decode_known([worst.got]),
        "margin": worst.margin,
        "allowed": worst.allowed,
    }
    return replace(outcome, divergence=text)
