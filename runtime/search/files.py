"""The arrays of an index: memory-mapped .npy files, compared with what lists them before they are used."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..bundle.bundle import compute_sha256, leaves_bundle
from ..errors import IntegrityError
from .layout import INDEX, WAY_OUT, FileRecord, Listing

Shape = tuple[int | None, ...]


class IndexFiles:
    """The files of a folder that a file of it lists."""

    def __init__(self, folder: Path, records: Mapping[str, FileRecord], listing: Listing = INDEX) -> None:
        self.folder = folder
        self._listing = listing.file
        self._way_out = listing.way_out
        self._records = records
        for name in records:
            self.locate(name)

    def locate(self, name: str) -> Path:
        """Return the path of a file that is listed, lies in the folder, and has the listed size."""
        path = self.folder / name
        record = self._records.get(name)
        if record is None:
            raise IntegrityError(f"{self.folder}: {self._listing} does not list {name}; {self._way_out}")
        if not path.is_file():
            raise IntegrityError(f"{self.folder}: {name} is missing; {self._way_out}")
        if leaves_bundle(self.folder, path):
            raise IntegrityError(f"{self.folder}: {name} is a link that leaves the folder; {self._way_out}")
        size = path.stat().st_size
        if size != record.bytes:
            raise IntegrityError(
                f"{self.folder}: {name} has {size} bytes, and {self._listing} says {record.bytes};"
                f" {self._way_out}"
            )
        return path

    def open(self, name: str, dtype: npt.DTypeLike, shape: Shape) -> npt.NDArray[Any]:
        """Return an array of a file, memory-mapped; None in `shape` is a length that the file says."""
        path = self.locate(name)
        try:
            array = np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError, OverflowError) as error:
            raise IntegrityError(f"{path} cannot be read: {error}; {self._way_out}") from error
        if not isinstance(array, np.ndarray):  # an archive of several
            raise IntegrityError(f"{path} is not the file of an array; {self._way_out}")
        fits = array.ndim == len(shape) and all(
            want in (None, have) for want, have in zip(shape, array.shape, strict=True)
        )
        if array.dtype != np.dtype(dtype) or not fits or not array.flags.c_contiguous:
            raise IntegrityError(
                f"{path} has an array {array.dtype}{list(array.shape)}, and {self._listing} needs"
                f" {np.dtype(dtype)}{list(shape)}; {self._way_out}"
            )
        return np.asarray(array)

    def check(self) -> None:
        """Compare every file's hash with its listing's."""
        for name, record in self._records.items():
            if compute_sha256(self.locate(name)) != record.sha256:
                raise IntegrityError(
                    f"{self.folder}: {name} has changed since it was made (its sha256 differs);"
                    f" {self._way_out}"
                )


@contextmanager
def refuse_misfits(folder: Path) -> Iterator[None]:
    """Turn the error of a place beyond an array's end into one that names the index."""
    try:
        yield
    except IndexError as error:
        raise IntegrityError(f"{folder}: its files do not fit each other ({error}); {WAY_OUT}") from error
