"""An encoder's graphs for plans whose products read 8 bits: what an export writes, and planted faults."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import pytest

from planforge.exporter import build, export
from planforge.exporter.calibration.static_products import find_fewest, rank_groups
from planforge.exporter.checkpoints.checkpoint import Checkpoint
from planforge.exporter.checkpoints.source import resolve_source
from planforge.exporter.errors import BuildOptionError
from planforge.exporter.graphs import plan_artifacts
from planforge.exporter.number_formats import PLAN_INT8
from planforge.exporter.passes.int8_rows import RowProduct, StaticRule
from planforge.exporter.passes.quantized_weight import QuantizedWeight
from planforge.exporter.passes.static_rows import UNSMOOTHING, find_source, read_rows
from planforge.exporter.tensorrt.choices import choose_architectures
from planforge.runtime import TextEncoder
from planforge.runtime.bundle.bundle import Bundle
from planforge.runtime.errors import InputError

from ...helpers.faults import Fault, Plant, change_weight, constant, node_of
from ...helpers.graphs import damaged
from ...helpers.models import tiny_bert, write_wordpiece
from ...helpers.verdicts import PlantedBundle, keep_answers
from ..tensorrt.test_hardware import needs_rtx

PRECISIONS = ["w8a8", "fp8a8"]
MODULE = "layers.1.attention.output"
OTHER = "layers.1.output"
OPERATORS = ("MatMul", "QuantizeLinear", "DequantizeLinear")
Codes = npt.NDArray[Any]


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlantedBundle]:
    """A random BERT of two layers."""
    folder = tmp_path_factory.mktemp("bert")
    tiny_bert(folder / "checkpoint", "BertForSequenceClassification", num_labels=3, num_hidden_layers=2)
    write_wordpiece(folder / "checkpoint")
    precisions = ["fp32", *PRECISIONS]
    export(folder / "checkpoint", folder / "bundle", target="portable", precision=precisions, verify=False)
    with keep_answers(folder / "answers"):
        yield PlantedBundle("BERT", folder / "bundle", folder / "copy")


def find_value(node: ir.Node, place: int) -> ir.Value:
    value = node.inputs[place]
    assert value is not None
    return value


def find_rounding(model: ir.Model, module: str = MODULE) -> tuple[ir.Node, ir.Node]:
    """The nodes that quantize and dequantize what a module's product reads."""
    dequantize = find_value(node_of(model, module, "MatMul"), 0).producer()
    assert dequantize is not None
    quantize = find_value(dequantize, 0).producer()
    assert quantize is not None
    return quantize, dequantize


def read_step(model: ir.Model, module: str) -> Codes:
    constant_step = find_value(find_rounding(model, module)[0], 1).const_value
    assert constant_step is not None
    return constant_step.numpy()


def step(change: Callable[[ir.Model], Any]) -> Plant:
    """Another step of a module's rows, for both nodes."""

    def plant(model: ir.Model) -> None:
        found = np.asarray(change(model), np.float16).reshape(())
        value = constant(model, "another_step", found)
        for node in find_rounding(model):
            node.replace_input_with(1, value)

    return plant


def zero_point(number: float) -> Plant:
    def plant(model: ir.Model) -> None:
        nodes = find_rounding(model)
        codes = find_value(nodes[0], 2).dtype
        assert codes is not None
        value = constant(model, "another_zero", np.zeros((), np.int8))
        value.const_value = ir.Tensor(np.asarray(number).astype(codes.numpy()), dtype=codes)
        value.dtype = codes
        for node in nodes:
            node.replace_input_with(2, value)

    return plant


def weight(place: int, change: Callable[[Codes], Codes]) -> Plant:
    """Other codes, or other scales, of a module's weight."""

    def plant(model: ir.Model) -> None:
        dequantize = find_value(node_of(model, MODULE, "MatMul"), 1).producer()
        assert dequantize is not None
        value = find_value(dequantize, place)
        assert value.const_value is not None
        before = value.const_value.numpy()
        made = np.ascontiguousarray(change(before.astype(np.float32)).astype(before.dtype))
        value.const_value = ir.Tensor(made, dtype=value.dtype, name=value.name)

    return plant


def read_floats(model: ir.Model) -> None:
    """The product reads what was never rounded, nor smoothed."""
    product = node_of(model, MODULE, "MatMul")
    product.replace_input_with(0, find_source(find_value(product, 0)))


FAULTS: dict[str, Plant] = {
    "scales off by one column": weight(1, lambda scale: np.roll(scale, 1)),
    "a clipped tail of codes": weight(0, lambda codes: np.clip(codes, -0.7 * codes.max(), 0.7 * codes.max())),
    "a clipped tail of rows": step(lambda model: 0.7 * read_step(model, MODULE)),
    "steps 10 % too large": step(lambda model: 1.1 * read_step(model, MODULE)),
    "the step of another layer": step(lambda model: read_step(model, OTHER)),
    "a step of zero": step(lambda model: 0.0),
    "a step of NaN": step(lambda model: math.nan),
    "a zero point": zero_point(2),
    "rows that are not rounded": read_floats,
}


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_fault_is_found_and_its_module_named(name: str, precision: str, planted: PlantedBundle) -> None:
    verdict = planted.judge(f"encoder.portable.{precision}", Fault(name, FAULTS[name], MODULE, OPERATORS))
    assert verdict.is_caught and verdict.is_right, verdict


def test_a_zero_point_that_is_no_number_is_found(planted: PlantedBundle) -> None:
    """TensorRT's parser passes over zero points of fp8."""
    fault = Fault("NaN", zero_point(math.nan), MODULE, OPERATORS)
    verdict = planted.judge("encoder.portable.fp8a8", fault)
    assert verdict.is_caught and verdict.is_right, verdict


def test_another_smoothing_is_found(planted: PlantedBundle) -> None:
    """Its weight would be another's too: what is read of the texts tells."""

    def plant(model: ir.Model) -> None:
        name = next(n for n in model.graph.initializers if MODULE in n and UNSMOOTHING in n)

        def change(array: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
            array[:5] *= 3
            return array

        change_weight(model.graph.initializers[name], change)

    verdict = planted.judge("encoder.portable.w8a8", Fault("smoothing", plant, MODULE, OPERATORS))
    assert verdict.is_caught and verdict.is_right, verdict


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_calibration_of_another_model_is_found(precision: str, planted: PlantedBundle) -> None:
    """The manifest and the graph agree on a step that the model's own texts do not give."""
    artifact_id = f"encoder.portable.{precision}"
    path = planted.folder / "manifest.json"
    with damaged(planted.folder, artifact_id, step(lambda model: 0.5 * read_step(model, MODULE))):
        manifest = json.loads(path.read_text(encoding="utf-8"))
        for entry in manifest["artifacts"]:
            if entry["precision"] == precision:
                rule = entry["quantization"]["rows"][f"{MODULE}.weight"]
                rule["step"] = float(np.float16(0.5 * rule["step"]))
        path.write_text(json.dumps(manifest), encoding="utf-8")
        report = planted.verify(artifact_id)
    told = [failure for one in report.comparisons for failure in one.failures]
    assert any("the export's texts give" in one and f" of {MODULE} " in one for one in told), told


def test_sound_graphs_pass(planted: PlantedBundle) -> None:
    """Random weights lose more than a trained model's; PyTorch, rounded the same way, loses as much."""
    report = planted.verify()
    failed = {c.artifact for c in report.comparisons if not c.passed}
    assert failed <= report.limited


@pytest.mark.parametrize("precision", PRECISIONS)
def test_it_runs_on_a_cpu(precision: str, planted: PlantedBundle) -> None:
    scores = []
    for name in ("fp32", precision):
        with TextEncoder.load(planted.folder, backend="ort-cpu", precision=name) as model:
            scores.append(model.classify("[UNK] [UNK]").score)
    assert 0 < abs(scores[1] - scores[0]) < 0.05  # close, and not the same


@pytest.mark.parametrize(("precision", "instead"), [("w8a8", "w8a16"), ("fp8a8", "fp8a16")])
def test_it_is_refused_for_what_is_no_encoder(precision: str, instead: str) -> None:
    checkpoint = Checkpoint(resolve_source("gpt2-demo"))
    with pytest.raises(InputError, match=f"'{precision}' .* is for encoders; export '{instead}'"):
        plan_artifacts(checkpoint, ["rtx"], [precision])


def test_a_gpu_without_fp8_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--sm sm86 has no kernels for fp8, which begin with sm89 "):
        export(tmp_path / "none", tmp_path / "B", target="rtx", precision="fp8a8", sms=["sm86"])


@needs_rtx
def test_a_plan_for_a_gpu_without_fp8_is_refused_before_it_is_built(planted: PlantedBundle) -> None:
    """What TensorRT's own builder answers is in passes/test_static_rows.py."""
    bundle = Bundle.open(planted.folder)
    graphs = [artifact for artifact in bundle.manifest.artifacts if artifact.precision == "fp8a8"]
    words = r"--sm sm86: encoder.portable.fp8a8 does not run on sm86 .* no kernels there for fp8; take fp16, "
    with pytest.raises(BuildOptionError, match=words):
        choose_architectures(bundle, graphs, "rtx", ["sm86"])
    with pytest.raises(InputError, match="--sm sm86 has no kernels for fp8, which begin with sm89 "):
        build(planted.folder, sms=["sm86"], precisions=["fp8a8"])


def test_those_that_lose_most_for_their_size_come_first_and_the_same_rows_together() -> None:
    def make(name: str, error: float, *together: str) -> tuple[tuple[str, ...], RowProduct]:
        rule = StaticRule(1.0, 1.0, "int8")
        codes = QuantizedWeight(np.zeros((2, 2), np.int8), np.ones((2, 1), np.float32), PLAN_INT8)
        return (name,), RowProduct(None, rule, codes, error, together or (name,))

    products = dict(
        [make("a", 0.1), make("q", 0.3, "q", "k"), make("k", 0.3, "q", "k"), make("b", 0.2), make("c", 0.05)]
    )
    shapes = dict.fromkeys("aqkbc", (2, 2))
    assert rank_groups(products, shapes) == ([("b",), ("q", "k"), ("a",), ("c",)], 1)  # 4 of 20 numbers
    shapes |= {"a": (8, 2)}  # its error is small for that; the others are half of all
    assert rank_groups(products, shapes) == ([("b",), ("q", "k"), ("c",), ("a",)], 3)
    assert rank_groups({}, shapes) == ([], 0)


@pytest.mark.parametrize("fewest", range(13))
def test_as_few_products_as_possible_are_left_out(fewest: int) -> None:
    asked = []

    def is_close(count: int) -> bool:
        asked.append(count)
        return count >= fewest

    assert find_fewest(is_close, 11) == min(fewest, 11)
    assert len(asked) == len(set(asked)) <= 8 and max(asked) <= 11


def test_the_rows_of_a_graph_are_rounded_where_the_manifest_says(planted: PlantedBundle) -> None:
    for precision in PRECISIONS:
        artifact = planted.manifest.artifact(f"encoder.portable.{precision}")
        model = ir.load(planted.folder / artifact.file)
        names = [
            str(node.name) for node in model.graph if node.op_type == "MatMul" and read_rows(node) is not None
        ]
        assert len(names) == len(artifact.quantization["rows"]) > 4
