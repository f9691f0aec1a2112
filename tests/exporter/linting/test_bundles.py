"""`planforge lint` of bundles: each graph is checked for the targets that take it."""

from __future__ import annotations

import dataclasses
import io
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from planforge.exporter.linting.lint import choose_graphs, explain_not_taken, lint, list_graph_targets
from planforge.exporter.linting.report import Finding, LintReport
from planforge.exporter.targets import find_targets
from planforge.runtime.bundle.bundle import Bundle

from ...helpers.cli import error_line, planforge


def test_each_graph_of_a_bundle_is_checked_for_the_targets_that_take_it(demo_bundle: Path) -> None:
    report = lint(demo_bundle, ["rtx", "tensorrt10.3", "cpu"])
    dialects = {graph: graph.split(".")[1] for graph in report.graphs}
    assert set(dialects.values()) == {"ort", "portable", "inplace"}
    takers = {"ort": "cpu", "portable": "tensorrt10.3", "inplace": "rtx"}
    assert {(dialects[graph], target) for graph, target in report.checked} == set(takers.items())
    assert report.passed and not any(finding.is_error for finding in report.findings)


def test_nothing_is_found_in_a_fresh_bundle(demo_bundle: Path) -> None:
    report = lint(demo_bundle)
    assert report.findings == () and {"cpu", "rtx"} <= set(report.targets)
    assert {graph for graph, _ in report.checked} == set(report.graphs)


def test_a_graph_that_no_named_target_takes_has_a_line_that_says_why(demo_bundle: Path) -> None:
    report = lint(demo_bundle, ["cpu", "cuda", "rtx"])
    named = {(graph, target) for graph in report.graphs for target in report.targets}
    assert {graph for graph, _ in named - set(report.checked)} == set(report.left_out)
    for graph, why in report.left_out.items():
        dialect = graph.split(".")[1]
        missing = [target for target in report.targets if (graph, target) not in report.checked]
        assert all(target in why for target in missing)
        if "is of no use" not in why:
            assert ("the same graph in the dialect" in why) == (dialect == "portable")
            assert (f"not '{dialect}'" in why) == (dialect != "portable")
    lines = planforge("lint", demo_bundle, "--target", "cpu,cuda,rtx").stdout.splitlines()
    told = [line.partition(" was left out: ")[0] for line in lines if " was left out: " in line]
    assert told == list(report.left_out)
    assert (
        "left out" not in planforge("lint", demo_bundle).stdout
    )  # each is checked for the targets it is for


def test_a_precision_that_a_target_has_no_use_for_is_named(demo_bundle: Path) -> None:
    manifest = Bundle.open(demo_bundle).manifest
    ort = next(artifact for artifact in manifest.artifacts if artifact.id == "decoder.ort.fp32")
    cpu, cuda = find_targets(["cpu", "cuda"])
    half = dataclasses.replace(ort, precision="fp16")
    portable = dataclasses.replace(half, dialect="portable")
    for artifact in (half, portable):
        assert explain_not_taken(cpu, artifact, [half, portable]).startswith("fp16 is of no use")
    assert explain_not_taken(cuda, portable, [half, portable]) == (
        "the same graph in the dialect 'ort' is taken"
    )


def test_reasons_of_several_targets_are_one_sentence(demo_bundle: Path) -> None:
    report = lint(demo_bundle, ["jetpack5.1", "tensorrt8.5"])
    (ort,) = (name for name in report.graphs if "ort.fp32" in name)
    assert report.left_out[ort] == (
        "for jetpack5.1 and tensorrt8.5 the dialect 'portable' is taken, not 'ort'"
    )


@pytest.mark.parametrize(
    ("name", "precision", "is_taken"),
    [
        ("cuda", "fp16", True),
        ("cuda", "w4a16", True),
        ("cuda", "int8", False),
        ("cuda", "nvfp4a16", False),
        ("cpu", "fp16", False),
        ("cpu", "fp32", True),
        ("rtx", "fp16", False),
    ],
)
def test_the_portable_graph_of_a_precision_without_another_is_checked(
    name: str, precision: str, is_taken: bool, demo_bundle: Path
) -> None:
    """As ONNX Runtime runs it: an encoder's fp16 has a graph in that dialect alone."""
    decoder = Bundle.open(demo_bundle).manifest.artifacts[0]
    own = "inplace" if name == "rtx" else "ort"
    other = dataclasses.replace(decoder, graph="encoder", inputs=(), dialect=own, precision="fp32-kv8")
    if name == "cuda":
        other = dataclasses.replace(other, precision="w8a16")
    only = dataclasses.replace(other, dialect="portable", precision=precision)
    (target,) = find_targets([name])
    assert choose_graphs(target, [other, only]) == ([other, only] if is_taken else [other])
    better = dataclasses.replace(other, precision=precision)
    assert only not in choose_graphs(target, [other, only, better])


@pytest.mark.parametrize("command", ["lint", "inspect"])
def test_the_name_of_a_demo_is_refused_with_the_command_that_makes_a_bundle(command: str) -> None:
    line = error_line(command, "gpt2-demo")
    first = "first `planforge export gpt2-demo -o build/gpt2-demo`"
    assert f"{first}, then `planforge {command} build/gpt2-demo`" in line
    assert "planforge export" not in error_line(command, "another-demo").replace(
        "`planforge export` wrote", ""
    )


def test_a_target_that_takes_no_graph_of_a_bundle_is_told_why(demo_bundle: Path) -> None:
    manifest = Bundle.open(demo_bundle).manifest
    ort = [artifact for artifact in manifest.artifacts if artifact.dialect == "ort"]
    portable = [artifact for artifact in manifest.artifacts if artifact.dialect == "portable"]
    for names, artifacts, expected in (
        (["rtx"], ort, ort),
        (["jetpack6.2"], [*ort, *portable], portable),
        (["rtx"], [*ort, *portable], portable),
        (["cpu"], [a for a in ort if a.precision == "fp16"], [a for a in ort if a.precision == "fp16"]),
    ):
        (target,) = find_targets(names)
        assert choose_graphs(target, artifacts) == expected


def test_of_several_graphs_that_a_target_takes_one_without_errors_is_enough(tmp_path: Path) -> None:
    graphs = ("onnx/decoder.ort.fp32-1.onnx", "onnx/decoder.ort.int8-1.onnx")
    fault = Finding(graphs[1], "cpu", "error", "r", "", (), (), "what", "fix", "source")
    checked = tuple((graph, "cpu") for graph in graphs)
    report = LintReport(tmp_path, dict.fromkeys(graphs, "decoder"), ("cpu",), checked, (fault,))
    console = Console(file=io.StringIO(), width=160)
    console.print(*report.tables())
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert report.passed and re.search(r"error +r +cpu +onnx/decoder\.ort\.int8-1\.onnx: .* what +fix", shown)
    assert report.suggest_other(graphs[1], "cpu") == "; use decoder.ort.fp32-1.onnx"


@pytest.mark.parametrize(
    ("graph", "dialect", "precision", "targets"),
    [
        ("encoder", "portable", "fp16", ("portable", "rtx")),
        ("encoder", "portable", "fp32", ("portable",)),
        ("decoder", "portable", "fp16", ("portable",)),
        ("decoder", "inplace", "fp16", ("rtx",)),
        ("encoder", "ort", "fp32", ("cpu",)),
        ("encoder", "ort", "fp16", ("cuda",)),
    ],
)
def test_a_graph_is_checked_for_those_who_take_it(
    graph: str, dialect: str, precision: str, targets: tuple[str, ...], demo_bundle: Path
) -> None:
    """An encoder has no cache, so rtx builds its plan from the portable graph, when it builds one."""
    decoder = Bundle.open(demo_bundle).manifest.artifacts[0]
    artifact = dataclasses.replace(decoder, graph=graph, dialect=dialect, precision=precision)
    if graph == "encoder":
        artifact = dataclasses.replace(artifact, inputs=())
    assert list_graph_targets(artifact) == targets


def test_an_encoder_without_a_plan_is_checked_for_rtx(head_bundle: Callable[[str], Path]) -> None:
    assert Bundle.open(head_bundle("classifier")).manifest.plans == ()
    assert "rtx" in lint(head_bundle("classifier")).targets


@pytest.mark.parametrize("target", ["jetpack5.1", "jetpack6.0", "tensorrt8.6"])
def test_a_graph_is_judged_as_build_rewrites_it_for_tensorrt_8(target: str, demo_bundle: Path) -> None:
    """`build` writes Gelu and LayerNormalization out, and hands over opset 17."""
    report = lint(demo_bundle, [target])
    assert report.passed
    assert {finding.rule for finding in report.findings} <= {"int64-input"}
    portable = next(name for name in report.graphs if "portable" in name)
    alone = lint(demo_bundle / portable, [target])
    assert {"opset", "operator-unsupported"} <= {finding.rule for finding in alone.findings}


def test_slots_that_only_build_makes_a_number_are_an_error_of_the_file_alone(demo_bundle: Path) -> None:
    """TensorRT-RTX's own parser refuses such a cache: see test_oracle.py's "cache-of-unknown-length"."""
    report = lint(demo_bundle, ["rtx"])
    assert report.passed and not report.findings
    inplace = next(name for name, target in report.checked)
    (finding,) = (found for found in lint(demo_bundle / inplace, ["rtx"]).findings if found.is_error)
    assert (finding.rule, finding.severity) == ("cache-length", "error")
    assert "'slots', which only `planforge build` makes a number" in finding.what
