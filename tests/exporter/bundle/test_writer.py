"""Bundles stay whole: killed at every step, on a full disk, in a folder that is somebody else's."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import os
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from planforge.exporter.bundle import writer
from planforge.exporter.bundle.writer import check_output, install, list_file_entries, open_staging_folder
from planforge.exporter.errors import ExporterError, OutputError
from planforge.runtime.bundle.bundle import Bundle, compute_sha256
from planforge.runtime.bundle.manifest import FileEntry

from ...helpers.killed import STEPS, stop_at_every_step
from ...helpers.staging import install_stage, stage, whole

MANIFEST = {"family": "gpt2", "task": "text-generation", "export_id": "", "files": {}, "artifacts": []}

INSTALL = """
from planforge.exporter.bundle import writer
from planforge.runtime.bundle.manifest import Manifest

def change(folder):
    manifest = Manifest.from_json((folder / "staging/manifest.staged").read_text())
    writer.install(folder / "staging", manifest, folder / "bundle")
"""


def install_killed(folder: Path, old: str | None, how: str = "killed") -> list[int]:
    """Install export "new" over an old one in children of which each dies at a step; return their exit codes.

    The N-th leaves FOLDER/N/bundle.
    """
    for step in range(STEPS):
        staging = folder / str(step) / "staging"
        staging.mkdir(parents=True)
        (staging / "manifest.staged").write_text(stage(staging, "new").to_json())
        if old is not None:
            install_stage(folder / str(step) / "bundle", old)
    return stop_at_every_step(INSTALL, folder, how)


def test_killed_at_every_step_the_old_or_the_new_bundle_is_whole(tmp_path: Path) -> None:
    codes = install_killed(tmp_path, "old")
    steps = codes.index(0)
    assert steps >= 8 and set(codes[:steps]) == {-signal.SIGKILL}
    seen = [whole(tmp_path / str(step) / "bundle") for step in range(steps + 1)]
    assert seen[0] == "old"
    assert seen[-1] == "new"
    assert seen == sorted(seen, reverse=True)  # once new, always new: one step is the commit
    for step in range(steps):  # and the next export mends what was left
        output = tmp_path / str(step) / "bundle"
        install_stage(output, "next")
        assert whole(output) == "next"
        assert len([p for p in output.rglob("*") if p.is_file()]) == 4


def test_killed_before_the_first_bundle_there_is_none(tmp_path: Path) -> None:
    steps = install_killed(tmp_path, None).index(0)
    assert steps >= 4
    assert whole(tmp_path / str(steps) / "bundle") == "new"
    for step in range(steps):
        output = tmp_path / str(step) / "bundle"
        assert not output.exists() or whole(output) == "new"


def test_a_new_bundle_removes_the_old_ones_files_only(tmp_path: Path) -> None:
    output = tmp_path / "bundle"
    install_stage(output, "old")
    (output / "notes.txt").write_text("mine")
    (output / "onnx" / "left-by-a-killed-export.onnx").write_text("x")
    install_stage(output, "new")
    left = {path.relative_to(output).as_posix() for path in output.rglob("*") if path.is_file()}
    new = {"manifest.json", "onnx/a-new.onnx", "onnx/w-new.data", "tokenizer/t-new.json"}
    assert left == new | {"notes.txt"}


def test_an_existing_bundle_needs_force(tmp_path: Path) -> None:
    output = tmp_path / "bundle"
    install_stage(output, "old")
    with pytest.raises(OutputError, match="--force"):
        check_output(output, force=False)
    check_output(output, force=True)


@pytest.mark.parametrize("force", [False, True])
def test_a_folder_that_is_no_bundle_is_left_alone(tmp_path: Path, force: bool) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(OutputError, match="not a bundle"):
        check_output(tmp_path, force)
    with pytest.raises(OutputError, match="not a bundle"):
        check_output(tmp_path / "thesis.tex", force)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"manifest_version": 3, "name": "An extension", "version": "1.0"}, "is not PlanForge's"),
        ({"name": "An app", "start_url": "/", "icons": [], "files": {}, "format": 1}, "is not PlanForge's"),
        (["a", "list"], "is not PlanForge's"),
        (
            {"format": 2, **MANIFEST},
            "is a bundle of format 2, and this version of PlanForge replaces format 1",
        ),
        ({"format": 0, **MANIFEST}, "is a bundle of format 0"),
        ("{", "is not a bundle"),
    ],
)
def test_another_programs_manifest_makes_no_bundle(tmp_path: Path, content: object, words: str) -> None:
    """Browser extensions and web apps have a manifest.json as well; theirs lie beside folders of any name."""
    folder = tmp_path / "extension"
    (folder / "plans").mkdir(parents=True)
    (folder / "plans" / "background.js").write_text("mine")
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / "manifest.json").write_text(text)
    with pytest.raises(OutputError, match=words):
        check_output(folder, force=True)
    with pytest.raises(OutputError, match=words):
        install_stage(folder, "new")
    assert (folder / "manifest.json").read_text() == text
    assert (folder / "plans" / "background.js").read_text() == "mine"


def test_a_damaged_bundle_of_ours_may_be_replaced(tmp_path: Path) -> None:
    (tmp_path / "bundle").mkdir()
    (tmp_path / "bundle" / "manifest.json").write_text(json.dumps({"format": 1, **MANIFEST}))
    check_output(tmp_path / "bundle", force=True)


def test_an_output_below_a_file_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="not a writable folder"):
        check_output(tmp_path / "file" / "bundle", force=False)


def test_a_disk_that_is_full_at_any_step_leaves_the_old_bundle_or_the_new_one(tmp_path: Path) -> None:
    install_killed(tmp_path, "old", "full")
    seen = []
    for step in range(STEPS):
        output = tmp_path / str(step) / "bundle"
        seen.append(whole(output))
        left = {p.relative_to(output).as_posix() for p in output.rglob("*") if p.is_file()}
        if whole(output) == "old":  # and nothing of the new one stays behind
            assert left - {"manifest.json.new", ".lock"} == {
                "manifest.json",
                *Bundle.open(output).manifest.files,
            }
    assert set(seen) == {"old", "new"}


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        OSError("262144 requested and 170240 written"),  # of numpy's tofile
    ],
)
def test_a_full_disk_is_told_in_one_line(tmp_path: Path, error: OSError) -> None:
    with pytest.raises(OutputError, match="No space left on device; nothing was changed"):  # noqa: SIM117
        with open_staging_folder(tmp_path / "bundle"):
            raise error
    assert list(tmp_path.iterdir()) == []


def test_only_what_is_written_there_is_said_to_be_unwritable(tmp_path: Path) -> None:
    """A file of the source that has gone is no fault of the output."""
    source = tmp_path / "source" / "model.safetensors"
    with pytest.raises(ExporterError) as caught, open_staging_folder(tmp_path / "bundle"):
        source.read_bytes()
    assert str(caught.value) == f"{source}: No such file or directory; {tmp_path / 'bundle'} was not changed"
    assert not isinstance(caught.value, OutputError)
    with pytest.raises(OutputError, match="cannot be written: Is a directory"):  # noqa: SIM117
        with open_staging_folder(tmp_path / "bundle") as staging:
            (staging / "onnx").mkdir()
            (staging / "onnx").write_bytes(b"")
    with pytest.raises(BrokenPipeError), open_staging_folder(tmp_path / "bundle"):  # of a line of progress
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))
    assert list(tmp_path.iterdir()) == []


def test_names_in_use_are_never_overwritten_by_other_bytes(tmp_path: Path) -> None:
    output = tmp_path / "bundle"
    install_stage(output, "old")
    with open_staging_folder(output) as staging:
        manifest = stage(staging, "old")
        (staging / "onnx/a-old.onnx").write_bytes(b"other")
        entries = list_file_entries(staging)
        with pytest.raises(OutputError, match=r"a-old\.onnx exists already"):
            install(staging, dataclasses.replace(manifest, files=entries), output)
    assert whole(output) == "old"


def test_the_same_export_again_leaves_every_file_as_it_is(tmp_path: Path) -> None:
    output = tmp_path / "bundle"
    install_stage(output, "old")
    before = {name: (output / name).stat() for name in Bundle.open(output).manifest.files}
    install_stage(output, "old")
    assert whole(output) == "old"
    after = {name: (output / name).stat() for name in before}
    assert {name: (s.st_ino, s.st_mtime_ns) for name, s in after.items()} == {
        name: (s.st_ino, s.st_mtime_ns) for name, s in before.items()
    }


def test_a_file_that_was_damaged_or_left_half_written_is_mended(tmp_path: Path) -> None:
    output = tmp_path / "bundle"
    install_stage(output, "old")
    (output / "onnx/w-old.data").write_bytes(b"damaged")
    (output / "onnx/a-new.onnx").write_bytes(b"half of i")  # left by a copy that was killed
    install_stage(output, "old")
    assert whole(output) == "old"
    (output / "onnx/a-new.onnx").write_bytes(b"half of i")
    (output / "onnx/w-new.data").symlink_to(tmp_path / "elsewhere")
    install_stage(output, "new")
    assert whole(output) == "new"
    assert not (tmp_path / "elsewhere").exists()


def test_many_exports_of_the_same_at_once_leave_one_whole_bundle(tmp_path: Path) -> None:
    output = tmp_path / "bundle"
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: install_stage(output, "same"), range(12)))
    assert whole(output) == "same"
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]


@pytest.mark.parametrize("folder", ["onnx", "plans", "checks", "tokenizer"])
def test_a_folder_that_is_a_link_is_refused(tmp_path: Path, folder: str) -> None:
    output = tmp_path / "bundle"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "precious.txt").write_text("mine")
    install_stage(output, "old")
    shutil.rmtree(output / folder, ignore_errors=True)
    (output / folder).symlink_to(elsewhere)
    with pytest.raises(OutputError, match="is a symbolic link"):
        install_stage(output, "new")
    assert (elsewhere / "precious.txt").read_text() == "mine"


def test_what_an_old_manifest_lists_elsewhere_is_not_removed(tmp_path: Path) -> None:
    output = tmp_path / "bundle"
    install_stage(output, "old")
    (output / "notes.txt").write_text("mine")
    old = Bundle.open(output).manifest
    files = {**old.files, "manifest.json": FileEntry("0", 1), "notes.txt": FileEntry("0", 1)}
    (output / "manifest.json").write_text(dataclasses.replace(old, files=files).to_json())
    install_stage(output, "new")
    assert whole(output) == "new"
    assert (output / "notes.txt").read_text() == "mine"


def test_files_that_are_listed_are_not_hashed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "onnx").mkdir()
    (tmp_path / "onnx" / "old").write_bytes(b"old")
    first = list_file_entries(tmp_path)
    assert first == {"onnx/old": FileEntry(hashlib.sha256(b"old").hexdigest(), 3)}
    (tmp_path / "onnx" / "new").write_bytes(b"newer")
    hashed: list[Path] = []

    def keep(path: Path) -> str:
        hashed.append(path)
        return compute_sha256(path)

    monkeypatch.setattr(writer, "compute_sha256", keep)
    entries = list_file_entries(tmp_path, known=first)
    assert entries == {"onnx/new": FileEntry(hashlib.sha256(b"newer").hexdigest(), 5), **first}
    assert hashed == [tmp_path / "onnx" / "new"]
    (tmp_path / "onnx" / "old").unlink()  # what is gone is not listed, known or not
    assert list(list_file_entries(tmp_path, known=first)) == ["onnx/new"]
