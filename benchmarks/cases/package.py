"""GPT-2 124M: the same graph and weights, run by PlanForge and, packaged, by onnxruntime-genai."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ..case import Case, Entry, Target
from .decode import CHECKPOINT, generation

PRECISIONS = ("fp32", "int8", "int4")
RATIO = 0.97  # of genai's tokens per second: what Python may cost


def cases(work: Path) -> list[Case]:
    one = replace(generation(1, 32, 64), options={"logprobs": False})  # genai has no log-probabilities
    return [
        Case(
            f"package-{precision}",
            "package",
            f"GPT-2 124M, {precision}, one graph in two runtimes: new tokens/s",
            {
                "planforge": Entry("planforge", precision, CHECKPOINT, one),
                "genai": Entry("genai_package", precision, CHECKPOINT, one),
            },
            targets=(Target("planforge", "genai", "per_s", RATIO),),
            processes=4,
        )
        for precision in PRECISIONS
    ]
