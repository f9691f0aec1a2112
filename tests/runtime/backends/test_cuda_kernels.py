"""The table of kernels on a GPU: onnx's schemas say which types an input can have at all.

What an H200 showed with onnxruntime-gpu 1.31.1: GroupQueryAttention in fp32 runs on the CPU, in fp16 on the
GPU, and MatMulNBits in 8 and 4 bits on fp16 does too.
"""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

from planforge.runtime.backends.cuda_kernels import (
    ATTENTION,
    KERNELS,
    SHAPE_OPERATORS,
    explain_missing,
    explain_missing_attention,
)
from planforge.runtime.backends.dialects import CPU_DIALECTS, CUDA_DIALECTS
from planforge.runtime.bundle.bundle import Bundle

# By the names of numpy, which the table has.
ONNX_TYPES = {"float32": "float", "float64": "double"}


def list_allowed(operator: str, number: int) -> set[str]:
    """The types that onnx allows of an input, as in "tensor(float)"."""
    schema = onnx.defs.get_schema(operator)
    given = schema.inputs[min(number, len(schema.inputs) - 1)]
    return set(given.types)


@pytest.mark.parametrize("operator", [name for name in KERNELS if "." not in name])
def test_no_kernel_is_for_a_type_that_its_operator_cannot_have(operator: str) -> None:
    if operator == "SimplifiedLayerNormalization":  # ONNX Runtime's, in ONNX's domain
        return
    for number, types in KERNELS[operator].types.items():
        wrong = {t for t in types if f"tensor({ONNX_TYPES.get(t, t)})" not in list_allowed(operator, number)}
        assert not wrong


def test_every_operator_of_the_bundles_is_in_the_table(
    demo_bundle: Path, llama_demo_bundle: Path, marian_bundle: Path, minilm_bundle: Path
) -> None:
    seen: set[str] = set()
    for folder in (demo_bundle, llama_demo_bundle, marian_bundle, minilm_bundle):
        for artifact in Bundle.open(folder).manifest.artifacts:
            graph = onnx.load(folder / artifact.file, load_external_data=False).graph
            seen |= {f"{node.domain}.{node.op_type}".removeprefix(".") for node in graph.node}
    assert len(seen) > 30
    assert seen - KERNELS.keys() == set()


def test_shapes_are_computed_by_operators_that_a_gpu_has_too() -> None:
    """Else what is left on the CPU for want of a kernel would pass for a shape."""
    own = {"Constant", "MemcpyFromHost", "MemcpyToHost"}  # of the engine: no node stays one, or it copies
    assert SHAPE_OPERATORS - KERNELS.keys() == own
    assert all(all(KERNELS[name].types.values()) for name in SHAPE_OPERATORS - own)


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
        ("Unheard", {0: "float16"}, {}, ""),
    ],
)
def test_what_has_no_kernel_is_told(
    operator: str, types: dict[int, str], attributes: dict[str, object], words: str
) -> None:
    found = explain_missing(operator, types, attributes)
    assert words in found and bool(words) == bool(found)


def test_a_dialects_attention_decides() -> None:
    assert set(ATTENTION) <= set(CPU_DIALECTS)
    assert explain_missing_attention("ort", "float32", "float32")
    assert not explain_missing_attention("ort", "float16", "float16")
    for dialect in set(CUDA_DIALECTS) - set(ATTENTION):
        assert not explain_missing_attention(dialect, "float32", "float32")
