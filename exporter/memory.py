"""Gives freed memory back to the system."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import re
import sys
from bisect import bisect_right
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

WEIGHTS = (".safetensors", ".data", ".onnx")  # files that are mapped, and never written through a mapping
REGION = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) (.*)\n", re.MULTILINE)
CHANGED = re.compile(r"^Anonymous: +([0-9]+) kB", re.MULTILINE)  # pages that are not as in the file


def give_back_memory() -> None:
    """Give freed memory back to the system, between two stages of work on a large model.

    Graphs are full of cycles, and torch and ONNX Runtime leave hundreds of megabytes in glibc's arenas.
    """
    gc.collect()
    give_back_freed_memory()
    give_back_mapped_pages()


def give_back_freed_memory() -> None:
    """Give back the free memory of glibc's arenas; objects that wait for a collection stay."""
    with contextlib.suppress(AttributeError, OSError, TypeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def give_back_mapped_pages() -> None:
    """Let go of the pages of mapped weights files: the next reader finds them in the system's cache.

    The system takes them back by itself where it is short of memory; until then they count as this
    process's. Only what a live Python object maps is let go, and that object is held meanwhile: else another
    thread may unmap a file, and map memory of its own at the same address.

    Objects are found by the references to their types. gc.get_objects() would hold every tuple that another
    thread is building, and Python then refuses to finish it (a SystemError).
    """
    if sys.platform != "linux":
        return
    torch = sys.modules.get("torch")
    kinds = () if torch is None else (torch.Tensor, torch.nn.Parameter)
    storages = []
    for owner in gc.get_referrers(mmap.mmap, *kinds):
        if type(owner) is mmap.mmap:
            give_back_map(owner)
        elif type(owner) in kinds and (storage := find_fixed_storage(owner)) is not None:
            storages.append(storage)
    with contextlib.suppress(AttributeError, OSError, TypeError):
        give_back_storages(storages)


def give_back_map(owner: mmap.mmap, begin: int = 0, end: int | None = None) -> None:
    """Give back the pages of a mapping, from the one of byte `begin` on, that cannot have been written to."""
    if sys.platform != "linux":
        return
    begin -= begin % mmap.PAGESIZE
    # It may be closed by now, and cannot be while it is viewed.
    with contextlib.suppress(ValueError, OSError), memoryview(owner) as view:
        if view.readonly:
            owner.madvise(mmap.MADV_DONTNEED, begin, (len(view) if end is None else end) - begin)


def find_fixed_storage(tensor: Any) -> Any:
    """Return the storage of a tensor in memory that stays in place while the storage is held; else None.

    That of a mapped file is such a storage; one that PyTorch allocated may be moved by another thread.
    """
    if tensor.device.type != "cpu" or tensor.layout != sys.modules["torch"].strided:
        return None
    try:
        storage = tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # a tensor that wraps another
        return None
    return None if storage.resizable() or not storage.nbytes() else storage


def give_back_storages(storages: list[Any]) -> None:
    """Give back the pages of mapped weights files that lie wholly in storages that the caller holds.

    PyTorch has no call for it, so it goes by addresses. No other thread can have anything else there: a
    storage that is held keeps its mapping, and only what lies whole in one is let go. Nothing is lost:
    a private mapping of weights is never written through, and one that shows changed pages is left out.
    """
    library = ctypes.CDLL(None, use_errno=True)
    regions = find_mapped_weights(Path("/proc/self/smaps").read_text(encoding="utf-8"))
    for begin, end in intersect_pages([(s.data_ptr(), s.data_ptr() + s.nbytes()) for s in storages], regions):
        library.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_DONTNEED)


def intersect_pages(held: list[tuple[int, int]], regions: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield the whole pages of regions that are held; each pair is a beginning and an end.

    Regions are in order and do not overlap, as a process has them.
    """
    page = mmap.PAGESIZE
    ends = [end for _, end in regions]
    for first, last in sorted(set(held)):
        for begin, end in islice(regions, bisect_right(ends, first), None):
            if begin >= last:
                break
            low = max(begin, -(-first // page) * page)
            high = min(end, last // page * page)
            if low < high:
                yield low, high


class Reclaimer:
    """Gives memory back while many weights take the place of others, not only when all have."""

    EVERY = 2**28  # bytes of weights

    def __init__(self) -> None:
        self._bytes = 0  # since memory was given back

    def count(self, nbytes: int) -> None:
        """Count a weight of `nbytes` that was read from a file, or that replaces another."""
        self._bytes += nbytes
        if self._bytes >= self.EVERY:
            self._bytes = 0
            give_back_freed_memory()
            give_back_mapped_pages()


def find_mapped_weights(smaps: str) -> list[tuple[int, int]]:
    """Return the addresses of mapped weights files with unchanged pages, by /proc/PID/smaps."""
    regions = list(REGION.finditer(smaps))
    ends = [region.start() for region in regions[1:]] + [len(smaps)]
    found = []
    for region, end in zip(regions, ends, strict=True):
        changed = CHANGED.search(smaps, region.end(), end)
        if region[3].endswith(WEIGHTS) and changed is not None and changed[1] == "0":
            found.append((int(region[1], 16), int(region[2], 16)))
    return found
