"""Disks that are read-only, mounted apart, or a network's: a bundle is the old one or the new one, whole."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from planforge.exporter.bundle.writer import install, open_staging_folder, replace_manifest
from planforge.exporter.errors import OutputError

from ..helpers.staging import stage, whole
from .disks import mount_disk, remount

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="has other modes and renames")


def test_a_folder_that_is_read_only_is_one_line(folder: Path, tmp_path: Path) -> None:
    with make_read_only(folder, tmp_path) as (bundle, reason):
        for write in (write_same_manifest, install_again):
            with pytest.raises(OutputError, match=f"cannot be written: {reason}; nothing was changed"):
                write(bundle)
            assert whole(bundle) == "old"


@contextlib.contextmanager
def make_read_only(folder: Path, beside: Path) -> Iterator[tuple[Path, str]]:
    """Yield a bundle that cannot be written to, and why: root, whom no mode stops, needs a disk for that."""
    if os.geteuid() != 0:
        folder.chmod(0o500)
        yield folder, "Permission denied"
        folder.chmod(0o700)
        return
    with mount_disk(beside) as disk:
        if disk is None:
            pytest.skip("root, and nothing can be mounted: what it could not write to cannot be made")
        shutil.copytree(folder, disk / "bundle")
        remount(disk, "ro")
        yield disk / "bundle", "Read-only file system"


def write_same_manifest(bundle: Path) -> None:
    replace_manifest(bundle, lambda manifest: manifest)


def install_again(bundle: Path) -> None:
    with open_staging_folder(bundle) as staging:
        install(staging, stage(staging, "new"), bundle)


def test_a_bundle_on_a_file_system_of_its_own_is_replaced(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container's volume is mounted where the bundle is: nothing can be renamed into it."""
    replace = os.replace

    def refuse_to_cross(source: Path, target: Path) -> None:
        if folder in Path(target).parents and folder not in Path(source).parents:
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), str(source))
        replace(source, target)

    monkeypatch.setattr(os, "replace", refuse_to_cross)
    with open_staging_folder(folder) as staging:
        install(staging, stage(staging, "new"), folder)
    assert whole(folder) == "new"
    assert len([path for path in folder.rglob("*") if path.is_file()]) == 4


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ENOENT])
@pytest.mark.parametrize("done", [False, True])
def test_a_rename_that_fails_or_whose_answer_is_lost_leaves_a_whole_bundle(
    folder: Path, monkeypatch: pytest.MonkeyPatch, number: int, done: bool
) -> None:
    """A network's file system may have renamed the manifest, and say that it has not."""
    replace = os.replace

    def lose(source: Path, target: Path) -> None:
        if Path(target).name != "manifest.json" or done:
            replace(source, target)
        if Path(target).name == "manifest.json":
            raise OSError(number, os.strerror(number), str(target))

    monkeypatch.setattr(os, "replace", lose)
    with open_staging_folder(folder) as staging:
        manifest = stage(staging, "new")
        if done:
            install(staging, manifest, folder)
        else:
            with pytest.raises(OSError):
                install(staging, manifest, folder)
    assert whole(folder) == ("new" if done else "old")
    assert len([path for path in folder.rglob("*") if path.is_file()]) == 4


@pytest.mark.parametrize(
    ("number", "done"),
    [(errno.ESTALE, True), (errno.ENOENT, True), (errno.ENOTEMPTY, False), (errno.EXDEV, False)],
)
def test_a_new_bundle_is_there_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, done: bool
) -> None:
    """Its folder is renamed into place, which fails over one that another process made meanwhile."""
    rename = os.rename

    def lose(source: Path, target: Path) -> None:
        if done:
            rename(source, target)
        raise OSError(number, os.strerror(number), str(source), None, str(target))

    output = tmp_path / "bundle"
    monkeypatch.setattr(os, "rename", lose)
    if done:
        with open_staging_folder(output) as staging:
            install(staging, stage(staging, "new"), output)
        assert whole(output) == "new"
    else:
        with (
            pytest.raises(OutputError, match=r"cannot be written: .*; nothing was changed"),
            open_staging_folder(output) as staging,
        ):
            install(staging, stage(staging, "new"), output)
        assert not output.exists()
    assert not list(tmp_path.glob(".bundle.partial-*"))
