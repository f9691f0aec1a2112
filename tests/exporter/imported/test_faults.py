"""Faults in what was imported from optimum's graphs: which node is named, and by what."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper, numpy_helper

from planforge.exporter import verify
from planforge.exporter.errors import VerificationError
from planforge.exporter.exporting import import_folder
from planforge.exporter.imported.folder import read_folder
from planforge.exporter.tracing.modules import find_results_by_scope, find_scope
from planforge.exporter.verification import verify as verify_module
from planforge.runtime.bundle.bundle import Bundle

from ...helpers.faults import Plant, change_weight
from ...helpers.graphs import parse_graph, replace_graph

FOLDED = "layer.0/attention/self/query/MatMul"
NORM = "layer.1/output/LayerNorm/LayerNormalization"


def larger(node: str) -> Plant:
    """The matrix of a product 5 % larger."""

    def plant(model: ir.Model) -> None:
        product = next(each for each in model.graph if str(each.name).endswith(node))
        weight = next(v for v in product.inputs if v is not None and v.const_value is not None)
        change_weight(weight, lambda array: 1.05 * array)

    return plant


@pytest.mark.parametrize(
    ("name", "node", "module", "layer"),
    [
        ("llama", "layers.1/mlp/up_proj/MatMul", "model.layers.1.mlp.up_proj", 1),
        ("roberta", "layer.1/output/dense/MatMul", "encoder.layer.1.output.dense", 1),
    ],
)
def test_an_imported_graph_in_fp32_is_held_against_the_modules_of_transformers(
    name: str,
    node: str,
    module: str,
    layer: int,
    exported: Path,
    imported: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    damaged = Path(shutil.copytree(imported(name), tmp_path / "bundle"))
    artifacts = [artifact.id for artifact in Bundle.open(damaged).manifest.artifacts]
    for artifact in artifacts:  # no graph of the bundle is sound
        replace_graph(damaged, artifact, larger(node))
    report = verify(damaged, source=exported / name)
    assert [mismatch.artifact for mismatch in report.mismatches] == artifacts
    assert {(mismatch.module, mismatch.layer) for mismatch in report.mismatches} == {(module, layer)}
    assert {mismatch.reference for mismatch in report.mismatches} == {"PyTorch"}
    assert not report.unexplained


def test_without_the_checkpoint_another_dialect_is_the_reference_and_fp32_is_not_advised(
    imported: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify_module, "find_recorded_source", lambda bundle: None)
    damaged = Path(shutil.copytree(imported("llama"), tmp_path / "bundle"))
    replace_graph(damaged, "decoder.ort.fp32", larger("layers.0/mlp/down_proj/MatMul"))
    (mismatch,) = verify(damaged).mismatches
    assert (mismatch.artifact, mismatch.module) == ("decoder.ort.fp32", "model.layers.0.mlp.down_proj")
    assert mismatch.reference == "decoder.portable.fp32"
    replace_graph(damaged, "decoder.portable.fp32", larger("layers.0/mlp/down_proj/MatMul"))
    report = verify(damaged)
    assert set(report.unexplained) == {"decoder.ort.fp32", "decoder.portable.fp32"}
    for why in report.unexplained.values():
        assert "--source CHECKPOINT" in why
        assert "add fp32" not in why


def test_an_import_that_fails_names_the_node(exported: Path, tmp_path: Path) -> None:
    own = Path(shutil.copytree(exported / "roberta.onnx", tmp_path / "folder"))
    model = onnx.load(own / "model.onnx")
    (norm,) = [node for node in model.graph.node if node.name.endswith(NORM)]
    next(a for a in norm.attribute if a.name == "epsilon").f = 0.5
    onnx.save(model, own / "model.onnx")
    with pytest.raises(
        VerificationError, match=r"encoder\.layer\.1\.output\.LayerNorm, layer 1 is the first"
    ):
        import_folder(
            own, tmp_path / "bundle", source=exported / "roberta", precision=["fp32"], target=["cpu"]
        )


def folded(folder: Path) -> None:
    """A product whose weight is twice the checkpoint's, and halved behind it: it is no tensor of that."""
    model = onnx.load(folder / "model.onnx")
    graph = model.graph
    number, product = next((i, n) for i, n in enumerate(graph.node) if n.name.endswith(FOLDED))
    weight = next(tensor for tensor in graph.initializer if tensor.name == product.input[1])
    weight.CopyFrom(numpy_helper.from_array(2 * numpy_helper.to_array(weight), weight.name))
    graph.initializer.append(numpy_helper.from_array(np.array(0.5, np.float32), "half"))
    result, product.output[0] = product.output[0], "twice"
    graph.node.insert(number + 1, helper.make_node("Mul", ["twice", "half"], [result]))
    onnx.save(model, folder / "model.onnx")


def test_a_weight_that_is_no_tensor_of_the_checkpoint_becomes_integers_too(
    exported: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = Path(shutil.copytree(exported / "roberta.onnx", tmp_path / "folder"))
    folded(own)
    import_folder(own, tmp_path / "bundle", source=exported / "roberta", precision=["int8"], target=["cpu"])
    assert "1 of 13 weights, such as" in caplog.text
    assert FOLDED in caplog.text
    (artifact,) = Bundle.open(tmp_path / "bundle").manifest.artifacts
    graph = onnx.load(tmp_path / "bundle" / artifact.file, load_external_data=False).graph
    assert not [node for node in graph.node if node.op_type in ("MatMul", "Gemm") and "query" in node.name]
    assert verify(tmp_path / "bundle", source=exported / "roberta").passed


def test_a_folders_graph_is_whoever_asks_for_its(exported: Path) -> None:
    found = read_folder(exported / "roberta.onnx")
    first = found.graph
    names = [node.name for node in first.graph]
    weights = {name: value.const_value for name, value in first.graph.initializers.items()}
    first.graph.remove(list(first.graph)[-1], safe=False)
    first.graph.outputs.clear()
    next(iter(first.graph.initializers.values())).const_value = None
    second = found.graph
    assert [node.name for node in second.graph] == names
    assert second.graph.outputs
    for name, value in second.graph.initializers.items():
        assert value.const_value is weights[name]  # the tensors themselves are shared


def test_a_modules_result_is_the_one_value_that_others_read() -> None:
    model = parse_graph("""
<ir_version: 10, opset_import: ["" : 20]>
g (float[2, 4] x) => (float[2, 4] y, float[2, 4] z) {
  a = Relu (x)
  b = Tanh (a)
  c = Sin (b)
  d = Cos (b)
  e = Add (c, d)
  y = Neg (e)
  z = Abs (e)
}""")
    scopes = ["/h.0/inner/a", "/h.0/b", "/h.1/c", "/h.1/d", "/sum/e", "y_node", "/head/z"]
    for node, name in zip(model.graph, scopes, strict=True):
        node.name = name
    paths = {".".join(path) for path in (["h", "0"], ["h", "0", "inner"], ["h", "1"], ["sum"], ["head"])}
    assert [find_scope(node) for node in model.graph] == ["h.0.inner", "h.0", "h.1", "h.1", "sum", "", "head"]
    found = {path: value for value, path in find_results_by_scope(model.graph, paths).items()}
    assert found == {"h.0.inner": "a", "h.0": "b", "sum": "e", "head": "z"}  # of h.1 both are read
