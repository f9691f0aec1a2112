"""Two ONNX files, one of them quantized: the limit is what its codes can change, not what the file holds."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from planforge.exporter import verify

WIDTH = 64
RANDOM = np.random.default_rng(3)
WEIGHTS = [RANDOM.standard_normal((WIDTH, WIDTH)).astype(np.float32) / 8 for _ in range(2)]


def write(path: Path, spoil: float = 0.0) -> Path:
    """Write x -> Tanh(x W0) W1; `spoil` is added to one weight."""
    weights = [weight.copy() for weight in WEIGHTS]
    weights[1][5, 7] += spoil
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["x", "w0"], ["a"], name="first"),
            helper.make_node("Tanh", ["a"], ["b"], name="tanh"),
            helper.make_node("MatMul", ["b", "w1"], ["y"], name="second"),
        ],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", WIDTH])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", WIDTH])],
        [numpy_helper.from_array(weight, f"w{i}") for i, weight in enumerate(weights)],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), path)
    return path


def quantize_dynamically(source: Path, path: Path) -> None:
    from onnxruntime.quantization import quantize_dynamic

    quantize_dynamic(source, path)


def quantize_to_pairs(source: Path, path: Path) -> None:
    from onnxruntime.quantization import CalibrationDataReader, quantize_static

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.rows = iter([{"x": RANDOM.standard_normal((64, WIDTH)).astype(np.float32)}])

        def get_next(self) -> dict[str, np.ndarray] | None:
            return next(self.rows, None)

    quantize_static(source, path, Reader(), per_channel=True)


def quantize_to_four_bits(source: Path, path: Path) -> None:
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    quantizer = MatMulNBitsQuantizer(onnx.load(source), bits=4, block_size=32, is_symmetric=True)
    quantizer.process()
    quantizer.model.save_model_to_file(str(path))


def halve(source: Path, path: Path, keep: bool) -> None:
    from onnxruntime.transformers.float16 import convert_float_to_float16

    onnx.save(convert_float_to_float16(onnx.load(source), keep_io_types=keep), path)


def halve_within(source: Path, path: Path) -> None:
    halve(source, path, keep=True)


def halve_all(source: Path, path: Path) -> None:
    halve(source, path, keep=False)


def halve_weights(source: Path, path: Path) -> None:
    """Store weights in fp16, and compute in fp32."""
    model = onnx.load(source)
    for tensor in model.graph.initializer:
        array = numpy_helper.to_array(tensor).astype(np.float16)
        name = f"{tensor.name}_half"
        model.graph.node.insert(0, helper.make_node("Cast", [name], [tensor.name], to=TensorProto.FLOAT))
        tensor.CopyFrom(numpy_helper.from_array(array, name))
    onnx.save(model, path)


QUANTIZERS = [
    quantize_dynamically,
    quantize_to_pairs,
    quantize_to_four_bits,
    halve_within,
    halve_all,
    halve_weights,
]


def put_into_branches(path: Path) -> None:
    """Put a graph's nodes into both branches of an If, which read the weights of the graph around them.

    So are the decoders that optimum merges.
    """
    opened = ir.load(path)
    opened.graph.sort()
    model = ir.to_proto(opened)
    graph = model.graph
    (y,) = graph.output
    results = [helper.make_tensor_value_info("z", y.type.tensor_type.elem_type, ["n", WIDTH])]
    nodes = [*graph.node, helper.make_node("Identity", ["y"], ["z"])]
    branches = {f"{name}_branch": helper.make_graph(nodes, name, [], results) for name in ("then", "else")}
    chosen = helper.make_node("If", ["use_cache"], ["y"], name="if", **branches)
    graph.ClearField("node")
    graph.ClearField("value_info")
    graph.node.append(chosen)
    graph.input.append(helper.make_tensor_value_info("use_cache", TensorProto.BOOL, []))
    for branch in chosen.attribute:  # a name that is new there
        for node in branch.g.node:
            for names in (node.input, node.output):
                names[:] = ["inner" if name == "y" else name for name in names]
    onnx.save(model, path)


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    x = np.random.default_rng(9).standard_normal((16, WIDTH)).astype(np.float32)
    np.savez(tmp_path / "in.npz", x=x, use_cache=np.array(True))
    return tmp_path / "in.npz"


@pytest.mark.parametrize("in_branches", [False, True])
@pytest.mark.parametrize("quantize", QUANTIZERS)
def test_what_onnxruntime_quantizes_passes_and_a_fault_of_a_weight_fails(
    quantize: Callable[[Path, Path], None], in_branches: bool, tmp_path: Path, inputs: Path
) -> None:
    """ONNX Runtime's own quantizers are the reference of what a sound file is."""
    sound = write(tmp_path / "sound.onnx")
    spoiled = write(tmp_path / "spoiled.onnx", 2.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantize(sound, tmp_path / "quantized.onnx")
    for path in (sound, spoiled, tmp_path / "quantized.onnx") if in_branches else ():
        put_into_branches(path)
    report = verify(tmp_path / "quantized.onnx", against=sound, inputs=inputs)
    assert report.passed, [c.failures for c in report.comparisons]
    for pair in ((tmp_path / "quantized.onnx", spoiled), (spoiled, tmp_path / "quantized.onnx")):
        failures = [
            f for c in verify(pair[0], against=pair[1], inputs=inputs).comparisons for f in c.failures
        ]
        assert any("max_error is" in failure for failure in failures)


def quantize_deep(path: Path, accuracy_level: int | None) -> Path:
    """Write a chain of eight products that ONNX Runtime quantized; level 4 rounds their inputs to int8."""
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    random = np.random.default_rng(1)
    names = [f"h{i}" for i in range(8)] + ["y"]
    nodes = [helper.make_node("Identity", ["x"], ["h0"])]
    weights = []
    for i, (read, written) in enumerate(itertools.pairwise(names)):
        weight = random.standard_normal((256, 256)).astype(np.float32) / 12
        weights.append(numpy_helper.from_array(weight, f"w{i}"))
        nodes.append(helper.make_node("MatMul", [read, f"w{i}"], [f"p{i}"], name=f"product{i}"))
        nodes.append(helper.make_node("Erf", [f"p{i}"], [written]))
    sides = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 256]) for name in ("x", "y")]
    graph = helper.make_graph(nodes, "g", sides[:1], sides[1:], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    quantizer = MatMulNBitsQuantizer(
        model, bits=4, block_size=32, is_symmetric=True, accuracy_level=accuracy_level
    )
    quantizer.process()
    quantizer.model.save_model_to_file(str(path))
    return path


def test_activations_that_an_operator_rounds_may_be_a_step_apart(tmp_path: Path) -> None:
    """What differs by fp32's rounding is another code of int8 now and then, in each run of the same file."""
    np.savez(tmp_path / "in.npz", x=np.random.default_rng(2).standard_normal((64, 256)).astype(np.float32))
    found = {}
    for level in (4, 0):
        report = verify(quantize_deep(tmp_path / f"{level}.onnx", level), inputs=tmp_path / "in.npz")
        assert report.passed, [c.failures for c in report.comparisons]
        (comparison,) = report.comparisons
        found[level] = comparison.limits["y.max_error"]
    assert found[4] > found[0] == 1e-4  # what is not rounded is compared as fp32 is


def add_half(path: Path) -> None:
    """Add to y what is 0 * y in fp16."""
    model = onnx.load(path)
    for node in model.graph.node:
        node.output[:] = ["exact" if name == "y" else name for name in node.output]
    model.graph.initializer.append(numpy_helper.from_array(np.float16(0), "nothing"))
    model.graph.node.extend(
        [
            helper.make_node("Cast", ["exact"], ["half"], to=TensorProto.FLOAT16, name="to_half"),
            helper.make_node("Mul", ["half", "nothing"], ["zeros"], name="zeros"),
            helper.make_node("Cast", ["zeros"], ["added"], to=TensorProto.FLOAT, name="to_float"),
            helper.make_node("Add", ["exact", "added"], ["y"], name="add"),
        ]
    )
    onnx.save(onnx.shape_inference.infer_shapes(model), path)


@pytest.mark.parametrize("in_branches", [False, True])
@pytest.mark.parametrize("spoil", [0.0005, 0.0])
def test_a_live_number_in_fp16_loosens_no_limit_of_others(
    spoil: float, in_branches: bool, tmp_path: Path, inputs: Path
) -> None:
    sound = write(tmp_path / "sound.onnx")
    spoiled = write(tmp_path / "spoiled.onnx", spoil)
    add_half(spoiled)
    for path in (sound, spoiled) if in_branches else ():
        put_into_branches(path)
    report = verify(spoiled, against=sound, inputs=inputs)
    assert report.passed == (spoil == 0.0)
    failures = [failure for comparison in report.comparisons for failure in comparison.failures]
    assert any("max_error is" in failure for failure in failures) == (spoil > 0)


def add_constant(path: Path, dtype: type[np.generic], used: bool) -> None:
    """Add integers that no quantized operator reads, or that one reads whose result is of no use."""
    model = onnx.load(path)
    model.graph.initializer.append(numpy_helper.from_array(np.ones(4, dtype), "spare"))
    if used:
        model.graph.initializer.append(numpy_helper.from_array(np.float32(1.0), "scale"))
        model.graph.node.append(
            helper.make_node("DequantizeLinear", ["spare", "scale"], ["unread"], name="d")
        )
    onnx.save(model, path)


@pytest.mark.parametrize(
    ("dtype", "used"),
    [(np.uint8, False), (np.int8, False), (np.float16, False), (np.uint8, True), (np.int8, True)],
)
def test_a_constant_that_changes_nothing_loosens_no_limit(
    dtype: type[np.generic], used: bool, tmp_path: Path, inputs: Path
) -> None:
    sound = write(tmp_path / "sound.onnx")
    spoiled = write(tmp_path / "spoiled.onnx", 0.01)
    add_constant(spoiled, dtype, used)
    assert not verify(spoiled, against=sound, inputs=inputs).passed
    same = write(tmp_path / "same.onnx")
    add_constant(same, dtype, used)
    assert verify(same, against=sound, inputs=inputs).passed
