"""The table of kernels on a GPU is what ONNX Runtime's documentation lists, no more and no less.

What an H200 showed with onnxruntime-gpu 1.31.1: GroupQueryAttention in fp32 runs on the CPU, in fp16 on the
GPU, and MatMulNBits in 8 and 4 bits on fp16 does too.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import onnx
import pytest
from onnxruntime.capi import onnxruntime_pybind11_state as ort_state

from planforge.exporter.targets import find_target
from planforge.runtime.backends.cuda_kernels import (
    ATTENTION,
    COMMIT,
    IN_LIBRARY,
    INITIALIZER,
    KERNELS,
    WRITTEN_OUT,
    explain_missing,
    explain_missing_attention,
)
from planforge.runtime.backends.dialects import CPU_DIALECTS, CUDA_DIALECTS

from ...helpers.cuda_kernels import LISTED, NUMPY_NAMES, read_kernels

OPSET = 18  # the table has kernels from there on
IN_LISTS = [name for name, kernel in KERNELS.items() if kernel.source not in (INITIALIZER, WRITTEN_OUT)]


def list_places(operator: str) -> dict[str, set[str]]:
    """The types of a row of the table, by input or result: "in0", "out0"."""
    kernel = KERNELS[operator]
    places = {f"in{number}": set(types) for number, types in kernel.types.items()}
    return places | {f"out{number}": set(types) for number, types in kernel.results.items()}


@cache
def read_schemas() -> list[Any]:
    """ONNX Runtime's schemas, of ONNX's own operators too, which takes a while."""
    return list(ort_state.get_all_operator_schema())


def list_schemas(operator: str) -> list[Any]:
    """The schemas of an operator, of each version from `OPSET` on."""
    domain, _, name = operator.rpartition(".")
    found = [schema for schema in read_schemas() if (schema.domain, schema.name) == (domain, name)]
    first = max((s.since_version for s in found if s.since_version <= OPSET), default=OPSET)
    return [schema for schema in found if schema.since_version >= first]


def list_allowed(operator: str, place: str) -> set[str]:
    """The types of tensors that an operator allows at a place."""
    allowed: set[str] = set()
    for schema in list_schemas(operator):
        formals = schema.inputs if place.startswith("in") else schema.outputs
        if formals:
            kind = formals[min(int(place.lstrip("inout")), len(formals) - 1)].typeStr
            constraints = {c.type_param_str: c.allowed_type_strs for c in schema.type_constraints}
            allowed |= set(constraints.get(kind, [kind]))
    names = [name[len("tensor(") : -1] for name in allowed if name.startswith("tensor(")]
    return {NUMPY_NAMES.get(name, name) for name in names}


def test_the_list_is_of_the_commit_that_the_table_names() -> None:
    assert COMMIT in LISTED.read_text(encoding="utf-8")


def test_the_operators_are_those_of_the_list() -> None:
    assert set(IN_LISTS) == read_kernels().keys()


@pytest.mark.parametrize("operator", IN_LISTS)
def test_the_types_are_those_of_the_list(operator: str) -> None:
    """Each that the table names is in the list, and each of the list that limits a graph is in the table."""
    listed, told = read_kernels()[operator], list_places(operator)
    if KERNELS[operator].source == IN_LIBRARY:  # where a list was found to lack a type
        told = {place: types & listed[place] for place, types in told.items()}
    assert told == {place: listed[place] for place in told}
    assert list_schemas(operator)
    limits = {place for place, types in listed.items() if list_allowed(operator, place) - types}
    assert limits <= told.keys()


def test_what_has_no_kernel_anywhere_is_written_out() -> None:
    """ONNX Runtime inlines a function of ONNX that none of its providers has a kernel of."""
    on_cpu = {k.op_name for k in ort_state.get_all_opkernel_def() if k.domain == ""}
    newest = find_target("cuda").opsets[1]
    schemas: list[Any] = list(onnx.defs.get_all_schemas_with_history())  # its stub lacks some attributes
    functions = {
        schema.name
        for schema in schemas
        if schema.domain == ""
        and schema.since_version <= newest
        and (schema.has_function or schema.has_context_dependent_function)
    }
    table = {name for name, kernel in KERNELS.items() if kernel.source == WRITTEN_OUT}
    assert table == functions - on_cpu - read_kernels().keys()


@pytest.mark.parametrize(
    ("operator", "types", "attributes", "words"),
    [
        (
            "com.microsoft.GroupQueryAttention",
            {0: "float32", 3: "float32"},
            {},
            "for float32, only for float16",
        ),
        ("com.microsoft.GroupQueryAttention", {0: "float16", 3: "float16"}, {}, ""),
        ("com.microsoft.GroupQueryAttention", {0: "bfloat16", 3: "int8"}, {}, ""),
        ("com.microsoft.GroupQueryAttention", {0: "float16", 3: "float32"}, {}, "for float32"),
        ("com.microsoft.GroupQueryAttention", {}, {}, ""),  # of unknown types nothing is said
        ("com.microsoft.MatMulNBits", {0: "float16", 1: "uint8"}, {"bits": 8}, ""),
        ("com.microsoft.MatMulNBits", {0: "float16", 1: "uint8"}, {"bits": 4}, ""),
        ("com.microsoft.MatMulNBits", {0: "float16", 1: "uint8"}, {"bits": 3}, "with bits 3, only 2, 4, 8"),
        (
            "com.microsoft.MatMulIntegerToFloat",
            {0: "uint8"},
            {},
            "MatMulIntegerToFloat has no kernel on a GPU",
        ),
        ("com.microsoft.QuantizeLinear", {0: "float32"}, {}, "for float32"),
        ("Range", {0: "float16"}, {}, "Range has no kernel on a GPU for float16"),
        ("Where", {0: "bool", 1: "float16"}, {}, ""),
        ("Where", {0: "bool", 1: "bool"}, {}, "Where has no kernel on a GPU for bool"),
        ("QuantizeLinear", {0: "float16", 1: "float16", 2: "int8"}, {}, ""),
        ("QuantizeLinear", {0: "float16", 1: "float16", 2: "uint16"}, {}, "for uint16, only for int8"),
        ("MatMulInteger", {0: "uint8", 1: "int8"}, {}, "for uint8, only for int8"),
        ("MatMulInteger", {0: "int8", 1: "int8"}, {}, ""),
        ("Tan", {0: "float32"}, {}, "Tan has no kernel on a GPU"),
        ("DynamicQuantizeLinear", {0: "float32"}, {}, "DynamicQuantizeLinear has no kernel on a GPU"),
        ("ai.onnx.ml.Scaler", {}, {}, "ai.onnx.ml.Scaler has no kernel on a GPU"),
        ("CastLike", {0: "float32", 1: "float16"}, {}, ""),
        ("Constant", {}, {}, ""),
    ],
)
def test_what_has_no_kernel_is_told(
    operator: str, types: dict[int, str], attributes: dict[str, object], words: str
) -> None:
    found = explain_missing(operator, types, attributes)
    assert words in found and bool(words) == bool(found)


def test_a_result_without_a_kernel_is_told() -> None:
    assert explain_missing("Cast", {0: "float16"}, results={0: "int8"}) == ""
    words = explain_missing("Cast", {0: "float16"}, results={0: "int4"})
    assert words.startswith("Cast has no kernel on a GPU for a result in int4, only in float32")
    assert explain_missing("QuantizeLinear", {0: "float16", 1: "float16"}, results={0: "uint16"})


def test_a_dialects_attention_decides() -> None:
    assert set(ATTENTION) <= set(CPU_DIALECTS)
    assert explain_missing_attention("ort", "float32", "float32")
    assert not explain_missing_attention("ort", "float16", "float16")
    for dialect in set(CUDA_DIALECTS) - set(ATTENTION):
        assert not explain_missing_attention(dialect, "float32", "float32")
