"""PlanForge alone: how its figures grow with the batch, the context and the model, and with one thread."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..case import Case, Entry, Work
from .decode import CHECKPOINT, generation

NEW = 32
BATCHES = (1, 2, 4, 8, 16, 32)
PROMPTS = (128, 256, 512, 1024 - NEW)
PRECISIONS = ("fp32", "int8")
SIZES = {CHECKPOINT: ("int8", "int4"), "gpt2-medium": ("int8",), "gpt2-large": ("int8",)}
ALONE = "these are figures of PlanForge alone"


def alone(name: str, title: str, entries: dict[str, Entry], metric: str = "per_s") -> Case:
    """Return a case in which nothing is compared."""
    parts = ("prompts", "new_tokens", "prefill_logit_rows", "cache", "threads", "precision", "weights_sha256")
    return Case(name, "growth", title, entries, dict.fromkeys(parts, ALONE), metric=metric, rounds=3)


def entry(precision: str, work: Work, label: str, checkpoint: str = CHECKPOINT, **options: Any) -> Entry:
    return Entry("planforge", precision, checkpoint, work, label=label, **options)


def cases(work: Path) -> list[Case]:
    batches = {
        f"{precision} {rows}": entry(precision, generation(rows, 32, NEW), f"batch {rows}")
        for precision in PRECISIONS
        for rows in BATCHES
    }
    contexts = {
        f"{precision} {tokens}": entry(precision, generation(1, tokens, NEW), f"prompt of {tokens}")
        for precision in (*PRECISIONS, "int8-kv8")
        for tokens in PROMPTS
    }
    sizes = {
        f"{checkpoint} {precision}": entry(precision, generation(1, 32, NEW), checkpoint, checkpoint)
        for checkpoint, precisions in SIZES.items()
        for precision in precisions
    }
    one = generation(1, 32, 64)
    threads = {
        f"{precision}, {count}": entry(precision, one, f"threads {count}", threads=count)
        for precision in ("fp32", "int8", "int4")
        for count in (1, 2)
    }
    return [
        alone("growth-batch", f"GPT-2 124M by batch, prompts of 32 tokens, {NEW} new: tokens/s", batches),
        alone("growth-context", f"GPT-2 124M by prompt, {NEW} new: ms per token", contexts, "inter_token_ms"),
        alone("growth-size", f"GPT-2 by size, a prompt of 32 tokens, {NEW} new: tokens/s", sizes),
        alone("growth-threads", "GPT-2 124M by threads, a prompt of 32 tokens, 64 new: tokens/s", threads),
    ]
