"""Freed memory, given back to the system."""

from __future__ import annotations

import contextlib
import ctypes
import gc


def give_back_memory() -> None:
    """Give freed memory back to the system, between two stages of work on a large model.

    Graphs are full of cycles, and torch and ONNX Runtime leave hundreds of megabytes in glibc's arenas.
    """
    gc.collect()
    with contextlib.suppress(AttributeError, OSError, TypeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)
