"""What rounding to fp32 may do in any order of adding, against sums in fp32 one after another."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from planforge.exporter.checkpoints.checkpoint import Checkpoint
from planforge.exporter.checkpoints.source import resolve_source
from planforge.exporter.comparison.explanations import (
    Reference,
    compute,
    measure,
    measure_saturation,
    widen,
)
from planforge.exporter.reference.model import load_our_model
from planforge.exporter.reference.rounding import RoundInAnyOrder
from planforge.runtime.explain.objectives import SIGMOID, SOFTMAX


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
    limits = widen(replace(case, outputs=exact), model, recipe).wider
    for name, limit in limits.items():
        gap = measure(in_fp32[name], exact[name])
        assert gap <= limit, name
        assert limit < 1e-3, name


def test_the_gradient_of_a_probability_near_1_is_as_exact_as_fp32_can_tell() -> None:
    """Softmax of logits that are W x, by PyTorch in fp32 against PyTorch in float64."""
    nearest = 0.0
    for seed in range(300):
        random = np.random.default_rng(seed)
        weight = torch.from_numpy(random.standard_normal((5, 8)))
        x = torch.from_numpy(random.standard_normal((1, 1, 8)))
        x *= float(random.uniform(2, 12))
        target = (x[0, 0] @ weight.T).argmax()
        exact = differentiate_softmax(weight, x, target)
        in_fp32 = differentiate_softmax(weight.float(), x.float(), target)
        of_logit = {"gradient.embeddings": weight[target][None, None].numpy()}
        given = {"gradient.embeddings": exact[0], "score": exact[1]}
        (limit,) = measure_saturation(given, of_logit).values()
        by_logits = 2.0**-23 * 100  # inputs of 1e2 are rounded, and products of them
        gap = measure(in_fp32[0], exact[0])
        assert gap <= limit + by_logits
        if exact[1][0] > 1 - 1e-5:
            nearest = max(nearest, gap / limit)
    assert 0.05 < nearest <= 1  # the limit is near what rounding does, and nothing else sets it there


def differentiate_softmax(weight: torch.Tensor, x: torch.Tensor, target: torch.Tensor) -> list[Any]:
    """Return the gradient by x, and the probability, as arrays."""
    leaf = x.clone().requires_grad_()
    score = (leaf @ weight.T).softmax(-1)[..., target].flatten()
    (gradient,) = torch.autograd.grad(score.sum(), leaf)
    return [gradient.numpy(), score.detach().numpy()]


@pytest.mark.parametrize("objective", [SOFTMAX, SIGMOID])
def test_gradients_are_compared_of_probabilities_that_are_not_saturated(objective: int) -> None:
    """By float64 no target's probability is near 1, so that gradients in fp32 tell something."""
    checkpoint = Checkpoint(resolve_source("transformer-demo"), outputs=("explain",))
    model = load_our_model(checkpoint.folder, checkpoint.choices.max_length)
    recipe = next(r for r in checkpoint.explanations.values() if r.graph == "gradient")
    reference = Reference(model, checkpoint.explanations, seed=0)
    cases = [reference.make_case(recipe, "a case", 3, 5, objective) for _ in range(8)]
    exact_model = model.double()
    for case in cases:
        exact = compute(exact_model, recipe, case.inputs)
        assert exact["score"].max() < 0.901
        for name, value in exact.items():
            assert measure(case.outputs[name], value) <= 1e-3
            assert case.find_limit(name) < 5e-3
