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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

log = logging.getLogger("planforge")

SYSTEM = Path("/sys/kernel/mm/transparent_hugepage")
PROCESS = Path("/proc/self")
# The ranges of addresses in /proc/self/maps that are written to, private, and no file's; but no stack.
ANONYMOUS = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) rw-p 0+ 00:00 0 *(?:\[heap\]|\[anon:.*\])?$", re.MULTILINE)
MADV_COLLAPSE = 25  # since Linux 6.1
# Of an entry in /proc/self/pagemap, of 64 bits: the page is in memory, and no other process has it too.
PRESENT = 1 << 63
EXCLUSIVE = 1 << 56

# Measured with GPT-2 124M on two cores: 5 ms of one core for each 2 MiB. A token takes 14 % less time in
# int8, 9 % in int4, 5 % in fp32, so that it pays after 200 to 700 tokens. So a process has to compute twice
# as long first, and to begin another piece of work then: one that answers once and ends never pays.
SECONDS_PER_BYTE = 5e-3 / 2**21
PATIENCE = 2
# Until a block has been moved, whoever reads it waits. With as long a pause before each, the longest of the
# steps meanwhile takes 10 ms instead of 27 to 60, where a step takes 6.
PAUSE = 5e-3


class HugePages:
    """The memory that appears in a `with` block, which opens a graph, and is moved into huge pages later.

    Where the kernel has none, or an administrator wants none, nothing happens.
    """

    def __init__(self) -> None:
        self.size = read_huge_page_size()
        self.blocks: list[int] = []  # that are still to be moved
        self.due = 0.0  # by the process's own clock

    def __enter__(self) -> HugePages:
        self.before = self.list_blocks()
        return self

    def __exit__(self, *error: object) -> None:
        self.blocks = sorted(self.list_blocks() - self.before)
        self.before.clear()
        self.due = time.process_time() + PATIENCE * SECONDS_PER_BYTE * self.size * len(self.blocks)

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
            threading.Thread(
                target=collapse, args=arguments, name="planforge-huge-pages", daemon=True
            ).start()


def read_huge_page_size() -> int:
    """Return the bytes of a huge page; 0 where this process cannot or shall not have any."""
    try:
        if "[never]" in (SYSTEM / "enabled").read_text(encoding="ascii"):
            return 0
        return int((SYSTEM / "hpage_pmd_size").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return 0


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
                if not is_resident(pagemap.fileno(), block, size):
                    continue
                time.sleep(PAUSE)
                if madvise(block, size, MADV_COLLAPSE) == 0:
                    moved += 1
                elif ctypes.get_errno() in (errno.ENOMEM, errno.EBUSY):
                    break  # no huge page is free, or the process may not have more memory
    except OSError as error:
        log.debug("no huge pages: %s", error)
    log.debug("%d MiB of weights are in huge pages", moved * size // 2**20)


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
