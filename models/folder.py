"""Reads a checkpoint folder's JSON and safetensors; nothing is unpickled, nothing outside it is opened."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

if TYPE_CHECKING:
    from torch import Tensor

MAX_JSON_BYTES = 16 * 2**20
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# Weights in one file, and the index of weights in several; what is there first in this list is read.
FILES = (
    (SINGLE, INDEX),
    ("diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.safetensors.index.json"),
    ("model.fp16.safetensors", "model.safetensors.index.fp16.json"),
    ("diffusion_pytorch_model.fp16.safetensors", "diffusion_pytorch_model.safetensors.index.fp16.json"),
)
AGAIN = "download the checkpoint again"


def read_json(path: Path, missing: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return a JSON object from a file of at most 16 MiB; `missing` where there is no such file."""
    if missing is not None and not path.is_file():
        return missing
    return _check_object(path, _read(path))


def read_json_list(path: Path) -> list[Any]:
    """Return a JSON array from a file of at most 16 MiB."""
    value = _read(path)
    if not isinstance(value, list):
        raise ValueError(f"{path} must hold a JSON array, not a {type(value).__name__}")
    return value


def _check_object(path: Path, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, not a {type(value).__name__}")
    return value


def _read(path: Path, collect: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """Return a file's JSON; `collect` makes an object of its names and values."""
    if not path.is_file():
        raise ValueError(f"{path} does not exist")
    if path.stat().st_size > MAX_JSON_BYTES:
        raise ValueError(f"{path} has {path.stat().st_size} bytes; at most {MAX_JSON_BYTES} are read")
    try:
        text = path.read_text(encoding="utf-8")
        value = json.loads(text, object_pairs_hook=collect)
        if "\\ud" in text.lower():
            json.dumps(value, ensure_ascii=False).encode()  # half a surrogate pair is in no text
        return value
    except (ValueError, RecursionError) as error:  # the latter: nested thousands deep
        raise ValueError(f"{path} is not valid JSON: {error}") from error


@dataclass(frozen=True)
class Published:
    """A tensor of a checkpoint, as its file's header describes it.

    Attributes:
        path: the file that holds it.
        shape: its shape.
        dtype: its type by safetensors' name, such as "BF16".
    """

    path: Path
    shape: tuple[int, ...]
    dtype: str


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a checkpoint folder: one, or the shards that its index lists."""
    for single, index in FILES:
        if (folder / single).is_file():
            return [folder / single]
        if (folder / index).is_file():
            break
    return sorted(set(read_index(folder).values()))


def read_index(folder: Path) -> dict[str, Path]:
    """Return the shard of each tensor, by the index of a folder.

    Raises:
        ValueError: there is no index, it lists a tensor twice, or a shard that is missing; names both.
    """
    path = next((folder / index for _, index in FILES if (folder / index).is_file()), None)
    if path is None:
        pickled = sorted(p.name for p in folder.glob("*.bin")) + sorted(p.name for p in folder.glob("*.pt"))
        hint = (
            f"; {pickled[0]} is a pickle, which is never opened: load it with transformers and"
            " save_pretrained(..., safe_serialization=True)"
            if pickled
            else ""
        )
        raise ValueError(f"{folder} has neither {SINGLE} nor {INDEX}{hint}")
    listed = read_json_pairs(path).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise ValueError(f"{path} has no weight_map")
    for shard in sorted({str(value) for value in listed.values()}):
        if Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise ValueError(f"{path} lists {shard!r}, which is not a safetensors file name")
        if not (folder / shard).is_file():
            lost = [name for name, value in listed.items() if value == shard]
            others = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
            raise ValueError(f"{path} lists {shard}, which is missing, for {lost[0]}{others}; {AGAIN}")
    return {name: folder / shard for name, shard in listed.items()}


def read_json_pairs(path: Path) -> dict[str, Any]:
    """Return a JSON object as `read_json` does, but refuse a name that an object in it has twice."""
    twice: list[tuple[str, Any, Any]] = []

    def collect(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in pairs:
            if name in found:
                twice.append((name, found[name], value))
            found[name] = value
        return found

    value = _check_object(path, _read(path, collect))
    if twice:
        name, first, second = twice[0]
        raise ValueError(f"{path} lists {name} twice, in {first} and in {second}; {AGAIN}")
    return value


def read_headers(folder: Path) -> dict[str, Published]:
    """Return the description of every tensor in a checkpoint's files, unread, by its published name.

    Raises:
        ValueError: a file is missing or damaged, a tensor lies in two of them, or not in the one that the
            index lists; names file and tensor.
    """
    found: dict[str, Published] = {}
    for path in weight_files(folder):
        with _opened(path) as file:
            for name in file.keys():  # noqa: SIM118 - safe_open is not a mapping
                if name in found:
                    raise ValueError(
                        f"{folder}: {name} lies in {found[name].path.name} and in {path.name}; {AGAIN}"
                    )
                if not name.isprintable():
                    raise ValueError(
                        f"{path} has a tensor {name!r:.80}, whose name cannot be printed; {AGAIN}"
                    )
                part = file.get_slice(name)
                found[name] = Published(path, tuple(part.get_shape()), str(part.get_dtype()))
    if not (folder / SINGLE).is_file():
        check_index(folder, found)
    return found


def check_index(folder: Path, found: Mapping[str, Published]) -> None:
    """Refuse shards that lack a tensor that the index lists for them."""
    for name, shard in read_index(folder).items():
        if name not in found:
            raise ValueError(f"{folder / INDEX} lists {name} in {shard.name}, which lacks it; {AGAIN}")
        if found[name].path != shard:
            raise ValueError(
                f"{folder / INDEX} lists {name} in {shard.name}, but it lies in {found[name].path.name};"
                f" {AGAIN}"
            )


def read_published_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return every tensor's name and shape; the tensors themselves are not read."""
    return {name: tensor.shape for name, tensor in read_headers(folder).items()}


def read_published_weights(folder: Path) -> Iterator[tuple[Path, str, Tensor]]:
    """Yield every tensor under its published name, with the file that holds it.

    A tensor has its published type, and its numbers stay in the file, which is mapped, until somebody reads
    them.
    """
    for path in weight_files(folder):
        with _opened(path) as file:
            for name in file.keys():  # noqa: SIM118 - safe_open is not a mapping
                yield path, name, file.get_tensor(name)


def read_file(path: Path) -> dict[str, Tensor]:
    """Return every tensor of one safetensors file."""
    with _opened(path) as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        why = " ".join(str(error).split())
        raise ValueError(f"{path} is not a whole safetensors file: {why}; {AGAIN}") from error
