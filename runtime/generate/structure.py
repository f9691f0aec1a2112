"""What the text of an answer must be, from the options that say so: one of `KINDS`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import InputError
from ..text.tokenizer import check_text
from .json_schema import read_schema

KINDS = ("json_schema", "regex", "grammar", "choices")
MAX_LENGTH = 2**17  # characters of what says it


@dataclass(frozen=True)
class Structure:
    """What an answer must be.

    Attributes:
        kind: how it is said, one of `KINDS`.
        text: a JSON schema, a regular expression, a Lark grammar, or a list of choices as JSON.
        option: the one that says it, which errors name; "" is the one of the kind's name.
    """

    kind: str
    text: str
    option: str = ""

    @property
    def name(self) -> str:
        """The option that says it."""
        return self.option or self.kind


def read_structure(options: Mapping[str, Any]) -> Structure | None:
    """Return what options say of the answer's text; None where they say nothing."""
    given = {name: options[name] for name in KINDS if options.get(name) is not None}
    if not given:
        return None
    if len(given) > 1:
        raise InputError(f"{' and '.join(given)} each set the form of the answer; give one of them")
    ((kind, value),) = given.items()
    if kind == "json_schema":
        text = read_schema(value, MAX_LENGTH)
    elif kind == "choices":
        text = read_choices(value)
    else:
        text = read_text(kind, value)
    check_length(kind, text)
    return Structure(kind, text)


def read_text(kind: str, value: Any) -> str:
    """Return a regular expression or a grammar that is a text."""
    if not isinstance(value, str) or not value:
        raise InputError(f"{kind}={value!r:.80} must be a non-empty text, or None", option=kind)
    check_text(value)
    return value


def read_choices(choices: Any) -> str:
    """Return choices as JSON."""
    if not isinstance(choices, Sequence) or isinstance(choices, str | bytes) or not choices:
        raise InputError(
            f"choices={choices!r:.80} must be a list of at least one text, or None",
            option="choices",
        )
    for number, choice in enumerate(choices):
        if not isinstance(choice, str) or not choice:
            name = f"choices[{number}]"
            raise InputError(f"{name}={choice!r:.80} must be a non-empty text", option=name)
        check_text(choice, number)
    return json.dumps(list(choices))


def check_length(option: str, text: str) -> None:
    if len(text) > MAX_LENGTH:
        raise InputError(
            f"{option} has {len(text)} characters; at most {MAX_LENGTH} are allowed", option=option
        )
