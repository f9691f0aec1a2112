"""Reads a checkpoint folder's JSON and safetensors; nothing is unpickled, nothing outside it is opened."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

if TYPE_CHECKING:
    from torch import Tensor

MAX_JSON_BYTES = 16 * 2**20
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def read_json(path: Path, missing: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return a JSON object from a file of at most 16 MiB; `missing` where there is no such file."""
    if missing is not None and not path.is_file():
        return missing
    value = _read(path)
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, not a {type(value).__name__}")
    return value


def read_json_list(path: Path) -> list[Any]:
    """Return a JSON array from a file of at most 16 MiB."""
    value = _read(path)
    if not isinstance(value, list):
        raise ValueError(f"{path} must hold a JSON array, not a {type(value).__name__}")
    return value


def _read(path: Path) -> Any:
    if not path.is_file():
        raise ValueError(f"{path} does not exist")
    if path.stat().st_size > MAX_JSON_BYTES:
        raise ValueError(f"{path} has {path.stat().st_size} bytes; at most {MAX_JSON_BYTES} are read")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # the latter: nested thousands deep
        raise ValueError(f"{path} is not valid JSON: {error}") from error


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a checkpoint folder: one, or the shards that its index lists."""
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if not (folder / INDEX).is_file():
        pickled = sorted(p.name for p in folder.glob("*.bin")) + sorted(p.name for p in folder.glob("*.pt"))
        hint = (
            f"; {pickled[0]} is a pickle, which is never opened: load it with transformers and"
            " save_pretrained(..., safe_serialization=True)"
            if pickled
            else ""
        )
        raise ValueError(f"{folder} has neither {SINGLE} nor {INDEX}{hint}")
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{folder / INDEX} has no weight_map")
    shards = []
    for name in sorted({str(value) for value in weight_map.values()}):
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise ValueError(f"{folder / INDEX} lists {name!r}, which is not a safetensors file name")
        if not (folder / name).is_file():
            raise ValueError(f"{folder / INDEX} lists {name}, which is missing")
        shards.append(folder / name)
    return shards


def read_published_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return every tensor's name and shape; the tensors themselves are not read."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path in weight_files(folder):
        with _opened(path) as file:
            shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    return shapes


def read_published_weights(folder: Path) -> Iterator[tuple[Path, str, Tensor]]:
    """Yield every tensor under its published name, with the file that holds it."""
    for path in weight_files(folder):
        with _opened(path) as file:
            for name in file.keys():  # noqa: SIM118 - safe_open is not a mapping
                yield path, name, file.get_tensor(name)


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is not a whole safetensors file: {error}") from error
