"""Tokens as they stand in a text, of tokenizers that put a space before it too."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from planforge.runtime.apps.explain.tokens import describe_ids, encode_alone
from planforge.runtime.text.tokenizer import Tokenizer

from ....helpers.text import KINDS

SPACED = ("metaspace", "byte_fallback")  # these put a space before a text
TEXTS = st.text(alphabet="ab é", max_size=8)


def open_kind(name: str) -> Tokenizer:
    return Tokenizer(KINDS[name]().to_str().encode())


@pytest.mark.parametrize("name", [*SPACED, "byte_level"])
@given(text=TEXTS)
def test_places_are_those_of_the_decoded_text(name: str, text: str) -> None:
    tokenizer = open_kind(name)
    ids = tokenizer.encode(text)
    tokens = describe_ids(tokenizer, ids, "prompt")
    decoded = tokenizer.decode(ids)
    assume("�" not in decoded)
    for token in tokens:
        if "�" not in token.text and token.part == "prompt":  # else it is a part of a character
            own = decoded[token.start : token.end]
            assert own == token.text or (token.start == 0 and own == token.text.lstrip(" "))
    if tokens and all(token.part == "prompt" and "�" not in token.text for token in tokens):
        assert tokens[-1].end == len(decoded)


@pytest.mark.parametrize("name", SPACED)
def test_an_answer_has_the_space_that_it_begins_with(name: str) -> None:
    tokenizer = open_kind(name)
    answer = " b a"
    tokens = describe_ids(tokenizer, encode_alone(tokenizer, answer), "answer", continues=True)
    assert "".join(token.text for token in tokens) == answer
    assert all(answer[token.start : token.end] == token.text for token in tokens)


@pytest.mark.parametrize("name", SPACED)
def test_a_space_before_an_answer_is_the_tokenizers_own(name: str) -> None:
    tokenizer = open_kind(name)
    assert encode_alone(tokenizer, " b") == encode_alone(tokenizer, "b") == tokenizer.encode("b")
    assert encode_alone(tokenizer, "  b") == tokenizer.encode(" b")


def test_a_space_counts_where_a_tokenizer_puts_none() -> None:
    tokenizer = open_kind("byte_level")
    assert encode_alone(tokenizer, " b") == tokenizer.encode(" b") != encode_alone(tokenizer, "b")
