"""Faults planted in the graph of word vectors: each is refused, and named at its node."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import pytest

from ...helpers.faults import Fault, change_weight, constant, node_of
from ...helpers.verdicts import PlantedBundle, keep_answers


def smallest(model: ir.Model) -> None:
    """The words are found that are least alike."""
    (node,) = [node for node in model.graph if node.op_type == "TopK"]
    node.attributes["largest"] = ir.AttrInt64("largest", 0)


def added_alone(model: ir.Model) -> None:
    """Words that are taken away are added."""
    signs = next(value for value in model.graph.inputs if value.name == "signs")
    users = list(signs.uses())
    node = ir.node("Abs", [signs])
    node.outputs[0].type = signs.type
    node.outputs[0].shape = signs.shape
    model.graph.insert_before(users[0].node, node)
    for user, index in users:
        user.replace_input_with(index, node.outputs[0])


def other_norm(model: ir.Model) -> None:
    """A question is divided by the sum of its absolute values."""
    node = node_of(model, "question", "ReduceL2")
    length = ir.node("ReduceL1", list(node.inputs), {"keepdims": 1}, num_outputs=1)
    length.outputs[0].type = node.outputs[0].type
    length.outputs[0].shape = node.outputs[0].shape
    length.metadata_props.update(node.metadata_props)
    model.graph.insert_after(node, length)
    ir.convenience.replace_all_uses_with(node.outputs[0], length.outputs[0])
    model.graph.remove(node, safe=True)


def without_lengths(model: ir.Model) -> None:
    """Every vector has the length 1."""
    lengths = next(v for v in model.graph.initializers.values() if v.name == "lengths.weight")
    change_weight(lengths, np.ones_like)


def next_word(model: ir.Model) -> None:
    """The vector of the word behind is read."""
    node = node_of(model, "directions", "Gather")
    late = ir.node("Sub", [node.inputs[1], constant(model, "one", np.array(1))])
    late.outputs[0].type = ir.TensorType(ir.DataType.INT64)
    model.graph.insert_before(node, late)
    node.replace_input_with(1, late.outputs[0])


def one_word(model: ir.Model) -> None:
    """One word of many has another vector."""

    def change(weight: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        signs = np.ones((len(weight), 1))
        signs[77] = -1
        return weight * signs

    change_weight(next(v for v in model.graph.initializers.values() if v.name == "directions.weight"), change)


FAULTS = [
    Fault("the least alike", smallest, "ranking", ("TopK",)),
    Fault("words that are added alone", added_alone, "question", ("Unsqueeze",)),
    Fault("another norm", other_norm, "question", ("ReduceL1", "Clip")),
    Fault("no lengths", without_lengths, "lengths", ("GatherND",)),
    Fault("the next word", next_word, "directions", ("Gather",)),
    Fault("one word of many", one_word, "directions", ("Gather",)),
]
PLANTED = [("words.portable.fp32", fault) for fault in FAULTS] + [
    ("words.portable.fp16", FAULTS[0]),
    ("words.portable.fp16", FAULTS[2]),
    ("words.portable.fp16", FAULTS[4]),
]


@pytest.fixture(scope="module")
def planted(words_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlantedBundle]:
    """A copy of a sound bundle, beside its vectors."""
    folder = tmp_path_factory.mktemp("damaged")
    with keep_answers(tmp_path_factory.mktemp("answers")):
        yield PlantedBundle("words", words_bundle, folder / "words")


@pytest.mark.parametrize(("artifact", "fault"), PLANTED, ids=[f"{a}: {fault.name}" for a, fault in PLANTED])
def test_a_fault_is_refused_and_named(planted: PlantedBundle, artifact: str, fault: Fault) -> None:
    verdict = planted.judge(artifact, fault)
    assert verdict.is_caught
    assert verdict.is_right, verdict.describe_name()


def test_a_sound_graph_has_no_node_at_fault(planted: PlantedBundle) -> None:
    report = planted.verify("words.portable.fp32", "words.portable.fp16")
    assert report.list_failures() == []
    assert report.list_locations() == []
