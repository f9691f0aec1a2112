"""A KV cache in 8 bits in a plan: TensorRT-RTX itself says what it takes.

It writes slots in place in floats alone. A cache that grows may be in int8, but each step copies it whole
into a second one: both take as much memory as one in fp16 that is written in place, and more time.
"""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from planforge.exporter.errors import BuildError
from planforge.exporter.tensorrt.build import PlanRequest, build_plan
from planforge.exporter.tensorrt.profiles import Profile
from planforge.runtime.backends.tensorrt_library import import_library, make_logger
from planforge.runtime.bundle.manifest import Artifact, Axis, TensorSpec

from .test_hardware import needs_rtx

H, S, D = 2, 16, 8
TYPES = {"int8": TensorProto.INT8, "fp8": TensorProto.FLOAT8E4M3FN, "float16": TensorProto.FLOAT16}
BATCH, TOKENS = Axis("batch", 1, 1, 4), Axis("tokens", 1, 1, 4)
PAST, TOTAL = Axis("past", 1, 4, 8), Axis("total", 2, 5, 12)


def make_cache(kind: str, in_place: bool) -> onnx.ModelProto:
    """New keys go into a cache, rounded where that is in 8 bits, and all of it is read in fp16."""
    half = TensorProto.FLOAT16
    steps = [helper.make_tensor("step", half, [], [0.05]), helper.make_tensor("zero", TYPES[kind], [], [0])]
    if kind == "float16":
        round_new = helper.make_node("Identity", ["k"], ["codes"])
        read = helper.make_node("Neg", ["present"], ["y"])
        steps = []
    else:
        round_new = helper.make_node("QuantizeLinear", ["k", "step", "zero"], ["codes"])
        read = helper.make_node("DequantizeLinear", ["present", "step", "zero"], ["y"])
    inputs = [helper.make_tensor_value_info("k", half, ["batch", H, "tokens", D])]
    if in_place:
        given = ["cache", "codes", "lengths"]
        write = helper.make_node("TensorScatter", given, ["present"], name="write", axis=-2)
        inputs.append(helper.make_tensor_value_info("cache", TYPES[kind], ["batch", H, S, D]))
        inputs.append(helper.make_tensor_value_info("lengths", TensorProto.INT64, ["batch"]))
    else:
        write = helper.make_node("Concat", ["cache", "codes"], ["present"], name="write", axis=2)
        inputs.append(helper.make_tensor_value_info("cache", TYPES[kind], ["batch", H, "past", D]))
    shape: list[str | int | None] = ["batch", H, S if in_place else "total", D]
    outputs = [
        helper.make_tensor_value_info("y", half, shape),
        helper.make_tensor_value_info("present", TYPES[kind], shape),
    ]
    graph = helper.make_graph([round_new, write, read], "cache", inputs, outputs, steps)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=11)


def request_plan(kind: str, in_place: bool, folder: Path) -> PlanRequest:
    model = make_cache(kind, in_place)
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, folder / "g.onnx")
    length = S if in_place else PAST
    inputs = [
        TensorSpec("k", "k", "float16", (BATCH, H, TOKENS, D)),
        TensorSpec("cache", "cache", kind, (BATCH, H, length, D)),
    ]
    inputs += [TensorSpec("lengths", "lengths", "int64", (BATCH,))] if in_place else []
    shape = (BATCH, H, S if in_place else TOTAL, D)
    outputs = (TensorSpec("y", "y", "float16", shape), TensorSpec("present", "present", kind, shape))
    aliases = {"present": "cache"} if in_place else {}
    onnx_file = folder / "g.onnx"
    artifact = Artifact(
        "decoder", "inplace", "fp16", 24, "g.onnx", (), "right", tuple(inputs), outputs, aliases=aliases
    )
    axes = (BATCH, TOKENS) if in_place else (BATCH, TOKENS, PAST)
    profile = Profile("all", {axis.name: (axis.min, axis.opt, axis.max) for axis in axes})
    return PlanRequest(onnx_file, artifact, [profile], folder / "g.plan", sms=["sm89"])


@needs_rtx
@pytest.mark.parametrize(("kind", "called"), [("int8", "Int8"), ("fp8", "FP8")])
def test_no_slots_of_8_bits_are_written_in_place(kind: str, called: str) -> None:
    trt = import_library("tensorrt-rtx")
    log = make_logger(trt)
    builder = trt.Builder(log)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, log)
    assert not parser.parse(make_cache(kind, in_place=True).SerializeToString())
    words = f"cache has type {called} but must have type Float, Half, or BFloat16"
    assert words in parser.get_error(0).desc()


@needs_rtx
def test_the_message_says_what_is_allowed(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"'write' \(TensorScatter\): it writes a cache of Int8 in place"):
        build_plan(request_plan("int8", True, tmp_path))


@needs_rtx
@pytest.mark.parametrize(("kind", "in_place"), [("float16", True), ("int8", False)])
def test_slots_of_floats_and_growing_caches_are_taken(kind: str, in_place: bool, tmp_path: Path) -> None:
    """So the tests above refuse nothing but the type."""
    build_plan(request_plan(kind, in_place, tmp_path))
    assert (tmp_path / "g.plan").stat().st_size > 0
