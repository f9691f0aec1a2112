"""Which sequences run together: neighbours in length, so that little padding is computed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

R = TypeVar("R")

TOKEN_BUDGET = 1024  # rows x longest row; larger batches leave the processor's caches
# What starting one more batch costs, in tokens: measured from 8 (BERT base) to 25 (MiniLM), 2 cores.
BATCH_COST = 16


def group_by_length(
    lengths: Sequence[int], max_batch: int, budget: int = TOKEN_BUDGET, batch_cost: int = BATCH_COST
) -> list[list[int]]:
    """Group sequences so that padded tokens and the number of batches together cost least.

    Args:
        lengths: the length of each sequence in tokens.
        max_batch: the most rows of a batch.
        budget: the most padded tokens of a batch; a longer sequence runs alone.
        batch_cost: what a further batch costs, in tokens.

    Returns:
        Indices into `lengths`, a list per batch, each index once; shorter sequences first.
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    cost = [0]  # of the best grouping of the first n, and where its last batch begins
    begin = [0]
    for n in range(1, len(order) + 1):
        longest = lengths[order[n - 1]]
        rows = max(1, min(max_batch, n, budget // max(1, longest)))
        best, start = min((cost[n - r] + r * longest, n - r) for r in range(1, rows + 1))
        cost.append(best + batch_cost)
        begin.append(start)
    groups: list[list[int]] = []
    end = len(order)
    while end:
        groups.append(order[begin[end] : end])
        end = begin[end]
    return groups[::-1]


def sort_by_first_index(groups: list[list[int]]) -> list[list[int]]:
    """Order batches by the first index that each has, so that what was read first is computed first.

    Running the batches in this order lets the results of the first sequences out while later batches have
    yet to run; which sequences run together stays the same.
    """
    return sorted(groups, key=min)


def yield_in_order(
    batches: Iterable[Mapping[int, R]], report: Callable[[int], None], before: int
) -> Iterator[R]:
    """Yield results by their index from 0 on, each as soon as it and those before it are computed.

    Args:
        batches: the results of each batch, by index.
        report: called after each batch with the number of results so far.
        before: number of results before the first of these.
    """
    waiting: dict[int, R] = {}
    given = 0
    for batch in batches:
        waiting |= batch
        report(before + given + len(waiting))
        while given in waiting:
            yield waiting.pop(given)
            given += 1
