"""Where an engine that chooses its own tokens leaves PyTorch's, and whether rounding explains it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, TypeAlias

from .metrics import Logits, Outcome, measure_scale

if TYPE_CHECKING:
    from . import decoders, translations

    Sample: TypeAlias = decoders.Sample | translations.Sample


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
    def failures(self) -> list[str]:
        """What rounding does not explain, in words."""
        return [
            f"new token {one.step} is {one.got}, PyTorch's is {one.want} by a margin of {one.margin:.3g}"
            f" (at most {one.allowed:.3g} is rounding)"
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


def add_divergence(
    outcome: Outcome,
    followed: Followed,
    prompts: Sequence[str],
    samples: Sequence[Sample],
    decode: Callable[[Sequence[int]], str],
) -> Outcome:
    """Return the outcome with how many tokens the engine shares with PyTorch, and where it left them."""
    prefix = {"common_prefix": followed.common_prefix, "common_prefix_of": followed.steps}
    outcome = replace(outcome, metrics={**outcome.metrics, **prefix})
    if not followed.divergences:
        return outcome
    worst = max(followed.divergences, key=lambda divergence: divergence.margin)
    text = {
        "prompt": prompts[worst.row],
        "common": decode(samples[worst.row].continuation[: worst.step]),
        "common_tokens": worst.step,
        "want": decode([worst.want]),
        "got": decode([worst.got]),
        "margin": worst.margin,
        "allowed": worst.allowed,
    }
    return replace(outcome, divergence=text)
