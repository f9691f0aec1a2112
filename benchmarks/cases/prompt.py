"""GPT-2 124M, random weights: long prompts, and decoding far from the beginning."""

from __future__ import annotations

from pathlib import Path

from ..case import Case, Entry, Target
from .decode import BITS_8, CHECKPOINT, FP32, ahead, entries, generation

PROMPT = 900
NEW = 8
NEAR = 50
FAR = 900
STEPS = 64


def cases(work: Path) -> list[Case]:
    """Return the cases of the time to first token of a prompt of 900 tokens."""
    long = generation(1, PROMPT, NEW)
    return [
        Case(
            "prompt-fp32",
            "prompt",
            f"GPT-2 124M, fp32, a prompt of {PROMPT} tokens: ms to first token",
            entries(FP32, long),
            targets=ahead("ttft_ms", ctranslate2=1.1, llama_cpp=1.5),
            metric="ttft_ms",
        ),
        Case(
            "prompt-8bit",
            "prompt",
            f"GPT-2 124M, 8-bit, a prompt of {PROMPT} tokens: ms to first token",
            entries(BITS_8, long),
            targets=ahead("ttft_ms", ctranslate2=1.5, llama_cpp=1.5),
            metric="ttft_ms",
        ),
    ]


def position_cases(work: Path) -> list[Case]:
    """Return the cases of milliseconds per token around two positions, with an fp32 or int8 cache."""
    found = {}
    for precision in ("int8", "int8-kv8"):
        for position in (NEAR, FAR):
            tokens = generation(1, position - STEPS // 2, STEPS)
            found[f"{precision} at {position}"] = Entry(
                "planforge", precision, CHECKPOINT, tokens, label=f"position {position}"
            )
    # 0.8 of the speed at the near position, so that a step may take 1/0.8 of its time.
    targets = (Target(f"int8-kv8 at {FAR}", f"int8-kv8 at {NEAR}", "inter_token_ms", 0.8),)
    return [
        Case(
            "position",
            "position",
            f"GPT-2 124M, ms per token around position {NEAR} and {FAR}",
            found,
            varies={
                "prompts": "positions are compared, not systems",
                "cache": "the int8 cache is compared with the fp32 one",
            },
            targets=targets,
            metric="inter_token_ms",
        )
    ]
