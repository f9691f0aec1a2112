"""Convolutions in Winograd's domain give what PyTorch's give, at any size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
import torch.nn.functional as F

from planforge.exporter.passes import winograd
from planforge.exporter.passes.weights import ParameterRef, transform_kernels
from planforge.exporter.passes.winograd import multiply_in_winograds_domain

CHANNELS = (winograd.LEAST_CHANNELS, winograd.LEAST_CHANNELS + 3)  # in and out
ERROR = 2.0**-24  # of one sum in float32


def make_model(weight: np.ndarray[Any, Any], bias: np.ndarray[Any, Any], **options: Any) -> ir.Model:
    """Return a graph of one convolution of pictures of any size."""
    K, C, _, _ = weight.shape
    x = ir.Value(name="x", shape=ir.Shape(["N", C, "H", "W"]), type=ir.TensorType(ir.DataType.FLOAT))
    constants = [
        ir.Value(name=name, const_value=ir.tensor(array), shape=ir.Shape(array.shape))
        for name, array in (("conv.weight", weight), ("conv.bias", bias))
    ]
    usual: dict[str, Any] = {"pads": [1, 1, 1, 1], "strides": [1, 1], "dilations": [1, 1], "group": 1}
    conv = ir.node("Conv", [x, *constants], {**usual, **options}, name="conv")
    conv.metadata_props["module"] = "conv"
    y = conv.outputs[0]
    y.name = "y"
    y.type = ir.TensorType(ir.DataType.FLOAT)
    y.shape = ir.Shape(["N", K, "H", "W"])
    graph = ir.Graph([x], [y], nodes=[conv], initializers=constants, opset_imports={"": 20}, name="g")
    return ir.Model(graph, ir_version=10)


def draw(*shape: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.fixture(scope="module")
def parameters() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    C, K = CHANNELS
    return draw(K, C, 3, 3) / np.float32((9 * C) ** 0.5), draw(K, seed=1)


@pytest.mark.parametrize("size", [(8, 12), (7, 9), (1, 1), (2, 5), (33, 16)])
def test_results_are_those_of_a_convolution(size: tuple[int, int], parameters: Any, tmp_path: Path) -> None:
    weight, bias = parameters
    model = make_model(weight, bias)
    multiply_in_winograds_domain(model)
    graph = model.graph
    assert "Conv" not in {node.op_type for node in graph}
    assert {node.metadata_props["module"] for node in graph} == {"conv"}
    assert sum(node.op_type == "Gemm" for node in graph) == 16
    assert "conv.weight" not in graph.initializers
    ir.save(model, tmp_path / "x.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "x.onnx", providers=["CPUExecutionProvider"])
    x = draw(2, CHANNELS[0], *size, seed=2)
    (got,) = session.run(None, {"x": x})
    numbers = [torch.from_numpy(array).double() for array in (x, weight, bias)]
    wanted = F.conv2d(numbers[0], numbers[1], numbers[2], padding=1).numpy()
    assert got.shape == wanted.shape
    # Errors of a sum of C terms add up as a random walk does; each result has the sums of 16 products.
    terms = F.conv2d(numbers[0].abs(), numbers[1].abs(), numbers[2].abs(), padding=1).numpy()
    allowed = ERROR * 16 * CHANNELS[0] ** 0.5 * terms.max()
    assert np.abs(got - wanted).max() <= allowed


@pytest.mark.parametrize("size", [(7, 12), (8, 9)])
def test_every_value_has_the_shape_that_the_graph_tells(
    size: tuple[int, int], parameters: Any, tmp_path: Path
) -> None:
    """A size that is not told makes ONNX Runtime open the graph slowly; of a wrong one it warns."""
    model = make_model(*parameters)
    multiply_in_winograds_domain(model)
    values = [value for node in model.graph for value in node.outputs]
    told = {value.name: [str(dim) for dim in value.shape or ()] for value in values}
    model.graph.outputs.extend(value for value in values if value not in model.graph.outputs)
    ir.save(model, tmp_path / "x.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "x.onnx", providers=["CPUExecutionProvider"])
    found = session.run(list(told), {"x": draw(2, CHANNELS[0], *size)})
    sizes = {"N": 2, "H": size[0], "W": size[1]}
    for (name, dims), array in zip(told.items(), found, strict=True):
        assert [eval(dim, {}, sizes) for dim in dims] == list(array.shape), name


def test_kernels_are_those_of_the_paper() -> None:
    """U = G g G^T, of Lavin and Gray's equation 8."""
    G = np.array([[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]])
    kernels = draw(3, 2, 3, 3)
    wanted = np.einsum("ia,kcab,jb->ijkc", G, kernels.astype(np.float64), G)
    for i in range(4):
        for j in range(4):
            np.testing.assert_allclose(transform_kernels(kernels, i, j), wanted[i, j], rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize(
    "options",
    [
        {"strides": [2, 2]},
        {"pads": [0, 0, 0, 0]},
        {"pads": [2, 2, 2, 2], "dilations": [2, 2]},
        {"auto_pad": "SAME_UPPER"},
    ],
    ids=str,
)
def test_others_stay(options: dict[str, Any], parameters: Any) -> None:
    model = make_model(*parameters, **options)
    multiply_in_winograds_domain(model)
    assert [node.op_type for node in model.graph] == ["Conv"]


@pytest.mark.parametrize("shape", [(512, 128, 3, 3), (128, 512, 3, 3), (512, 512, 1, 1), (512, 512, 5, 5)])
def test_few_channels_and_other_kernels_stay(shape: tuple[int, ...]) -> None:
    model = make_model(np.zeros(shape, np.float32), np.zeros(shape[0], np.float32))
    multiply_in_winograds_domain(model)
    assert [node.op_type for node in model.graph] == ["Conv"]


def test_constants_say_what_they_store(parameters: Any) -> None:
    weight, bias = parameters
    model = make_model(weight, bias)
    multiply_in_winograds_domain(model)
    seen = set()
    for value in model.graph.initializers.values():
        stored = ParameterRef.read(value)
        if stored.point is not None:
            seen.add(tuple(stored.point))
            assert value.const_value is not None and stored.parameter == "conv.weight"
            array = value.const_value.numpy()
            np.testing.assert_array_equal(stored.of(weight, array.shape).astype(np.float32), array)
    assert len(seen) == 16
