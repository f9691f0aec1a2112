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
    r"\{ Name: (?P<name>.*?), Dimensions: \[(?P<dimensions>[^\]]*)\],.*?"
    r" Datatype: (?P<type>\w+), Format: (?P<format>.*?) \}(?=, \{|\])"
)


def read_listing(text: str) -> list[dict[str, Any]]:
    """Return the layers of a listing in the form of an engine inspector's JSON, without constants.

    It is empty where a line is not of the form that is known: another version may write another.
    """
    lines = text.removeprefix(LISTING).partition("\n\n")[0].split("\n")
    found = [LAYER.fullmatch(line) for line in lines]
    return [
        {
            "Name": match["name"],
            "LayerType": match["type"],
            "Inputs": read_tensors(match["inputs"]),
            "Outputs": read_tensors(match["outputs"]),
            "Metadata": match["metadata"],
        }
        for match in found
        if match is not None and None not in found
    ]


def read_tensors(text: str) -> list[dict[str, Any]]:
    """Return the tensors of a layer; a dimension of -1 follows from the call's shapes."""
    return [
        {
            "Name": match["name"],
            "Dimensions": [int(number) for number in match["dimensions"].split(",") if number],
            "Datatype": match["type"],
            "Format": match["format"],
        }
        for match in TENSOR.finditer(text)
    ]
