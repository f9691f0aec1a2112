"""Refuses to compare systems that did different work, by the reports of each system."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

# What every system must report of a piece of work, by its kind.
COMMON = ("weights_sha256", "precision", "threads")
REPORTED = {
    "generate": (*COMMON, "cache", "prompts", "new_tokens", "beams", "prefill_logit_rows", "eos"),
    "translate": (*COMMON, "prompts", "new_tokens", "beams", "eos"),
    "embed": (*COMMON, "texts_sha256", "tokens", "pooling", "normalized", "vectors"),
}
Description = Mapping[str, Any]


class UnlikeWorkError(Exception):
    """Two systems did different work; the message names every difference."""


def check_alike(
    kind: str,
    descriptions: Mapping[str, Description],
    allowed: Mapping[str, Mapping[str, str]],
) -> None:
    """Compare the work of systems with that of the first of them.

    Args:
        kind: of the work.
        descriptions: by the systems' names.
        allowed: of each system, parts that may differ, with the reason that is shown with its figures.

    Raises:
        UnlikeWorkError: a part is missing, or differs without being allowed to.
    """
    if not descriptions:
        return
    first, reference = next(iter(descriptions.items()))
    faults = []
    for name, description in descriptions.items():
        keys = sorted({*REPORTED[kind], *reference, *description})
        for key in keys:
            if key not in description:
                faults.append(f"{name} does not report {key}")
            elif key in reference and description[key] != reference[key] and key not in allowed.get(name, {}):
                one, other = abbreviate(reference[key], description[key])
                faults.append(f"{key} of {first} is {one}, of {name} {other}")
    if faults:
        raise UnlikeWorkError(
            "refused to compare unlike work: " + "; ".join(faults) + ". Make them do the same, or declare"
            " the difference, with its reason, in the system's `differences` or the case's `varies`"
        )


def differences(reference: Description, description: Description) -> list[str]:
    """Return the parts that both report and that differ."""
    return [key for key in reference if key in description and description[key] != reference[key]]


def abbreviate(one: Any, other: Any) -> tuple[str, str]:
    """Return two unequal values, shortened; of sequences the first place where they differ."""
    path = ""
    while is_sequence(one) and is_sequence(other) and len(one) == len(other):
        place = next(i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)
        path = f"{path}[{place}]"
        one = one[place]
        other = other[place]
    long = is_sequence(one) and is_sequence(other)
    first, second = (f"{len(value)} long" if long else repr(value) for value in (one, other))
    where = f" at {path}" if path else ""
    return first + where, second + where


def is_sequence(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def digest(value: Any) -> str:
    """Return a hash of plain JSON, for descriptions that would be long."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()
