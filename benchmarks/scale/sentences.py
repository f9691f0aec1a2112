"""Sentences of random words, some short and some long."""

from __future__ import annotations

import random

from ..texts import gpt2_words

SHORTEST = 8  # words
LONGEST = 40


def make_sentences(count: int, seed: int = 0) -> list[str]:
    """Return sentences of 8 to 40 words of GPT-2's vocabulary."""
    draw = random.Random(seed)
    words = [word for word, _ in gpt2_words()]
    return [" ".join(draw.choices(words, k=draw.randint(SHORTEST, LONGEST))) for _ in range(count)]
