"""Decoding with GPT-2 124M, random weights: a prompt of 32 tokens, 64 new ones, greedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..case import Case, Entry, Target, Work
from ..texts import gpt2_prompts

CHECKPOINT = "gpt2-124m"
# The name of each entry of a case: its system, and the system's name of the precision.
FP32 = {
    "planforge": ("planforge", "fp32"),
    "transformers": ("transformers", "fp32"),
    "optimum": ("optimum_onnx", "fp32"),
    "ctranslate2": ("ctranslate2", "fp32"),
    "llama.cpp": ("llama_cpp", "fp32"),
}
BITS_8 = {
    "planforge": ("planforge", "int8"),
    "ctranslate2": ("ctranslate2", "int8"),
    "llama.cpp": ("llama_cpp", "q8_0"),
}
BITS_4 = {"planforge": ("planforge", "int4"), "llama.cpp": ("llama_cpp", "q4_0")}


def generation(rows: int, tokens: int, new_tokens: int) -> Work:
    """Return the work of random words in, greedy tokens out."""
    texts, prompts = gpt2_prompts(rows, tokens)
    return Work("generate", texts, prompts, new_tokens)


def entries(systems: dict[str, tuple[str, str]], work: Work) -> dict[str, Entry]:
    """Return an entry for each system at the same work."""
    return {name: Entry(*system, CHECKPOINT, work) for name, system in systems.items()}


def ahead(metric: str, **ratios: float) -> tuple[Target, ...]:
    """Return targets of the entry "planforge" against others; underscores in a name stand for dots."""
    return tuple(Target("planforge", name.replace("_", "."), metric, ratio) for name, ratio in ratios.items())


def cases(work: Path) -> list[Case]:
    one = generation(1, 32, 64)
    eight = generation(8, 32, 64)
    limited: dict[str, Any] = {"settings": {"torch_threads": 1}, "label": "torch on 1 thread"}
    single = {
        **entries(FP32, one),
        "optimum, 1 thread": Entry("optimum_onnx", "fp32", CHECKPOINT, one, **limited),
    }
    return [
        Case(
            "decode-fp32-b1",
            "decode",
            "GPT-2 124M, fp32, batch 1: new tokens/s",
            single,
            targets=ahead("per_s", optimum=1.9, ctranslate2=1.3, llama_cpp=0.93),
        ),
        Case(
            "decode-8bit-b1",
            "decode",
            "GPT-2 124M, 8-bit, batch 1: new tokens/s",
            entries(BITS_8, one),
            targets=ahead("per_s", ctranslate2=2.2, llama_cpp=1.15),
        ),
        Case(
            "decode-4bit-b1",
            "decode",
            "GPT-2 124M, 4-bit, batch 1: new tokens/s",
            entries(BITS_4, one),
            targets=ahead("per_s", llama_cpp=1.25),
        ),
        Case(
            "decode-fp32-b8",
            "decode",
            "GPT-2 124M, fp32, batch 8: new tokens/s of the batch",
            entries(FP32, eight),
            targets=ahead("per_s", transformers=1.5, optimum=1.5, ctranslate2=1.5, llama_cpp=1.5),
        ),
        Case(
            "decode-8bit-b8",
            "decode",
            "GPT-2 124M, 8-bit, batch 8: new tokens/s of the batch",
            entries(BITS_8, eight),
            targets=ahead("per_s", ctranslate2=2.0, llama_cpp=2.0),
        ),
    ]
