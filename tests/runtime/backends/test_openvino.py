"""Encoders in OpenVINO: beside ONNX Runtime and transformers, which engine is taken, and refusals.

A processor without bf16 computes in fp32 what it is asked for in bf16: tests that only say so pass there too.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from rich.console import Console

from planforge.exporter import VerificationError, export, verify
from planforge.exporter import graphs as exporter_graphs
from planforge.exporter.commands.bench import make_bench_tables, record_default
from planforge.exporter.tasks import verifier
from planforge.runtime import TextEncoder, load
from planforge.runtime.apps.diagnostics import bench
from planforge.runtime.backends import openvino_backend
from planforge.runtime.backends.openvino_backend import NO_BF16, OpenVinoBackend, OpenVinoProgram
from planforge.runtime.bundle.bundle import Bundle
from planforge.runtime.errors import BackendError, BackendUnavailableError, ClosedError, InputError

from ...commands.test_bench import result
from ...helpers.models import tiny_bert, write_wordpiece

TEXTS = ["a cat", "the dog sees a cat and the cat sees a dog", "dog", ""]
NOT_INSTALLED = "it needs OpenVINO: pip install 'planforge[openvino]'"
PRECISIONS = ("fp32", "bf16", "w8a8")


@contextmanager
def pretend(reason: str) -> Iterator[None]:
    """Let bf16 be missing for a reason, or be there for none."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (openvino_backend, exporter_graphs, verifier):
            patch.setattr(module, "explain_no_bf16", lambda: reason)
        yield


@pytest.fixture(autouse=True)
def has_bf16() -> Iterator[None]:
    with pretend(""):
        yield


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("openvino") / "bert"
    folder.mkdir()
    tiny_bert(folder)
    write_wordpiece(folder)
    return folder


@pytest.fixture(scope="module")
def bundle(checkpoint: Path) -> Path:
    losses = {"max_error": 8.0, "path_error": 8.0, "rms_error": 1.0, "rank_changes": 1.0}
    with pretend(""):
        made = export(
            checkpoint,
            checkpoint.with_name("bundle"),
            target=["cpu", "openvino"],
            precision=["fp32", "int8", "bf16", "w8a8"],
            accept={**losses, "mean_cosine_gap": 0.2, "cosine_gap": 0.2},
        )
    assert made.report is not None
    engines = {(c.artifact, c.backend) for c in made.report.comparisons}
    assert ("encoder.portable.bf16", "openvino") in engines
    assert ("encoder.portable.bf16", "ort-cpu") in engines
    return made.bundle


def embed(bundle: Path, **options: Any) -> Any:
    with TextEncoder.load(bundle, threads=1, **options) as model:
        return model.embed(TEXTS, pooling="mean", normalize=True)


def test_it_computes_what_transformers_and_onnx_runtime_do(bundle: Path, checkpoint: Path) -> None:
    model = transformers.BertModel.from_pretrained(checkpoint)
    with TextEncoder.load(bundle, backend="openvino", precision="fp32", threads=1) as encoder:
        assert encoder.backend == "openvino"
        got = encoder.embed(TEXTS[1], pooling="mean", normalize=False)
        tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
        with torch.no_grad():
            want = model(**tokenizer(TEXTS[1], return_tensors="pt")).last_hidden_state[0].mean(0).numpy()
    assert np.abs(got - want).max() <= 1e-5 * np.abs(want).max()
    exact = embed(bundle, backend="ort-cpu", precision="fp32")
    np.testing.assert_allclose(embed(bundle, backend="openvino", precision="fp32"), exact, atol=1e-5)
    for precision in ("bf16", "w8a8"):
        cosines = (embed(bundle, backend="openvino", precision=precision) * exact).sum(-1)
        assert cosines.min() > 0.98  # of a model whose weights are noise


def test_batches_do_not_change_an_answer(bundle: Path) -> None:
    for precision in PRECISIONS:
        with TextEncoder.load(bundle, backend="openvino", precision=precision, threads=1) as model:
            together = model.embed(TEXTS)
            apart = np.stack([model.embed(text) for text in TEXTS])
            again = model.embed(TEXTS)
        np.testing.assert_array_equal(together, again)
        assert (together * apart).sum(-1).min() / np.square(together).sum(-1).max() > 0.98


def set_default(bundle: Path, tmp_path: Path, **fields: Any) -> Path:
    """A copy of a bundle, with another default."""
    manifest = dataclasses.replace(Bundle.open(bundle).manifest, **fields)
    folder = tmp_path / "copy"
    shutil.copytree(bundle, folder)
    (folder / "manifest.json").write_text(manifest.to_json(), encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("precision", "default", "backend", "taken"),
    [
        (None, None, None, "ort-cpu"),
        ("bf16", None, None, "openvino"),
        ("w8a8", None, None, "openvino"),
        ("fp32", "bf16", "openvino", "ort-cpu"),
        (None, "bf16", None, "openvino"),
        (None, "fp32", "openvino", "openvino"),
        (None, "fp32", None, "ort-cpu"),
    ],
)
def test_the_engine_follows_the_precision_and_the_default(
    precision: str | None, default: str | None, backend: str | None, taken: str, bundle: Path, tmp_path: Path
) -> None:
    folder = set_default(bundle, tmp_path, default_precision=default, default_backend=backend)
    with load(folder, precision=precision, threads=1) as model:
        assert model.backend == taken
        assert model.artifact.precision == precision or precision is None


@pytest.mark.parametrize("missing", ["openvino", "bf16"])
def test_where_it_is_missing_onnx_runtime_computes_in_fp32(
    missing: str,
    bundle: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    reason = NO_BF16
    if missing == "openvino":
        monkeypatch.setattr(openvino_backend, "import_openvino", refuse)
        reason = NOT_INSTALLED
    folder = set_default(bundle, tmp_path, default_precision="bf16", default_backend="openvino")
    with pretend(reason), caplog.at_level(logging.INFO, "planforge"):
        with TextEncoder.load(folder, threads=1) as model:
            assert (model.backend, model.artifact.precision) == ("ort-cpu", "bf16")
            found = model.embed(TEXTS, pooling="mean", normalize=True)
        with pytest.raises(BackendUnavailableError, match="openvino") as refused:
            load(folder, backend="openvino", precision="bf16")
    assert reason in str(refused.value)
    assert "encoder.portable.bf16 is computed in fp32" in caplog.text
    assert reason in caplog.text
    np.testing.assert_allclose(found, embed(bundle, backend="ort-cpu", precision="fp32"), atol=1e-6)


def refuse() -> Any:
    raise BackendUnavailableError(NOT_INSTALLED)


def test_a_graph_that_a_limit_of_memory_weighs_is_not_said_to_run(
    bundle: Path, caplog: pytest.LogCaptureFixture
) -> None:
    load(bundle, backend="ort-cpu", precision="fp32", memory_limit=2**30, threads=1).close()
    assert "is computed in fp32" not in caplog.text


def test_a_program_without_the_package_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openvino", None)
    with pytest.raises(BackendUnavailableError, match=r"pip install 'planforge\[openvino\]'"):
        OpenVinoBackend()


def test_its_makers_are_told_nothing(bundle: Path, tmp_path: Path) -> None:
    code = (
        "import json, sys\n"
        "from planforge.runtime import load\n"
        "load(sys.argv[1], backend='openvino', precision='fp32', threads=1).close()\n"
        "import openvino\n"
        "assert callable(openvino.convert_model)\n"
        "print(json.dumps([name for name in sys.modules if name.startswith('openvino_telemetry')]))\n"
    )
    home = tmp_path / "home"
    home.mkdir()
    environment = {**os.environ, "HOME": str(home), "USERPROFILE": str(home)}
    environment.pop("CI", None)  # in which it says nothing
    done = subprocess.run(
        [sys.executable, "-c", code, str(bundle)], capture_output=True, text=True, check=True, env=environment
    )
    assert json.loads(done.stdout) == []
    assert {path.name for path in home.iterdir()} <= {".cache"}


def test_decoders_and_other_precisions_are_refused(whole_bundle: Path, bundle: Path) -> None:
    with pytest.raises(BackendUnavailableError, match="no encoder's graph for it: export with"):
        load(whole_bundle, backend="openvino")
    with pytest.raises(InputError, match=r"precision='int8' is not in this bundle"):
        load(bundle, backend="openvino", precision="int8")


def test_a_bundle_is_exported_for_it_where_its_precision_is_named(checkpoint: Path, tmp_path: Path) -> None:
    made = export(checkpoint, tmp_path / "made", precision=["fp32", "bf16"], verify=False)
    assert [a.id for a in made.manifest.artifacts] == [
        "encoder.ort.fp32",
        "encoder.portable.fp32",
        "encoder.portable.bf16",
    ]
    with pretend(NO_BF16), pytest.raises(InputError, match="compared with PyTorch where it runs") as told:
        export(checkpoint, tmp_path / "other", precision=["bf16"])
    assert NO_BF16 in str(told.value) and not (tmp_path / "other").exists()
    with pytest.raises(InputError, match="'bf16' is what openvino rounds encoders to, and this is"):
        export("gpt2-demo", tmp_path / "decoder", target=["cpu", "openvino"], precision=["fp32", "bf16"])


def spoil(change: Callable[[Any], Any]) -> Any:
    """What OpenVINO computes, changed: an engine with a fault."""
    run = OpenVinoProgram.run

    def spoiled(self: OpenVinoProgram, *arguments: Any, **options: Any) -> Any:
        return {name: change(array) for name, array in run(self, *arguments, **options).items()}

    return spoiled


@pytest.mark.parametrize("fault", ["rows exchanged", "not finite"])
def test_an_engine_that_computes_something_else_gets_no_bundle(
    fault: str, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"rows exchanged": lambda a: a[:, ::-1].copy(), "not finite": lambda a: a * np.inf}
    monkeypatch.setattr(OpenVinoProgram, "run", spoil(changes[fault]))
    with pytest.raises(VerificationError, match=r"encoder\.portable\.bf16 on openvino"):
        export(checkpoint, tmp_path / "made", precision=["bf16"])
    assert not (tmp_path / "made").exists()


def test_a_machine_without_bf16_compares_the_graph_and_says_so(
    bundle: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pretend(NO_BF16):
        report = verify(bundle, only=["encoder.portable.bf16"])
    assert report.passed and "openvino" not in {c.backend for c in report.comparisons}
    assert f"encoder.portable.bf16 is compared in fp32 alone: {NO_BF16}" in caplog.text


def test_bench_measures_both_engines_and_sets_the_faster(bundle: Path, tmp_path: Path) -> None:
    opened = Bundle.open(bundle)
    engines = {p: bench.list_engines(opened, "encoder", "auto", p) for p in ("fp32", "int8", "bf16", "w8a8")}
    assert engines == {
        "fp32": ["ort-cpu", "openvino"],
        "int8": ["ort-cpu"],
        "bf16": ["openvino"],
        "w8a8": ["openvino"],
    }
    assert bench.list_engines(opened, "encoder", "ort-cpu", "fp32") == ["ort-cpu"]
    with pretend(NO_BF16):
        assert bench.list_engines(opened, "encoder", "auto", "bf16") == ["ort-cpu"]
    folder = set_default(bundle, tmp_path)
    found = result(30.0, 20.0)
    ours, theirs = (dataclasses.replace(case, precision="fp32") for case in found.cases)
    theirs = dataclasses.replace(theirs, backend="openvino")
    slower = dataclasses.replace(found, cases=(ours, theirs))
    shown = StringIO()
    Console(width=100, file=shown).print(*make_bench_tables(slower, record_default(folder, slower)))
    rows = [line.split() for line in shown.getvalue().splitlines()]
    assert [row[0] for row in rows if row[1:2] == ["fp32"]] == ["ort-cpu", "openvino"]
    assert Bundle.open(folder).manifest.default_backend is None
    faster = dataclasses.replace(found, cases=(theirs, dataclasses.replace(ours, backend="openvino")))
    assert record_default(folder, faster).backend == "openvino"
    manifest = Bundle.open(folder).manifest
    assert (manifest.default_precision, manifest.default_backend) == ("fp32", "openvino")
    with load(folder, threads=1) as model:
        assert model.backend == "openvino"


def test_a_closed_program_and_a_damaged_graph_are_told(bundle: Path, tmp_path: Path) -> None:
    opened = Bundle.open(bundle)
    program = OpenVinoBackend(1).open(opened, opened.manifest.artifact("encoder.portable.fp32"))
    with pytest.raises(BackendError, match="keeps no buffers"):
        program.allocate("cache", (1,))
    with pytest.raises(BackendError, match="OpenVINO failed while running"):
        program.run({"input_ids": np.zeros((1, 2, 3), np.int64)}, {})
    program.close()
    program.close()
    with pytest.raises(ClosedError):
        program.run({}, {})
    path = tmp_path / "graph.onnx"
    path.write_bytes(b"no graph")
    with pytest.raises(BackendError, match=r"OpenVINO cannot load graph\.onnx"):
        OpenVinoProgram(str(path), 1, "f32")
