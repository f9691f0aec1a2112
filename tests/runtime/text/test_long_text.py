"""Texts longer than the model: against transformers' truncation, and by properties that windows must have."""

from __future__ import annotations

import functools
import itertools
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from planforge.runtime.bundle.defaults import EncoderDefaults, SpecialTokens
from planforge.runtime.encode.request_runner import RequestRunner
from planforge.runtime.encode.requests import TokenizeOptions
from planforge.runtime.errors import ContextLengthError, InputError
from planforge.runtime.options import EncoderOptions
from planforge.runtime.text.long_text import TRUNCATIONS, FittedText, Piece, fit, place_tokens

from ...helpers.models import write_wordpiece

TOKENS = {"cls": 9001, "sep": 9002}


def make_special_tokens(tokens: dict[str, int], is_pair: bool) -> SpecialTokens:
    return EncoderDefaults(512, tokens).make_special_tokens(is_pair)


SECOND = 5000  # the ids of a pair's second text begin here, those of the first at 0
fast = settings(deadline=None, max_examples=200)


def fitted(first: int, second: int | None = None, **options: Any) -> FittedText:
    """`fit` for texts of so many tokens, whose ids all differ."""
    pair = None if second is None else range(SECOND, SECOND + second)
    return fit(range(first), pair, special_tokens=make_special_tokens(TOKENS, second is not None), **options)


def bodies(piece: Piece) -> tuple[list[int], list[int] | None]:
    """The ids of both texts in a piece, read from its ids alone; checks what stands between them."""
    assert piece.ids[0] == TOKENS["cls"] and piece.ids[-1] == TOKENS["sep"]
    assert not set(TOKENS.values()) & {*piece.first, *(piece.second or ())}
    end = piece.ids.index(TOKENS["sep"])
    assert len(piece.segments) == len(piece.ids) == len(piece)
    assert piece.segments == [0] * (end + 1) + [1] * (len(piece.ids) - end - 1)
    if piece.second is None:
        assert end == len(piece.ids) - 1
        return piece.ids[1:end], None
    return piece.ids[1:end], piece.ids[end + 1 : -1]


def single(length: int, **options: Any) -> list[int]:
    """What is kept of one text."""
    result = fitted(length, **options)
    (piece,) = result.pieces
    first, second = bodies(piece)
    assert second is None and list(piece.first) == first
    assert result.dropped == length - len(first)
    return first


@pytest.mark.parametrize("truncation", TRUNCATIONS)
@pytest.mark.parametrize("length", [0, 1, 509, 510])
def test_a_text_that_has_room_stays_whole(length: int, truncation: str) -> None:
    assert single(length, max_length=512, truncation=truncation) == [*range(length)]
    result = fitted(length // 2, length - length // 2, max_length=513, truncation=truncation)
    (piece,) = result.pieces
    assert result.dropped == 0 and len(piece) == length + 3
    assert bodies(piece) == (
        [*range(length // 2)],
        [*range(SECOND, SECOND + length - length // 2)],
    )


@pytest.mark.parametrize("length", [511, 700, 800, 801, 5000])
def test_head_and_tail(length: int) -> None:
    assert single(length, max_length=512, truncation="head") == [*range(510)]
    assert single(length, max_length=512, truncation="tail") == [*range(length - 510, length)]


@pytest.mark.parametrize(("length", "head", "tail"), [(511, 128, 382), (800, 128, 382), (801, 256, 254)])
def test_head_and_tail_together_are_sun_et_al(length: int, head: int, tail: int) -> None:
    kept = single(length, max_length=512, truncation="head+tail")
    assert kept == [*range(head), *range(length - tail, length)]


@fast
@given(st.integers(0, 1000), st.integers(3, 600), st.sampled_from(["head", "tail", "head+tail"]))
def test_what_is_kept_of_one_text(length: int, max_length: int, truncation: str) -> None:
    kept = single(length, max_length=max_length, truncation=truncation)
    assert kept == sorted(set(kept)) and set(kept) <= set(range(length))
    assert len(kept) == min(length, max_length - 2)


@functools.cache
def load_reference(side: str) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        write_wordpiece(Path(folder))
        return transformers.BertTokenizer.from_pretrained(folder, truncation_side=side)


@fast
@given(st.integers(0, 60), st.integers(0, 60), st.integers(4, 64), st.sampled_from(["head", "tail"]))
def test_pairs_are_transformers_longest_first(
    first: int, second: int, max_length: int, truncation: str
) -> None:
    letters = "abcdefghijklmnopqrstuvwxyz"
    texts = [" ".join(letters[i % 26] for i in range(n)) for n in (first, second)]
    tokenizer = load_reference("right" if truncation == "head" else "left")
    # Lists, since of two strings transformers takes an empty second one for none.
    batch = tokenizer(texts[:1], texts[1:], truncation="longest_first", max_length=max_length)
    expected = {name: rows[0] for name, rows in batch.items()}
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    tokens = {"cls": tokenizer.cls_token_id, "sep": tokenizer.sep_token_id}
    got = fit(
        ids[0],
        ids[1],
        max_length=max_length,
        special_tokens=make_special_tokens(tokens, True),
        truncation=truncation,
    )
    (piece,) = got.pieces
    assert piece.ids == expected["input_ids"]
    assert piece.segments == expected["token_type_ids"]
    assert got.dropped == first + second + 3 - len(expected["input_ids"])


@st.composite
def windowed(draw: st.DrawFn) -> tuple[int, int | None, dict[str, Any]]:
    """A text that needs windows, or a pair whose second text does; max_length; a stride or none."""
    max_length = draw(st.integers(5, 40))
    first = 0
    room = max_length - 2
    if paired := draw(st.booleans()):
        first = draw(st.integers(0, (max_length - 3) // 2))
        room = max_length - 3 - first
    length = draw(st.integers(room + 1, 200))
    stride = draw(st.none() | st.integers(0, room - 1))
    options = {"max_length": max_length, "stride": stride, "truncation": "windows"}
    return (first, length, options) if paired else (length, None, options)


@fast
@given(windowed())
def test_windows_cover_every_token_and_overlap_by_the_stride(case: tuple[int, int | None, Any]) -> None:
    first, second, options = case
    result = fitted(first, second, **options)
    parts = [bodies(piece) for piece in result.pieces]
    if second is None:
        slid = [part[0] for part in parts]
        length = first
    else:
        assert all(part[0] == [*range(first)] for part in parts)  # all of the first text in each window
        slid = [[token - SECOND for token in part[1] or ()] for part in parts]
        length = second
    room = options["max_length"] - (2 if second is None else 3 + first)
    stride = options["stride"]
    if stride is None:
        stride = min(options["max_length"] // 4, room - 1)
    assert len(slid) > 1
    assert all(len(piece) == options["max_length"] for piece in result.pieces)
    assert all(part == [*range(part[0], part[0] + room)] for part in slid)
    assert {token for part in slid for token in part} == set(range(length))
    shared = [len(set(a) & set(b)) for a, b in itertools.pairwise(slid)]
    assert shared[:-1] == [stride] * (len(shared) - 1)
    assert stride <= shared[-1] < room  # the last window ends where the text does, so it may share more
    assert result.dropped == 0


@fast
@given(
    st.integers(0, 120),
    st.none() | st.integers(0, 120),
    st.integers(5, 60),
    st.sampled_from(TRUNCATIONS),
)
def test_dropped_counts_the_tokens_that_are_in_no_piece(
    first: int, second: int | None, max_length: int, truncation: str
) -> None:
    try:
        result = fitted(first, second, max_length=max_length, truncation=truncation)
    except ContextLengthError:
        assert truncation == "windows" and second is not None and first > (max_length - 3) // 2
        return
    seen: set[int] = set()
    for piece in result.pieces:
        one, two = bodies(piece)
        assert len(piece) <= max_length
        assert one == list(piece.first)
        assert two == (None if piece.second is None else [SECOND + k for k in piece.second])
        seen |= {*one, *(two or ())}
    assert result.dropped == first + (second or 0) - len(seen)
    assert result.dropped == 0 or truncation != "windows"


def room_around(piece: Piece, token: int) -> int:
    """A token's context on its narrower side, within the text that windows slide over; -1 if not there."""
    if token not in piece.ids:
        return -1
    start = 1 if piece.second is None else 2 + len(piece.first)
    position = piece.ids.index(token)
    last = len(piece) - 2
    return min(position - start, last - position)


@fast
@given(windowed())
def test_tokens_are_placed_where_a_token_has_most_context(case: tuple[int, int | None, Any]) -> None:
    first, second, options = case
    pieces = fitted(first, second, **options).pieces
    length, zero = (first, 0) if second is None else (second, SECOND)
    best = place_tokens(pieces, length)
    assert len(best) == length
    for token, (index, position) in enumerate(best):
        assert pieces[index].ids[position] == zero + token
        contexts = [room_around(piece, zero + token) for piece in pieces]
        assert index == contexts.index(max(contexts))  # of equals the first


def test_dropped_tokens_have_no_place() -> None:
    pieces = fitted(9, max_length=6, truncation="head+tail").pieces
    assert pieces[0].ids[1:-1] == [0, 6, 7, 8]  # 4 x 128 / 510 is 1
    dropped = [(-1, -1)] * 5
    assert place_tokens(pieces, 9) == [(0, 1), *dropped, (0, 2), (0, 3), (0, 4)]


def read_options(options: Any) -> TokenizeOptions:
    """A call's options, as every task of an encoder checks them before it fits a text."""
    encoder: Any = SimpleNamespace(max_batch=8)
    unread: Any = None
    return RequestRunner(encoder, unread, unread).read_options(options, EncoderOptions, "head")


def test_an_unknown_truncation_names_those_there_are() -> None:
    names = r"None, 'head', 'tail', 'head\+tail', 'windows'"
    with pytest.raises(InputError, match=f"'middle' is not one of {names}"):
        read_options({"truncation": "middle"})


@pytest.mark.parametrize("stride", [-1, True, 1.0, "2"])
def test_a_stride_that_is_no_integer_is_refused(stride: Any) -> None:
    with pytest.raises(InputError, match=f"stride={stride!r} must be an integer of at least 0"):
        read_options({"stride": stride})


@pytest.mark.parametrize("stride", [-1, 6, 7])
def test_a_stride_that_leaves_no_step_is_refused(stride: int) -> None:
    with pytest.raises(InputError, match=r"must be from 0 to 5"):
        fitted(20, max_length=8, truncation="windows", stride=stride)


def test_a_question_that_leaves_no_room_for_windows_is_refused() -> None:
    assert len(fitted(10, 30, max_length=23, truncation="windows").pieces) > 1
    with pytest.raises(
        ContextLengthError, match=r"has 11 tokens.*it may have 10.*truncation='head'"
    ) as caught:
        fitted(11, 30, max_length=23, truncation="windows")
    assert (caught.value.tokens, caught.value.limit) == (41, 20)
