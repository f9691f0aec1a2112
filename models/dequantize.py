"""Writes a checkpoint whose weights others quantized as one in floats, with the codes beside it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from .derived_folder import copy_other_files, write_shards
from .folder import read_file, read_json, read_published_shapes, read_published_weights
from .quantized_files import UNREAD, FileCodes, Floats, Method, find_method

CODES = "quantized_codes.safetensors"
OLDER = {"quantize_config.json": "gptq", "quant_config.json": "awq"}  # files of older tools, by the method


@dataclass
class Dequantized:
    """A summary of what `write_dequantized` found.

    Attributes:
        method: by its name.
        kept: how many weights have codes of so many bits.
        floats: how many are floats, of which no codes are kept.
    """

    method: str
    kept: dict[int, int] = field(default_factory=dict)
    floats: int = 0

    @property
    def kept_bits(self) -> int:
        """Return the bits of most codes; 0 where there are none."""
        return max(self.kept, key=lambda bits: self.kept[bits], default=0)

    def describe(self) -> str:
        """Return in words what becomes of the weights."""
        parts = [f"{count} keep their {bits}-bit codes" for bits, count in sorted(self.kept.items())]
        if self.floats:
            parts.append(f"{self.floats} become floats")
        return f"reading weights that {self.method} quantized, of which {' and '.join(parts)}"


def find_settings(folder: Path | str, config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return what a checkpoint's files say of quantized weights; None where they are floats."""
    settings = config.get("quantization_config", config.get("compression_config"))
    if isinstance(settings, dict) and settings:
        return settings
    for name, method in OLDER.items():
        if Path(folder, name).is_file():
            return {"quant_method": method, **read_json(Path(folder, name))}
    return None


def write_dequantized(folder: Path, out: Path) -> Dequantized:
    """Write a checkpoint of the values that quantized weights stand for, in fp32, and their codes.

    Raises:
        ValueError: a method that is not read, or tensors that do not fit one another; names them.
    """
    config = read_json(folder / "config.json")
    settings = find_settings(folder, config)
    assert settings is not None
    method = find_method(folder, settings)
    found = Dequantized(method.name)
    codes: dict[str, Tensor] = {}
    copy_other_files(folder, folder, out)
    for name in OLDER:
        (out / name).unlink(missing_ok=True)
    write_shards(dequantize(folder, method, codes, found), out)
    if codes:
        save_file(codes, out / CODES, metadata={"format": "pt"})
    for name in ("quantization_config", "compression_config"):
        config.pop(name, None)
    (out / "config.json").write_text(json.dumps(config | {"dtype": "float32"}, indent=2), encoding="utf-8")
    return found


def dequantize(
    folder: Path, method: Method, codes: dict[str, Tensor], done: Dequantized
) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of a checkpoint in floats, each as soon as all of its parts were read."""
    published = read_published_shapes(folder)
    first = f".{method.endings[0]}"
    modules = {name.removesuffix(first) for name in published if name.endswith(first)}
    if not modules:
        raise ValueError(f"{folder}: config.json says {method.name}, but no weight has {method.endings[0]}")
    missing = {
        module: {ending for ending in method.endings if f"{module}.{ending}" in published}
        for module in modules
    }
    read: dict[str, dict[str, Tensor]] = {}
    for _, name, tensor in read_published_weights(folder):
        module, _, ending = name.rpartition(".")
        if module not in modules or ending not in (*method.endings, *UNREAD):
            yield name, tensor
        elif ending in method.endings:
            read.setdefault(module, {})[ending] = tensor
            missing[module].remove(ending)
            if not missing[module]:
                values = read_weight(folder, module, method, read.pop(module), codes, done)
                yield f"{module}.weight", torch.from_numpy(values)


def read_weight(
    folder: Path,
    module: str,
    method: Method,
    parts: Mapping[str, Tensor],
    codes: dict[str, Tensor],
    done: Dequantized,
) -> Floats:
    """Return a module's weight in floats, and note its codes where they are kept."""
    try:
        found = method.read(parts)
        values = found.dequantize() if isinstance(found, FileCodes) else found
    except (KeyError, ValueError, IndexError) as error:
        missing = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        shapes = {ending: list(part.shape) for ending, part in parts.items()}
        raise ValueError(f"{folder}: {module} has parts {shapes}: {missing}") from error
    if isinstance(found, FileCodes):
        keep(codes, f"{module}.weight", found)
        done.kept[found.bits] = done.kept.get(found.bits, 0) + 1
    else:
        done.floats += 1
    return values


def keep(codes: dict[str, Tensor], name: str, found: FileCodes) -> None:
    """Note the parts of a weight's codes."""
    codes[f"{name}.codes{found.bits}"] = torch.from_numpy(np.ascontiguousarray(found.codes))
    codes[f"{name}.scales"] = torch.from_numpy(found.scales)
    codes[f"{name}.zeros"] = torch.from_numpy(found.zeros)
    if found.order is not None:
        codes[f"{name}.order"] = torch.from_numpy(np.ascontiguousarray(found.order))


def read_codes(folder: Path) -> dict[str, FileCodes]:
    """Return the codes that `write_dequantized` wrote, by their published weights' names."""
    if not (folder / CODES).is_file():
        return {}
    tensors = read_file(folder / CODES)
    found = {}
    for key, tensor in tensors.items():
        name, _, part = key.rpartition(".")
        if part.startswith("codes"):
            order = tensors.get(f"{name}.order")
            found[name] = FileCodes(
                tensor.numpy(),
                tensors[f"{name}.scales"].numpy(),
                tensors[f"{name}.zeros"].numpy(),
                int(part.removeprefix("codes")),
                None if order is None else np.asarray(order.numpy()),
            )
    return found
