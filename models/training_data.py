"""Makes batches to train on: padding, teacher forcing, masked words, pairs of sentences, labels of pieces.

B batch, T tokens
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TypeVar

import torch
from torch import Tensor

IGNORED = -100  # a label that no loss counts, as in transformers
Sentence = TypeVar("Sentence")


def pad_rows(rows: Sequence[Sequence[int]], value: int) -> tuple[Tensor, Tensor]:
    """Return rows of unequal length as (B, T), with `value` on the right, and a mask that is 0 there."""
    width = max(map(len, rows))
    ids = torch.tensor([[*row, *[value] * (width - len(row))] for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    return ids, mask


def shift_right(labels: Tensor, start: int, pad: int) -> Tensor:
    """Return what a decoder reads to predict labels (B, T), by teacher forcing: `start`, then all but one.

    Args:
        labels: (B, T) int64; where one is `IGNORED`, the decoder reads `pad`.
        start: the token that the decoder starts with.
        pad: the padding token.
    """
    first = torch.full_like(labels[:, :1], start)
    return torch.cat([first, labels[:, :-1].masked_fill(labels[:, :-1] == IGNORED, pad)], dim=1)


def mask_words(
    ids: Tensor,
    special: Tensor,
    mask_id: int,
    vocab_size: int,
    generator: torch.Generator,
    share: float = 0.15,
) -> tuple[Tensor, Tensor]:
    """Return BERT's input and labels for masked words (Devlin et al., A.1), each (B, T).

    Of the chosen tokens 80 % become the mask, 10 % a random token, and 10 % stay; only they have a label.

    Args:
        ids: (B, T) int64.
        special: (B, T) bool, true at special tokens and padding, which are never chosen.
        mask_id: the mask's token.
        vocab_size: random tokens are below it.
        generator: of the random choices.
        share: of the tokens that are chosen.
    """
    chosen = (torch.rand(ids.shape, generator=generator) < share) & ~special
    kind = torch.rand(ids.shape, generator=generator)
    others = torch.randint(vocab_size, ids.shape, generator=generator)
    inputs = ids.masked_fill(chosen & (kind < 0.8), mask_id)
    inputs = torch.where(chosen & (kind >= 0.9), others, inputs)
    return inputs, ids.masked_fill(~chosen, IGNORED)


def draw_pairs(
    documents: Sequence[Sequence[Sentence]], generator: random.Random
) -> Iterator[tuple[Sentence, Sentence, int]]:
    """Yield pairs of sentences for BERT's next sentence, one for each sentence but the last of a document.

    The label is 0 where the second follows the first, and 1, half the time, where it is one of another
    document.

    Raises:
        ValueError: there are fewer than two documents, or an empty one.
    """
    if len(documents) < 2 or not all(documents):
        raise ValueError(
            f"got {len(documents)} documents; at least 2 are needed, with a sentence in each, as random"
            " sentences come from others"
        )
    for number, document in enumerate(documents):
        for first, following in pairwise(document):
            if generator.random() < 0.5:
                yield first, following, 0
                continue
            other = generator.randrange(len(documents) - 1)
            yield first, generator.choice(documents[other + (other >= number)]), 1


def label_first_pieces(words: Sequence[int | None], labels: Sequence[int]) -> list[int]:
    """Return a label for each token: its word's at the word's first piece, else `IGNORED`.

    Args:
        words: for each token the number of its word, None at special tokens: `word_ids` of tokenizers.
        labels: of the words.
    """
    before = [None, *words[:-1]]
    return [
        IGNORED if word is None or word == previous else labels[word]
        for word, previous in zip(words, before, strict=True)
    ]


def find_answer(
    offsets: Sequence[tuple[int, int]], sequences: Sequence[int | None], first: int, end: int
) -> tuple[int, int]:
    """Return the first and last token of an answer; `IGNORED` for both where its text was cut.

    Args:
        offsets: of each token in its text: `offsets` of tokenizers.
        sequences: 1 at the context's tokens, 0 at the question's, None at special ones: `sequence_ids`.
        first, end: of the answer in the context, in characters; `end` is behind its last.
    """
    found = [
        token
        for token, ((start, stop), sequence) in enumerate(zip(offsets, sequences, strict=True))
        if sequence == 1 and start < end and stop > first
    ]
    if not found or offsets[found[0]][0] > first or offsets[found[-1]][1] < end:
        return IGNORED, IGNORED
    return found[0], found[-1]
