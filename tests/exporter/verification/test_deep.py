"""Graphs that are made from the checkpoint once more show where a bundle's own are others."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from planforge.exporter import export, verify
from planforge.exporter.calibration.calibration import Calibration
from planforge.exporter.calibration.repeat import read_calibration
from planforge.exporter.checkpoints.source import find_demo
from planforge.exporter.errors import VerificationError
from planforge.exporter.verification.deep import compare_artifact
from planforge.exporter.verification.explain import make_tracer
from planforge.exporter.verification.verify import find_recorded_source, load_model_to_compare
from planforge.runtime.bundle.bundle import Bundle

from ...helpers.faults import Plant, constant, exchanged_caches
from ...helpers.graphs import damaged, nodes
from ...helpers.models import TINY, random_gpt2, tiny_bert, write_wordpiece

ARTIFACTS = ("decoder.portable.fp16", "decoder.inplace.fp32")


def times_one(model: ir.Model) -> None:
    """A multiplication that changes nothing today."""
    add = nodes(model, "Add")[-1]
    (result,) = add.outputs
    users = list(result.uses())
    one = constant(model, "one", np.array(1, result.dtype.numpy() if result.dtype else np.float32))
    product = ir.node("Mul", [result, one], name="extra")
    product.outputs[0].name = "extra_output"
    model.graph.insert_after(add, product)
    for user, index in users:
        user.replace_input_with(index, product.outputs[0])


def other_number(model: ir.Model) -> None:
    """The largest number that a mask adds is another one."""
    where = next(n for n in nodes(model, "Where") if n.inputs[2] is not None)
    value = where.inputs[2]
    assert value is not None and value.dtype is not None
    where.replace_input_with(2, constant(model, "low", np.array(-20000, value.dtype.numpy())))


def other_axis(model: ir.Model) -> None:
    """An attribute that no other check reads."""
    node = nodes(model, "Transpose")[0]
    order = list(node.attributes["perm"].as_ints())
    node.attributes["perm"] = ir.AttrInt64s("perm", [order[0], order[2], order[1], *order[3:]])


def renamed_and_shuffled(model: ir.Model) -> None:
    """Other names, an Identity, and the terms of a sum in another order: the same computation."""
    for number, node in enumerate(model.graph):
        node.name = f"other_{number}"
    add = next(n for n in nodes(model, "Add") if n.inputs[0] is not n.inputs[1])
    first, second = add.inputs
    add.replace_input_with(0, second)
    add.replace_input_with(1, first)
    same = ir.node("Identity", [second])
    same.outputs[0].name = "same_output"
    model.graph.insert_before(add, same)
    add.replace_input_with(0, same.outputs[0])


@pytest.fixture(scope="module")
def bundle(demo_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(demo_bundle, tmp_path_factory.mktemp("deep") / "bundle"))


@pytest.fixture(scope="module")
def bert_in_int8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random classifier in int8, whose rows are rounded too."""
    folder = tmp_path_factory.mktemp("deep")
    tiny_bert(folder / "checkpoint", "BertForSequenceClassification", num_labels=3, num_hidden_layers=1)
    write_wordpiece(folder / "checkpoint")
    options: dict[str, Any] = {"target": ["cpu"], "precision": ["int8"], "verify": False}
    export(folder / "checkpoint", folder / "bundle", **options)
    return folder / "bundle"


@pytest.fixture(scope="module")
def again(bundle: Path) -> tuple[Mapping[str, ir.Model], Calibration]:
    """The graphs of the checkpoint, traced again, and what they are converted with."""
    opened = Bundle.open(bundle)
    source = find_recorded_source(opened)
    assert source is not None
    model = load_model_to_compare(opened, source)
    recipes = [opened.manifest.artifact(name).recipe_id for name in ARTIFACTS]
    return make_tracer(opened.manifest, source, model)(recipes), read_calibration(opened, model)


@pytest.mark.parametrize("artifact", ARTIFACTS)
@pytest.mark.parametrize(
    ("plant", "word"),
    [
        (lambda model: None, ""),
        (renamed_and_shuffled, ""),
        (times_one, "is Mul, and Add belongs there"),
        (other_number, "reads the number -20000 where"),
        (other_axis, "has perm"),
    ],
    ids=["sound", "the same in other words", "one node more", "another number", "another attribute"],
)
def test_a_graph_is_what_this_exporter_writes_or_told_where_not(
    artifact: str, plant: Plant, word: str, bundle: Path, again: tuple[Mapping[str, ir.Model], Calibration]
) -> None:
    traced, calibration = again
    one = Bundle.open(bundle).manifest.artifact(artifact)
    with damaged(bundle, artifact, plant) as opened:
        failures = compare_artifact(opened, one, traced[one.recipe_id], calibration).failures
    assert word in failures[0] if word else failures == ()


@pytest.fixture(scope="module")
def gpt2_in_int8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random GPT-2 in int4, and with its cache in int8."""
    folder = tmp_path_factory.mktemp("deep")
    shutil.copytree(find_demo("gpt2-demo"), folder / "checkpoint")
    random_gpt2(**TINY | {"vocab_size": 2048}).save_pretrained(folder / "checkpoint")
    options: dict[str, Any] = {"target": ["cpu"], "precision": ["int4", "fp32-kv8"], "verify": False}
    export(folder / "checkpoint", folder / "bundle", **options)
    return folder / "bundle"


@pytest.fixture(scope="module")
def other_family(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[Path, Mapping[str, ir.Model], Calibration]]:
    """A copy of a bundle by its name, its graphs, traced again, and what they are converted with."""

    @functools.cache
    def make(name: str) -> tuple[Path, Mapping[str, ir.Model], Calibration]:
        fixture, _, argument = name.partition(":")
        found = request.getfixturevalue(fixture)
        folder: Path = found(argument) if argument else found
        folder = folder / "bundle" if (folder / "bundle").exists() else folder
        opened = Bundle.open(folder)
        source = find_recorded_source(opened)
        assert source is not None
        model = load_model_to_compare(opened, source)
        recipes = list(dict.fromkeys(artifact.recipe_id for artifact in opened.manifest.artifacts))
        copy = Path(shutil.copytree(folder, tmp_path_factory.mktemp("family") / "bundle"))
        return copy, make_tracer(opened.manifest, source, model)(recipes), read_calibration(opened, model)

    return make


def other_epsilon(model: ir.Model) -> None:
    node = next(n for n in model.graph if "Normalization" in n.op_type)
    node.attributes["epsilon"] = ir.AttrFloat32("epsilon", 2 * node.attributes["epsilon"].as_float())


def other_accuracy(model: ir.Model) -> None:
    nodes(model, "MatMulNBits")[1].attributes["accuracy_level"] = ir.AttrInt64("accuracy_level", 3)


FAMILIES = [
    ("head_bundle:ranker", "encoder.portable.fp16", times_one, "node 'extra' (Mul) is Mul"),
    ("bert_in_int8", "encoder.ort.int8", other_epsilon, "(LayerNormalization) of"),
    ("llama_bundle:qwen3", "decoder.ort.fp32", other_epsilon, "(SimplifiedLayerNormalization) of"),
    ("marian_bundle", "decoder.inplace.fp16", other_axis, "(Transpose) of decoder.layers.0"),
    ("marian_bundle", "encoder.portable.fp32", other_number, "reads the number -20000 where"),
    ("gpt2_in_int8", "decoder.ort.int4", other_accuracy, "(MatMulNBits) of h.0.attn.c_proj has"),
    ("gpt2_in_int8", "decoder.ort.fp32-kv8", exchanged_caches("key"), "reads the input 'cache.0.key'"),
    ("gpt2_in_int8", "decoder.ort.fp32-kv8", exchanged_caches("value"), "reads the input 'cache.0.value'"),
]


@pytest.mark.parametrize(("name", "artifact", "plant", "word"), FAMILIES)
def test_graphs_of_every_family_are_made_again(
    other_family: Callable[[str], tuple[Path, Mapping[str, ir.Model], Calibration]],
    name: str,
    artifact: str,
    plant: Plant,
    word: str,
) -> None:
    """Sound ones are the same, and one small change is told by its node."""
    folder, traced, calibration = other_family(name)
    opened = Bundle.open(folder)
    one = opened.manifest.artifact(artifact)
    assert compare_artifact(opened, one, traced[one.recipe_id], calibration).failures == ()
    with damaged(folder, artifact, plant) as bundle:
        first, *_ = compare_artifact(bundle, one, traced[one.recipe_id], calibration).failures
    assert word in first


def test_what_cannot_be_made_again_is_refused(
    bundle: Path, imported: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(VerificationError, match="optimum made those of"):
        verify(imported("llama"), deep=True)
    monkeypatch.setattr("planforge.exporter.verification.verify.find_recorded_source", lambda bundle: None)
    with pytest.raises(
        VerificationError, match="--deep makes graphs from the checkpoint again; pass --source"
    ):
        verify(bundle, deep=True)
