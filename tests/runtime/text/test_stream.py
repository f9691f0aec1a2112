from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st

from planforge.runtime.errors import InputError, TokenizerError
from planforge.runtime.text.stream import StopStrings, encode_piece
from planforge.runtime.text.tokenizer import Tokenizer

from ...helpers.text import KINDS, gpt2, texts, tiny

fast = settings(deadline=None, max_examples=150)


def pieces(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    stream = tokenizer.stream()
    return [*map(stream.push, ids), stream.finish()]


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=200)
@given(data=st.data())
def test_pieces_joined_are_decode_for_any_ids(kind: str, data: st.DataObject) -> None:
    tokenizer = tiny(kind)
    some = st.sampled_from(range(tokenizer.vocab_size))
    late = st.sampled_from(range(tokenizer.vocab_size * 9 // 10, tokenizer.vocab_size))
    ids = data.draw(st.lists(some | late, max_size=30))
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)


@fast
@given(ids=st.lists(st.integers(0, 255) | st.integers(0, 50256)))
def test_pieces_of_gpt2_joined_are_decode(ids: list[int]) -> None:
    assert "".join(pieces(gpt2(), ids)) == gpt2().decode(ids)


@fast
@given(text=texts)
def test_no_piece_ends_within_a_character(text: str) -> None:
    """A U+FFFD may come only where the text itself has one."""
    for tokenizer in (gpt2(), tiny("byte_level"), tiny("byte_fallback")):
        ids = tokenizer.encode(text)
        shown = ""
        for piece in pieces(tokenizer, ids):
            shown += piece
            assert tokenizer.decode(ids).startswith(shown)
        assert shown.count("\ufffd") == tokenizer.decode(ids).count("\ufffd")


@pytest.mark.parametrize("kind", KINDS)
@fast
@given(text=texts, data=st.data())
@example("aé a", None)
def test_what_goes_on_with_a_text_reads_as_in_tokenizers(kind: str, text: str, data: Any) -> None:
    tokenizer = tiny(kind)
    try:
        ids = tokenizer.encode(text.replace("\ufffd", "a"))
    except TokenizerError:  # without an unknown token
        return
    at = data.draw(st.integers(0, len(ids))) if data else 2
    # The reference shows no prompt that ends within a character, and nothing where none follows.
    if "\ufffd" in tokenizer.decode(ids[:at]) + tokenizer.decode(ids[at:]):
        return
    reference = tokenizers.decoders.DecodeStream(ids=ids[:at], skip_special_tokens=True)
    raw = KINDS[kind]()
    expected = "".join(reference.step(raw, token) or "" for token in ids[at:])
    stream = tokenizer.stream(tokenizer.find_context(ids[:at]))
    assert "".join([*map(stream.push, ids[at:]), stream.finish()]) == expected
    assert tokenizer.decode_known(ids[at:], tokenizer.find_context(ids[:at])) == expected


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "word_ends"])
@fast
@given(text=texts)
def test_the_bytes_of_tokens_joined_are_the_text(kind: str, text: str) -> None:
    tokenizer = tiny(kind)
    ids = tokenizer.encode(text)
    first = next((n for n, token in enumerate(ids) if tokenizer.find_context([token])), len(ids))
    added = [tokenizer.find_bytes(token, begins=n <= first) for n, token in enumerate(ids)]
    assert b"".join(added).decode(errors="replace") == tokenizer.decode(ids)


def test_a_character_comes_with_its_last_byte_and_not_later() -> None:
    tokenizer = tiny("byte_level")
    assert pieces(tokenizer, tokenizer.encode("ü!🎉")) == ["", "ü", "!", "", "", "", "🎉", ""]
    half = tokenizer.encode("🎉")[:2]
    assert pieces(tokenizer, half) == ["", "", "\ufffd"]
    # A byte that nothing can complete is shown at once, and so is a genuine U+FFFD.
    assert pieces(tokenizer, [*half, *tokenizer.encode("a")]) == ["", "", "\ufffda", ""]
    assert tokenizer.stream().push(tokenizer.find_id("�") or 0) == "\ufffd"


def test_special_tokens_do_not_break_a_character() -> None:
    tokenizer = tiny("byte_level")
    first, second = tokenizer.encode("ü")
    assert pieces(tokenizer, [256, first, 256, second, 256]) == ["", "", "", "ü", "", ""]


def test_words_come_as_they_arrive() -> None:
    wordpiece = tiny("wordpiece")
    ids = wordpiece.encode("hello world.")
    assert pieces(wordpiece, [1, *ids]) == ["", "he", "llo", " wor", "ld", ".", ""]
    llama = tiny("byte_fallback")
    assert pieces(llama, llama.encode("aé a")) == ["", "a", "é", " ", "a", ""]


def test_a_byte_level_piece_spells_bytes() -> None:
    assert encode_piece("Ġthe") == b" the"
    assert encode_piece("ðŁİī") == "🎉".encode()
    assert encode_piece("two words") == b"two words"


@pytest.mark.parametrize("bad", [-1, 10_000, "a"])
def test_an_id_outside_the_vocabulary_is_refused(bad: Any) -> None:
    with pytest.raises(InputError, match="token id"):
        tiny("byte_level").stream().push(bad)


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "wordpiece"])
def test_the_cost_of_a_token_does_not_grow(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """20,000 tokens, none of which completes a character, and none of which is decoded often."""
    tokenizer = tiny(kind)
    lone = {"byte_level": 200, "byte_fallback": 0x82, "wordpiece": 4}[kind]
    decoded: list[int] = []  # how many tokens, each time
    decode = Tokenizer.decode

    def count(one: Tokenizer, ids: Sequence[int], *arguments: Any, **options: Any) -> str:
        decoded.append(len(ids))
        return decode(one, ids, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Tokenizer, "decode", count)
        shown = pieces(tokenizer, [lone] * 20_000)
    assert sum(decoded) <= 4 * 20_000
    assert "".join(shown) == tokenizer.decode([lone] * 20_000)


def cut(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The definition: read character by character until the text ends with a stop string."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


letters = st.text(alphabet="ab\n", max_size=25)


@settings(deadline=None, max_examples=500)
@given(
    splits=st.lists(letters, max_size=8),
    stops=st.lists(st.text(alphabet="ab\n", min_size=1, max_size=5), max_size=4),
)
@example(splits=["xabc", "d"], stops=["abcd", "bc"])
@example(splits=["aab"], stops=["ab", "aab"])
def test_the_cut_does_not_depend_on_the_split(splits: list[str], stops: list[str]) -> None:
    text = "".join(splits)
    expected, found = cut(text, stops)
    for split in (splits, [text], list(text)):
        stop = StopStrings(stops)
        shown = ""
        for piece in split:
            shown += stop.push(piece)
            assert expected.startswith(shown), "showed what belongs to a stop string"
        assert (shown + stop.finish(), stop.found) == (expected, found)


@settings(deadline=None, max_examples=500)
@given(
    splits=st.lists(letters, max_size=8),
    special=st.lists(st.booleans(), min_size=8, max_size=8),
    stops=st.lists(st.text(alphabet="ab\n", min_size=1, max_size=5), max_size=4),
)
@example(splits=["a", "b", "a"], special=[False, True] * 4, stops=["bb"])
def test_special_tokens_are_searched_and_never_shown(
    splits: list[str], special: list[bool], stops: list[str]
) -> None:
    """The definition: the letters up to the stop string, each kept where its piece is no special token."""
    pieces = list(zip(splits, special, strict=False))
    expected, found = cut("".join(splits), stops)
    hidden = [is_special for piece, is_special in pieces for _ in piece]
    kept = "".join(letter for letter, is_hidden in zip(expected, hidden, strict=False) if not is_hidden)
    stop = StopStrings(stops)
    shown = "".join(stop.push(piece, hidden=is_special) for piece, is_special in pieces)
    assert kept.startswith(shown)
    assert (shown + stop.finish(), stop.found) == (kept, found)


@settings(deadline=None, max_examples=300)
@given(splits=st.lists(letters, max_size=8), stop=st.text(alphabet="ab\n", min_size=1, max_size=5))
def test_one_stop_string_cuts_where_it_first_occurs(splits: list[str], stop: str) -> None:
    cutter = StopStrings(stop)
    shown = "".join(map(cutter.push, splits)) + cutter.finish()
    assert shown == "".join(splits).partition(stop)[0]


def test_only_what_could_begin_a_stop_string_is_held() -> None:
    stop = StopStrings(["\n\nUser:"])
    assert [*map(stop.push, ["a\n", "b\n\n", "Use", "d\n"]), stop.finish()] == [
        "a",
        "\nb",
        "",
        "\n\nUsed",
        "\n",
    ]
    assert stop.found is None


def test_nothing_is_shown_after_a_stop_string() -> None:
    stop = StopStrings("END")
    assert [stop.push("ok E"), stop.push("ND more"), stop.push("END"), stop.finish()] == [
        "ok ",
        "",
        "",
        "",
    ]
    assert stop.found == "END"


def test_no_stop_string_holds_nothing() -> None:
    nothing: list[list[str] | None] = [None, []]
    for none in nothing:
        stop = StopStrings(none)
        assert (stop.push("a\n"), stop.finish(), stop.found) == ("a\n", "", None)


@pytest.mark.parametrize("bad", ["", [""], ["a", ""]])
def test_an_empty_stop_string_is_refused(bad: Any) -> None:
    with pytest.raises(InputError, match="stop=None"):
        StopStrings(bad)


@pytest.mark.parametrize("bad", [1, ["a", 1], b"a", {"a"}, [None]])
def test_stop_strings_are_strings(bad: Any) -> None:
    with pytest.raises(InputError, match="it must be a string, a list of strings, or None"):
        StopStrings(bad)
