"""Faults in a mixture of experts: each is refused, and named at the module that has it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from planforge.exporter import export
from planforge.exporter.tracing.modules import find_module

from ...helpers.faults import Fault, Plant, constant, node_of, perturbed, weight_of
from ...helpers.llamas import tiny_llama
from ...helpers.verdicts import PlantedBundle, keep_answers

MIXTURE = "layers.1.mlp"
ORT = "decoder.ort.fp32"
PORTABLE = "decoder.portable.fp32"
# Nodes inside a mixture are compared with those of a graph that is converted again.
READS_SHARES = ("Unsqueeze",)


def computed_split(graph: ir.Graph) -> ir.Node:
    """Return the node that gives each expert of the mixture its rows."""
    return next(n for n in graph if find_module(n) == MIXTURE and n.op_type == "Split" and len(n.outputs) > 2)


def exchanged_rows(model: ir.Model) -> None:
    """Two experts compute each other's rows."""
    split = computed_split(model.graph)
    readers = [list(output.uses()) for output in split.outputs[:2]]
    for uses, other in zip(readers, reversed(split.outputs[:2]), strict=True):
        for user, index in uses:
            user.replace_input_with(index, other)


def exchanged_results(model: ir.Model) -> None:
    """Two experts' results are joined in the other order."""
    concat = next(n for n in model.graph if find_module(n) == MIXTURE and n.op_type == "Concat")
    first, second = concat.inputs[:2]
    concat.replace_input_with(0, second)
    concat.replace_input_with(1, first)


def exchanged_matrices(first: str, second: str) -> Plant:
    """Two experts have each other's weights of one product."""

    def plant(model: ir.Model) -> None:
        one, other = weight_of(model, first), weight_of(model, second)
        one.const_value, other.const_value = other.const_value, one.const_value

    return plant


def normalizing_division(graph: ir.Graph) -> ir.Node:
    """Return the node that divides a token's shares by their sum."""

    def divides_by_sum(node: ir.Node) -> bool:
        divisor = node.inputs[1].producer() if node.op_type == "Div" and node.inputs[1] is not None else None
        return divisor is not None and divisor.op_type == "ReduceSum"

    return next(n for n in graph if find_module(n) == MIXTURE and divides_by_sum(n))


def unscaled_shares(model: ir.Model) -> None:
    """Shares are not scaled to a sum of 1."""
    divide = normalizing_division(model.graph)
    shares = divide.inputs[0]
    assert shares is not None
    ir.convenience.replace_all_uses_with(divide.outputs[0], shares)


def last_choice_left_out(model: ir.Model) -> None:
    """The share of the last of a token's experts is 0."""
    divide = normalizing_division(model.graph)
    users = list(divide.outputs[0].uses())
    kept = constant(model, "kept", np.array([1, 0], np.float32))
    masked = ir.node("Mul", [divide.outputs[0], kept], name="masked_shares")
    masked.metadata_props.update(divide.metadata_props)
    masked.outputs[0].type = divide.outputs[0].type
    masked.outputs[0].shape = divide.outputs[0].shape
    model.graph.insert_after(divide, masked)
    for user, index in users:
        user.replace_input_with(index, masked.outputs[0])


def smallest_shares(model: ir.Model) -> None:
    """Tokens choose the experts with the smallest shares."""
    node_of(model, MIXTURE, "TopK").attributes["largest"] = ir.AttrInt64("largest", 0)


def other_activation(module: str) -> Plant:
    """An expert's gate is GELU's approximation by a sigmoid, and not SiLU."""

    def plant(model: ir.Model) -> None:
        node_of(model, module, "QuickGelu").attributes["alpha"] = ir.AttrFloat32("alpha", 1.702)

    return plant


def lost_expert(model: ir.Model) -> None:
    """No token finds the last expert among those that it chose."""
    where = node_of(model, MIXTURE, "Equal")
    place = next(i for i, v in enumerate(where.inputs) if v is not None and v.const_value is not None)
    numbers = where.inputs[place]
    assert numbers is not None and numbers.const_value is not None
    array = numbers.const_value.numpy().copy()
    array.flat[-1] = -1
    where.replace_input_with(place, constant(model, "numbers", array))


def expert(number: int, part: str) -> str:
    return f"{MIXTURE}.experts.{number}.{part}"


ACTIVATION = expert(2, "activation")
FIRST_GATES = expert(0, "gate_proj"), expert(1, "gate_proj")
BOTH = [
    Fault("shares unscaled", unscaled_shares, MIXTURE, READS_SHARES),
    Fault("the last choice left out", last_choice_left_out, MIXTURE, READS_SHARES),
    Fault("the smallest shares", smallest_shares, MIXTURE, ("TopK",)),
    Fault("a router 1 % off", perturbed(f"{MIXTURE}.gate"), f"{MIXTURE}.gate", ("Gemm",)),
    Fault("an expert 1 % off", perturbed(expert(3, "up_proj")), expert(3, "up_proj"), ("Gemm",)),
    Fault("matrices exchanged", exchanged_matrices(*FIRST_GATES), FIRST_GATES[0], ("Gemm",)),
]
OF_ORT = [
    Fault("rows exchanged", exchanged_rows, MIXTURE, ("Concat",)),
    Fault("results exchanged", exchanged_results, MIXTURE, ("Concat",)),
    Fault(
        "another activation",
        other_activation(expert(2, "activation")),
        expert(2, "activation"),
        ("QuickGelu",),
    ),
]
OF_PORTABLE = [Fault("the last expert lost", lost_expert, MIXTURE, ("Equal",))]
PLANTED = [
    *((ORT, fault) for fault in (*BOTH, *OF_ORT)),
    *((PORTABLE, fault) for fault in (*BOTH, *OF_PORTABLE)),
]


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlantedBundle]:
    folder = tmp_path_factory.mktemp("mixtral")
    tiny_llama(folder / "checkpoint", "mixtral", num_hidden_layers=2)
    how: dict[str, Any] = {"precision": ["fp32"], "target": ["cpu", "portable"], "verify": "quick"}
    with keep_answers(folder / "answers"):
        export(folder / "checkpoint", folder / "bundle", **how)
        yield PlantedBundle("mixtral", folder / "bundle", folder / "damaged")


@pytest.mark.parametrize(("artifact", "fault"), PLANTED, ids=lambda value: getattr(value, "name", value))
def test_planted_faults_are_refused_and_named(mixtral: PlantedBundle, artifact: str, fault: Fault) -> None:
    verdict = mixtral.judge(artifact, fault)
    assert verdict.is_caught and verdict.is_right, verdict


def test_the_bundle_without_a_fault_passes(mixtral: PlantedBundle) -> None:
    report = mixtral.verify(ORT, PORTABLE)
    assert report.passed and report.mismatches == ()
