"""Stamps of files whose hash was right: what an earlier process knows holds for the same file alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from planforge.runtime.bundle import bundle as bundle_module
from planforge.runtime.bundle import hashed_files
from planforge.runtime.bundle.bundle import Bundle, compute_sha256
from planforge.runtime.errors import IntegrityError

pytestmark = pytest.mark.skipif(os.name != "posix", reason="needs a time that no program sets")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder; files count as large, and as settled."""
    monkeypatch.setenv("PLANFORGE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hashed_files, "LEAST_BYTES", 1)
    monkeypatch.setattr(hashed_files, "SETTLED", -1.0)
    return tmp_path / "cache" / "hashed"


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names of the files that were hashed."""
    names: list[str] = []

    def compute(path: Path) -> str:
        names.append(path.name)
        return compute_sha256(path)

    monkeypatch.setattr(bundle_module, "compute_sha256", compute)
    yield names


def read(folder: Path, verify: bool = False) -> str:
    """Check a bundle's weights as another process would; return their name."""
    opened = Bundle.open(folder)
    name = opened.manifest.artifact("decoder.ort.fp32").data[0]
    return opened.path(name, verify=verify).name


def test_what_was_right_is_not_hashed_again_but_where_that_is_asked(
    own_bundle: Path, cache: Path, hashed: list[str]
) -> None:
    name = read(own_bundle)
    assert hashed == [name]
    (stamp,) = cache.iterdir()
    assert stamp.stat().st_mode & 0o777 == 0o600
    assert cache.stat().st_mode & 0o777 == 0o700
    assert read(own_bundle) == name and hashed == [name]
    assert read(own_bundle, verify=True) == name and hashed == [name, name]


def rewrite(path: Path) -> None:
    """Write zeros over a file; size and the time of writing are the same afterwards."""
    state = path.stat()
    with path.open("r+b") as file:
        file.write(bytes(64))
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))


def replace(path: Path) -> None:
    """Another file in its place, of the same size and time of writing."""
    state = path.stat()
    other = path.with_name("other")
    other.write_bytes(bytes(state.st_size))
    os.utime(other, ns=(state.st_atime_ns, state.st_mtime_ns))
    other.replace(path)


@pytest.mark.parametrize("damage", [rewrite, replace])
def test_a_file_that_was_changed_is_refused_whatever_its_times_say(
    damage: Callable[[Path], None], own_bundle: Path, hashed: list[str]
) -> None:
    name = read(own_bundle)
    damage(own_bundle / "onnx" / name)
    with pytest.raises(IntegrityError, match="has changed since it was exported"):
        read(own_bundle)
    with pytest.raises(IntegrityError):
        read(own_bundle)
    assert len(hashed) == 3


@pytest.mark.parametrize(
    "spoil",
    [
        lambda stamp: stamp.write_text("{", encoding="utf-8"),
        lambda stamp: stamp.write_text("[]", encoding="utf-8"),
        lambda stamp: stamp.chmod(0o622),  # others may write to it
        lambda stamp: stamp.unlink(),
        lambda stamp: stamp.write_text(
            json.dumps({**json.loads(stamp.read_text(encoding="utf-8")), "sha256": "0" * 64}),
            encoding="utf-8",
        ),
    ],
)
def test_a_stamp_that_says_something_else_counts_for_nothing(
    spoil: Callable[[Path], object], own_bundle: Path, cache: Path, hashed: list[str]
) -> None:
    read(own_bundle)
    (stamp,) = cache.iterdir()
    spoil(stamp)
    read(own_bundle)
    assert len(hashed) == 2


def test_a_copy_is_hashed_and_a_wrong_file_leaves_no_stamp(
    own_bundle: Path, cache: Path, hashed: list[str]
) -> None:
    name = read(own_bundle)
    moved = own_bundle.with_name("moved")
    own_bundle.rename(moved)
    read(moved)
    assert len(hashed) == 2 and len(list(cache.iterdir())) == 2
    rewrite(moved / "onnx" / name)
    before = {stamp: stamp.read_bytes() for stamp in cache.iterdir()}
    with pytest.raises(IntegrityError):
        read(moved)
    assert {stamp: stamp.read_bytes() for stamp in cache.iterdir()} == before


def test_a_file_that_was_just_written_gets_none(
    own_bundle: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later change within the same tick of the file system's clock would not show."""
    monkeypatch.setattr(hashed_files, "SETTLED", 3600.0)
    read(own_bundle)
    assert not cache.exists()


def test_small_files_and_a_folder_that_cannot_be_written_are_no_trouble(
    own_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hashed: list[str]
) -> None:
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("PLANFORGE_CACHE", str(tmp_path / "file"))
    read(own_bundle)
    read(own_bundle)
    assert len(hashed) == 2
    monkeypatch.setenv("PLANFORGE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hashed_files, "LEAST_BYTES", 2**40)
    read(own_bundle)
    assert not (tmp_path / "cache").exists()


def test_stamps_that_nobody_needs_any_more_are_deleted(own_bundle: Path, cache: Path) -> None:
    cache.mkdir(parents=True)
    old = cache / "old.json"
    old.touch()
    os.utime(old, (0, 0))
    read(own_bundle)
    assert not old.exists() and len(list(cache.iterdir())) == 1


def test_a_program_s_second_start_reads_the_weights_once(own_bundle: Path, tmp_path: Path) -> None:
    """In processes of their own, with `load` as users call it."""
    code = (
        "import sys\n"
        "from planforge.runtime import load\n"
        "from planforge.runtime.bundle import bundle, hashed_files\n"
        "hashed_files.LEAST_BYTES = 1\nhashed_files.SETTLED = -1.0\n"
        "real = bundle.compute_sha256\n"
        "bundle.compute_sha256 = lambda path: print(path.suffix) or real(path)\n"
        "load(sys.argv[1], precision='fp32', threads=1).close()\n"
    )
    said = [
        subprocess.run(
            [sys.executable, "-c", code, str(own_bundle)], capture_output=True, text=True, check=True
        ).stdout.split()
        for _ in range(2)
    ]
    assert ".data" in said[0] and ".data" not in said[1]
    assert said[0].count(".json") == said[1].count(".json") > 0  # the tokenizer is always hashed
