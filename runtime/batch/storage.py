"""Folders that a job reads and writes: of this machine, or what pyarrow finds by its address, as s3://bucket/folder."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pyarrow as pa
from pyarrow.fs import FileInfo, FileSelector, FileSystem, FileType, LocalFileSystem

from ..errors import BatchError, InputError

JOB = "_job"  # the folder of what is no part; readers of tables pass over names that begin so
TEMPORARY = ".tmp"


@dataclass(frozen=True)
class Storage:
    """A folder, or a file; it can be pickled.

    Attributes:
        address: its absolute path, or its URI.
    """

    address: str

    @classmethod
    def of(cls, address: str | Path) -> Storage:
        """Return a folder by its path or URI."""
        text = str(address)
        return cls(text if "://" in text else str(Path(text).absolute()))

    @cached_property
    def place(self) -> tuple[FileSystem, str]:
        """The file system, and the path in it."""
        if "://" not in self.address:
            return LocalFileSystem(), self.address
        try:
            files, path = FileSystem.from_uri(self.address)
        except (pa.ArrowInvalid, OSError) as error:
            raise InputError(f"{self.address} is no address of a folder: {error}") from error
        return files, path.rstrip("/")

    @property
    def files(self) -> FileSystem:
        return self.place[0]

    @property
    def path(self) -> str:
        return self.place[1]

    @property
    def local_path(self) -> Path | None:
        """The path on this machine, if it is there."""
        return Path(self.path) if self.files.type_name == "local" else None

    def join(self, name: str) -> str:
        """Return the path of something in the folder."""
        return f"{self.path}/{name}"

    def list_entries(self, recursive: bool = False) -> list[FileInfo]:
        """Return what is in the folder; nothing if it is not there."""
        selector = FileSelector(self.path, allow_not_found=True, recursive=recursive)
        entries: list[FileInfo] = self.files.get_file_info(selector)
        return entries

    def exists(self, name: str) -> bool:
        """Return whether there is a file of a name."""
        return bool(self.files.get_file_info(self.join(name)).type == FileType.File)

    def read(self, name: str) -> bytes:
        """Return a file's contents."""
        with self.files.open_input_stream(self.join(name), compression=None) as stream:
            data: bytes = stream.read()
        return data

    def write(self, name: str, data: bytes | pa.Buffer) -> None:
        """Write a file whole or not at all, in place of one that is there.

        On this machine it is renamed when it is written; in an object store it is there when it is closed.
        """
        with self.write_parts(name) as stream:
            stream.write(data)

    @contextlib.contextmanager
    def write_parts(self, name: str) -> Iterator[pa.NativeFile]:
        """Write a file as `write` does, piece by piece."""
        if self.local_path is None:
            with self.files.open_output_stream(self.join(name), compression=None) as stream:
                yield stream
            return
        folder = self.local_path / JOB
        folder.mkdir(parents=True, exist_ok=True)
        temporary = folder / f"{TEMPORARY}-{os.getpid()}-{uuid.uuid4().hex}"
        try:
            with temporary.open("xb") as stream:
                yield stream
                stream.flush()
                os.fsync(stream.fileno())
            temporary.replace(self.local_path / name)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

    def remove_temporary(self) -> None:
        """Remove what writers that were killed left."""
        if self.local_path is not None:
            for path in (self.local_path / JOB).glob(f"{TEMPORARY}-*"):
                path.unlink(missing_ok=True)

    def leave_nothing(self, unless: str) -> None:
        """Remove the folder of what is no part, and this one if it is empty then, unless a file is there."""
        if self.local_path is None or self.exists(unless):
            return
        with contextlib.suppress(OSError):
            (self.local_path / JOB / "lock").unlink()
            (self.local_path / JOB).rmdir()
            self.local_path.rmdir()

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Keep other jobs on this machine from writing to the folder; they are refused."""
        try:
            import fcntl
        except ModuleNotFoundError:  # on Windows
            yield
            return
        if self.local_path is None:
            yield
            return
        (self.local_path / JOB).mkdir(parents=True, exist_ok=True)
        with (self.local_path / JOB / "lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise BatchError(f"{self.address}: another job writes there now") from None
            yield
