"""The three levels of a verification, with their costs in weights times tokens.

What is counted and not timed is the same on any machine. A small model has all cases at `standard` too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ..runtime.errors import InputError
from ..runtime.suggest import did_you_mean


@dataclass(frozen=True)
class Level:
    """The budgets of one level; each work is a model's weights times the tokens that it reads.

    Attributes:
        name: what a user calls it.
        meaning: what a passed verdict of this level says.
        random_work: of random texts; at 0 there are none.
        min_random: tokens of random texts, however large the model is.
        step_work: of single steps, which read all weights each.
        batch_work: weights times the random batches; there is at least one of each size.
        prefill_work: of the random batches' tokens, padding included; a half of the longest text is always
            allowed for each batch.
        cached: tokens of a random batch's cache, rows and all; one row may have a whole context.
        text_work: of real text, of which every token is predicted, and of the prompts.
        min_text: tokens of real text that are read however large the model is.
        context_work: of a long context, of which as many tokens are read.
        min_context: tokens of it that are read however large the model is; 0 leaves it out.
    """

    name: str
    meaning: str
    random_work: float
    min_random: int
    step_work: float
    batch_work: float
    prefill_work: float
    cached: int
    text_work: float
    min_text: int
    context_work: float
    min_context: int

    def count_text(self, weights: int) -> float:
        """Return how many tokens of real text a model of so many weights reads."""
        return max(self.min_text, self.text_work / weights)

    def count_context(self, weights: int) -> float:
        """Return how many tokens of a context it reads at most."""
        return max(self.min_context, self.context_work / weights)

    def count_samples(self, weights: int, tokens: int) -> float:
        """Return how many texts of up to so many tokens it reads, for which it is asked token by token."""
        return max(MIN_SAMPLES, self.count_text(weights) / tokens)


MIN_SAMPLES = 3  # one of a batch's rows is a single token, and two others are padded
LEVELS = {
    level.name: level
    for level in (
        Level("quick", "a smoke test", 0, 0, 0, 0, 0, 0, 0, 128, 0, 0),
        Level(
            name="standard",
            meaning="what the model's size allows",
            random_work=4e10,
            min_random=128,
            step_work=5e9,
            batch_work=1.5e9,
            prefill_work=2e10,
            cached=2048,
            text_work=8e10,
            min_text=512,
            context_work=3.3e10,
            min_context=256,
        ),
        Level("full", "every case", 2.6e11, 256, 3e10, math.inf, 2.6e11, 8192, math.inf, 0, math.inf, 0),
    )
}
QUICK = LEVELS["quick"]
STANDARD = LEVELS["standard"]
FULL = LEVELS["full"]
# The level for choosing a decoder's int8 and int4 without a verdict: standard's cases of real text.
CALIBRATION = replace(STANDARD, name="calibration", random_work=0, step_work=0, context_work=0, min_context=0)


def find_level(name: str) -> Level:
    """Return the level of a name; raise an InputError with all names for an unknown one."""
    if name not in LEVELS:
        raise InputError(f"level {name!r} is not one of {', '.join(LEVELS)}{did_you_mean(name, LEVELS)}")
    return LEVELS[name]


def describe_quick(name: str) -> str:
    """Return the words to follow "passed" at a level that says little; "" at the others, and without one."""
    return f" ({QUICK.name}, {QUICK.meaning})" if name == QUICK.name else ""


def parse_verify(verify: bool | str) -> Level | None:
    """Return the level that an export's `verify` names: True is "standard", False verifies nothing."""
    if isinstance(verify, bool):
        return STANDARD if verify else None
    return find_level(verify)
