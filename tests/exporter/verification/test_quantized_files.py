"""Two ONNX files, one of them quantized: the limit is what its codes can change, not what the file holds."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import onnx
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


QUANTIZERS = [quantize_dynamically, quantize_to_pairs, quantize_to_four_bits]


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    np.savez(tmp_path / "in.npz", x=np.random.default_rng(9).standard_normal((16, WIDTH)).astype(np.float32))
    return tmp_path / "in.npz"


@pytest.mark.parametrize("quantize", QUANTIZERS)
def test_what_onnxruntime_quantizes_passes_and_a_fault_of_a_weight_fails(
    quantize: object, tmp_path: Path, inputs: Path
) -> None:
    """ONNX Runtime's own quantizers are the reference of what a sound file is."""
    assert callable(quantize)
    sound = write(tmp_path / "sound.onnx")
    spoiled = write(tmp_path / "spoiled.onnx", 2.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantize(sound, tmp_path / "quantized.onnx")
    report = verify(tmp_path / "quantized.onnx", against=sound, inputs=inputs)
    assert report.passed, [c.failures for c in report.comparisons]
    for pair in ((tmp_path / "quantized.onnx", spoiled), (spoiled, tmp_path / "quantized.onnx")):
        failures = [
            f for c in verify(pair[0], against=pair[1], inputs=inputs).comparisons for f in c.failures
        ]
        assert any("max_error is" in failure for failure in failures)


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
