"""Graphs with QuantizeLinear and DequantizeLinear as NVIDIA ModelOpt writes them, and bad ones.

They are written here by onnx.helper, in the form that `python -m modelopt.onnx.quantization` of ModelOpt
0.47 gave of bert-demo with --high_precision_dtype fp32: in int4 a DequantizeLinear of codes in blocks along
axis 0; in int8 and fp8 a pair of nodes at each weight, with a scale for each column, and one at each
activation. ModelOpt itself is no dependency.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from planforge.exporter.errors import BuildOptionError, CheckpointError
from planforge.exporter.exporting import import_folder
from planforge.exporter.linting.lint import lint
from planforge.runtime import TextEncoder
from planforge.runtime.bundle.bundle import Bundle
from planforge.runtime.errors import InputError

from ...helpers.models import write_wordpiece
from ...helpers.plans import only

WORDS = 128
WIDTH = 64
BLOCK = 32
LENGTH = 16
NODE = "/encoder/layer.0/output/dense/DequantizeLinear"
TYPES = {"int8": TensorProto.INT8, "fp8": TensorProto.FLOAT8E4M3FN}
TENSORS: dict[str, Any] = {"int8": np.int8, "fp8": ml_dtypes.float8_e4m3fn}


def draw_weights() -> tuple[Any, Any, Any]:
    """Return a table of words, int4 codes (K, N), and fp32 scales that fp16 does not have (K / b, N)."""
    random = np.random.default_rng(0)
    table = random.standard_normal((WORDS, WIDTH)).astype(np.float32)
    codes = random.integers(-8, 8, (WIDTH, WIDTH)).astype(np.int8)
    scales = random.uniform(0.01, 0.02, (WIDTH // BLOCK, WIDTH)).astype(np.float32)
    assert (scales != scales.astype(np.float16)).all()
    return table, codes, scales


def make_folder(folder: Path, kind: str) -> Path:
    """Write an encoder of one product, whose weight is quantized, as optimum names its files."""
    folder.mkdir()
    write_wordpiece(folder)
    settings = {"model_type": "bert", "vocab_size": WORDS, "hidden_size": WIDTH, "pad_token_id": 0}
    settings |= {"num_attention_heads": 4, "num_hidden_layers": 1, "max_position_embeddings": LENGTH}
    (folder / "config.json").write_text(json.dumps({**settings, "architectures": ["BertModel"]}))
    table, codes, scales = draw_weights()
    weights = [numpy_helper.from_array(table, "table")]
    nodes = [
        helper.make_node("Gather", ["table", "input_ids"], ["words"], "/embeddings/Gather"),
        helper.make_node("Cast", ["attention_mask"], ["mask"], "/Cast", to=TensorProto.FLOAT),
        helper.make_node("Unsqueeze", ["mask", "last"], ["seen"], "/Unsqueeze"),
        helper.make_node("Mul", ["words", "seen"], ["x"], "/Mul"),
    ]
    weights.append(numpy_helper.from_array(np.array([-1]), "last"))
    read = "x"
    if kind == "int4":
        packed = helper.make_tensor("codes", TensorProto.INT4, codes.shape, codes.ravel().tolist())
        weights += [packed, numpy_helper.from_array(scales, "scales")]
        nodes.append(helper.make_node("DequantizeLinear", ["codes", "scales"], ["w"], NODE))
        nodes[-1].attribute.extend([helper.make_attribute("axis", 0)])
        nodes[-1].attribute.extend([helper.make_attribute("block_size", BLOCK)])
    else:
        zeros = np.zeros(WIDTH, TENSORS[kind])
        values = codes * scales[:1]
        weights += [numpy_helper.from_array(values, "values"), numpy_helper.from_array(scales[0], "scales")]
        weights += [numpy_helper.from_array(zeros, "zeros"), numpy_helper.from_array(zeros[0], "zero")]
        weights.append(numpy_helper.from_array(np.float32(0.03), "step"))
        pairs: list[tuple[list[str], str, str, dict[str, Any]]] = [
            (["x", "step"], "zero", "activation", {}),
            (["values", "scales"], "zeros", "w", {"axis": 1}),
        ]
        for given, shift, made, axis in pairs:
            name = f"/encoder/{made}"
            q = helper.make_node("QuantizeLinear", [*given, shift], [f"{made}.q"], f"{name}/Quantize", **axis)
            back = [f"{made}.q", given[1], shift]
            nodes += [q, helper.make_node("DequantizeLinear", back, [made], f"{name}/Dequantize", **axis)]
        read = "activation"
    nodes.append(helper.make_node("MatMul", [read, "w"], ["last_hidden_state"], "/encoder/layer.0/MatMul"))
    axes = ["batch", "tokens"]
    inputs = [
        helper.make_tensor_value_info(n, TensorProto.INT64, axes) for n in ("input_ids", "attention_mask")
    ]
    output = helper.make_tensor_value_info("last_hidden_state", TensorProto.FLOAT, [*axes, WIDTH])
    graph = helper.make_graph(nodes, "main", inputs, [output], weights)
    opset = helper.make_opsetid("", 21 if kind == "int4" else 19)
    model = helper.make_model(graph, opset_imports=[opset], ir_version=10)
    onnx.checker.check_model(model)
    onnx.save(model, folder / "model.onnx")
    return folder


def read_scales(path: Path) -> dict[str, list[bytes]]:
    """Return the bytes of each quantizing node's scales, by operator."""
    graph = onnx.load(path).graph
    tensors = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    found: dict[str, list[bytes]] = {}
    for node in graph.node:
        if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            assert tensors[node.input[1]].dtype == np.float32
            found.setdefault(node.op_type, []).append(tensors[node.input[1]].tobytes())
    return {name: sorted(scales) for name, scales in found.items()}


def change(folder: Path, edit: Callable[[onnx.GraphProto], None]) -> None:
    model = onnx.load(folder / "model.onnx")
    edit(model.graph)
    onnx.save(model, folder / "model.onnx")


def set_tensor(graph: onnx.GraphProto, name: str, array: Any) -> None:
    next(t for t in graph.initializer if t.name == name).CopyFrom(numpy_helper.from_array(array, name))


@pytest.fixture(scope="module")
def int4(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A folder in int4, and its verified bundle with a plan."""
    folder = make_folder(tmp_path_factory.mktemp("int4") / "folder", "int4")
    bundle = folder.parent / "bundle"
    options: dict[str, Any] = {"precision": ["fp32", "fp16"], "target": ["portable", "rtx"], "sms": ["sm89"]}
    import_folder(folder, bundle, verify="quick", **options)
    return folder, bundle


def test_int4_is_verified_and_built_with_its_scales(int4: tuple[Path, Path], tmp_path: Path) -> None:
    folder, bundle = int4
    manifest = Bundle.open(bundle).manifest
    assert all(artifact.passed for artifact in manifest.artifacts)
    assert [plan.built_from for plan in manifest.plans] == ["encoder.portable.fp16"]
    wanted = read_scales(folder / "model.onnx")
    table, codes, scales = draw_weights()
    weight = codes * np.repeat(scales, BLOCK, 0)  # by ONNX's definition of the operator
    for artifact in manifest.artifacts:
        assert read_scales(bundle / artifact.file) == wanted
    ids = [5, 7, 11]
    with TextEncoder.load(only(bundle, tmp_path / "one", "encoder.portable.fp32")) as model:
        inputs = {"input_ids": np.array([ids]), "attention_mask": np.ones((1, 3), np.int64)}
        name = "last_hidden_state"
        found = model.encoder.program.run(inputs, {}, [name])[name]
    np.testing.assert_allclose(found[0], table[ids] @ weight, atol=1e-5)


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_rounded_activations_are_built_unverified(kind: str, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "folder", kind)
    options: dict[str, Any] = {"precision": ["fp16"], "target": ["rtx"], "sms": ["sm89"]}
    where = r"first at node '/encoder/activation/Quantize' \(QuantizeLinear\) in encoder.activation"
    with pytest.raises(InputError, match=f"rounds activations, {where}.* pass --no-verify"):
        import_folder(folder, tmp_path / "bundle", **options)
    result = import_folder(folder, tmp_path / "bundle", verify=False, **options)
    (artifact,) = result.manifest.artifacts
    assert len(result.manifest.plans) == 1 and not artifact.passed
    assert read_scales(tmp_path / "bundle" / artifact.file) == read_scales(folder / "model.onnx")


def test_a_checkpoint_is_no_reference_of_quantized_weights(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "folder", "int4")
    (folder / "model.safetensors").touch()
    with pytest.raises(InputError, match=r"quantized weights, which differ from a checkpoint's .* leave out"):
        import_folder(folder, tmp_path / "bundle")


def give_zero_points(graph: onnx.GraphProto) -> None:
    node = next(node for node in graph.node if node.name == NODE)
    node.input.append("zeros")
    shape = (WIDTH // BLOCK, WIDTH)
    graph.initializer.append(helper.make_tensor("zeros", TensorProto.INT4, shape, [3] * 2 * WIDTH))


def give_scale(value: float) -> Callable[[onnx.GraphProto], None]:
    def edit(graph: onnx.GraphProto) -> None:
        scales = draw_weights()[2]
        scales[1, 9] = value
        set_tensor(graph, "scales", scales)

    return edit


def give_scales(*shape: int) -> Callable[[onnx.GraphProto], None]:
    return lambda graph: set_tensor(graph, "scales", np.full(shape, 0.01, np.float32))


def give_blocks(size: int, count: int) -> Callable[[onnx.GraphProto], None]:
    def edit(graph: onnx.GraphProto) -> None:
        node = next(node for node in graph.node if node.name == NODE)
        next(a for a in node.attribute if a.name == "block_size").i = size
        set_tensor(graph, "scales", np.full((count, WIDTH), 0.01, np.float32))

    return edit


@pytest.mark.parametrize(
    ("edit", "fault"),
    [
        (give_zero_points, "its zero point is not 0"),
        (give_scale(0.0), "a scale is 0; all must be finite and above 0"),
        (give_scale(np.nan), "a scale is nan; all must be finite and above 0"),
        (give_scale(np.inf), "a scale is inf; all must be finite and above 0"),
        (give_blocks(24, 3), "its blocks of 24 do not divide the 64 values of axis 0"),
        (
            give_blocks(16, 2),
            "its scales are 2 x 64, and must be 4 x 64: one for each block of 16 along axis 0",
        ),
        (
            give_scales(WIDTH // BLOCK, WIDTH - 1),
            "its scales are 2 x 63, and must be 2 x 64: one for each block",
        ),
        (give_scales(WIDTH - 1), "its scales are 63, and must be 2 x 64: one for each block"),
    ],
)
def test_bad_forms_are_refused_at_the_node_and_module(
    edit: Callable[[onnx.GraphProto], None], fault: str, tmp_path: Path
) -> None:
    folder = make_folder(tmp_path / "folder", "int4")
    change(folder, edit)
    where = rf"model\.onnx: node '{NODE}' \(DequantizeLinear\) in encoder\.layer\.0\.output\.dense: {fault}"
    with pytest.raises(CheckpointError, match=where):
        import_folder(folder, tmp_path / "bundle")
    found = lint(folder / "model.onnx", ["rtx"]).findings
    assert any(one.rule == "quantization-form" and fault in one.what for one in found)


@pytest.mark.parametrize(("name", "axis"), [("w", 1), ("activation", 2)])
def test_a_wrong_number_of_scales_is_refused_at_the_node_and_module(
    name: str, axis: int, tmp_path: Path
) -> None:
    folder = make_folder(tmp_path / "folder", "int8")

    def give(graph: onnx.GraphProto) -> None:
        for node in graph.node:
            if node.name.startswith(f"/encoder/{name}/"):
                node.input[1] = "few"
                node.input[2] = "zeros_few"
                del node.attribute[:]
                node.attribute.append(helper.make_attribute("axis", axis))
        few = np.full(WIDTH - 1, 0.01, np.float32)
        graph.initializer.append(numpy_helper.from_array(few, "few"))
        graph.initializer.append(numpy_helper.from_array(np.zeros(WIDTH - 1, np.int8), "zeros_few"))

    change(folder, give)
    what = "its scales are 63, and must be 64: one for each index of axis"
    where = rf"node '/encoder/{name}/Quantize' \(QuantizeLinear\) in encoder\.{name}: {what}"
    with pytest.raises(CheckpointError, match=where):
        import_folder(folder, tmp_path / "bundle", verify=False)


@pytest.mark.parametrize("operator", ["TRT_FP8QuantizeLinear", "TRT_INT4DequantizeLinear"])
def test_operators_of_tensorrts_domain_are_refused_at_the_node_and_module(
    operator: str, tmp_path: Path
) -> None:
    folder = make_folder(tmp_path / "folder", "fp8")
    model = onnx.load(folder / "model.onnx")
    node = next(node for node in model.graph.node if node.name == "/encoder/activation/Quantize")
    node.op_type = operator
    node.domain = "trt"
    model.opset_import.append(helper.make_opsetid("trt", 1))
    onnx.save(model, folder / "model.onnx")
    where = (
        rf"node '{node.name}' \(trt::{operator}\) in encoder\.activation: .*own domain 'trt'.*; write it with"
    )
    with pytest.raises(CheckpointError, match=where):
        import_folder(folder, tmp_path / "bundle")


def test_shapes_beyond_the_graph_are_refused(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "folder", "int4")
    options: dict[str, Any] = {"precision": ["fp16"], "target": ["rtx"], "opt": [{"length": LENGTH + 1}]}
    with pytest.raises(BuildOptionError, match="--opt length=17 is outside of what the graph allows, 1 to"):
        import_folder(folder, tmp_path / "bundle", **options)
