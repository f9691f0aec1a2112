"""Writes bundles so that a reader finds the old one or the new one, whole, whatever happens between.

A new bundle is written beside its place and renamed into it. Into a bundle that exists, files come under new
names; replacing manifest.json is the commit; what nothing lists any more goes last.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ..runtime.bundle.bundle import Bundle, sha256_of
from ..runtime.bundle.json_reader import FILE_NAME
from ..runtime.bundle.manifest import FileEntry, Manifest
from ..runtime.errors import BundleError
from .errors import OutputError

OWN_FOLDERS = ("onnx", "plans", "tokenizer", "checks")  # everything in these is ours


def check_output(output: Path, force: bool) -> None:
    """Refuses an output that would overwrite something.

    Raises:
        OutputError: it exists and force is off; it is not a bundle; or its parent cannot be written.
    """
    if output.exists() or output.is_symlink():
        try:
            Bundle.open(output)
            is_bundle = True
        except BundleError:
            is_bundle = (output / FILE_NAME).is_file() or (output.is_dir() and not any(output.iterdir()))
        if not is_bundle:
            raise OutputError(
                f"{output} exists and is not a bundle, so it is left alone; choose another folder"
            )
        if not force and any(output.iterdir()):
            raise OutputError(f"{output} exists; pass --force to replace it")
    parent = output.absolute().parent
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise OutputError(f"{output} cannot be written: {parent} is not a writable folder")


@contextlib.contextmanager
def staging_folder(output: Path) -> Iterator[Path]:
    """A folder beside `output` to write in; whatever is left in it at the end is removed.

    Raises:
        OutputError: the disk is full, or not writable.
    """
    output = output.resolve()  # beside the folder itself where `output` is a link to it
    staging = output.parent / f".{output.name}.partial-{os.getpid()}"
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        remove_abandoned(output)
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir()
        yield staging
    except OSError as error:
        reason = error.strerror or str(error)
        raise OutputError(f"{output} cannot be written: {reason}; nothing was changed") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def remove_abandoned(output: Path) -> None:
    """Removes staging folders of exports to `output` whose process is gone."""
    if sys.platform == "win32":
        return  # asking whether a process lives needs another call there
    for path in output.parent.glob(f".{output.name}.partial-*"):
        match = re.fullmatch(r".*\.partial-(\d+)", path.name)
        if match and not process_exists(int(match[1])):
            shutil.rmtree(path, ignore_errors=True)


def process_exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def file_entries(folder: Path) -> dict[str, FileEntry]:
    """Name, hash and size of every file below a folder."""
    return {
        path.relative_to(folder).as_posix(): FileEntry(sha256_of(path), path.stat().st_size)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != FILE_NAME
    }


def install(staging: Path, manifest: Manifest, output: Path) -> None:
    """Commits the staged files and their manifest as the bundle `output`.

    Raises:
        OutputError: a folder of the bundle is a link to elsewhere, or a name is in use.
    """
    output = output.resolve()
    staged = [name for name in manifest.files if (staging / name).exists()]
    for name in staged:
        sync(staging / name)
    if not output.exists():
        write_manifest(staging, manifest)
        sync(staging)
        os.rename(staging, output)
        sync(output.parent)
        return
    refuse_links_and_used_names(output, staged)
    try:
        for name in staged:
            (output / name).parent.mkdir(exist_ok=True)
            os.replace(staging / name, output / name)
        for folder in OWN_FOLDERS:
            if (output / folder).is_dir():
                sync(output / folder)
        write_manifest(output, manifest)
    except OSError:
        for name in staged:  # the old manifest doesn't list them: their names are new
            (output / name).unlink(missing_ok=True)
        raise
    sync(output)
    remove_unlisted(output, manifest)


def refuse_links_and_used_names(output: Path, staged: Sequence[str]) -> None:
    for folder in OWN_FOLDERS:
        if (output / folder).is_symlink():
            raise OutputError(f"{output / folder} is a link; a bundle's folders must be its own")
    for name in staged:
        if (output / name).exists():
            raise OutputError(f"{output / name} exists already, and is not overwritten")


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """The commit: manifest.json is the old one or the new one, never a part of one."""
    text = manifest.to_json()
    Manifest.from_json(text)  # what a reader would refuse is not written
    temporary = folder / f"{FILE_NAME}.new"
    try:
        temporary.write_text(text, encoding="utf-8")
        sync(temporary)
        os.replace(temporary, folder / FILE_NAME)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def replace_manifest(folder: Path, change: Callable[[Manifest], Manifest]) -> Manifest:
    """Rewrite a bundle's manifest.json and touch no other file, listed or not.

    What the manifest doesn't list stays too: kernels that TensorRT compiled for a GPU lie beside their plans.

    Args:
        folder: the bundle.
        change: makes the new manifest of the old one.

    Returns:
        The new manifest.

    Raises:
        BundleError: the folder is not a bundle.
        OutputError: the manifest cannot be written; the old one is still there.
    """
    opened = Bundle.open(folder)
    manifest = change(opened.manifest)
    target = opened.folder.resolve()
    try:
        write_manifest(target, manifest)
    except OSError as error:
        reason = error.strerror or str(error)
        raise OutputError(f"{target / FILE_NAME} cannot be written: {reason}; nothing was changed") from error
    with contextlib.suppress(OSError):  # the new manifest is there; only its lasting a power cut is unsure
        sync(target)
    return manifest


def remove_unlisted(output: Path, manifest: Manifest) -> None:
    """Removes what the old manifest listed, or a killed export left, and the new one doesn't list."""
    for folder in OWN_FOLDERS:
        for path in (output / folder).glob("*"):
            if path.is_file() and f"{folder}/{path.name}" not in manifest.files:
                path.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Forces a file's content, or a folder's entries, to the disk."""
    if path.is_dir() and sys.platform == "win32":
        return  # folders cannot be opened there
    descriptor = os.open(path, os.O_RDWR if sys.platform == "win32" else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
