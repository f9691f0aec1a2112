"""Graphs that NVIDIA ModelOpt quantized: verified, built with their scales, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import transformers
from onnx import TensorProto, helper, numpy_helper

from planforge.exporter import verify
from planforge.exporter.errors import BuildOptionError, CheckpointError
from planforge.exporter.exporting import import_folder
from planforge.exporter.imported.folder import read_folder, read_graph
from planforge.exporter.imported.quantized import list_quantizing_nodes
from planforge.exporter.linting.lint import lint
from planforge.exporter.passes.quantization_form import KEPT
from planforge.exporter.reference_model import OnnxGraphs
from planforge.runtime import TextEncoder
from planforge.runtime.bundle.bundle import Bundle
from planforge.runtime.errors import InputError

from ...helpers.plans import only
from ...helpers.quantized import (
    BLOCK,
    LENGTH,
    NODE,
    TENSORS,
    WIDTH,
    WORDS,
    change,
    draw_weights,
    make_folder,
    read_scales,
    set_tensor,
)


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


def test_a_checkpoint_is_no_reference_of_quantized_weights(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "folder", "int4")
    (folder / "model.safetensors").touch()
    with pytest.raises(InputError, match=r"quantized weights, which differ from a checkpoint's .* leave out"):
        import_folder(folder, tmp_path / "bundle")


@pytest.mark.parametrize("name", ["encoder_model.onnx", "decoder_model.onnx", "decoder_with_past_model.onnx"])
def test_each_graph_of_an_encoder_decoder_needs_a_reference(name: str, tmp_path: Path) -> None:
    """What is refused of a single graph is refused of one among three."""
    folder = make_folder(tmp_path / "folder", "int8")
    quantized = (folder / "model.onnx").read_bytes()
    change(folder, remove_quantization)
    plain = (folder / "model.onnx").read_bytes()
    (folder / "model.onnx").unlink()
    for one in ("encoder_model.onnx", "decoder_model.onnx", "decoder_with_past_model.onnx"):
        (folder / one).write_bytes(quantized if one == name else plain)
    with pytest.raises(InputError, match=f"{name} rounds activations at node '/encoder/activation/Q"):
        import_folder(folder, tmp_path / "bundle")
    (folder / "model.safetensors").touch()
    with pytest.raises(InputError, match=f"{name} has quantized weights, which differ from a checkpoint's"):
        import_folder(folder, tmp_path / "bundle")


def remove_quantization(graph: onnx.GraphProto) -> None:
    """Let the product read what was quantized."""
    for node in [node for node in graph.node if node.op_type in ("QuantizeLinear", "DequantizeLinear")]:
        graph.node.remove(node)
    graph.node[-1].input[:] = ["x", "values"]


def test_the_reference_runs_a_quantized_encoder_as_it_is(tmp_path: Path) -> None:
    """ONNX Runtime's optimizer refuses what it makes of fp8."""
    folder = make_folder(tmp_path / "folder", "fp8")
    quantized = (folder / "model.onnx").read_bytes()
    change(folder, remove_quantization)
    (folder / "model.onnx").rename(folder / "decoder_model_merged.onnx")
    (folder / "encoder_model.onnx").write_bytes(quantized)
    found = OnnxGraphs(read_folder(folder))
    given = {"input_ids": np.array([[5, 7]]), "attention_mask": np.ones((1, 2), np.int64)}
    assert found.encoder is not None
    (hidden,) = found.encoder.run(None, given)
    table, codes, scales = draw_weights()
    stored = codes.astype(TENSORS["fp8"]).astype(np.float32) * scales[:1]  # by ONNX's definition
    np.testing.assert_allclose(hidden[0], table[[5, 7]] @ stored, atol=1e-5)
    assert found.rounds  # though the decoder does not
    with pytest.raises(InputError, match=r"encoder_model\.onnx rounds activations at .*encoder-decoder"):
        found.found.check_comparable(has_weights=False)


def test_verify_refuses_a_checkpoint_as_the_reference_of_quantized_weights(tmp_path: Path) -> None:
    """What --no-verify let in is no bundle to prove."""
    folder = make_folder(tmp_path / "folder", "int4")
    sizes: dict[str, Any] = {
        "vocab_size": WORDS,
        "hidden_size": WIDTH,
        "intermediate_size": WIDTH,
        "num_hidden_layers": 1,
    }
    config = transformers.BertConfig(num_attention_heads=4, max_position_embeddings=LENGTH, **sizes)
    transformers.BertModel(config).save_pretrained(folder)
    options: dict[str, Any] = {"precision": ["fp32"], "target": ["portable"]}
    import_folder(folder, tmp_path / "bundle", verify=False, **options)
    with pytest.raises(InputError, match="has quantized weights, which differ from a checkpoint's"):
        verify(tmp_path / "bundle", level="quick")


@pytest.mark.parametrize("kind", ["int4", "int8"])
def test_unnamed_nodes_get_names_that_are_free(kind: str, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "folder", kind)

    def take_names(graph: onnx.GraphProto) -> None:
        for node in graph.node:
            node.name = ""
        graph.node[0].name = "Unsqueeze_1"
        graph.node[1].name = "MatMul_2"

    change(folder, take_names)
    names = [node.name for node in read_graph(folder / "model.onnx").graph]
    assert all(names) and len(set(names)) == len(names)
    assert names[:2] == ["Unsqueeze_1", "MatMul_2"]


def test_older_opsets_are_converted_with_their_marks(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "folder", "int8")
    model = onnx.load(folder / "model.onnx")
    model.opset_import[0].version = 13
    onnx.checker.check_model(model)
    onnx.save(model, folder / "model.onnx")
    nodes = list_quantizing_nodes(read_graph(folder / "model.onnx"))
    assert len(nodes) == 4 and all(KEPT in node.metadata_props for node in nodes)


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
            "it has 2 x 64 scales, and must have 4 x 64: one for each block of 16 along axis 0",
        ),
        (
            give_scales(WIDTH // BLOCK, WIDTH - 1),
            "it has 2 x 63 scales, and must have 2 x 64: one for each block",
        ),
        (give_scales(WIDTH - 1), "it has 63 scales, and must have 2 x 64: one for each block"),
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
    what = "it has 63 scales, and must have 64: one for each index of axis"
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
