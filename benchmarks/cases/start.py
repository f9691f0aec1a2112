"""GPT-2 124M from a fresh process: time to its first token, memory after 64 tokens, size of its files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ..case import Case, Entry, Limit, Target
from .decode import BITS_4, BITS_8, FP32, entries, generation

# 1.25 times GPT-2 124M's fp32 weights of 498 MB, and 80 MB
FP32_RSS = 702


def cases(work: Path) -> list[Case]:
    one = generation(1, 32, 64)
    fp32 = entries(FP32, one)
    int8 = entries(BITS_8, one)
    return [
        start_case(
            "start-fp32",
            "fp32",
            fp32,
            targets=(Limit("planforge", "peak_rss_mb", FP32_RSS), no_slower(2.5)),
        ),
        start_case("start-fp32-prepared", "fp32, prepared", prepare(fp32), targets=(no_slower(1.2),)),
        start_case(
            "start-8bit",
            "8-bit",
            int8,
            targets=(
                Limit("planforge", "file_mb", 140),
                Limit("planforge", "peak_rss_mb", 200),
                Limit("planforge", "start_s", 0.4),
                no_slower(1.7),
            ),
        ),
        start_case("start-8bit-prepared", "8-bit, prepared", prepare(int8), targets=(no_slower(1.2),)),
        start_case(
            "start-4bit",
            "4-bit",
            entries(BITS_4, one),
            targets=(Limit("planforge", "peak_rss_mb", 150),),
        ),
    ]


def start_case(name: str, what: str, systems: dict[str, Entry], targets: tuple[Target | Limit, ...]) -> Case:
    """Return the case of one precision."""
    return Case(
        name,
        "start",
        f"GPT-2 124M, {what}: seconds from process start to first token",
        systems,
        targets=targets,
        fresh=True,
        metric="start_s",
        rounds=5 if "bit" in what else 3,
    )


def prepare(systems: dict[str, Entry]) -> dict[str, Entry]:
    """Return PlanForge with its weights packed beforehand, and the quickest to start of the others."""
    ours = replace(systems["planforge"], settings={"prepared": True})
    return {"planforge": ours, "llama.cpp": systems["llama.cpp"]}


def no_slower(times: float) -> Target:
    """Return the target of a start that takes at most so many times as long as llama.cpp's."""
    return Target("planforge", "llama.cpp", "start_s", round(1 / times, 2))
