"""What rounding to fp32 may do in any order of adding, against sums in fp32 one after another."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from planforge.exporter.checkpoints.checkpoint import Checkpoint
from planforge.exporter.checkpoints.source import resolve_source
from planforge.exporter.limits import measure_distance
from planforge.exporter.reference_model import load_our_model
from planforge.exporter.tasks import explanation
from planforge.exporter.tasks.explanation import SMALLEST, Reference, compute, limit_by_rounding, widen
from planforge.exporter.tasks.rounding import RoundInAnyOrder
from planforge.runtime.apps.explain.objectives import LOGIT

from ...helpers.models import edit_weights, tiny_bert, write_wordpiece


@pytest.mark.parametrize("terms", [64, 1024])
@pytest.mark.parametrize("drift", [0.0, 1.0])
def test_sums_one_after_another_are_off_by_about_as_much(terms: int, drift: float) -> None:
    """NumPy's cumulative sums are in fp32 and in order, on every processor."""
    random = np.random.default_rng(0)
    left = (random.standard_normal((24, terms)) + drift).astype(np.float32)
    right = (random.standard_normal((terms, 24)) + drift).astype(np.float32)
    in_order = np.cumsum(left[:, :, None] * right[None], axis=1, dtype=np.float32)[:, -1]
    a = torch.from_numpy(left).double()
    b = torch.from_numpy(right).double()
    exact = (a @ b).numpy()
    with RoundInAnyOrder(0):
        moved = (a @ b).numpy()
    of_order = np.sqrt(np.square(in_order - exact).mean())
    of_noise = np.sqrt(np.square(moved - exact).mean())
    assert of_order <= of_noise * 1.1
    assert of_noise <= 4 * of_order


def test_views_and_whole_numbers_are_not_moved() -> None:
    x = torch.arange(12.0, dtype=torch.float64).view(3, 4)
    with RoundInAnyOrder(0):
        assert torch.equal(x.T, x.mT)
        assert (torch.arange(5) + 1).tolist() == [1, 2, 3, 4, 5]
        moved = x * 1.0
    assert 0 < float((moved - x).abs().max()) < 12 * 2.0**-21


def test_a_limit_does_not_hang_on_one_processors_order() -> None:
    """Where PyTorch in fp32 is by chance exact, an engine that rounds as it does elsewhere still passes."""
    checkpoint = Checkpoint(resolve_source("transformer-demo"), outputs=("explain",))
    model = load_our_model(checkpoint.folder, checkpoint.choices.max_length)
    recipe = next(r for r in checkpoint.explanations.values() if r.graph == "gradient")
    reference = Reference(model, checkpoint.explanations, seed=0)
    case = reference.make_case(recipe, "a case", batch=1, tokens=11)
    in_fp32 = case.outputs
    exact = compute(model.double(), recipe, case.inputs)
    limits = limit_by_rounding(replace(case, outputs=exact), model, recipe)
    for name, limit in limits.items():
        gap = measure_distance(in_fp32[name], exact[name], SMALLEST)
        assert gap <= limit, name
        assert limit < 1e-3, name


@pytest.mark.parametrize("seed", [0, 3])  # both draw a token of which fp32 makes a probability of 1
def test_no_gradient_is_compared_of_which_fp32_keeps_nothing(seed: int) -> None:
    """The gradient of a probability of 1 - 5e-7 is rounding alone: its limit would let pass anything."""
    checkpoint = Checkpoint(resolve_source("transformer-demo"), outputs=("explain",))
    model = load_our_model(checkpoint.folder, checkpoint.choices.max_length)
    recipe = next(r for r in checkpoint.explanations.values() if r.graph == "gradient")
    for case in Reference(model, checkpoint.explanations, seed).list_cases(recipe):
        limits = limit_by_rounding(case, model, recipe)
        assert max(limits.values()) < 0.01, case.name
        if case.inputs["objective"].any():
            assert case.outputs["score"].max() <= 0.99, case.name


def test_an_only_label_that_is_certain_is_compared_by_its_logit(tmp_path: Path) -> None:
    tiny_bert(tmp_path, "BertForSequenceClassification", num_labels=1)
    edit_weights(tmp_path, **{"classifier.bias": torch.tensor([15.0])})
    write_wordpiece(tmp_path)
    checkpoint = Checkpoint(resolve_source(str(tmp_path)), outputs=("explain",))
    ours = load_our_model(checkpoint.folder, checkpoint.choices.max_length)
    recipe = next(r for r in checkpoint.explanations.values() if r.graph == "gradient")
    cases = list(Reference(ours, checkpoint.explanations, seed=0).list_cases(recipe))
    assert {int(case.inputs["objective"][0]) for case in cases} == {LOGIT}


def test_what_is_not_finite_in_float64_widens_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explanation, "limit_by_rounding", lambda *_: {"a": math.inf, "b": 0.5, "c": math.nan})
    case = explanation.ExplanationCase("a case", {}, {}, {"a": 0.1, "b": 0.1, "c": 0.1})
    checkpoint = Checkpoint(resolve_source("transformer-demo"), outputs=("explain",))
    recipe, *_ = checkpoint.explanations.values()
    assert widen(case, torch.nn.Identity(), recipe).limits == {"a": 0.1, "b": 0.5, "c": 0.1}
