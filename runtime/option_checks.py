"""Refuses options that a call does not take, and values that an option cannot have."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from .errors import InputError
from .suggest import did_you_mean


def list_options(options: type) -> tuple[str, ...]:
    """Return the names of the options that a TypedDict has, those it inherits first."""
    return tuple(options.__annotations__)


def check_options(given: Iterable[str], options: type) -> None:
    """Refuse what is no option of a TypedDict; name the one that may be meant, and all that there are."""
    known = list_options(options)
    for name in given:
        if name not in known:
            hint = did_you_mean(name, known) or "."
            raise InputError(f"unknown option {name!r}{hint} There are: {', '.join(known)}", option=name)


def check_choice(name: str, value: Any, allowed: Collection[Any]) -> None:
    """Refuse a value that is none of those allowed; name the one that may be meant."""
    # A list or an array is no choice, and comparing it with one may fail.
    if not isinstance(value, str | None) or value not in allowed:
        choices = ", ".join(map(repr, allowed))
        names = [choice for choice in allowed if isinstance(choice, str)]
        hint = did_you_mean(value, names) if isinstance(value, str) else ""
        raise InputError(f"{name}={value!r} is not one of {choices}{hint}", option=name)


def check_whole(
    name: str, value: Any, least: int, most: int | None = None, *, optional: bool = False, what: str = ""
) -> None:
    """Refuse what is no integer from `least` to `most`; None is fine where the option is optional."""
    if value is None and optional:
        return
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    if is_integer and least <= value and (most is None or value <= most):
        return
    allowed = f"of at least {least}" if most is None else f"from {least} to {most}"
    note = f" ({what})" if what else ""
    way_out = ", or left out" if optional else ""
    raise InputError(f"{name}={value!r} must be an integer {allowed}{note}{way_out}", option=name)


def check_switch(name: str, value: Any) -> None:
    """Refuse what is neither True nor False."""
    if not isinstance(value, bool):
        raise InputError(f"{name}={value!r:.80} must be True or False", option=name)


def check_batch_size(batch_size: int | None, most: int) -> int:
    """Return how many rows may run together: what the caller asks for, else the most of the bundle."""
    if batch_size is None:
        return most
    check_whole("batch_size", batch_size, 1, optional=True)
    if batch_size > most:
        raise InputError(
            f"batch_size={batch_size} is more than the {most} rows that this bundle allows; ask for fewer, or"
            " export it again for more (planforge export --max-batch)",
            option="batch_size",
        )
    return batch_size


def check_not_pair(texts: Any, call: str = "") -> None:
    """Refuse a tuple of two strings, which could be one pair or two texts.

    `call` is how to pass a pair, such as "classify(text, pair=other)"; nothing where no pairs are taken.
    """
    if isinstance(texts, tuple) and len(texts) == 2 and all(isinstance(text, str) for text in texts):
        pair = f" a pair: {call} or [(text, other)];" if call else ""
        raise InputError(
            f"a tuple of two texts could be a pair or two texts;{pair} two texts: [a, b]. Got {texts!r:.80}"
        )
