"""Reads and writes golden data: PyTorch's answers, and the limits of each precision, as a plain .npz."""

from __future__ import annotations

import json
import logging
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ...bundle.bundle import WAY_OUT, Bundle
from ...errors import BundleError, InputError, PlanForgeError

log = logging.getLogger("planforge")

Arrays = Mapping[str, npt.NDArray[Any]]
MAX_FILE_BYTES = 2**29  # of all arrays, unpacked
PREFIX = "checks/golden-"  # of its name in a bundle
HEADER_BYTES = 256  # of an array in the file, at most
LIMITS_BYTES = 2**16  # of the limits, beside the answers, at most


def write_golden(path: Path, arrays: Arrays, limits: Mapping[str, Mapping[str, float]]) -> None:
    """Write what PyTorch answered, and the limits.

    Raises an InputError where that is more than `read_golden` reads.
    """
    if not fits(arrays):
        raise InputError(
            f"the golden data (PyTorch's answers) for these texts takes more than {MAX_FILE_BYTES >> 20} MiB;"
            " give shorter --prompts, or leave it out with --no-verify"
        )
    np.savez(path, limits=np.array(json.dumps(limits)), **arrays)  # type: ignore[arg-type]


def count_bytes(arrays: Iterable[npt.NDArray[Any]]) -> int:
    """Return how many bytes arrays take in the file, unpacked, at most."""
    return sum(array.nbytes + HEADER_BYTES for array in arrays)


def fits(arrays: Arrays) -> bool:
    """Tell whether a file of golden data has room for the arrays, with limits."""
    return count_bytes(arrays.values()) + LIMITS_BYTES <= MAX_FILE_BYTES


def read_golden(path: Path) -> tuple[dict[str, npt.NDArray[Any]], dict[str, dict[str, float]]]:
    """Read what `write_golden` wrote; a KeyError says that it has no limits.

    Raises a BundleError where the file is damaged, or would take more than `MAX_FILE_BYTES` of memory.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            size = sum(member.file_size for member in archive.infolist())
            if size > MAX_FILE_BYTES:
                raise ValueError(f"its arrays have {size} bytes; at most {MAX_FILE_BYTES} are allowed")
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        if others := [name for name, array in arrays.items() if not isinstance(array, np.ndarray)]:
            raise ValueError(f"{others[0]!r} is not an array")
        return arrays, read_limits(str(arrays.pop("limits")))
    except KeyError:
        raise
    except Exception as error:  # whatever zipfile, zlib and numpy raise
        raise BundleError(f"{path} is not valid golden data: {join_lines(error)}; {WAY_OUT}") from error


def read_limits(text: str) -> dict[str, dict[str, float]]:
    """Return the limits by precision and metric; a ValueError says that they are none."""
    limits = json.loads(text)
    rows = limits.values() if isinstance(limits, dict) else [None]
    if not all(isinstance(row, dict) and set(map(type, row.values())) <= {int, float} for row in rows):
        raise ValueError("its limits are not numbers by precision and metric")
    return limits  # type: ignore[no-any-return]


@contextmanager
def name_damage(bundle: Bundle) -> Iterator[None]:
    """Turn what comes of golden data that does not fit the bundle's graphs into an error that says so."""
    try:
        yield
    except PlanForgeError:
        raise
    except (ArithmeticError, AttributeError, LookupError, MemoryError, TypeError, ValueError) as error:
        raise BundleError(
            f"the golden data of {bundle.folder} does not fit its graphs: {join_lines(error):.300}; {WAY_OUT}"
        ) from error


def join_lines(error: Exception) -> str:
    """Return an error's text in one line."""
    return " ".join(str(error).split()) or type(error).__name__


def choose_evenly(count: int, most: int) -> tuple[int, ...]:
    """Return at most `most` of `count` indices, the first and last among them."""
    return tuple(int(i) for i in np.unique(np.linspace(0, count - 1, min(count, most)).round()))


def find_golden(bundle: Bundle) -> Path | None:
    """Return the file of a bundle's golden data, hashed; None where it was exported without verification."""
    names = [name for name in bundle.manifest.files if name.startswith(PREFIX)]
    return bundle.path(names[0]) if names else None
