"""Faults in how an encoder's int8 products read their rows: limits from the same graph let them pass."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir
import pytest

from planforge.exporter import export
from planforge.exporter.calibration.calibration import Calibration
from planforge.exporter.calibration.prompts import read_prompts
from planforge.exporter.calibration.repeat import read_calibration, repeat_calibration
from planforge.exporter.levels import QUICK
from planforge.exporter.passes.store_rows import UNSMOOTHING
from planforge.exporter.reference_model import load_our_model
from planforge.exporter.tasks.verifier import open_verifier
from planforge.exporter.verification.structure import compare_structure
from planforge.runtime.bundle.bundle import Bundle

from ...helpers.faults import change_weight, constant
from ...helpers.graphs import replace_graph
from ...helpers.models import tiny_bert, write_wordpiece

Array: TypeAlias = Any

ARTIFACT = "encoder.ort.int8"


@pytest.fixture(scope="module")
def encoder_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random BERT of two layers in int8, not verified, with its checkpoint beside it. Don't change it."""
    folder = tmp_path_factory.mktemp("int8-encoder")
    tiny_bert(folder / "checkpoint", "BertForSequenceClassification", num_labels=3, num_hidden_layers=2)
    write_wordpiece(folder / "checkpoint")
    export(folder / "checkpoint", folder / "bundle", target="cpu", precision="int8", verify=False)
    return folder / "bundle"


def repeat(bundle: Path, checkpoint: Path) -> tuple[Calibration, Calibration]:
    """What a bundle's graph was calibrated to, as it says and computed again."""
    opened = Bundle.open(bundle)
    model = load_our_model(checkpoint, opened.manifest.max_length)
    verifier = open_verifier(opened, model, read_prompts(None, checkpoint), level=QUICK)
    calibration = read_calibration(opened, model)
    return calibration, repeat_calibration(verifier, model, calibration)


def smooth_otherwise(model: ir.Model) -> None:
    """Five columns are smoothed three times as much."""

    def change(array: Array) -> Array:
        array[:5] *= 3
        return array

    name = next(name for name in model.graph.initializers if name.endswith(UNSMOOTHING))
    change_weight(model.graph.initializers[name], change)


def read_number(node: ir.Node, place: int) -> Array:
    value = node.inputs[place]
    assert value is not None and value.const_value is not None
    return value.const_value.numpy()


def find_product(model: ir.Model, with_step: bool) -> ir.Node:
    """The first product with one step for all rows, or with a step for each."""
    products = [node for node in model.graph if node.op_type == "MatMulIntegerToFloat"]
    return next(node for node in products if (read_number(node, 2).item() != 1.0) == with_step)


def clip_rows(model: ir.Model) -> None:
    """Rows are read in steps of 0.6 of the right ones, so that the largest numbers are clipped."""
    node = find_product(model, with_step=True)
    assert node.inputs[0] is not None
    quantizer = node.inputs[0].producer()
    assert quantizer is not None
    step = constant(model, "step", np.asarray(0.6 * read_number(node, 2), np.float32))
    node.replace_input_with(2, step)
    quantizer.replace_input_with(1, step)


def move_zero(model: ir.Model) -> None:
    node = find_product(model, with_step=False)
    zero = np.asarray(read_number(node, 4) - 20, np.uint8)
    node.replace_input_with(4, constant(model, "zero", zero))


FAULTS: dict[str, tuple[Callable[[ir.Model], None], str]] = {
    "another smoothing": (smooth_otherwise, "smooths 5 of "),
    "smaller steps": (clip_rows, "reads rows in steps of "),
    "another zero point": (move_zero, "reads rows of the zero point "),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_rows_is_named(name: str, encoder_bundle: Path, tmp_path: Path) -> None:
    plant, told = FAULTS[name]
    damaged = Path(shutil.copytree(encoder_bundle, tmp_path / "damaged"))
    replace_graph(damaged, ARTIFACT, plant)
    _, again = repeat(damaged, encoder_bundle.parent / "checkpoint")
    bundle = Bundle.open(damaged)
    read = compare_structure(
        bundle, bundle.manifest.artifact(ARTIFACT), row_products=again.weights["int8"].products
    )
    assert any(told in failure and "layers." in failure for failure in read.failures)


def test_what_is_calibrated_again_is_what_the_export_has_chosen(encoder_bundle: Path) -> None:
    """So a graph whose smoothing is damaged sets no limits for itself."""
    first, again = repeat(encoder_bundle, encoder_bundle.parent / "checkpoint")
    products, before = again.weights["int8"].products, first.weights["int8"].products
    assert again.texts and products.keys() == before.keys()
    for names, product in products.items():
        assert product.rule == before[names].rule
        np.testing.assert_allclose(product.weight.scale, before[names].weight.scale, rtol=1e-5)
    assert any(product.smoothing is not None for product in products.values())
    bundle = Bundle.open(encoder_bundle)
    read = compare_structure(
        bundle, bundle.manifest.artifact(ARTIFACT), row_products=again.weights["int8"].products
    )
    assert read.failures == ()
