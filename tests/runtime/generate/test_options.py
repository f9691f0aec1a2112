"""What all options have in common: unknown names, batch sizes, pairs and progress."""

from __future__ import annotations

import io
import sys
from typing import Any, TypedDict

import pytest

from planforge.runtime.errors import InputError
from planforge.runtime.option_checks import (
    check_batch_size,
    check_choice,
    check_not_pair,
    check_options,
    list_options,
)
from planforge.runtime.options import EmbedOptions
from planforge.runtime.progress import Progress


class Known(TypedDict, total=False):
    temperature: float
    top_k: int


def test_an_unknown_option_names_the_one_that_is_meant_and_all_there_are() -> None:
    check_options({"top_k": 3}, Known)
    with pytest.raises(InputError) as caught:
        check_options({"temprature": 0.8}, Known)
    assert str(caught.value) == (
        "unknown option 'temprature'; did you mean 'temperature'? There are: temperature, top_k"
    )
    with pytest.raises(InputError) as caught:
        check_options(["top_k", "zzz"], Known)
    assert str(caught.value) == "unknown option 'zzz'. There are: temperature, top_k"


def test_a_choice_that_does_not_exist_names_the_one_that_is_meant() -> None:
    with pytest.raises(InputError, match=r"is not one of None, 'head', 'tail'; did you mean 'tail'\?"):
        check_choice("truncation", "tails", (None, "head", "tail"))


def test_option_names_have_those_that_are_inherited() -> None:
    names = list_options(EmbedOptions)
    assert {"truncation", "batch_size", "progress", "prompt", "prompt_name", "truncate_dim"} <= set(names)


@pytest.mark.parametrize("size", [0, -1, True, 2.0, "8", 65])
def test_a_batch_size_out_of_range_is_refused(size: Any) -> None:
    assert (check_batch_size(None, 64), check_batch_size(8, 64)) == (64, 8)
    with pytest.raises(InputError, match=f"batch_size={size!r} "):
        check_batch_size(size, 64)


@pytest.mark.parametrize("value", ["left", 1, True, ["head"], {}])
def test_a_choice_names_what_is_allowed(value: Any) -> None:
    check_choice("truncation", None, (None, "tail"))
    check_choice("truncation", "tail", (None, "tail"))
    with pytest.raises(InputError, match=r"truncation=.* is not one of None, 'tail'"):
        check_choice("truncation", value, (None, "tail"))


def test_two_texts_in_a_tuple_are_neither_a_pair_nor_two_texts() -> None:
    for texts in ("a", ["a", "b"], ("a",), ("a", "b", "c"), (("a", "b"), ("c", "d")), None):
        check_not_pair(texts)
    with pytest.raises(InputError, match=r"a pair: classify\(text, pair=other\) or .* two texts: \[a, b\]"):
        check_not_pair(("a", "b"), "classify(text, pair=other)")
    with pytest.raises(InputError, match=r"two texts; two texts: \[a, b\]"):
        check_not_pair(("a", "b"))


def test_a_callable_gets_each_number_once() -> None:
    numbers: list[int] = []
    with Progress(numbers.append) as report:
        for done in (1, 1, 4, 3, 9):
            report(done)
    assert numbers == [1, 4, 9]


@pytest.mark.parametrize("option", [None, 1, "yes"])
def test_progress_is_a_bool_or_a_callable(option: Any) -> None:
    with pytest.raises(InputError, match=r"progress=.* must be True"):
        Progress(option)


@pytest.mark.parametrize(("terminal", "shown"), [(True, "\r1 texts\r9 texts\n"), (False, "9 texts\n")])
def test_progress_counts_on_stderr(monkeypatch: pytest.MonkeyPatch, terminal: bool, shown: str) -> None:
    stderr = io.StringIO()
    monkeypatch.setattr(stderr, "isatty", lambda: terminal)
    monkeypatch.setattr(sys, "stderr", stderr)
    with Progress(True) as report:
        report(1)
        report(9)
    assert stderr.getvalue() == shown
    with Progress(False) as report:
        report(1)
    assert stderr.getvalue() == shown
