"""Describes where two values of plain JSON differ."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

MOST = 3  # differences that are told
SHOWN = 60  # characters of a value
SHORT = 8  # entries of a list that is shown whole
MISSING = "missing"

Show = Callable[[str, Any], str]  # a value as messages show it, by its path


def describe_differences(got: Any, expected: Any, whose: str, show: Show | None = None) -> list[str]:
    """Return the first differences, such as "a.b is 1, the checkpoint's is 2", and how many more there are.

    `whose` stands before what is expected, as "the checkpoint's is".
    """
    show = show or show_value
    found = list(find_differences(got, expected, "", whose, show))
    return found if len(found) <= MOST else [*found[:MOST], f"and {len(found) - MOST} more like it"]


def find_differences(got: Any, expected: Any, path: str, whose: str, show: Show) -> Iterator[str]:
    """Yield each difference, from the outside to the inside."""
    if is_equal(got, expected):
        return
    if isinstance(got, Mapping) and isinstance(expected, Mapping):
        for key in (*expected, *(key for key in got if key not in expected)):
            inside = f"{path}.{key}" if path else str(key)
            if key not in got:
                yield f"{inside} is {MISSING}, {whose} {show(inside, expected[key])}"
            elif key not in expected:
                yield f"{inside} is {show(inside, got[key])}, {whose} {MISSING}"
            else:
                yield from find_differences(got[key], expected[key], inside, whose, show)
    elif is_shown_by_entries(got) and is_shown_by_entries(expected):
        if len(got) != len(expected):
            yield f"{path} has {len(got)} entries, {whose} of {len(expected)}"
        for index, (one, other) in enumerate(zip(got, expected, strict=False)):
            yield from find_differences(one, other, f"{path}[{index}]", whose, show)
    else:
        yield f"{path or 'it'} is {show(path, got)}, {whose} {show(path, expected)}"


def is_equal(got: Any, expected: Any) -> bool:
    """Tell whether two values are the same JSON: 1 is 1.0, and not true."""
    return bool(got == expected) and isinstance(got, bool) == isinstance(expected, bool)


def is_shown_by_entries(value: Any) -> bool:
    """Tell whether a list is told entry by entry; a short one of plain values is shown whole."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        return False
    return len(value) > SHORT or any(isinstance(entry, Mapping | list) for entry in value)


def show_value(path: str, value: Any) -> str:
    """Return a value as JSON, cut where it is long."""
    try:
        text = json.dumps(value, ensure_ascii=False, default=str)
    except RecursionError:
        return "nested too deep to be shown"
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
