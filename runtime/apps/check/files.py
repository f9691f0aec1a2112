"""Golden data as a file: PyTorch's answers, and the limits of each precision, as a plain .npz."""

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
MOST_BYTES = 2**29  # of all arrays, unpacked
PREFIX = "checks/golden-"  # of its name in a bundle
SAMPLE = "sample."  # before the number of a text, in the names of its arrays
ALWAYS_KEPT = 2  # of the last samples: an encoder's are its single token and its longest text
HEADER_BYTES = 256  # of an array in the file, at most
LIMITS_BYTES = 2**16  # of the limits, beside the answers, at most


def write_golden(path: Path, arrays: Arrays, limits: Mapping[str, Mapping[str, float]]) -> None:
    """Write what PyTorch answered, and the limits; of more than `read_golden` reads, fewer samples.

    Raises an InputError where not even a few samples fit.
    """
    limits_array = np.array(json.dumps(limits))
    room = MOST_BYTES - count_bytes([limits_array])
    np.savez(path, limits=limits_array, **thin_samples(arrays, room))  # type: ignore[arg-type]


def count_bytes(arrays: Iterable[npt.NDArray[Any]]) -> int:
    """Return how many bytes arrays take in the file, unpacked, at most."""
    return sum(array.nbytes + HEADER_BYTES for array in arrays)


def fits(arrays: Arrays) -> bool:
    """Tell whether a file of golden data has room for the arrays, with limits."""
    return count_bytes(arrays.values()) + LIMITS_BYTES <= MOST_BYTES


def thin_samples(arrays: Arrays, room: int) -> Arrays:
    """Return the arrays without some of the samples, evenly left out, if all take more than `room` bytes."""
    if count_bytes(arrays.values()) <= room:
        return arrays
    others = {name: array for name, array in arrays.items() if not name.startswith(SAMPLE)}
    samples: dict[int, dict[str, npt.NDArray[Any]]] = {}
    for name in arrays.keys() - others.keys():
        number, _, key = name.removeprefix(SAMPLE).partition(".")
        samples.setdefault(int(number), {})[key] = arrays[name]
    last = sorted(samples)[-ALWAYS_KEPT:]
    texts = sorted(samples)[:-ALWAYS_KEPT]
    sizes = {number: count_bytes(sample.values()) for number, sample in samples.items()}
    room -= count_bytes(others.values()) + sum(sizes[number] for number in last)
    for count in range(len(texts) - 1, 0, -1):
        chosen = [texts[i] for i in choose_evenly(len(texts), count)]
        if sum(sizes[number] for number in chosen) <= room:
            break
    else:
        raise InputError(
            f"golden data of these texts has more than {MOST_BYTES >> 20} MiB, even with few of them;"
            " give shorter --prompts, or leave out golden data with --no-verify"
        )
    kept = [*chosen, *last]
    log.warning("golden data keeps %d of %d texts, so that it fits its file", len(kept), len(samples))
    renumbered = {
        f"{SAMPLE}{i}.{key}": array for i, number in enumerate(kept) for key, array in samples[number].items()
    }
    return others | renumbered


def read_golden(path: Path) -> tuple[dict[str, npt.NDArray[Any]], dict[str, dict[str, float]]]:
    """Read what `write_golden` wrote; a KeyError says that it has no limits.

    Raises a BundleError where the file is damaged, or would take more than `MOST_BYTES` of memory.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            size = sum(member.file_size for member in archive.infolist())
            if size > MOST_BYTES:
                raise ValueError(f"its arrays have {size} bytes, and at most {MOST_BYTES} are read")
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        if others := [name for name, array in arrays.items() if not isinstance(array, np.ndarray)]:
            raise ValueError(f"{others[0]!r} is no array")
        return arrays, read_limits(str(arrays.pop("limits")))
    except KeyError:
        raise
    except Exception as error:  # whatever zipfile, zlib and numpy raise
        raise BundleError(f"{path} is no golden data: {join_lines(error)}; {WAY_OUT}") from error


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
