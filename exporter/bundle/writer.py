"""Writes bundles such that a reader finds either the old one or the new one, whole, whatever happens.

A new bundle is written next to its place and renamed into it. Into a bundle that exists, files come under new
names; replacing manifest.json is the commit; files that nothing lists any more are removed last.

Names follow from content (see `names`), so what an export writes may be there already, from an earlier one or
from one that ran at the same time. Locks let one process at a time commit. It leaves a file as it is that has
the same bytes, and refuses to replace one that the present manifest lists with others. So nothing that a
manifest lists is ever overwritten by other bytes than those that it lists.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import json
import os
import re
import shutil
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from ...runtime.apps.signals import commit_change
from ...runtime.bundle.bundle import Bundle, compute_sha256
from ...runtime.bundle.json_reader import FILE_NAME
from ...runtime.bundle.manifest import FORMAT, MAX_BYTES, FileEntry, Manifest
from ...runtime.errors import BundleError
from ..errors import ExporterError, OutputError
from .locks import acquire, hold_lock, release

OWN_FOLDERS = ("onnx", "plans", "tokenizer", "checks")  # everything in these is ours
OWN_KEYS = {"format": int, "family": str, "task": str, "export_id": str, "files": dict, "artifacts": list}
LOCK = ".lock"  # the file of a bundle's lock; also the ending of locks next to folders
SHORT_WRITE = re.compile(r"\d+ requested and \d+ written")  # numpy, of a full disk; it has no errno
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EIO)  # of a write, which names no file


def check_output(output: Path, force: bool) -> None:
    """Refuse an output that would overwrite something, or that cannot be written."""
    is_there = output.exists() or output.is_symlink()
    if is_there and not (output.is_dir() and all(path.name == LOCK for path in output.iterdir())):
        check_own_bundle(output)
        if not force:
            raise OutputError(f"{output} exists; pass --force (in Python force=True) to replace it")
    check_parent(output)


def check_parent(output: Path) -> None:
    """Refuse an output where nothing can be written."""
    parent = output.absolute().parent
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise OutputError(f"{output} cannot be written: {parent} is not a writable folder")


def check_own_bundle(output: Path) -> None:
    """Refuse a folder whose manifest.json is not PlanForge's: browser extensions and web apps have one too.

    A bundle of ours with a damaged entry may be replaced; one of another format may not, since where that
    format keeps its files is not known here.
    """
    hint = "choose another folder, or remove it yourself"
    try:
        if not (output / FILE_NAME).is_file():
            raise ValueError("it has none, or a pipe in its place")
        with (output / FILE_NAME).open("rb") as file:
            manifest = json.loads(file.read(MAX_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise OutputError(f"{output} exists and is not a bundle, so it is left alone; {hint}") from error
    if not isinstance(manifest, dict) or not all(
        type(manifest.get(key)) is kind for key, kind in OWN_KEYS.items()
    ):
        raise OutputError(
            f"{output} exists and is not a bundle: its {FILE_NAME} is not PlanForge's, so it is left alone;"
            f" {hint}"
        )
    if manifest["format"] != FORMAT:
        raise OutputError(
            f"{output} is a bundle of format {manifest['format']}, and this version of PlanForge replaces"
            f" format {FORMAT} alone; {hint}"
        )


@contextlib.contextmanager
def open_staging_folder(output: Path) -> Iterator[Path]:
    """Yield a folder next to `output` to write in, which nobody else has; what is left in it is removed.

    Its lock comes first and is held as long as it is used: so a folder whose lock is free belongs to nobody
    any more, whatever process numbers say in containers that share a volume.
    """
    output = output.resolve()  # next to the folder itself where `output` is a link to it
    staging = output.parent / f".{output.name}.partial-{uuid.uuid4().hex[:12]}"
    with map_output_errors(output, output.parent):
        output.parent.mkdir(parents=True, exist_ok=True)
        remove_abandoned(output)
        with hold_lock(staging.with_name(staging.name + LOCK)):
            try:
                staging.mkdir()
                with map_output_errors(output, staging):
                    yield staging
            finally:
                shutil.rmtree(staging, ignore_errors=True)


@contextlib.contextmanager
def map_output_errors(output: Path, writing: Path) -> Iterator[None]:
    """Turn the system's errors into ours: only files below `writing` or `output` count as not writable.

    A full disk names no file. Nor does a closed pipe, whose error stays as it is.
    """
    try:
        yield
    except OSError as error:
        cut_short = SHORT_WRITE.fullmatch(str(error)) is not None
        reason = os.strerror(errno.ENOSPC) if cut_short else error.strerror or str(error)
        if error.filename is None and error.errno not in FULL and not cut_short:
            raise
        name = os.fspath(error.filename or writing)
        path = Path(os.fsdecode(name) if isinstance(name, str | bytes) else "")
        if path.is_relative_to(writing) or path.is_relative_to(output):
            raise OutputError(f"{output} cannot be written: {reason}; nothing was changed") from error
        raise ExporterError(f"{path}: {reason}; {output} was not changed") from error


def remove_abandoned(output: Path) -> None:
    """Remove staging folders of exports to `output` that nobody writes any more: their locks are free."""
    for path in output.parent.glob(f"{glob.escape(f'.{output.name}.partial-')}*{LOCK}"):
        lock = acquire(path, wait=False)
        if lock is not None:
            shutil.rmtree(path.with_suffix(""), ignore_errors=True)
            release(path, lock)


def list_file_entries(
    folder: Path, known: Mapping[str, FileEntry] = MappingProxyType({})
) -> dict[str, FileEntry]:
    """Return the name, hash and size of every file below a folder; files of `known` are not hashed again."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != FILE_NAME]
    names = {path.relative_to(folder).as_posix(): path for path in paths}
    return {
        name: known.get(name) or FileEntry(compute_sha256(path), path.stat().st_size)
        for name, path in names.items()
    }


def install(staging: Path, manifest: Manifest, output: Path, *, force: bool = True) -> None:
    """Commit the staged files and their manifest as the bundle `output`.

    `force` replaces a bundle that is there; it may have come since the export began.
    """
    output = output.resolve()
    with hold_lock(locate_creation_lock(output)), hold_bundle_lock(output):
        check_output(output, force)
        commit(staging, manifest, output)


def install_change(
    staging: Path, opened: Bundle, change: Callable[[Manifest], Manifest]
) -> tuple[Manifest, Manifest]:
    """Commit staged files into a bundle, whose manifest others may have changed since it was opened.

    `change` makes the new manifest of the one that is there now, and may stage more files; nobody else
    changes the bundle meanwhile. Both manifests are returned.
    """
    output = opened.folder.resolve()
    with hold_bundle_lock(output):
        current = Bundle.open(output).manifest
        if current.export_id != opened.manifest.export_id:
            raise OutputError(
                f"{opened.folder} was exported again, or pruned, meanwhile; nothing was changed, start again"
            )
        changed = change(current)
        commit(staging, changed, output)
        return current, changed


def locate_creation_lock(output: Path) -> Path:
    """Return the file by which one process at a time makes `output`; locked before the bundle itself."""
    return output.with_name(f".{output.name}{LOCK}")


@contextlib.contextmanager
def hold_bundle_lock(output: Path) -> Iterator[None]:
    """Let one process at a time change the bundle `output`; where nothing is yet, there is nothing to lock.

    The lock lies in the bundle, which may be all of a volume that a container sees, or may write.
    """
    if not output.is_dir():
        yield
        return
    with hold_lock(output / LOCK):
        yield


@commit_change()
def commit(staging: Path, manifest: Manifest, output: Path) -> None:
    """Move staged files and their manifest to `output`, whose locks are held; signals wait.

    The old manifest is valid, then the new one.
    """
    staged = [name for name in manifest.files if (staging / name).exists()]
    for name in staged:
        sync(staging / name)
    if not output.exists():
        write_manifest(staging, manifest)
        sync(staging)
        try:
            os.rename(staging, output)
        except OSError:
            if not is_committed(output, manifest):
                raise
        sync(output.parent)
        return
    listed = read_entries(output)
    refuse_links_and_used_names(output, manifest, staged, listed)
    missing = [name for name in staged if not has_content(output / name, manifest.files[name])]
    try:
        for name in missing:
            (output / name).parent.mkdir(exist_ok=True)
            move(staging / name, output / name)
        for folder in OWN_FOLDERS:
            if (output / folder).is_dir():
                sync(output / folder)
        write_manifest(output, manifest)
    except OSError:
        if not is_committed(output, manifest):
            for name in missing:
                if name not in listed:  # else it was damaged, and has now what the old manifest lists
                    (output / name).unlink(missing_ok=True)
            raise
    sync(output)
    remove_unlisted(output, manifest)


def move(source: Path, target: Path) -> None:
    """Move a file to its name in the bundle, which has all of it at once.

    The bundle may be a volume of its own, so that files next to it lie on another file system: then it is
    copied.
    """
    try:
        os.replace(source, target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        copy = target.with_name(f"{target.name}.new")
        try:
            shutil.copyfile(source, copy)
            sync(copy)
            os.replace(copy, target)
        finally:
            copy.unlink(missing_ok=True)


def is_committed(output: Path, manifest: Manifest) -> bool:
    """Tell whether a manifest is there, though the system said that it could not be put there.

    A network's file system may lose the answer to a rename that was done, and then fail to do it again.
    """
    try:
        return (output / FILE_NAME).read_text(encoding="utf-8") == manifest.to_json()
    except (OSError, ValueError):
        return False


def read_entries(output: Path) -> Mapping[str, FileEntry]:
    """Return the files that a bundle lists; none where its manifest is damaged, so that nobody reads it."""
    try:
        return Bundle.open(output).manifest.files
    except BundleError:
        return {}


def has_content(path: Path, entry: FileEntry) -> bool:
    """Tell whether a file is there and has the size and the hash of an entry."""
    is_own = path.is_file() and not path.is_symlink()
    return is_own and path.stat().st_size == entry.bytes and compute_sha256(path) == entry.sha256


def refuse_links_and_used_names(
    output: Path, manifest: Manifest, staged: Sequence[str], listed: Mapping[str, FileEntry]
) -> None:
    """Refuse a folder that leads elsewhere, and a name that the present manifest lists with other bytes."""
    for folder in OWN_FOLDERS:
        if (output / folder).is_symlink():
            raise OutputError(f"{output / folder} is a symbolic link; replace it by a real folder")
    for name in staged:
        if listed.get(name, manifest.files[name]) != manifest.files[name]:
            raise OutputError(f"{output / name} exists already, and is not overwritten")


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Commit a manifest: manifest.json is the old one or the new one, never a part of one."""
    text = manifest.to_json()
    Manifest.from_json(text)  # refuses a manifest that readers would refuse
    temporary = folder / f"{FILE_NAME}.new"
    try:
        temporary.unlink(missing_ok=True)  # left by a killed process, or a stranger's link to elsewhere
        with temporary.open("x", encoding="utf-8") as file:
            file.write(text)
        sync(temporary)
        os.replace(temporary, folder / FILE_NAME)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def replace_manifest(folder: Path, change: Callable[[Manifest], Manifest]) -> None:
    """Rewrite a bundle's manifest.json and touch no other file, listed or not.

    Unlisted files stay too: kernels that TensorRT compiled for a GPU lie next to their plans.
    """
    target = Bundle.open(folder).folder.resolve()
    try:
        with hold_bundle_lock(target):
            manifest = change(Bundle.open(target).manifest)
            with commit_change():
                write_manifest(target, manifest)
    except OSError as error:
        reason = error.strerror or str(error)
        raise OutputError(f"{target / FILE_NAME} cannot be written: {reason}; nothing was changed") from error
    with contextlib.suppress(OSError):  # the new manifest is in place, but may not survive a power cut
        sync(target)


def remove_unlisted(output: Path, manifest: Manifest) -> None:
    """Remove what the old manifest listed, or a killed export left, and the new one doesn't list.

    Kernels that TensorRT compiled for a GPU lie next to their plan, unlisted, and go when it does.
    """
    for folder in OWN_FOLDERS:
        for path in (output / folder).glob("*"):
            name = f"{folder}/{path.name}"
            listed = name in manifest.files or (
                path.suffix == ".cache" and any(name.startswith(f"{plan.file}.") for plan in manifest.plans)
            )
            if path.is_file() and not listed:
                path.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Force a file's content, or a folder's entries, to the disk."""
    if path.is_dir() and sys.platform == "win32":
        return  # folders cannot be opened there
    descriptor = os.open(path, os.O_RDWR if sys.platform == "win32" else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
