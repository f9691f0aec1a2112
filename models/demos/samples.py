"""Draws samples from the demo model and counts those that loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tokenizers import Tokenizer

PROMPTS = (
    "In the beginning",
    "And it came to pass",
    "The LORD is my",
    "Blessed are",
    "Now therefore",
    "And David said",
    "Thus saith the LORD",
    "O my God",
    "<|endoftext|>",
    "And the king",
)
NEW_TOKENS = 200
TEMPERATURE = 0.8
TOP_K = 40
LOOP = 20  # repeated tokens, from which on a sample counts as a loop


def longest_repeat(tokens: Sequence[int]) -> int:
    """Return the length of the longest run of tokens that occurs twice."""
    longest = 0
    while repeats(tokens, longest + 1):
        longest += 1
    return longest


def repeats(tokens: Sequence[int], length: int) -> bool:
    runs = [tuple(tokens[i : i + length]) for i in range(len(tokens) - length + 1)]
    return len(set(runs)) < len(runs)


def sample_report(model: Any, tokenizer: Tokenizer) -> dict[str, Any]:
    """Draw a sample from each prompt; return how many loop, and the longest repeat of any."""
    longest = []
    for seed, prompt in enumerate(PROMPTS):
        torch.manual_seed(seed)
        ids = torch.tensor([tokenizer.encode(prompt).ids])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            temperature=TEMPERATURE,
            top_k=TOP_K,
            min_new_tokens=NEW_TOKENS,
            max_new_tokens=NEW_TOKENS,
            pad_token_id=0,
        )
        longest.append(longest_repeat(out[0, ids.shape[1] :].tolist()))
    return {
        "samples": len(PROMPTS),
        "new_tokens": NEW_TOKENS,
        "temperature": TEMPERATURE,
        "top_k": TOP_K,
        "with_a_loop_of_20_tokens": sum(length >= LOOP for length in longest),
        "longest_repeat": max(longest),
    }
