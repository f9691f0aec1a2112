"""Where an engine that chooses its own tokens leaves PyTorch's, and whether rounding explains it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from ...decoding.decoder import DecoderRun
from ..metrics import Logits, Outcome, scale_of


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


@dataclass(frozen=True)
class Divergence:
    """The first token of a row that is not PyTorch's.

    Attributes:
        row: of the batch.
        step: how many tokens were the same before.
        want: PyTorch's token.
        got: the engine's.
        margin: by how much PyTorch preferred its own, or to the next best at least, in logits.
        allowed: the margin that rounding explains: two logits inside their limit may have changed places.
    """

    row: int
    step: int
    want: int
    got: int
    margin: float
    allowed: float

    @property
    def failure(self) -> str | None:
        """What is wrong, unless rounding explains it."""
        if self.margin <= self.allowed:
            return None
        return (
            f"new token {self.step} is {self.got}, PyTorch's is {self.want} by a margin of {self.margin:.3g}"
            f" (at most {self.allowed:.3g} is rounding)"
        )

    def describe(
        self, prompt: str, sample: Continued, decode: Callable[[Sequence[int]], str]
    ) -> dict[str, Any]:
        """Return the divergence as text, for people."""
        return {
            "prompt": prompt,
            "common": decode(sample.continuation[: self.step]),
            "common_tokens": self.step,
            "want": decode([self.want]),
            "got": decode([self.got]),
            "margin": self.margin,
            "allowed": self.allowed,
        }


@dataclass(frozen=True)
class Followed:
    """A batch that was decoded freely.

    Attributes:
        parts: got and want of every known step until a row leaves PyTorch's tokens.
        divergences: of the rows that do.
        steps: how many tokens each row was given.
    """

    parts: tuple[tuple[Logits, Logits], ...]
    divergences: tuple[Divergence, ...]
    steps: int

    @property
    def common_prefix(self) -> int:
        """How many tokens all rows share with PyTorch's, of `steps`."""
        return min((divergence.step for divergence in self.divergences), default=self.steps)

    @property
    def failures(self) -> list[str]:
        return [divergence.failure for divergence in self.divergences if divergence.failure is not None]

    @property
    def worst(self) -> Divergence | None:
        """The divergence that rounding explains least."""
        return max(self.divergences, key=lambda divergence: divergence.margin, default=None)


def follow(
    run: DecoderRun, logits: Logits, samples: Sequence[Continued], limits: Mapping[str, float]
) -> Followed:
    """Let the engine choose its own tokens.

    Args:
        run: decoder run that has taken in the samples' prompts.
        logits: (B, V) of the first new token.
        samples: one for each row.
        limits: limits of the graph's precision.
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
                allowed = 2 * limits["max_error"] * scale_of(samples[row].logits)
                divergences.append(Divergence(row, step, want, got, margin, allowed))
        if step + 1 < steps:
            logits = run.decode([int(token) for token in chosen])
    return Followed(tuple(parts), tuple(divergences), steps)


def with_divergence(
    outcome: Outcome,
    followed: Followed,
    prompts: Sequence[str],
    samples: Sequence[Continued],
    decode: Callable[[Sequence[int]], str],
) -> Outcome:
    """Return the outcome with how many tokens the engine shares with PyTorch, and where it left them."""
    metrics = {
        **outcome.metrics,
        "common_prefix": followed.common_prefix,
        "common_prefix_of": followed.steps,
    }
    worst = followed.worst
    text = None if worst is None else worst.describe(prompts[worst.row], samples[worst.row], decode)
    return replace(outcome, metrics=metrics, divergence=text)
