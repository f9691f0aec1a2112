"""Tracing without torch.onnx's decompositions: our models need none, and what needs them gets them."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from torch import Tensor, nn
from torch.onnx._internal.exporter import _fx_passes

from planforge.exporter.tracing.decompositions import SAME, rename_instead_of_decomposing
from planforge.exporter.tracing.recipes import TraceOptions, make_all_recipes
from planforge.exporter.tracing.trace import trace
from planforge.models.checkpoint import describe, empty_model

from ..helpers.paths import DEMOS

OPSET = 20


class Renamed(nn.Module):
    """Has each operation that is renamed."""

    def forward(self, x: Tensor) -> Tensor:
        y = x.square() @ x.mT
        chosen = (y > 0.5) & (y < 8)
        return chosen.to(torch.float32) + y.unsqueeze(0).unsqueeze(-1).squeeze([0, -1])


class Decomposed(nn.Module):
    """Has an operation that ONNX has no name for, and one in place."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.nn.functional.softshrink(x, 0.3)
        y.mul_(2)
        return y


def export(module: nn.Module, x: Tensor) -> Any:
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # torch.onnx warns of its own internals
        shapes = ({0: "n"},)
        return torch.onnx.export(
            module,
            (x,),
            dynamo=True,
            optimize=False,
            verbose=False,
            opset_version=OPSET,
            dynamic_shapes=shapes,
        )


@pytest.mark.parametrize(("module", "decompositions"), [(Renamed(), 0), (Decomposed(), 1)])
def test_a_graph_gives_what_torch_gives(
    module: nn.Module, decompositions: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = _fx_passes.decompose_with_registry
    called = []

    def decompose(*args: Any) -> Any:
        called.append(args)
        return usual(*args)

    monkeypatch.setattr(_fx_passes, "decompose_with_registry", decompose)
    x = torch.from_numpy(np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32))
    with rename_instead_of_decomposing():
        program = export(module, x)
    assert len(called) == decompositions
    program.save(tmp_path / "a.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "a.onnx", providers=["CPUExecutionProvider"])
    (got,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    np.testing.assert_allclose(got, module(x).numpy(), rtol=1e-5, atol=1e-6)


def test_the_operations_that_are_renamed_are_all_of_the_test() -> None:
    x = torch.ones(3, 4)
    used = {node.target for node in torch.export.export(Renamed(), (x,)).graph.nodes}
    assert SAME.keys() <= used


@pytest.mark.parametrize("demo", ["gpt2-demo", "llama-demo", "transformer-demo"])
def test_no_graph_of_ours_is_decomposed(demo: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> Any:
        raise AssertionError("decomposed")

    monkeypatch.setattr(_fx_passes, "decompose_with_registry", refuse)
    description = describe(DEMOS / demo)
    recipes, _ = make_all_recipes(description.task, description.config, TraceOptions(4, 32, ()))
    model = empty_model(description).to_empty(device="cpu").requires_grad_(False)
    trace(model, next(iter(recipes.values())))
