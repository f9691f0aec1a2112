"""Interpolated modified Kneser-Ney n-gram model, the baseline of the demo models.

Symbols are integers below `vocab_size`. The model of order n interpolates every shorter
order down to single symbols, and those with the uniform distribution, so that no symbol
ever has probability zero. Discounts are the usual closed-form estimates of Chen and
Goodman (1998): three per order (counts 1, 2, and 3 or more), nothing to tune.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

Context = tuple[int, ...]
Discounts = tuple[float, float, float]


def estimate_discounts(counts: Iterable[int]) -> Discounts:
    """Estimate the discounts for counts of 1, 2 and 3+, from how many n-grams occur 1 to 4 times."""
    n = Counter(count for count in counts if count <= 4)
    if min(n[i] for i in (1, 2, 3, 4)) == 0:
        return (0.5, 0.5, 0.5)
    y = n[1] / (n[1] + 2 * n[2])
    found = [i - (i + 1) * y * n[i + 1] / n[i] for i in (1, 2, 3)]
    first, second, third = (min(max(d, 0.01), i - 0.01) for i, d in enumerate(found, start=1))
    return (first, second, third)


@dataclass
class Level:
    """The n-grams of one length: per context, the count of each next symbol."""

    counts: dict[Context, dict[int, int]]
    discounts: Discounts = (0.5, 0.5, 0.5)
    totals: dict[Context, int] = field(default_factory=dict)
    backoffs: dict[Context, float] = field(default_factory=dict)

    def finish(self) -> None:
        """Compute the discounts and, per context, the weight left for the shorter order."""
        followers = self.counts.values()
        self.discounts = estimate_discounts(c for nexts in followers for c in nexts.values())
        for context, nexts in self.counts.items():
            total = sum(nexts.values())
            self.totals[context] = total
            freed = sum(self.discounts[min(count, 3) - 1] for count in nexts.values())
            self.backoffs[context] = freed / total


class KneserNey:
    """A trained model; `prob` gives the probability of a symbol after a context."""

    def __init__(self, data: Sequence[int], order: int, vocab_size: int) -> None:
        self.order = order
        self.vocab_size = vocab_size
        highest: dict[Context, dict[int, int]] = defaultdict(lambda: defaultdict(int))
        symbols = tuple(data)
        for end in range(order - 1, len(symbols)):
            highest[symbols[end - order + 1 : end]][symbols[end]] += 1
        levels = [Level(highest)]
        for _ in range(order - 1):
            levels.append(Level(self._continuations(levels[-1].counts)))
        self.levels = levels[::-1]  # self.levels[k] has contexts of k symbols
        for level in self.levels:
            level.finish()

    @staticmethod
    def _continuations(
        longer: dict[Context, dict[int, int]],
    ) -> dict[Context, dict[int, int]]:
        """Return the Kneser-Ney counts: how many n-grams longer by one end in each n-gram."""
        shorter: dict[Context, dict[int, int]] = defaultdict(lambda: defaultdict(int))
        for context, nexts in longer.items():
            ending = shorter[context[1:]]
            for symbol in nexts:
                ending[symbol] += 1
        return shorter

    def prob(self, context: Sequence[int], symbol: int) -> float:
        """Return P(symbol | the last order - 1 symbols of context)."""
        history = tuple(context[max(0, len(context) - self.order + 1) :])
        value = 1.0 / self.vocab_size
        for length in range(len(history) + 1):
            key = history[len(history) - length :]
            level = self.levels[length]
            total = level.totals.get(key)
            if total is None:  # then no longer context was seen either
                break
            count = level.counts[key].get(symbol, 0)
            kept = count - level.discounts[min(count, 3) - 1] if count else 0.0
            value = kept / total + level.backoffs[key] * value
        return value

    def bits(self, data: Sequence[int]) -> float:
        """Return the negative log2 likelihood of data[1:], each symbol given those before it."""
        symbols = tuple(data)
        total = 0.0
        for i in range(1, len(symbols)):
            total -= math.log2(self.prob(symbols[max(0, i - self.order + 1) : i], symbols[i]))
        return total

    def check_sums(self, contexts: Iterable[Sequence[int]]) -> float:
        """Return the largest distance from 1 of the summed probabilities after these contexts."""
        everything = range(self.vocab_size)
        sums = [sum(self.prob(context, symbol) for symbol in everything) for context in contexts]
        return max(abs(1.0 - total) for total in sums)
