"""The graphs of recurrent models: one node a layer, any batch and length, PyTorch's numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch

from planforge.exporter.execution.node_executor import NodeExecutor
from planforge.exporter.graphs import attach_weights
from planforge.exporter.tracing.recipes import RECIPES, Recipe, TraceOptions
from planforge.exporter.tracing.trace import trace
from planforge.models import Recurrent
from planforge.runtime.backends.ort_program import open_plain_session
from planforge.runtime.errors import InputError

from ..helpers.recurrent import KINDS, make_recurrent


def trace_both(model: Recurrent) -> tuple[Mapping[str, Recipe], Mapping[str, ir.Model]]:
    outputs = ("cross_attentions",) if model.config.has_attention else ()
    recipes = RECIPES["translation"].make_recipes(model.config, TraceOptions(4, 32, outputs))
    graphs = {name: trace(model, recipe) for name, recipe in recipes.items()}
    attach_weights(recipes, graphs, model)
    return recipes, graphs


class Session:
    """A graph in a session of ONNX Runtime."""

    def __init__(self, graph: ir.Model) -> None:
        self.session = open_plain_session(ir.to_proto(graph).SerializeToString())
        self.outputs = [one.name for one in self.session.get_outputs()]

    def run(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        return dict(zip(self.outputs, self.session.run(None, dict(inputs)), strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_graphs_compute_the_model_in_any_batch_and_length(kind: str) -> None:
    model = make_recurrent(kind)
    recipes, graphs = trace_both(model)
    operators = [node.op_type for node in graphs["encoder.portable"].graph]
    assert operators.count(model.config.cell.upper()) == model.config.encoder_layers
    decoder = {node.op_type for node in graphs["decoder.portable"].graph}
    assert not {*operators, *decoder} & {"Loop", "Scan"} and not decoder & {"GRU", "LSTM"}
    sessions = {name: Session(graph) for name, graph in graphs.items()}
    specs = recipes["decoder.portable"].inputs
    random = np.random.default_rng(0)
    for sources, tokens, beams in ((1, 1, 1), (2, 7, 3), (4, 32, 1)):
        ids = random.integers(0, 30, (sources, tokens))
        lengths = random.integers(1, tokens + 1, sources).astype(np.int32)
        lengths[0] = tokens
        encoded = sessions["encoder.portable"].run({"input_ids": ids, "lengths": lengths})
        source, states = model.encode(torch.from_numpy(ids), torch.from_numpy(lengths))
        wanted = [*source.list_tensors(), *states]
        for value, want in zip(encoded.values(), wanted, strict=False):  # what is fed begins with zeros
            np.testing.assert_allclose(value, want.numpy(), atol=1e-5)

        rows = sources * beams
        read = random.integers(0, 30, (rows, 1))
        before = [torch.from_numpy(random.normal(0, 0.5, (rows, *s.shape[1:])).astype("f")) for s in states]
        x, after = model.step(torch.from_numpy(read), before, source)
        is_token = random.integers(0, 2, (rows, 1))
        logit_rows = random.permutation(rows)[: max(1, rows // 2)]
        given = {"input_ids": read, "attention_mask": is_token, "logit_rows": logit_rows}
        given |= {s.name: encoded[s.name] for s in specs if s.role.startswith("cross.")}
        mask = (np.arange(tokens) < lengths[:, None]).astype(np.int64)
        given |= {s.name: mask for s in specs if s.role == "source_mask"}
        names = [s.name for s in specs if s.role.startswith("state.")]
        given |= {name: state.numpy() for name, state in zip(names, before, strict=True)}
        got = sessions["decoder.portable"].run(given)
        logits = model.output(x)[:, 0][torch.from_numpy(logit_rows)]
        np.testing.assert_allclose(got["logits"], logits.numpy(), atol=1e-5, rtol=1e-5)
        for name, old, new in zip(names, before, after, strict=True):
            kept = np.where(is_token[:, :, None] == 1, new.numpy(), old.numpy())
            np.testing.assert_allclose(got[f"next_{name}"], kept, atol=1e-5)
        if source.weights is not None:
            weights = source.weights.reshape(rows, 1, 1, tokens).numpy()
            np.testing.assert_allclose(got["cross_attentions.0"], weights, atol=1e-5)


def test_no_row_of_the_encoder_reads_its_padding() -> None:
    """Node by node, so as any engine computes that does what the file says."""
    _, graphs = trace_both(make_recurrent())
    ids = np.array([[3, 4, 5, 6], [7, 8, 0, 0]])
    lengths = np.array([4, 2], np.int32)
    executor = NodeExecutor(graphs["encoder.portable"])
    one = executor.run({"input_ids": ids, "lengths": lengths})
    other = executor.run({"input_ids": np.where(ids == 0, 9, ids), "lengths": lengths})
    assert not one["memory"][1, 2:].any()
    for name, value in one.items():
        np.testing.assert_array_equal(value, other[name])


def test_outputs_that_cannot_be_added() -> None:
    make = RECIPES["translation"].make_recipes
    with pytest.raises(InputError, match="output 'hidden_states' is not known: only cross_attentions can be"):
        make(make_recurrent().config, TraceOptions(4, 32, ("hidden_states",)))
    with pytest.raises(InputError, match="'cross_attentions' is not known: without attention there is none"):
        make(make_recurrent("cho").config, TraceOptions(4, 32, ("cross_attentions",)))
