"""Reads the layers of a plan in TensorRT's log of its build, which needs no GPU.

An engine inspector needs one. TensorRT-RTX 1.7.1 lists the layers of a plan that is built with detailed
profiling at the end of its build, as verbose as an inspector does: a line each, of the same fields.
"""

from __future__ import annotations

import re
from typing import Any

from ...runtime.backends.tensorrt_library import LISTING

TENSORS = r"\[(?: \{.*? \})?\]"  # "[]", or "[ { Name: x, ... }, { Name: y, ... }]"
LAYER = re.compile(
    rf"Name: (?P<name>.*?), LayerType: (?P<type>[^,]*), Inputs: (?P<inputs>{TENSORS}),"
    rf" (?:Constants: {TENSORS}, )?Outputs: (?P<outputs>{TENSORS}),.*? Metadata: (?P<metadata>.*)"
)
TENSOR = re.compile(
    r"\{ Name: (?P<name>.*?), Dimensions: \[(?P<dimensions>(?:-?\d+(?:, ?-?\d+)*)?)\],.*?"
    r" Datatype: (?P<type>\w+), Format: (?P<format>.*?) \}(?=, \{|\])"
)


def read_listing(text: str) -> list[dict[str, Any]]:
    """Return the layers of a listing in the form of an engine inspector's JSON, without constants.

    It is empty where a line is not of the form that is known: another version may write another.
    """
    layers = []
    for line in text.removeprefix(LISTING).partition("\n\n")[0].split("\n"):
        match = LAYER.fullmatch(line)
        if match is None:
            return []
        tensors = {side: read_tensors(match[side.lower()]) for side in ("Inputs", "Outputs")}
        if None in tensors.values():
            return []
        layers.append(
            {"Name": match["name"], "LayerType": match["type"], **tensors, "Metadata": match["metadata"]}
        )
    return layers


def read_tensors(text: str) -> list[dict[str, Any]] | None:
    """Return the tensors of a layer, None if one has another form; a -1 follows from the call's shapes."""
    found = [
        {
            "Name": match["name"],
            "Dimensions": [int(number) for number in match["dimensions"].split(",") if number],
            "Datatype": match["type"],
            "Format": match["format"],
        }
        for match in TENSOR.finditer(text)
    ]
    return found if len(found) == text.count("{ Name: ") else None
