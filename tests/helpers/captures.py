"""Answers of a small model, and what ONNX Runtime captured on an emulated GPU for them."""

from __future__ import annotations

from typing import Any

from planforge.runtime import TextGenerator

from .emulated_cuda import EmulatedCuda

PROMPTS = ["Now therefore", "In the beginning God created the heaven", "And"]
Answers = list[tuple[int, ...]]


def answer(model: TextGenerator, count: int = 3, **options: Any) -> Answers:
    """What a model answers to the first prompts."""
    return [one.token_ids for one in model.generate(PROMPTS[:count], max_new_tokens=20, **options)]


def count_captures(cuda: EmulatedCuda) -> int:
    return sum(session.captures for session in cuda.sessions)


def count_replays(cuda: EmulatedCuda) -> int:
    return sum(session.replays for session in cuda.sessions)
