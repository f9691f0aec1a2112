"""Golden data as a file: PyTorch's answers, and the limits of each precision, as a plain .npz."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ...bundle.bundle import Bundle

Arrays = Mapping[str, npt.NDArray[Any]]
PREFIX = "checks/golden-"  # of its name in a bundle


def write_golden(path: Path, arrays: Arrays, limits: Mapping[str, Mapping[str, float]]) -> None:
    """Write what PyTorch answered, and the limits."""
    np.savez(path, limits=np.array(json.dumps(limits)), **arrays)  # type: ignore[arg-type]


def read_golden(path: Path) -> tuple[dict[str, npt.NDArray[Any]], dict[str, dict[str, float]]]:
    """Read what `write_golden` wrote; a KeyError says that it has no limits."""
    with np.load(path, allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}
    return arrays, json.loads(str(arrays.pop("limits")))


def choose_evenly(count: int, most: int) -> tuple[int, ...]:
    """Return at most `most` of `count` indices, the first and last among them."""
    return tuple(int(i) for i in np.unique(np.linspace(0, count - 1, min(count, most)).round()))


def find_golden(bundle: Bundle) -> Path | None:
    """Return the file of a bundle's golden data, hashed; None where it was exported without verification."""
    names = [name for name in bundle.manifest.files if name.startswith(PREFIX)]
    return bundle.path(names[0]) if names else None
