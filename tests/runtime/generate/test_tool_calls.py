"""Calls in Python's syntax and between white space are read in one pass."""

from __future__ import annotations

import ast
import time
import warnings
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planforge.runtime.generate import tool_calls
from planforge.runtime.generate.tool_calls import read_calls

BEGIN = "<function_calls>"
END = "</function_calls>"
LETTERS = [*("f(a=", "f()", ")", "x", "1", " ", "\n", "#", "\\", "r", ","), *("'", '"', "'''", '"""', END)]


def find_end(text: str) -> int | None:
    """Return the first end mark before which Python reads the whole text; None where it reads it nowhere."""
    places = [place for place in range(len(text)) if text.startswith(END, place)]
    for place in [*places, len(text)]:
        try:
            ast.parse(text[:place].strip())
        except SyntaxError:
            continue
        return place
    return None


@pytest.mark.filterwarnings("ignore")  # Python warns of a backslash that escapes nothing
@settings(deadline=None, max_examples=500)
@given(
    st.one_of(
        st.lists(st.sampled_from(LETTERS), max_size=9).map("".join),
        st.lists(st.sampled_from(LETTERS), max_size=5).map(lambda parts: f"f(a={''.join(parts)!r})\n{END}"),
        st.tuples(
            st.sampled_from(["'", '"', "'''", '"""']), st.lists(st.sampled_from(LETTERS), max_size=5)
        ).map(lambda drawn: f"f(a={drawn[0]}{''.join(drawn[1])}{drawn[0]}) # {drawn[0]}{END}"),
    )
)
def test_python_says_where_calls_end(text: str) -> None:
    end = find_end(text)
    expected: list[Any] = []
    if end is not None:
        try:
            expected = tool_calls.parse_python(text[:end])
        except ValueError:
            expected = []
    more = "" if end is None else text[end + len(END) :]
    if BEGIN not in more:
        assert read_calls(BEGIN + text, ["f", *(name for name, _ in expected)]) == expected


@pytest.mark.parametrize("text", ['f(a="""', "f(a=1)\n" * 300 + "f(a='''", "f(a=1) # ", "x = [[1]]\nf(a="])
def test_calls_are_parsed_once(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    parsed: list[str] = []
    parse = ast.parse

    def count(source: str, *arguments: Any, **options: Any) -> Any:
        parsed.append(source)
        return parse(source, *arguments, **options)

    monkeypatch.setattr(ast, "parse", count)
    read_calls(f"{BEGIN}{text}" + f"{END} " * 500, ["f"])
    assert len([source for source in parsed if source.startswith(text[:5])]) <= 1


@pytest.mark.parametrize("arguments", ["1", "*[1]", "**{'a': 1}", "a=1, **{'b': 2}", "a=1, a=2", "ﬁ=1, fi=2"])
def test_a_call_that_would_lose_arguments_is_none(arguments: str) -> None:
    assert read_calls(f"{BEGIN}f({arguments})", ["f"]) == []


LITERALS = st.builds(
    lambda prefix, mark, parts: f"{prefix}{mark}{''.join(parts)}{mark}",
    st.sampled_from(["", "", "r", "R", "u"]),
    st.sampled_from(["'", '"', "'''", '"""']),
    st.lists(
        st.sampled_from([*"\\\\\\d.4017xuNé'\" \n", r"\d", r"\x41", r"\u00e9", r"\N{DIGIT ONE}", r"\400"]),
        max_size=6,
    ),
)


@pytest.mark.filterwarnings("error")
@settings(deadline=None, max_examples=500)
@given(LITERALS)
def test_strings_are_read_as_python_does_whatever_its_warnings_are(literal: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            expected = [("f", {"a": ast.literal_eval(f"({literal})")})]
        except (SyntaxError, ValueError):
            expected = []
    assert read_calls(f"{BEGIN}f(a={literal})\n{END}", ["f"]) == expected


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "text", [r'"\d+"', r"'\.\d'", r'["\d", r"\d", "\\d"]', r'{"\d": "\400"}', "'\\\n\\d'"]
)
def test_a_backslash_that_escapes_nothing_is_one(text: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = ast.literal_eval(text)
    assert read_calls(f"{BEGIN}f(a={text}) # \\d", ["f"]) == [("f", {"a": expected})]


@pytest.mark.parametrize("text", [" ", "f", "f ", "[TOOL_CALLS]", "f[CALL_ID]a", "f[ARGS]", "{}"])
def test_white_space_takes_no_long_time(text: str) -> None:
    """An expression that divides it in all ways takes minutes."""
    began = time.thread_time()
    assert read_calls(f"{text}{' ' * 4000}x", ["f"]) == []
    assert time.thread_time() - began < 1
