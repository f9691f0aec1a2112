"""Graphs that round activations: compared without the rounding, and the numbers that round bit for bit."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from planforge.exporter import verify
from planforge.exporter.exporting import import_folder
from planforge.exporter.passes.quantization_form import KEPT
from planforge.exporter.passes.unrounded import pass_on, skip_rounding
from planforge.runtime.backends.ort_program import open_plain_session
from planforge.runtime.bundle.bundle import Bundle
from planforge.runtime.errors import InputError

from ...helpers.graphs import damaged
from ...helpers.quantized import TENSORS, change, draw_weights, make_folder, read_scales


@pytest.fixture(scope="module", params=["int8", "fp8"])
def rounded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A folder whose activations are rounded too, and its verified bundle with a plan."""
    kind = str(request.param)
    folder = make_folder(tmp_path_factory.mktemp(kind) / "folder", kind)
    bundle = folder.parent / "bundle"
    options: dict[str, Any] = {"precision": ["fp32", "fp16"], "target": ["portable", "rtx"], "sms": ["sm89"]}
    import_folder(folder, bundle, verify="quick", **options)
    return folder, bundle


def test_rounded_activations_are_verified_and_built_with_their_scales(
    rounded: tuple[Path, Path],
) -> None:
    folder, bundle = rounded
    manifest = Bundle.open(bundle).manifest
    assert all(artifact.passed for artifact in manifest.artifacts) and len(manifest.plans) == 1
    assert not any("golden" in name for name in manifest.files)
    for artifact in manifest.artifacts:
        assert read_scales(bundle / artifact.file) == read_scales(folder / "model.onnx")
    report = verify(bundle, level="quick")
    assert report.passed and any("without the rounding of activations" in note for note in report.notes)
    # By ONNX's definition of both operators: what runs rounds, though what was compared does not.
    table, codes, scales = draw_weights()
    format = TENSORS["int8" if "int8" in folder.parent.name else "fp8"]
    x = table[[5, 7, 11]]
    step = np.float32(0.03)
    whole = np.clip(np.rint(x / step), -128, 127) if format is np.int8 else x / step
    read = whole.astype(format).astype(np.float32) * step
    stored = codes.astype(format).astype(np.float32) * scales[:1]
    inputs = {"input_ids": np.array([[5, 7, 11]]), "attention_mask": np.ones((1, 3), np.int64)}
    # Without its optimizer, which makes nodes of fp8 that ONNX Runtime then refuses.
    session = open_plain_session(bundle / manifest.artifact("encoder.portable.fp32").file, optimized=False)
    (found,) = session.run(["last_hidden_state"], inputs)
    np.testing.assert_allclose(found[0], read @ stored, atol=1e-5)
    assert np.abs(x @ stored - read @ stored).max() > 1e-2


def find_node(model: ir.Model, end: str) -> ir.Node:
    return next(node for node in model.graph if str(node.name).endswith(end))


def change_constant(value: ir.Value | None, edit: Callable[[Any], Any]) -> None:
    assert value is not None and value.const_value is not None
    array = np.ascontiguousarray(edit(value.const_value.numpy()))
    value.const_value = ir.tensor(array, name=value.name)


def shift_scales(model: ir.Model) -> None:
    change_constant(find_node(model, "/w/Dequantize").inputs[1], lambda scales: np.roll(scales, 1))


def turn_weight(model: ir.Model) -> None:
    change_constant(find_node(model, "/w/Quantize").inputs[0], lambda values: values.T)


def take_another_step(model: ir.Model) -> None:
    change_constant(find_node(model, "/activation/Quantize").inputs[1], lambda step: step * np.float32(1.01))


def take_another_step_back(model: ir.Model) -> None:
    """Another for the codes than for what they become."""
    node = find_node(model, "/activation/Dequantize")
    step = ir.Value(name="other", const_value=ir.tensor(np.float32(0.0301), name="other"))
    model.graph.register_initializer(step)
    node.replace_input_with(1, step)


def round_nothing(model: ir.Model) -> None:
    skip_rounding(model)


def round_twice(model: ir.Model) -> None:
    """Behind the first pair another one, which the folder's graph does not have."""
    first = find_node(model, "/activation/Dequantize")
    quantize = ir.node("QuantizeLinear", [first.outputs[0], *first.inputs[1:]], name="again")
    second = ir.node("DequantizeLinear", [quantize.outputs[0], *first.inputs[1:]], name="back")
    uses = list(first.outputs[0].uses())
    for node in (quantize, second):
        node.metadata_props[KEPT] = "scales"
    codes = first.inputs[0]
    assert codes is not None
    quantize.outputs[0].type = codes.type
    second.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
    model.graph.insert_after(first, [quantize, second])
    for use in uses:
        if use.node is not quantize:
            use.node.replace_input_with(use.idx, second.outputs[0])


def round_another_value(model: ir.Model) -> None:
    """The product of words by their mask is no more what is rounded, but the words."""
    node = find_node(model, "/activation/Quantize")
    words = find_node(model, "/embeddings/Gather").outputs[0]
    read = node.inputs[0]
    assert read is not None
    if read.dtype != words.dtype:  # in fp16
        cast = ir.node("Cast", [words], {"to": int(ir.DataType.FLOAT)}, name="cast")
        cast.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
        model.graph.insert_before(node, cast)
        words = cast.outputs[0]
    doubled = ir.node("Add", [words, words], name="doubled")
    doubled.outputs[0].type = words.type
    model.graph.insert_before(node, doubled)
    node.replace_input_with(0, doubled.outputs[0])


def round_output(model: ir.Model) -> None:
    """The output is rounded as the first product's input is, which the folder's graph does not do."""
    (output,) = model.graph.outputs
    producer = output.producer()
    first = find_node(model, "/activation/Dequantize")
    codes = first.inputs[0]
    assert producer is not None and codes is not None
    given = ir.Value(name="given", type=output.type, shape=output.shape)
    cast = ir.node("Cast", [output], {"to": int(ir.DataType.FLOAT)}, name="given/cast")
    quantize = ir.node("QuantizeLinear", [cast.outputs[0], *first.inputs[1:]], name="given/quantize")
    dequantize = ir.node(
        "DequantizeLinear", [quantize.outputs[0], *first.inputs[1:]], outputs=[given], name="given/back"
    )
    for node in (quantize, dequantize):
        node.metadata_props[KEPT] = "scales"
    cast.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
    quantize.outputs[0].type = codes.type
    model.graph.insert_after(producer, [cast, quantize, dequantize])
    model.graph.outputs[0] = given
    output.name, given.name = "before", output.name


def rename_product(model: ir.Model) -> None:
    find_node(model, "/layer.0/MatMul").name = "another"


PRODUCT = r"node '/encoder/layer\.0/MatMul' \(MatMul\) in encoder\.layer\.0: its input "


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize(
    ("plant", "fault"),
    [
        (shift_scales, f"{PRODUCT}1 has another scale of its QuantizeLinear than in the folder's graph"),
        (turn_weight, f"{PRODUCT}1 has another data of its QuantizeLinear than in the folder's graph"),
        (take_another_step, f"{PRODUCT}0 has another scale of its (Deq|Q)uantizeLinear than"),
        (take_another_step_back, f"{PRODUCT}0 has another scale of its DequantizeLinear than"),
        (rename_product, r"node '/encoder/layer\.0/MatMul', whose input 0 the folder's .* is not there"),
        (round_nothing, f"{PRODUCT}0 is not quantized, as it is in the folder's graph"),
        (round_twice, f"{PRODUCT}0 has another data of its QuantizeLinear than in the folder's graph"),
        (round_output, "output 'last_hidden_state' is quantized, as it is not in the folder's graph"),
        (round_another_value, r"last_hidden_state\.max_error is .*, at most .* is allowed"),
    ],
)
def test_planted_faults_are_found(
    plant: Callable[[ir.Model], None], fault: str, precision: str, rounded: tuple[Path, Path]
) -> None:
    name = f"encoder.portable.{precision}"
    with damaged(rounded[1], name, plant) as bundle:
        report = verify(bundle.folder, only=[name], level="quick")
    assert not report.passed
    assert any(re.search(fault, failure) for failure in report.list_failures()), report.list_failures()


@pytest.fixture(scope="module", params=["int8", "fp8"])
def rounded_output(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The verified bundle of a folder whose last node rounds the output."""
    kind = str(request.param)
    folder = make_folder(tmp_path_factory.mktemp(f"{kind}-output") / "folder", kind)

    def round_output(graph: onnx.GraphProto) -> None:
        graph.node[-1].output[0] = "product"
        graph.initializer.append(numpy_helper.from_array(np.float32(0.07), "last.step"))
        for operator, given, made in (
            ("QuantizeLinear", "product", "last.q"),
            ("DequantizeLinear", "last.q", "last_hidden_state"),
        ):
            name = f"/encoder/last/{operator}"
            graph.node.append(helper.make_node(operator, [given, "last.step", "zero"], [made], name))

    change(folder, round_output)
    bundle = folder.parent / "bundle"
    import_folder(folder, bundle, precision=["fp32", "fp16"], target=["portable"], verify="quick")
    return bundle


def find_last(model: ir.Model, operator: str) -> ir.Node:
    return next(n for n in model.graph if n.op_type == operator and "/last/" in str(n.name))


def take_another_last_step(model: ir.Model) -> None:
    change_constant(find_last(model, "QuantizeLinear").inputs[1], lambda step: step * np.float32(1.01))


def take_another_last_step_back(model: ir.Model) -> None:
    node = find_last(model, "DequantizeLinear")
    step = ir.Value(name="other", const_value=ir.tensor(np.float32(0.0701), name="other"))
    model.graph.register_initializer(step)
    node.replace_input_with(1, step)


def leave_output_unrounded(model: ir.Model) -> None:
    node = find_last(model, "DequantizeLinear")
    value = find_last(model, "QuantizeLinear").inputs[0]
    pass_on(node, value)


OUTPUT = "output 'last_hidden_state' "


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize(
    ("plant", "fault"),
    [
        (
            take_another_last_step,
            f"{OUTPUT}has another scale of its (Deq|Q)uantizeLinear than in the folder's",
        ),
        (
            take_another_last_step_back,
            f"{OUTPUT}has another scale of its DequantizeLinear than in the folder's",
        ),
        (leave_output_unrounded, f"{OUTPUT}is not quantized, as it is in the folder's graph"),
    ],
)
def test_faults_of_a_rounded_output_are_found(
    plant: Callable[[ir.Model], None], fault: str, precision: str, rounded_output: Path
) -> None:
    name = f"encoder.portable.{precision}"
    assert verify(rounded_output, only=[name], level="quick").passed
    with damaged(rounded_output, name, plant) as bundle:
        report = verify(bundle.folder, only=[name], level="quick")
    assert not report.passed
    assert any(re.search(fault, failure) for failure in report.list_failures()), report.list_failures()


@pytest.mark.parametrize("kind", ["int4", "int8", "fp8"])
@pytest.mark.parametrize("half", [TensorProto.FLOAT16, TensorProto.BFLOAT16])
def test_half_precision_is_compared_in_fp32_with_its_scales(kind: str, half: int, tmp_path: Path) -> None:
    """As ModelOpt does without --high_precision_dtype: fp16 inside, with a Cast to fp32 at the end."""
    folder = make_folder(tmp_path / "folder", kind)
    model = onnx.load(folder / "model.onnx")
    graph = model.graph
    wanted = []
    for tensor in graph.initializer:
        if tensor.data_type == TensorProto.FLOAT:
            array = numpy_helper.to_array(tensor).astype(helper.tensor_dtype_to_np_dtype(half))
            tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
            if tensor.name in ("scales", "step"):
                wanted.append(array.astype(np.float32).tobytes())
    for node in graph.node:
        for attribute in node.attribute:
            if node.op_type == "Cast":
                attribute.i = half
    graph.node[-1].output[0] = "half"
    graph.node.append(helper.make_node("Cast", ["half"], ["last_hidden_state"], "/out", to=TensorProto.FLOAT))
    onnx.checker.check_model(model)
    onnx.save(model, folder / "model.onnx")
    options: dict[str, Any] = {"precision": ["fp32", "fp16"], "target": ["portable"]}
    result = import_folder(folder, tmp_path / "bundle", verify="quick", **options)
    assert [artifact.passed for artifact in result.manifest.artifacts] == [True, True]
    for artifact in result.manifest.artifacts:
        found = read_scales(tmp_path / "bundle" / artifact.file)
        assert len(found) == (1 if kind == "int4" else 2)
        assert all(scales == sorted(wanted) for scales in found.values())


def test_products_that_an_import_leaves_out_are_no_fault(tmp_path: Path) -> None:
    """A pooler's, and the second of two that compute the same."""
    folder = make_folder(tmp_path / "folder", "int8")

    def add_products(graph: onnx.GraphProto) -> None:
        product = graph.node[-1]
        product.output[0] = "one"
        twin = helper.make_node("MatMul", product.input, ["two"], "/encoder/layer.0/Twin")
        both = helper.make_node("Add", ["one", "two"], ["last_hidden_state"], "/encoder/layer.0/Add")
        pooler = helper.make_node("MatMul", ["last_hidden_state", "w"], ["pooler_output"], "/pooler/MatMul")
        graph.node.extend([twin, both, pooler])
        pooled = graph.output.add()
        pooled.CopyFrom(graph.output[0])
        pooled.name = "pooler_output"

    change(folder, add_products)
    bundle = tmp_path / "bundle"
    result = import_folder(folder, bundle, precision=["fp32"], target=["portable"], verify="quick")
    (artifact,) = result.manifest.artifacts
    assert artifact.passed
    names = {node.name for node in onnx.load(bundle / artifact.file).graph.node}
    assert "/encoder/layer.0/MatMul" in names
    assert names.isdisjoint({"/encoder/layer.0/Twin", "/pooler/MatMul"})


def read_codes_otherwise(graph: onnx.GraphProto) -> None:
    node = helper.make_node("Cast", ["activation.q"], ["raw"], "/encoder/raw", to=TensorProto.FLOAT)
    product = graph.node.pop()
    both = helper.make_node("Add", ["activation", "raw"], ["sum"], "/encoder/Add")
    product.input[0] = "sum"
    graph.node.extend([node, both, product])


def compute_scale(graph: onnx.GraphProto) -> None:
    place = next(i for i, node in enumerate(graph.node) if node.name == "/encoder/activation/Quantize")
    node = helper.make_node("ReduceMax", ["seen"], ["largest"], "/encoder/Max", keepdims=0)
    for reader in graph.node[place : place + 2]:
        reader.input[1] = "largest"
    graph.node.insert(place, node)


@pytest.mark.parametrize(
    ("edit", "fault"),
    [
        (read_codes_otherwise, r"its codes are read by node '/encoder/raw' \(Cast\)"),
        (compute_scale, r"the scale of node '/encoder/activation/Quantize' .* is computed"),
    ],
)
def test_rounding_that_cannot_be_left_out_needs_no_verify(
    edit: Callable[[onnx.GraphProto], None], fault: str, tmp_path: Path
) -> None:
    folder = make_folder(tmp_path / "folder", "int8")
    change(folder, edit)
    where = r"rounds activations at node '/encoder/activation/Quantize' \(QuantizeLinear\)"
    with pytest.raises(
        InputError, match=f"{where} in encoder.activation: {fault}.* import it with --no-verify"
    ):
        import_folder(folder, tmp_path / "bundle", precision=["fp32"], target=["portable"])
    import_folder(folder, tmp_path / "bundle", precision=["fp32"], target=["portable"], verify=False)
    with pytest.raises(InputError, match=f"{where} in encoder.activation: {fault}"):
        verify(tmp_path / "bundle", level="quick")
