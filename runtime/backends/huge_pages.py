"""Asks Linux to hold weights in huge pages, of 2 MiB instead of 4 KiB on most processors.

A step reads all weights once, and the processor has to look up where each page of them lies. ONNX Runtime
allocates packed weights one by one, in pieces that are rarely made of whole huge pages: only the kernel can
move them together, later. Weights in a file that is mapped, such as prepared ones, stay as they are: it moves
anonymous memory alone.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import re
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

log = logging.getLogger("planforge")

SYSTEM = Path("/sys/kernel/mm/transparent_hugepage")
PROCESS = Path("/proc/self")
# The ranges of addresses in /proc/self/maps that are written to, private, and no file's; but no stack.
ANONYMOUS = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) rw-p 0+ 00:00 0 *(?:\[heap\]|\[anon:.*\])?$", re.MULTILINE)
MADV_COLLAPSE = 25  # since Linux 6.1
LARGEST = 4 * 2**20  # bytes; where pages have 64 KiB, huge ones have 512 MiB, which weights rarely fill
# Of an entry in /proc/self/pagemap, of 64 bits: the page is in memory, and no other process has it too.
PRESENT = 1 << 63
EXCLUSIVE = 1 << 56

# Measured with GPT-2 124M on two cores: 5 ms of one core for each 2 MiB. A token takes 14 % less time in
# int8, 9 % in int4, 5 % in fp32, so that it pays after 200 to 700 tokens. So a process has to compute twice
# as long first: most that answer once and end never pay. Whether it has is looked at when the shapes of a
# graph's inputs change, for instance with the next prompt, and not at each step.
SECONDS_PER_BYTE = 5e-3 / 2**21
PAYBACK_FACTOR = 2
# Until a block has been moved, whoever reads it waits. With as long a pause before each, the longest of the
# steps meanwhile takes 10 ms instead of 27 to 60, where a step takes 6.
PAUSE = 5e-3


class HugePages:
    """The process's new memory of a `with` block, which opens a graph: it is moved into huge pages later.

    Most of it is the graph's weights; what other threads allocate meanwhile is moved too. Where the kernel
    has no huge pages, or an administrator wants none, nothing happens.

    Args:
        wanted: False for a graph whose weights the processor does not read; nothing happens then.
    """

    opened: ClassVar[weakref.WeakSet[HugePages]] = weakref.WeakSet()
    noting = threading.Lock()  # so that of graphs that are opened at once, one notes a block

    def __init__(self, wanted: bool = True) -> None:
        self.size = read_huge_page_size() if wanted else 0
        self.blocks: list[int] = []  # that are still to be moved
        self.due = 0.0  # by the process's own clock

    def __enter__(self) -> HugePages:
        self.before = self.list_blocks()
        return self

    def __exit__(self, *error: object) -> None:
        with self.noting:
            noted = [other.blocks for other in self.opened]
            self.blocks = sorted((self.list_blocks() - self.before).difference(*noted))
            self.opened.add(self)
        self.before.clear()
        self.due = time.process_time() + PAYBACK_FACTOR * SECONDS_PER_BYTE * self.size * len(self.blocks)

    def list_blocks(self) -> set[int]:
        """Return the addresses of all blocks of the size of a huge page that could become one."""
        if not self.size:
            return set()
        try:
            maps = (PROCESS / "maps").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return set()
        return set(find_blocks(maps, self.size))

    def collapse_when_due(self) -> None:
        """Begin to move the memory, beside whatever runs, if that was not done and begins to pay."""
        if self.blocks and time.process_time() >= self.due:
            arguments = (self.blocks, self.size)
            self.blocks = []
            thread = threading.Thread(
                target=collapse, args=arguments, name="planforge-huge-pages", daemon=True
            )
            try:
                thread.start()
            except RuntimeError as error:  # the process may have no more, or ends
                log.debug("no huge pages: %s", error)

    def forget(self) -> None:
        """Leave the memory alone, which was freed: other graphs may get it."""
        self.blocks = []


def read_huge_page_size() -> int:
    """Return the bytes of a huge page; 0 where this process cannot or shall not have any, or it is vast."""
    try:
        if "[never]" in (SYSTEM / "enabled").read_text(encoding="ascii"):
            return 0
        size = int((SYSTEM / "hpage_pmd_size").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return 0
    return size if size <= LARGEST else 0


def find_blocks(maps: str, size: int) -> Iterator[int]:
    """Yield the addresses of whole blocks in the anonymous private memory that /proc/self/maps lists."""
    for start, end in ANONYMOUS.findall(maps):
        first = -(-int(start, 16) // size) * size
        yield from range(first, int(end, 16) // size * size, size)


def collapse(blocks: Sequence[int], size: int) -> None:
    """Move each block into a huge page, if all of it is in memory: what nobody has touched stays untouched.

    A block whose memory was freed or used otherwise meanwhile is refused, or moved with what it has now.
    """
    moved = 0
    try:
        madvise = find_madvise()
        with (PROCESS / "pagemap").open("rb", buffering=0) as pagemap:
            for block in blocks:
                time.sleep(PAUSE)
                if not is_resident(pagemap.fileno(), block, size):
                    continue
                if madvise(block, size, MADV_COLLAPSE) == 0:
                    moved += 1
                    continue
                error = ctypes.get_errno()
                if error == errno.EINVAL and moved == 0:
                    break  # the kernel does not know this advice
                if error == errno.EBUSY:
                    break  # the process may not have more memory
                if error == errno.ENOMEM and is_resident(pagemap.fileno(), block, size):
                    break  # no huge page is free; where the block is gone, it was freed just now
    except OSError as failure:
        log.debug("no huge pages: %s", failure)
    log.debug("%d MiB were moved into huge pages", moved * size // 2**20)


def find_madvise() -> Any:
    """Return the C library's function, during which Python's other threads run."""
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return madvise


def is_resident(pagemap: int, block: int, size: int) -> bool:
    """Return whether all pages of a block are in memory, and this process's alone."""
    pages = size // mmap.PAGESIZE
    content = os.pread(pagemap, 8 * pages, 8 * (block // mmap.PAGESIZE))
    entries = np.frombuffer(content, np.uint64)
    wanted = np.uint64(PRESENT | EXCLUSIVE)
    return len(entries) == pages and bool(((entries & wanted) == wanted).all())
