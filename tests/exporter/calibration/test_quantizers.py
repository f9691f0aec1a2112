"""The choice of a quantizer: from `export`'s argument to the numbers."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from planforge.exporter import export, exporting
from planforge.exporter.calibration import calibration, run_gptq
from planforge.exporter.calibration.calibration import choose_row_products
from planforge.exporter.passes.int8_rows import (
    ATTENTION_WORTH,
    CONSTANT_WORTH,
    RowProduct,
    choose_product,
)
from planforge.exporter.passes.weights import attach_parameters
from planforge.runtime.apps.stage_progress import CountedLine, Notice

from ...helpers.graphs import normal, parse_graph

Array = npt.NDArray[np.float32]


class ReachedError(Exception):
    """Ends an export at the place that a test looks at, with what was found there."""


def reach(*found: Any) -> None:
    """Raise what a function is called with."""
    raise ReachedError(*found)


def test_export_and_import_take_a_quantizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporting, "write_bundle", reach)
    monkeypatch.setattr(exporting, "import_graphs", reach)
    choices: tuple[dict[str, Any], ...] = ({}, {"quantizer": "gptq"}, {"quantizer": "rtn"})
    for options in choices:
        expected = options.get("quantizer", "gptq")
        with pytest.raises(ReachedError) as exported:
            export("gpt2-demo", tmp_path / "B", precision=["int4"], **options)
        assert exported.value.args[1].quantizer == expected
        with pytest.raises(ReachedError) as imported:
            exporting.import_folder(tmp_path, tmp_path / "B", precision=["int4"], **options)
        assert imported.value.args[2].quantizer == expected


def test_the_calibration_gets_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporting, "start_trace", lambda *arguments: contextlib.nullcontext({}))
    monkeypatch.setattr(exporting, "compute_answers", lambda *arguments: SimpleNamespace(expected=None))
    monkeypatch.setattr(exporting, "note_ranges", lambda manifest, expected: manifest)
    monkeypatch.setattr(exporting, "collect_graphs", lambda *arguments: {})
    monkeypatch.setattr(exporting, "calibrate", reach)
    options: dict[str, Any] = {"target": ["cpu"], "precision": ["int4"], "verify": False}
    with pytest.raises(ReachedError) as found:
        export("gpt2-demo", tmp_path / "B", quantizer="rtn", **options)
    assert found.value.args[-2] == "rtn"


def test_an_encoder_s_weights_are_rounded_to_the_nearest_too() -> None:
    x = normal(100, 32, seed=1)
    weight = normal(32, 6, seed=2)
    nearest = choose_product(x, weight)
    scaled = weight if nearest.smoothing is None else weight * nearest.smoothing[:, None]
    np.testing.assert_array_equal(
        nearest.weight.codes.T, np.clip(np.rint(scaled / nearest.weight.scale[:, 0]), -127, 127)
    )
    close = nearest.compensate(x, weight)
    assert (close.rule, close.error) == (nearest.rule, nearest.error)
    assert (close.weight.codes != nearest.weight.codes).any()


class Block(torch.nn.Module):
    """Attention and a GLU, with rows to calibrate by."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.gate, self.up = (torch.nn.Linear(64, 64, bias=False) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = (self.q(x) @ self.k(x).mT).softmax(-1)
        context = weights @ self.v(x)
        return torch.mul(self.gate(context).sigmoid(), self.up(context))


BLOCK = """
<ir_version: 10, opset_import: ["" : 21]>
g (float[b, t, 64] x, GIVEN) => (float[b, t, 64] y) {
    qt = Transpose <perm = [1, 0]> (q_weight)
    kt = Transpose <perm = [1, 0]> (k_weight)
    vt = Transpose <perm = [1, 0]> (v_weight)
    gt = Transpose <perm = [1, 0]> (gate_weight)
    ut = Transpose <perm = [1, 0]> (up_weight)
    queries = MatMul (x, qt)
    keys = MatMul (x, kt)
    turned = Transpose <perm = [0, 2, 1]> (keys)
    values = MatMul (x, vt)
    scores = MatMul (queries, turned)
    weights = Softmax (scores)
    context = MatMul (weights, values)
    gate = MatMul (context, gt)
    up = MatMul (context, ut)
    open = Sigmoid (gate)
    y = Mul (open, up)
}
"""


def test_an_encoder_s_rows_are_chosen_by_what_weights_are_and_progress_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run_gptq, "LONG_SECONDS", 0.0)
    worths: list[float] = []

    def choose(x: Array, weight: Array, worth: float) -> RowProduct:
        worths.append(worth)
        return choose_product(x, weight, worth)

    monkeypatch.setattr(calibration, "choose_product", choose)
    model = Block()
    parameters = dict(model.named_parameters())
    given = ", ".join(f"float[64, 64] {name.replace('.', '_')}" for name in parameters)
    graph = parse_graph(BLOCK.replace("GIVEN", given))
    for name, value in zip(parameters, graph.graph.inputs[1:], strict=True):
        value.name = name
    attach_parameters(graph, parameters)
    x = torch.from_numpy(normal(2, 50, 64))

    def run() -> None:
        with torch.no_grad():
            model(x)

    lines: list[str] = []
    by_gptq = choose_row_products(model, graph.graph, run, True, lines.append)
    names = [("q.weight", "k.weight", "v.weight"), ("gate.weight", "up.weight")]
    assert list(by_gptq) == names and worths == [ATTENTION_WORTH, CONSTANT_WORTH]
    counted = [line for line in lines if isinstance(line, CountedLine)]
    assert [line for line in counted if line.done == line.total] == [
        "calibrating int8: choosing scales: 5 of 5 weights",
        "calibrating int8: GPTQ: 5 of 5 weights",
    ]
    (notice,) = [line for line in lines if isinstance(line, Notice)]
    assert notice.startswith("GPTQ takes about ") and "--quantizer rtn" in notice

    lines.clear()
    nearest = choose_row_products(model, graph.graph, run, False, lines.append)
    assert not any("GPTQ" in line for line in lines)
    for each in names:
        assert nearest[each].rule == by_gptq[each].rule and nearest[each].error == by_gptq[each].error
        assert (nearest[each].weight.codes != by_gptq[each].weight.codes).any()
