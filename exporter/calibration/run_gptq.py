"""Rounds a model's weights with GPTQ, several at a time, and says how long that takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from ...runtime.apps.stage_progress import Notice, StageCounter
from ...runtime.backends.threads import choose_threads
from ..passes.gptq import round_weight
from ..passes.quantize import QuantizedWeights, choose_scales
from ..passes.quantized_weight import QuantizedWeight

if TYPE_CHECKING:
    from torch import Tensor

Array = npt.NDArray[np.float32]
T = TypeVar("T")
R = TypeVar("R")
Names: TypeAlias = "tuple[str, ...]"

MAX_THREADS = 3  # each holds two matrices (K, K)
LONG_SECONDS = 10.0  # what takes longer is said before


def round_weights(
    weights: QuantizedWeights,
    shapes: Mapping[str, Sequence[int]],
    rows: dict[str, Tensor],
    progress: Callable[[str], None],
    stage: str,
) -> dict[str, QuantizedWeight]:
    """Return weights by name, each rounded with GPTQ for the rows (M, K) that it reads.

    Weights that read the same rows, which are one tensor, are rounded as one: factorizing takes longest.

    Args:
        weights: those without rows are left out.
        shapes: the weights' (N, K).
        rows: what each weight reads; those of weights that are done are removed.
        progress: told how many weights are done, and before that what takes long.
        stage: how its lines begin.
    """
    together: dict[tuple[int, int], list[str]] = {}
    for name in rows:
        together.setdefault((id(rows[name]), weights.bits[name]), []).append(name)
    heights = {tuple(names): sum(shapes[name][0] for name in names) for names in together.values()}

    def round_group(names: Names, x: Array) -> dict[str, QuantizedWeight]:
        own = [weights.read[name]() for name in names]
        format = weights.formats[weights.bits[names[0]]]
        size = format.choose_block(own[0].shape[1], weights.size)
        scales = [choose_scales(weight, format, size) for weight in own]
        joined = round_weight(np.concatenate(own), np.concatenate(scales), format, x)
        codes = np.split(joined.codes, np.cumsum([shapes[name][0] for name in names])[:-1])
        parts = zip(names, codes, scales, strict=True)
        return {name: QuantizedWeight(codes, scale, format) for name, codes, scale in parts}

    done: dict[str, QuantizedWeight] = {}
    for found in round_groups(round_group, heights, rows, progress, stage):
        done |= found
    return done


def round_groups(
    round_group: Callable[[Names, Array], R],
    heights: Mapping[Names, int],
    rows: dict[str, Tensor],
    progress: Callable[[str], None],
    stage: str,
) -> Iterator[R]:
    """Yield the results of `round_group` for each group of weights, which GPTQ rounds as one.

    Args:
        round_group: gets the names of a group's weights, and what they read; called in several threads.
        heights: N of all weights of a group.
        rows: what the first weight of each group reads; those of groups that are done are removed.
        progress: told how many weights are done, and before that what takes long.
        stage: how its lines begin.
    """
    groups = {names: count_operations(rows[names[0]], N) for names, N in heights.items()}

    def work(names: Names) -> R:
        x, *_ = [rows.pop(name) for name in names if name in rows]
        return round_group(names, x.float().numpy())

    count = StageCounter(progress, stage, "weights")
    total = sum(map(len, groups))
    done = 0
    threads = min(MAX_THREADS, choose_threads().count)
    began = time.monotonic()
    for names, found in zip(groups, map_in_threads(work, list(groups), threads), strict=True):
        if not done:
            seconds = (time.monotonic() - began) * sum(groups.values()) / groups[names] / threads
            if seconds >= LONG_SECONDS:
                progress(
                    Notice(
                        f"GPTQ takes about {seconds:,.0f} s; --quantizer rtn takes almost no time, with a"
                        " larger error"
                    )
                )
        done += len(names)
        count(done, total)
        yield found


def count_operations(rows: Tensor, N: int) -> float:
    """Return about how many multiplications it takes to round a weight (N, K) for rows (M, K)."""
    M, K = rows.shape
    return K**2 * (M + N + K / 3)


def map_in_threads(work: Callable[[T], R], items: Sequence[T], threads: int) -> Iterator[R]:
    """Yield the result of `work` for each item, in their order; several are worked on at once.

    PyTorch computes each with one thread: several spin while they wait for one another, which they do often
    here, and longest where other processes want the cores too.
    """
    import torch

    before = torch.get_num_threads()
    pool = ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,))
    try:
        yield from pool.map(work, items)
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(before)  # of threads that begin later, which the last setting counts for
