"""GPT-2 124M: a fresh process to its first token, its memory after 64, its files."""

from __future__ import annotations

from pathlib import Path

from ..case import Case, Limit
from .decode import BITS_8, FP32, entries, generation

# 1.25 times GPT-2 124M's fp32 weights of 498 MB, and 80 MB
FP32_RSS = 702


def cases(work: Path) -> list[Case]:
    one = generation(1, 32, 64)
    return [
        Case(
            "start-fp32",
            "start",
            "GPT-2 124M, fp32: seconds from process start to first token",
            entries(FP32, one),
            targets=(Limit("planforge", "peak_rss_mb", FP32_RSS),),
            fresh=True,
            metric="start_s",
            rounds=3,
        ),
        Case(
            "start-8bit",
            "start",
            "GPT-2 124M, 8-bit: seconds from process start to first token",
            entries(BITS_8, one),
            targets=(
                Limit("planforge", "file_mb", 140),
                Limit("planforge", "peak_rss_mb", 245),
                Limit("planforge", "start_s", 0.4),
            ),
            fresh=True,
            metric="start_s",
            rounds=5,
        ),
    ]
