"""Rounds lengths and batches up, so that an engine meets few shapes and can keep a graph of each."""

from __future__ import annotations


def find_bucket(count: int, limit: int) -> int:
    """Return the smallest of 1, 2, 3, 4, 6, 8, 12, 16, 24, ... that is at least `count`; `limit` at most.

    So less than a half of `count` is added.
    """
    power = 1 << (count - 1).bit_length()
    smaller = power * 3 // 4
    return min(limit, smaller if count <= smaller and power > 2 else power)
