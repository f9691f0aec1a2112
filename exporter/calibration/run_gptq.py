"""Rounds a model's weights with GPTQ, several at a time, and says how long that takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from ...runtime.backends.threads import choose_threads
from ...runtime.progress import Notice, StageCounter
from ..passes.quantize import Blocks, quantize

if TYPE_CHECKING:
    from torch import Tensor

Array = npt.NDArray[np.float32]
Read: TypeAlias = "Callable[[], Array]"  # gives a weight (N, K)
T = TypeVar("T")
R = TypeVar("R")

MOST_THREADS = 3  # each holds two matrices (K, K)
LONG_SECONDS = 10.0  # what takes longer is said before


def round_weights(
    read: Mapping[str, Read],
    rows: Mapping[str, Tensor],
    size: int,
    progress: Callable[[str], None],
    stage: str,
) -> dict[str, Blocks]:
    """Return weights in int4 by name, each rounded with GPTQ for the rows (M, K) that it reads.

    Weights that read the same rows, which are one tensor, are rounded as one: factorizing takes longest.

    Args:
        read: gives the weights; those without rows are left out.
        rows: what each weight reads.
        size: columns of a block.
        progress: told how many weights are done, and before that what takes long.
        stage: how its lines begin.
    """
    together: dict[int, list[str]] = {}
    for name in rows:
        together.setdefault(id(rows[name]), []).append(name)
    groups = list(together.values())
    work = [count_operations(rows[names[0]], [read[name] for name in names]) for names in groups]

    def round_group(names: Sequence[str]) -> dict[str, Blocks]:
        weights = [read[name]() for name in names]
        joined = quantize(np.concatenate(weights), 4, size, rows[names[0]].float().numpy())
        ends = np.cumsum([len(weight) for weight in weights])[:-1]
        parts = zip(np.split(joined.q, ends), np.split(joined.scale, ends), strict=True)
        return {name: Blocks(*part, bits=4) for name, part in zip(names, parts, strict=True)}

    count = StageCounter(progress, stage, "weights")
    threads = min(MOST_THREADS, choose_threads().count)
    began = time.monotonic()
    done: dict[str, Blocks] = {}
    for found in map_in_threads(round_group, groups, threads):
        if not done:
            seconds = (time.monotonic() - began) * sum(work) / work[0] / threads
            if seconds >= LONG_SECONDS:
                progress(
                    Notice(f"GPTQ takes about {seconds:,.0f} s; --quantizer rtn loses more, and takes none")
                )
        done |= found
        count(len(done), len(rows))
    return done


def count_operations(rows: Tensor, read: Iterable[Read]) -> float:
    """Return about how many multiplications it takes to round weights for the rows (M, K) that they read."""
    M, K = rows.shape
    N = sum(len(weight()) for weight in read)
    return K**2 * (M + N + K / 3)


def map_in_threads(work: Callable[[T], R], items: Sequence[T], threads: int) -> Iterator[R]:
    """Yield what `work` returns of each item, in their order; several are worked on at once.

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
