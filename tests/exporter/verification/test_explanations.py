"""Faults in the graphs that explain a model: refused, and named by their node."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from planforge.exporter import export, fit_head, verify
from planforge.exporter.errors import VerificationError
from planforge.exporter.tasks.explanation import ExplanationCase
from planforge.exporter.verification.explanations import keep_cases, read_cases
from planforge.runtime.apps.explain import explain
from planforge.runtime.bundle.bundle import Bundle
from planforge.runtime.errors import InputError

from ...helpers.explained import open_model
from ...helpers.faults import change_weight, constant
from ...helpers.graphs import nodes, replace_graph

GRADIENT = "gradient.portable.fp32"
LAYERS = "layers.portable.fp32"
LENS = "lens.portable.fp32"
Fault = Callable[[ir.Model], str]  # changes a graph, and returns the name of the node at fault


def choose_node(model: ir.Model, operator: str, place: float) -> ir.Node:
    """The node at a share of the way through those of its kind."""
    found = nodes(model, operator)
    return found[int(place * (len(found) - 1))]


def replace_operator(old: str, new: str, place: float) -> Fault:
    """A node computes something else."""

    def plant(model: ir.Model) -> str:
        node = choose_node(model, old, place)
        node.op_type = new
        if new == "Softplus":
            node.attributes.clear()
        return str(node.name)

    return plant


def scale_number(operator: str, factor: float) -> Fault:
    """A single number that a node reads is off."""

    def plant(model: ir.Model) -> str:
        for node in reversed(list(model.graph)):
            for index, value in enumerate(node.inputs):
                if value is None or value.const_value is None:
                    continue
                if node.op_type == operator and value.const_value.size == 1:
                    array = value.const_value.numpy() * np.float32(factor)
                    node.replace_input_with(index, constant(model, f"{value.name}_off", array))
                    return str(node.name)
        raise AssertionError(f"no {operator} with a number")

    return plant


def share_out_over_queries(place: float) -> Fault:
    """A softmax is over the queries of each key, where it is over the keys of each query."""

    def plant(model: ir.Model) -> str:
        node = choose_node(model, "Softmax", place)
        node.attributes["axis"] = ir.AttrInt64("axis", -2)
        return str(node.name)

    return plant


def choose_by_a_table(model: ir.Model) -> str:
    """A probability is chosen by another number, of another shape: what follows is a table."""
    _, node, *_ = [node for node in nodes(model, "Equal") if node.inputs[0] in model.graph.inputs]
    node.replace_input_with(1, constant(model, "other", np.array([[3]], np.int64)))
    return str(node.name)


def forget_branch(model: ir.Model) -> str:
    """A sum of two gradients, behind a layer's two branches, has one of them twice."""
    sums = [node for node in model.graph if node.op_type == "Add" and None not in node.inputs]
    backward = [n for n in sums if all(v.producer() is not None for v in n.inputs if v is not None)]
    node = backward[-2]
    node.replace_input_with(1, node.inputs[0])
    return str(node.name)


def shift_likeliest(model: ir.Model) -> str:
    """The lens names the next tokens of the vocabulary as the likeliest."""
    (top,) = [node for node in model.graph if node.op_type == "TopK"]
    old = top.outputs[1]
    node = ir.node("Add", [old, constant(model, "one", np.array([1], np.int64))], name="shifted")
    node.outputs[0].name = old.name
    old.name = f"{old.name}_before"
    node.outputs[0].type = old.type
    node.outputs[0].shape = old.shape
    model.graph.append(node)
    model.graph.outputs[list(model.graph.outputs).index(old)] = node.outputs[0]
    return "shifted"


def clip_positions(model: ir.Model) -> str:
    """Positions beyond the twelfth are the twelfth: only long texts show it."""
    table = next(n for n in model.graph if n.op_type == "Gather" and "wpe" in str(n.inputs[0].name))  # type: ignore[union-attr]
    most = constant(model, "most", np.array(11, np.int64))
    node = ir.node("Min", [table.inputs[1], most], name="clipped")
    node.outputs[0].name = "clipped"
    model.graph.insert_before(table, node)
    table.replace_input_with(1, node.outputs[0])
    return str(table.name)


# By what is wrong: the bundle, its graph, and the fault.
FAULTS: dict[str, tuple[str, str, Fault]] = {
    "a number is 1 % off": ("gpt2-demo", GRADIENT, scale_number("Mul", 1.01)),
    "a branch is forgotten": ("gpt2-demo", GRADIENT, forget_branch),
    "late positions are lost": ("gpt2-demo", GRADIENT, clip_positions),
    "neurons of another activation": ("gpt2-demo", LAYERS, replace_operator("Gelu", "Softplus", 0.5)),
    "a rank counts the equal": ("gpt2-demo", LENS, replace_operator("Greater", "GreaterOrEqual", 0.0)),
    "other words are the likeliest": ("gpt2-demo", LENS, shift_likeliest),
    "a lens of shares": ("gpt2-demo", LENS, replace_operator("LogSoftmax", "Softmax", 0.0)),
    "a sum is a difference": ("classifier", GRADIENT, replace_operator("Add", "Sub", 0.9)),
    "a lens of another pooler": ("classifier", LENS, replace_operator("Tanh", "Sigmoid", 0.0)),
    "a difference is a sum": ("vectors", GRADIENT, replace_operator("Sub", "Add", 0.8)),
    "an objective is another": ("vectors", GRADIENT, choose_by_a_table),
    "an early sum is a difference": ("transformer-demo", GRADIENT, replace_operator("Add", "Sub", 0.3)),
    "attention to a source by keys": ("transformer-demo", LAYERS, share_out_over_queries(1.0)),
    "a window is one too wide": ("gemma 2", LAYERS, replace_operator("GreaterOrEqual", "Greater", 0.0)),
}


@pytest.fixture
def bundle(explained: Callable[[str], Path], tmp_path: Path) -> Path:
    """gpt2-demo with its explanations, to damage."""
    return Path(shutil.copytree(explained("gpt2-demo") / "bundle", tmp_path / "bundle"))


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_refused_and_named(explained: Callable[[str], Path], tmp_path: Path, name: str) -> None:
    family, artifact, plant = FAULTS[name]
    bundle = Path(shutil.copytree(explained(family) / "bundle", tmp_path / "bundle"))
    source = family if family.endswith("-demo") else explained(family) / "checkpoint"
    planted: list[str] = []
    replace_graph(bundle, artifact, lambda model: planted.append(plant(model)))
    report = verify(bundle, source=source, only=[artifact], level="quick")
    assert {c.artifact for c in report.comparisons if not c.passed} == {artifact}
    assert [mismatch.node for mismatch in report.mismatches] == planted
    with pytest.raises(VerificationError, match=artifact):
        report.raise_if_failed()
    kept = verify_without(bundle, artifact)
    assert {c.artifact for c in kept.comparisons if not c.passed} == {artifact}


def verify_without(bundle: Path, artifact: str) -> Any:
    """Verify where no checkpoint is: it is recorded as one that is not there."""
    opened = Bundle.open(bundle)
    source = {**opened.manifest.source, "argument": "nowhere", "kind": "folder"}
    changed = replace(opened.manifest, source=source)
    (bundle / "manifest.json").write_text(changed.to_json(), encoding="utf-8")
    return verify(bundle, only=[artifact])


def test_graphs_that_read_what_a_wrong_one_gives_are_not_blamed(bundle: Path) -> None:
    def plant(model: ir.Model) -> None:
        choose_node(model, "Gelu", 0.5).op_type = "Relu"

    replace_graph(bundle, LAYERS, plant)
    failed = {c.artifact: c for c in verify_without(bundle, LENS).comparisons if not c.passed}
    assert failed.keys() == {LAYERS, LENS}
    assert failed[LENS].failures == (f"what it reads comes from {LAYERS}, which is wrong",)


def test_what_is_kept_is_small_whatever_the_hidden_size(tmp_path: Path) -> None:
    embeddings = np.zeros((1, 1024, 4096), np.float32)
    ids = np.arange(1024)[None]
    case = ExplanationCase(
        "a case",
        {"embeddings": embeddings, "row": np.array([7])},
        {"gradient.embeddings": embeddings},
        {"gradient.embeddings": 1e-4},
        ids={"input_ids": ids},
        scale=0.3,
    )
    keep_cases(tmp_path, {GRADIENT: [case]})
    (file,) = (tmp_path / "checks").iterdir()
    assert file.stat().st_size < 2e4
    (kept,) = read_cases(file)[GRADIENT]
    assert kept.inputs.keys() == {"row"}
    assert kept.scale == 0.3
    assert np.array_equal(kept.ids["input_ids"], ids)


def test_a_weight_that_is_another_is_refused(bundle: Path) -> None:
    def plant(model: ir.Model) -> None:
        weight = next(v for name, v in model.graph.initializers.items() if "ln_f.weight" in name)
        change_weight(weight, lambda array: 1.00001 * array)

    replace_graph(bundle, GRADIENT, plant)
    report = verify(bundle, source="gpt2-demo", only=[GRADIENT], level="quick")
    assert any("ln_f.weight" in failure for c in report.comparisons for failure in c.failures)


def test_healthy_graphs_pass_with_and_without_the_checkpoint(bundle: Path) -> None:
    report = verify(bundle, source="gpt2-demo", level="quick", seed=7)
    assert report.passed, report.list_failures()
    assert {GRADIENT, LAYERS, LENS} <= {comparison.artifact for comparison in report.comparisons}
    without = verify_without(bundle, GRADIENT)
    assert without.passed and not without.with_pytorch


def test_a_bundle_grows_by_little(explained: Callable[[str], Path]) -> None:
    """Weights are shared: what is added is less than 2 MB, and it is said in the manifest."""
    opened = Bundle.open(explained("gpt2-demo") / "bundle")
    manifest = opened.manifest
    assert [artifact.graph for artifact in manifest.explanations] == ["layers", "lens", "gradient"]
    assert all(artifact.passed for artifact in manifest.explanations)
    (weights,) = {name for artifact in manifest.artifacts for name in artifact.data}
    assert {name for artifact in manifest.explanations for name in artifact.data} == {weights}
    own = [artifact.file for artifact in manifest.explanations]
    own += [name for name in manifest.files if name.startswith("checks/explain-")]
    parameters = sum(
        value.const_value.nbytes
        for value in {
            name: value
            for artifact in manifest.artifacts
            for name, value in ir.load(opened.path(artifact.file)).graph.initializers.items()
        }.values()
        if value.const_value is not None
    )
    added = sum(manifest.files[name].bytes for name in own) + manifest.files[weights].bytes - parameters
    assert added < 2e6


def test_what_cannot_be_explained(tmp_path: Path, head_bundle: Callable[[str], Path]) -> None:
    with pytest.raises(InputError, match="add fp32"):
        export("gpt2-demo", tmp_path / "out", precision=["int8"], target=["cpu"], outputs=["explain"])
    checkpoint = head_bundle("tagger").parent / "tagger"
    with pytest.raises(InputError, match="token_classification"):
        export(checkpoint, tmp_path / "out", outputs=["explain"])
    with pytest.raises(InputError, match="a decoder supports only 'explain'"):
        export("gpt2-demo", tmp_path / "out", outputs=["hidden_states"])
    assert not (tmp_path / "out").exists()


def test_a_fitted_head_is_explained(explained: Callable[[str], Path], tmp_path: Path) -> None:
    """fit-head carries the graphs over, and the gradient goes through scikit-learn's weights."""
    good = [
        f"what a {word} film"
        for word in ("great", "fine", "lovely", "moving", "funny", "superb", "warm", "witty")
    ]
    bad = [
        f"what a {word} film" for word in ("dull", "bad", "poor", "awful", "boring", "weak", "stupid", "cold")
    ]
    rows = [f"{text}\t{label}" for label, texts in (("good", good), ("bad", bad)) for text in texts]
    (tmp_path / "reviews.tsv").write_text("\n".join(rows) + "\n")
    source = explained("vectors") / "bundle"
    fit_head(source, tmp_path / "reviews.tsv", tmp_path / "fitted")
    with open_model(tmp_path / "fitted") as model:
        result: Any = explain(
            model, "what a great film", methods=["gradient", "integrated_gradients", "lens"]
        )
        expected: Any = model.classify("what a great film")
        assert result.kind == "classification"
        assert result.targets[0].text == expected.label
        shares = {target.text: target.probability for target in result.targets}
        assert shares == pytest.approx(expected.probabilities, abs=1e-4)
        assert result.missing.max() <= 0.01
        one, other = result.lens.logprobs[-1]
        assert np.exp(one) + np.exp(other) == pytest.approx(1, abs=1e-5)
        assert np.exp(one) == pytest.approx(result.targets[0].probability, abs=1e-4)
    report = verify(
        tmp_path / "fitted", source=explained("vectors") / "checkpoint", only=[GRADIENT], level="quick"
    )
    assert report.passed, report.list_failures()
