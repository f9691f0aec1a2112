"""A bundle on disk: its manifest, and its files, which are checked against the manifest."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Lock

from ..errors import BundleError, BundleNotFoundError, IntegrityError
from .hashed_files import is_known, keep
from .json_reader import FILE_NAME
from .manifest import MAX_BYTES, Manifest

WAY_OUT = "copy the bundle again, or export it again"
MAX_FILE_BYTES = 2**30  # of a tokenizer, a template or golden data; what claims more is not even hashed
LARGE = ("onnx/", "plans/")  # whose files may have any size
ALWAYS_HASHED_BYTES = 256 * 2**20  # above this, ONNX files and data are hashed only when asked


def compute_sha256(path: Path) -> str:
    """Return the file's sha256 as hex, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(2**20):
            digest.update(piece)
    return digest.hexdigest()


def describe_checkpoint(folder: Path) -> str:
    """Return what to do with a checkpoint that was given for a bundle; "" where the folder is none."""
    if (folder / FILE_NAME).exists() or not (folder / "config.json").is_file():
        return ""
    import shlex  # a quicker start without it

    name = shlex.quote(str(folder))
    if any(folder.glob("*.onnx")):
        return f"{folder} holds a model from optimum, not a bundle; first: planforge import {name} -o BUNDLE"
    return f"{folder} is a checkpoint, not a bundle; first: planforge export {name} -o BUNDLE"


LINKS_WAY_OUT = "copy the files themselves, or download with snapshot_download(..., local_dir=FOLDER)"


def refuse_odd_files(folder: Path, path: Path) -> None:
    """Refuse a pipe or a device, whose reading may never end, and a link that leaves the folder."""
    if path.exists() and not path.is_dir() and not path.is_file():
        raise IntegrityError(f"{path} is not a regular file, so it is not read")
    if leaves_bundle(folder, path):
        raise IntegrityError(f"{path} is a link that leaves the bundle; {LINKS_WAY_OUT}")


def leaves_bundle(folder: Path, path: Path) -> bool:
    """Tell whether a file lies outside its bundle; the blobs of a hub's cache belong to its snapshots.

    The cache has them as models--OWNER--NAME/snapshots/COMMIT and models--OWNER--NAME/blobs.
    """
    real = Path(os.path.realpath(folder))  # Path.resolve raises where a link leads to itself
    allowed = [real]
    for snapshots in real.parents:
        repository = snapshots.parent
        if snapshots.name == "snapshots" and repository.name.startswith("models--"):
            allowed.append(repository / "blobs")
    file = Path(os.path.realpath(path))
    return not any(file.is_relative_to(place) for place in allowed)


class Bundle:
    """A folder with a manifest."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest
        self._hashed: dict[str, tuple[int, int, int]] = {}  # files that were right, as they were then
        self._locks: dict[str, Lock] = {}  # of files that are hashed: graphs that open together share some

    @classmethod
    def open(cls, folder: str | Path) -> Bundle:
        """Read the manifest; files are checked when they are used.

        Raises a BundleNotFoundError where there is no such folder or no manifest in it, a BundleError where
        the manifest cannot be read, a ManifestError where it is malformed or of another format, and an
        IntegrityError where it names a path outside the folder.
        """
        folder = Path(folder)
        path = folder / FILE_NAME
        if not folder.is_dir():
            raise BundleNotFoundError(
                f"{folder} is not a folder; `planforge export MODEL -o {folder}` makes a bundle"
            )
        try:
            refuse_odd_files(folder, path)
            with path.open("rb") as file:
                content = file.read(MAX_BYTES + 1)
        except OSError as error:
            kind = BundleNotFoundError if isinstance(error, FileNotFoundError) else BundleError
            raise kind(
                describe_checkpoint(folder)
                or f"{folder} is not a bundle: {FILE_NAME} cannot be read ({error.strerror}); give the"
                " folder that `planforge export` wrote"
            ) from error
        if len(content) > MAX_BYTES:
            raise BundleError(f"{path} has more than {MAX_BYTES} bytes, too many for a manifest; {WAY_OUT}")
        try:
            text = content.decode("utf-8")
        except UnicodeDecodeError as error:
            raise BundleError(f"{path} is not UTF-8: {error}") from error
        return cls(folder, Manifest.from_json(text))

    def path(self, name: str, *, verify: bool = True) -> Path:
        """Return the path of a listed file, after checking that it is the listed one.

        A file that was hashed before, and that nobody has written to since, is not hashed again: by this
        object, and without `verify` by an earlier process. The hash of ONNX files and data above 256 MiB is
        compared only if `verify` is set. Raises an IntegrityError where
        the file is not listed, missing, changed, or a link that leaves the folder.
        """
        path = self.locate(name)
        size = self.manifest.files[name].bytes
        if not (verify or size <= ALWAYS_HASHED_BYTES or name[:5] != "onnx/"):
            return path
        if size > MAX_FILE_BYTES and not name.startswith(LARGE):
            raise IntegrityError(
                f"{self.folder}: {name} has {size} bytes; only weights and plans may have more than"
                f" {MAX_FILE_BYTES}"
            )
        with self._locks.setdefault(name, Lock()):
            stat = path.stat()
            state = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
            if self._hashed.get(name) != state:
                self.check_hash(name, path, stat, verify)
                self._hashed[name] = state
        return path

    def check_hash(self, name: str, path: Path, state: os.stat_result, verify: bool) -> None:
        """Refuse a file of another hash; without `verify` an earlier process's word counts."""
        sha256 = self.manifest.files[name].sha256
        if not verify and is_known(path, state, sha256):
            return
        if compute_sha256(path) != sha256:
            raise IntegrityError(
                f"{self.folder}: {name} has changed since it was exported, or belongs to another"
                f" export (its sha256 differs); {WAY_OUT}"
            )
        keep(path, state, sha256)

    @contextmanager
    def check_meanwhile(self, names: Sequence[str], *, verify: bool = True) -> Iterator[None]:
        """Check files as `path` does, in parallel with what the caller does with their content.

        A wrong hash is raised at the end, whatever the caller's own work came to.
        """
        for name in names:
            self.locate(name)
        with ThreadPoolExecutor(1, "planforge-hash") as pool:
            checks = [pool.submit(self.path, name, verify=verify) for name in names]
            try:
                yield
            finally:
                for check in checks:
                    check.result()

    def locate(self, name: str) -> Path:
        """Return the path of a listed file that exists, lies in the folder, and has the listed size."""
        entry = self.manifest.files.get(name)
        if entry is None:
            raise IntegrityError(f"{self.folder}: {name} is not listed in {FILE_NAME}")
        path = self.folder / name
        if not os.path.isfile(path):  # Path.is_file raises where a name is too long
            raise IntegrityError(f"{self.folder}: {name} is missing; export the bundle again")
        if leaves_bundle(self.folder, path):
            raise IntegrityError(f"{self.folder}: {name} is a link that leaves the bundle; {LINKS_WAY_OUT}")
        size = path.stat().st_size
        if size != entry.bytes:
            raise IntegrityError(
                f"{self.folder}: {name} has {size} bytes, the manifest says {entry.bytes}; {WAY_OUT}"
            )
        return path

    def verify_files(self) -> None:
        """Check every listed file, whatever its size."""
        for name in self.manifest.files:
            self.path(name)
