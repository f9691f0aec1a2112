"""Prepared graphs: they compute the same, and nothing fails where they cannot be kept."""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from planforge.exporter.passes.weights import add_initializer
from planforge.runtime import InputError, MemoryLimitError, TextEncoder, TextGenerator, Translator, load
from planforge.runtime.backends import ort_prepared
from planforge.runtime.backends.ort_program import OrtProgram
from planforge.runtime.backends.prepared import DATA, GRAPH, STAMP
from planforge.runtime.bundle.bundle import Bundle
from planforge.runtime.errors import BackendError

from ...helpers.cli import error_line, planforge
from ...helpers.graphs import normal, parse_graph, replace_graph, run_graph
from ...helpers.prepared import PROMPT, edit_without_a_trace, generate

pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The paths of the graphs that are opened to be run."""
    paths: list[Path] = []
    make = OrtProgram.__init__

    def noting(self: OrtProgram, path: Path, *arguments: Any, **options: Any) -> None:
        paths.append(path)
        make(self, path, *arguments, **options)

    monkeypatch.setattr(OrtProgram, "__init__", noting)
    return paths


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_a_prepared_model_answers_with_the_same_bits(
    whole_bundle: Path, opened: list[Path], cache: Path, precision: str
) -> None:
    plain = generate(whole_bundle, precision=precision, prepared=False)
    assert not cache.exists()
    made = generate(whole_bundle, precision=precision, prepared=True)
    kept = generate(whole_bundle, precision=precision)
    assert plain == made == kept
    assert [path.is_relative_to(cache) for path in opened] == [False, True, True]
    (folder,) = cache.iterdir()
    assert {path.name for path in folder.iterdir()} == {GRAPH, DATA, STAMP}


def test_encoders_and_translators_are_prepared_too(
    minilm_bundle: Path, dates_bundle: Path, opened: list[Path], cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And say so."""
    caplog.set_level(logging.INFO, logger="planforge")
    vectors = []
    translations = []
    for option in (False, True, "auto"):
        caplog.clear()
        with TextEncoder.load(minilm_bundle, backend="ort-cpu", prepared=option) as encoder:
            assert encoder.prepared == bool(option) == ("prepared weights" in repr(encoder))
            assert ("its weights were prepared" in caplog.text) == bool(option)
            vectors.append(encoder.embed(["Wings lift the plane.", "Bread"]))
        with Translator.load(
            dates_bundle, backend="ort-cpu", precision="fp32", prepared=option
        ) as translator:
            translations.append(translator.translate("March 3, 1999").text)
    assert np.array_equal(vectors[0], vectors[1])
    assert np.array_equal(vectors[0], vectors[2])
    assert len(set(translations)) == 1
    assert sum(path.is_relative_to(cache) for path in opened) == 6  # two of three rounds, three graphs


def test_nothing_is_written_that_was_not_asked_for(own_bundle: Path, cache: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in own_bundle.rglob("*")}
    generate(own_bundle, precision="fp32")
    assert not cache.exists()
    generate(own_bundle, precision="fp32", prepared=True)
    assert cache.exists()
    assert {path: path.stat().st_mtime_ns for path in own_bundle.rglob("*")} == before


def fill_disk(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=100_000))


def block_folder(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    cache.parent.write_text("a file", encoding="utf-8")


def break_engine(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    def fail(path: Path, *arguments: object, **options: object) -> None:
        raise RuntimeError("Failed to write external initializers to file")

    monkeypatch.setattr(ort_prepared, "make_session", fail)


@pytest.mark.parametrize(
    ("prevent", "reason"),
    [
        (fill_disk, "0 MB free, and .* MB are needed"),
        (block_folder, "Not a directory|cannot find the path|exists"),
        (break_engine, "Failed to write"),
    ],
    ids=["disk", "folder", "engine"],
)
def test_it_runs_unprepared_where_nothing_can_be_kept(
    whole_bundle: Path,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    prevent: Callable[[pytest.MonkeyPatch, Path], None],
    reason: str,
) -> None:
    plain = generate(whole_bundle, precision="int8", prepared=False)
    prevent(monkeypatch, cache)
    caplog.set_level(logging.WARNING, "planforge")
    assert generate(whole_bundle, precision="int8", prepared=True) == plain
    (message,) = caplog.messages
    assert message.startswith("decoder.ort.int8 starts unprepared: ")
    assert not cache.exists() or not list(cache.iterdir())
    assert re.search(reason, error_line("prepare", whole_bundle, "--precision", "int8", code=1))


def test_several_models_share_what_is_prepared(whole_bundle: Path) -> None:
    options: dict[str, Any] = {"precision": "int8", "backend": "ort-cpu", "prepared": True}
    load_model = TextGenerator.load
    with load_model(whole_bundle, **options) as one, load_model(whole_bundle, **options) as other:
        answers = [model.generate(PROMPT, max_new_tokens=5).token_ids for model in (one, other)]
    assert answers == [tuple(generate(whole_bundle, precision="int8", prepared=False)[0][:5])] * 2


def test_the_memory_limit_holds(whole_bundle: Path, opened: list[Path], cache: Path) -> None:
    """The same one is enough, and the same one is not, as of a model that is not prepared."""
    manifest = Bundle.open(whole_bundle).manifest
    weights = manifest.count_weight_bytes(manifest.artifact("decoder.ort.int8"))
    needed = []
    for option in (False, True):
        open_model = partial(TextGenerator.load, whole_bundle, precision="int8", prepared=option)
        with open_model(memory_limit=weights + 1000) as model, pytest.raises(MemoryLimitError) as caught:
            model.generate(PROMPT, max_new_tokens=12)
        needed.append(caught.value.needed)
        with open_model(memory_limit=needed[-1]) as model:
            assert model.generate(PROMPT, max_new_tokens=12).token_ids
    assert needed[0] == needed[1] > weights + 1000
    assert [path.is_relative_to(cache) for path in opened] == [False, False, True, True]


@pytest.mark.parametrize("option", ["never", 2, None])
def test_another_option_is_refused(whole_bundle: Path, option: Any) -> None:
    with pytest.raises(InputError, match=r"prepared=.* is not one of \[True, False, 'auto'\]"):
        load(whole_bundle, prepared=option)


def test_the_command_prepares_and_clears(whole_bundle: Path, cache: Path) -> None:
    done = planforge("prepare", whole_bundle, "--precision", "int4", "--json")
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)["prepared"]
    (folder,) = cache.iterdir()
    size = sum(path.stat().st_size for path in folder.iterdir())
    assert row == {"id": "decoder.ort.int4", "bytes": size, "folder": str(folder)}
    written = (folder / STAMP).stat().st_mtime_ns
    again = planforge("prepare", whole_bundle, "--precision", "int4")
    assert again.stdout.split() == ["decoder.ort.int4", f"{size / 1e6:.1f}", "MB", str(folder)]
    assert (folder / STAMP).stat().st_mtime_ns == written
    edit_without_a_trace(folder)
    assert planforge("prepare", whole_bundle, "--precision", "int4").returncode == 0
    assert (folder / STAMP).stat().st_mtime_ns != written
    assert planforge("prepare", whole_bundle, "--clear").stdout == f"deleted {folder}\n"
    assert not list(cache.iterdir())
    assert planforge("prepare", whole_bundle, "--clear").stdout == "this bundle has no prepared graphs\n"


UNALIGNED = """
<ir_version: 10, opset_import: ["" : 21]>
g (float[n, 64] x) => (float[n, 260] y) {
    wide = MatMul (x, first)
    scaled = Mul (wide, scales)
    narrow = MatMul (scaled, second)
    y = MatMul (narrow, third)
}
"""


def test_a_graph_whose_packed_weights_lie_unaligned_computes_the_same(own_bundle: Path) -> None:
    """Without the other entry's name ONNX Runtime 1.31 ends the process here, or computes NaN."""
    shapes = {"first": (64, 260), "scales": (260,), "second": (260, 64), "third": (64, 260)}

    def change(model: ir.Model) -> None:
        model.graph = parse_graph(UNALIGNED).graph
        for number, (name, shape) in enumerate(shapes.items()):
            add_initializer(model.graph, name, ir.tensor(normal(*shape, seed=number), name=name))

    replace_graph(own_bundle, "decoder.ort.fp32", change)
    bundle = Bundle.open(own_bundle)
    artifact = bundle.manifest.artifact("decoder.ort.fp32")
    kept = ort_prepared.find_prepared(bundle, artifact)
    ort_prepared.make_prepared(bundle, artifact, kept)
    entries = list_packed(kept.graph.read_bytes())
    used = [value for value in entries if value.startswith("MatMul+")]
    assert 0 < len(used) < len(entries)
    program = ort_prepared.open_current(kept, artifact, threads=1, verify=True)
    assert program is not None
    x = normal(5, 64, seed=9)
    (found,) = program.session.run(None, {"x": x})
    (expected,) = run_graph(bundle.path(artifact.file), x=x)
    np.testing.assert_array_equal(found, expected)
    program.close()


def test_packed_weights_between_two_aligned_addresses_are_passed_over() -> None:
    """ONNX Runtime 1.31 computes NaN from them."""
    kept = ["MatMulNBits+123|64;100;0", "MatMul+12|640;64;0|1280;64;0"]
    left_out = ["MatMulNBits+456|130;100;0", "MatMul+12|640;64;0|1281;64;0"]
    model = make_packed_model([*kept, *left_out])
    changed = ort_prepared.pass_over_unaligned(model)
    renamed = [f"{'_' * 15}|130;100;0", f"{'_' * 9}|640;64;0|1281;64;0"]
    assert list_packed(changed) == [*kept, *renamed] * 3
    assert changed == make_packed_model([*kept, *renamed])


@pytest.mark.parametrize("value", ["other", "MatMul+12", "12|64;100;0", "MatMul+12|64;100", ""])
def test_packed_weights_of_another_form_are_refused(value: str) -> None:
    with pytest.raises(BackendError, match="an unknown format"):
        ort_prepared.pass_over_unaligned(make_packed_model(["MatMul+12|64;100;0", value]))


def test_packed_weights_in_another_place_are_refused() -> None:
    model = onnx.load_from_string(make_packed_model(["MatMul+12|64;100;0"]))
    model.metadata_props.add(key="prepacked_0", value="MatMul+12|65;100;0")
    with pytest.raises(BackendError, match="an unknown format"):
        ort_prepared.pass_over_unaligned(model.SerializeToString())


def make_packed_model(values: list[str]) -> bytes:
    """Return a model whose graph, and the graphs of a node in it, have a weight with such packed forms."""
    weight = onnx.TensorProto(name="w", dims=[2], data_type=onnx.TensorProto.FLOAT, data_location="EXTERNAL")
    weight.external_data.add(key="location", value="model.data")
    for number, value in enumerate(values):
        weight.external_data.add(key=f"prepacked_{number}", value=value)
    inner = onnx.GraphProto(name="inner", initializer=[weight])
    node = onnx.NodeProto(op_type="If")
    node.attribute.add(name="then_branch", type=onnx.AttributeProto.GRAPH, g=inner)
    node.attribute.add(name="others", type=onnx.AttributeProto.GRAPHS, graphs=[inner])
    graph = onnx.GraphProto(name="main", node=[node], initializer=[weight])
    data: bytes = onnx.ModelProto(ir_version=10, graph=graph).SerializeToString()
    return data


def list_packed(model: bytes) -> list[str]:
    """Return the values of the entries of packed weights, as the onnx package reads them."""
    graphs = [onnx.load_from_string(model).graph]
    for graph in graphs:
        for attribute in (attribute for node in graph.node for attribute in node.attribute):
            graphs += [attribute.g, *attribute.graphs]
    return [
        entry.value
        for graph in graphs
        for weight in graph.initializer
        for entry in weight.external_data
        if entry.key.startswith("prepacked_")
    ]
