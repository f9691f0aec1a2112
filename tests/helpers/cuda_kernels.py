"""ONNX Runtime's kernels on a GPU, as its own documentation lists them, from cuda_kernels.txt beside this."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path
from typing import Any

LISTED = Path(__file__).with_suffix(".txt")
# By the names of numpy, which the table of the runtime has.
NUMPY_NAMES = {"float": "float32", "double": "float64"}
DOMAINS = {"[ai.onnx]": "", "[com.microsoft]": "com.microsoft."}


@cache
def read_kernels() -> dict[str, dict[str, frozenset[str]]]:
    """The types of kernels by operator and by input or result, "in0" or "out0", of all opsets together."""
    found: dict[str, dict[str, frozenset[str]]] = {}
    prefix = ""
    for line in LISTED.read_text(encoding="utf-8").splitlines():
        if line in DOMAINS:
            prefix = DOMAINS[line]
        elif line and not line.startswith("#"):
            operator, _, *parts = line.split()
            kernel = found.setdefault(prefix + operator, {})
            for part in parts:
                place, _, types = part.partition("=")
                names = {NUMPY_NAMES.get(name, name) for name in types.split(",")}
                kernel[place] = kernel.get(place, frozenset()) | names
    return found


def has_kernel(node: Any, types: Mapping[str, str]) -> bool:
    """Whether a NodeProto has a kernel, by the types of the tensors that are known."""
    prefix = f"{node.domain}." if node.domain not in ("", "ai.onnx") else ""
    kernel = read_kernels().get(f"{prefix}{node.op_type}")
    if kernel is None:
        return False

    def fits(place: str, names: Collection[str]) -> bool:
        return all(
            types.get(name, "") in ("", *kernel.get(f"{place}{number}", [types.get(name, "")]))
            for number, name in enumerate(names)
        )

    return fits("in", node.input) and fits("out", node.output)
