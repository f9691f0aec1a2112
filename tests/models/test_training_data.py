"""Batches to train on: shares of masked words, pairs of sentences, labels of pieces and answers."""

from __future__ import annotations

import math
import random

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from planforge.models.training_data import (
    IGNORED,
    draw_pairs,
    find_answer,
    label_first_pieces,
    mask_words,
    pad_rows,
)

MASK, V = 4, 96


def assert_share(count: int, total: int, share: float) -> None:
    """A binomial count is within five standard deviations: one run in a million is not."""
    assert abs(count - share * total) < 5 * math.sqrt(total * share * (1 - share)), count / total


def test_15_percent_are_chosen_and_80_10_10_of_them_masked_random_kept() -> None:
    ids = torch.full((400, 400), 7)
    inputs, labels = mask_words(ids, torch.zeros_like(ids).bool(), MASK, V, torch.Generator().manual_seed(0))
    chosen = labels != IGNORED
    assert torch.equal(labels[chosen], ids[chosen]) and torch.equal(inputs[~chosen], ids[~chosen])
    total = int(chosen.sum())
    assert_share(total, ids.numel(), 0.15)
    found = inputs[chosen]
    others = (found != MASK) & (found != 7)
    # A random token is now and then the mask, or the word itself.
    assert_share(int((found == MASK).sum()), total, 0.8 + 0.1 / V)
    assert_share(int((found == 7).sum()), total, 0.1 + 0.1 / V)
    assert_share(int(others.sum()), total, 0.1 * (V - 2) / V)
    counts = torch.bincount(found[others], minlength=V)
    assert bool((counts[[n for n in range(V) if n not in (MASK, 7)]] > 0).all())


def test_special_tokens_and_padding_are_never_chosen() -> None:
    ids = torch.arange(96).repeat(300, 1)
    special = ids < 10
    inputs, labels = mask_words(ids, special, MASK, V, torch.Generator().manual_seed(0), share=0.5)
    assert torch.equal(inputs[special], ids[special]) and bool((labels[special] == IGNORED).all())
    assert bool((labels[~special] != IGNORED).any())


def test_the_same_seed_masks_the_same_words() -> None:
    ids = torch.arange(96)[None]
    one, two = (mask_words(ids, ids < 5, MASK, V, torch.Generator().manual_seed(9)) for _ in range(2))
    assert all(map(torch.equal, one, two))


def test_half_the_pairs_are_of_two_documents() -> None:
    documents = [[(document, place) for place in range(41)] for document in range(50)]
    pairs = list(draw_pairs(documents, random.Random(0)))
    assert len(pairs) == 50 * 40
    for (document, place), second, is_random in pairs:
        assert (second == (document, place + 1)) if not is_random else (second[0] != document)
    assert_share(sum(is_random for _, _, is_random in pairs), len(pairs), 0.5)


@pytest.mark.parametrize("documents", [[], [["alone"]], [["a", "b"], []]])
def test_pairs_need_two_documents(documents: list[list[str]]) -> None:
    with pytest.raises(ValueError, match="at least 2 are needed"):
        list(draw_pairs(documents, random.Random(0)))


def test_rows_are_padded_on_the_right() -> None:
    ids, mask = pad_rows([[5, 6, 7], [8]], value=9)
    assert ids.tolist() == [[5, 6, 7], [8, 9, 9]] and mask.tolist() == [[1, 1, 1], [1, 0, 0]]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    words = ["[UNK]", "[CLS]", "[SEP]", "who", "Ada", "Love", "##lace", "in", "London", "lives"]
    tokenizer = Tokenizer(
        models.WordPiece({word: number for number, word in enumerate(words)}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    return tokenizer


def test_a_words_first_piece_has_its_tag(tokenizer: Tokenizer) -> None:
    encoding = tokenizer.encode(["Ada", "Lovelace", "lives"], is_pretokenized=True)
    assert encoding.tokens == ["[CLS]", "Ada", "Love", "##lace", "lives", "[SEP]"]
    assert label_first_pieces(encoding.word_ids, [1, 2, 0]) == [IGNORED, 1, 2, IGNORED, 0, IGNORED]


def test_an_answer_is_found_by_its_letters(tokenizer: Tokenizer) -> None:
    context = "Ada Lovelace lives in London"
    encoding = tokenizer.encode("who lives in London", context)
    for answer in ("Ada Lovelace", "London", "Lovelace lives"):
        start = context.index(answer)
        first, last = find_answer(encoding.offsets, encoding.sequence_ids, start, start + len(answer))
        assert context[encoding.offsets[first][0] : encoding.offsets[last][1]] == answer
        assert encoding.sequence_ids[first] == encoding.sequence_ids[last] == 1


def test_an_answer_that_was_cut_has_no_place(tokenizer: Tokenizer) -> None:
    tokenizer.enable_truncation(9)
    try:
        encoding = tokenizer.encode("who", "Ada Lovelace lives in London")
    finally:
        tokenizer.no_truncation()
    assert find_answer(encoding.offsets, encoding.sequence_ids, 22, 28) == (IGNORED, IGNORED)  # London
    assert find_answer(encoding.offsets, encoding.sequence_ids, 19, 28) == (IGNORED, IGNORED)  # in London
    assert find_answer(encoding.offsets, encoding.sequence_ids, 19, 21) != (IGNORED, IGNORED)  # in
