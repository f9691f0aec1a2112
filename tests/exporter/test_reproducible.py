"""The same checkpoint, exported twice in the same way, gives the same bundle, byte for byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from planforge.exporter import export, fit_head, verify
from planforge.runtime.bundle.bundle import Bundle

from ..helpers.cli import planforge_process
from ..helpers.models import tiny_bert, write_wordpiece


def read_files(bundle: Path) -> dict[str, bytes]:
    return {
        path.relative_to(bundle).as_posix(): path.read_bytes() for path in bundle.rglob("*") if path.is_file()
    }


def assert_same(first: Path, second: Path) -> None:
    """Compare all files, so that a failure names those that differ."""
    one, other = read_files(first), read_files(second)
    assert one.keys() == other.keys()
    assert [name for name in one if one[name] != other[name]] == []


def test_two_exports_of_a_demo_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One in this process, one in another, in which sets have another order."""
    options: dict[str, Any] = {"precision": ["fp32", "int8", "int4"], "target": ["cpu"], "verify": "quick"}
    export("gpt2-demo", tmp_path / "first", **options)
    monkeypatch.setenv("PYTHONHASHSEED", "1")
    words = ("--precision", "fp32,int8,int4", "--target", "cpu", "--verify", "quick")
    done = planforge_process("export", "gpt2-demo", "-o", tmp_path / "second", *words)
    assert done.returncode == 0, done.stderr
    assert_same(tmp_path / "first", tmp_path / "second")
    folders = {name.partition("/")[0] for name in read_files(tmp_path / "first")}
    assert folders == {"checks", "manifest.json", "onnx", "tokenizer"}


def test_an_encoder_that_explains_and_its_head_are_the_same_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = tiny_bert(tmp_path / "checkpoint", "BertModel", num_hidden_layers=1)
    del checkpoint
    write_wordpiece(tmp_path / "checkpoint")
    table = tmp_path / "texts.tsv"
    rows = [f"{word} bread {i}\t{label}" for i in range(12) for word, label in (("good", "a"), ("bad", "b"))]
    table.write_text("\n".join(["text\tlabel", *rows]) + "\n", encoding="utf-8")
    options: dict[str, Any] = {"precision": ["fp32", "fp16"], "target": ["cpu", "portable"]}
    options |= {"outputs": ["explain"], "verify": "quick"}
    for name in ("first", "second"):
        export(tmp_path / "checkpoint", tmp_path / name, **options)
        fit_head(tmp_path / name, table, tmp_path / f"{name}-fitted")
    assert_same(tmp_path / "first", tmp_path / "second")
    assert_same(tmp_path / "first-fitted", tmp_path / "second-fitted")
    ids = {Bundle.open(tmp_path / name).manifest.export_id for name in ("first", "first-fitted")}
    assert len(ids) == 2 and all(ids)
    assert verify(tmp_path / "second-fitted", level="quick").passed


def test_an_export_over_the_same_one_touches_no_file(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    tiny_bert(checkpoint, num_hidden_layers=1)
    write_wordpiece(checkpoint)
    output = tmp_path / "bundle"
    export(checkpoint, output, precision=["fp32"], target=["cpu"], verify=False)
    before = read_files(output)
    times = {name: (output / name).stat().st_mtime_ns for name in before if name != "manifest.json"}
    export(checkpoint, output, precision=["fp32"], target=["cpu"], verify=False, force=True)
    assert read_files(output) == before
    assert {name: (output / name).stat().st_mtime_ns for name in times} == times
    export(checkpoint, output, precision=["fp16"], target=["portable"], verify=False, force=True)
    assert Bundle.open(output).manifest.export_id.encode() not in before["manifest.json"]
