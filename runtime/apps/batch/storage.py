"""Folders that a job reads and writes: of this machine, or what pyarrow finds by its address, as s3://bucket/folder."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO

import pyarrow as pa
from pyarrow.fs import FileInfo, FileSelector, FileSystem, FileType, LocalFileSystem

from ...errors import BatchError, InputError

try:
    import fcntl
except ModuleNotFoundError:  # on Windows
    fcntl = None  # type: ignore[assignment]

JOB = "_job"  # the folder of what is no part; readers of tables pass over names that begin so
TEMPORARY = ".tmp"
LOCK = "lock"


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
        return cls(text if "://" in text else os.path.abspath(text))

    def __str__(self) -> str:
        """Return its address without what may be a password."""
        scheme, separator, rest = self.address.partition("://")
        return f"{scheme}://{rest.partition('?')[0].rpartition('@')[2]}" if separator else self.address

    @cached_property
    def place(self) -> tuple[FileSystem, str]:
        """The file system, and the path in it."""
        if "://" not in self.address:
            return LocalFileSystem(), self.address
        try:
            files, path = FileSystem.from_uri(self.address)
        except (pa.ArrowInvalid, OSError) as error:
            raise InputError(f"{self} is not a valid path or address: {error}") from error
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

    def find_type(self) -> FileType:
        """Return whether it is a folder, a file, something else, or not there."""
        return self.files.get_file_info(self.path).type

    def list_entries(self) -> list[FileInfo]:
        """Return what is in the folder; nothing if it is not there."""
        entries: list[FileInfo] = self.files.get_file_info(FileSelector(self.path, allow_not_found=True))
        return entries

    def list_files(self, is_wanted: Callable[[str], bool]) -> list[FileInfo]:
        """Return the files of wanted paths below the folder; links to folders are not followed."""
        if self.local_path is None:
            entries = self.files.get_file_info(FileSelector(self.path, recursive=True))
            return [one for one in entries if one.type == FileType.File and is_wanted(one.path)]
        paths = (os.path.join(folder, name) for folder, _, names in os.walk(self.path) for name in names)
        wanted = list(filter(is_wanted, paths))
        for path in wanted:
            try:
                path.encode()
            except UnicodeEncodeError as error:
                raise InputError(f"{path!r} has a name that is not UTF-8; rename it") from error
        return [one for one in self.files.get_file_info(wanted) if one.type == FileType.File]

    def exists(self, name: str) -> bool:
        """Return whether there is a file of a name."""
        return bool(self.files.get_file_info(self.join(name)).type == FileType.File)

    def read(self, name: str) -> bytes:
        """Return a file's contents."""
        with self.files.open_input_stream(self.join(name), compression=None) as stream:
            data: bytes = stream.read()
        return data

    def write(self, name: str, data: bytes | pa.Buffer) -> None:
        """Write a file whole or not at all, in place of one that is there."""
        with self.write_parts(name) as stream:
            stream.write(data)

    @contextlib.contextmanager
    def write_parts(self, name: str) -> Iterator[IO[bytes]]:
        """Write a file as `write` does, piece by piece: under another name until it is written."""
        temporary = f"{JOB}/{TEMPORARY}-{os.getpid()}-{uuid.uuid4().hex}"
        try:
            if self.local_path is None:
                with self.files.open_output_stream(self.join(temporary), compression=None) as stream:
                    yield stream
            else:
                (self.local_path / JOB).mkdir(parents=True, exist_ok=True)
                with (self.local_path / temporary).open("xb") as stream:
                    yield stream
                    stream.flush()
                    os.fsync(stream.fileno())
            self.files.move(self.join(temporary), self.join(name))
        except BaseException:
            self._remove(temporary)
            raise

    def remove_temporary(self) -> None:
        """Remove what writers that were killed left."""
        for entry in self.files.get_file_info(FileSelector(self.join(JOB), allow_not_found=True)):
            if entry.base_name.startswith(f"{TEMPORARY}-"):
                self._remove(f"{JOB}/{entry.base_name}")

    def _remove(self, name: str) -> None:
        with contextlib.suppress(OSError):  # it was not made, or somebody else removed it
            self.files.delete_file(self.join(name))

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Keep other jobs on this machine from writing to the folder; they are refused.

        A folder that the block leaves without a job is as it was before.
        """
        if self.local_path is None or fcntl is None:
            yield
            return
        is_new = not self.local_path.exists()
        job = self.local_path / JOB
        job.mkdir(parents=True, exist_ok=True)
        with (job / LOCK).open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise BatchError(
                    f"{self}: another job is writing there; wait for it, or give another folder"
                ) from None
            try:
                yield
            finally:
                if [path.name for path in job.iterdir()] == [LOCK]:
                    (job / LOCK).unlink()
                    job.rmdir()
                    if is_new:
                        self.local_path.rmdir()
