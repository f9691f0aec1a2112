"""Writes a checkpoint's folder that is made of another one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from .folder import INDEX, weight_files

SHARD_BYTES = 2**31  # tensors are collected up to so many bytes, and written
TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "vocab.txt")  # one of which a tokenizer has
TOKENIZER_MORE = (
    "merges.txt", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "chat_template.jinja",
)  # fmt: skip


def link_files(folder: Path, out: Path) -> None:
    """Link a folder's files from another folder; copy them where the system allows no links."""
    for path in sorted(folder.iterdir()):
        if path.is_file():
            try:
                (out / path.name).symlink_to(path.resolve())
            except OSError:
                shutil.copyfile(path, out / path.name)


def copy_other_files(base: Path, adapter: Path, out: Path) -> None:
    """Copy all but weights and config.json, and the adapter's tokenizer where it has one."""
    weights = {path.name for path in weight_files(base)}
    for path in sorted(base.iterdir()):
        is_weight = path.name in weights or path.suffix in (".bin", ".pt", ".onnx", ".safetensors")
        if path.is_file() and not is_weight and path.name not in ("config.json", INDEX):
            shutil.copyfile(path, out / path.name)
        elif path.is_dir() and (base / "modules.json").is_file():
            shutil.copytree(path, out / path.name)
    if any((adapter / name).is_file() for name in TOKENIZER_FILES):
        for name in (*TOKENIZER_FILES, *TOKENIZER_MORE):
            (out / name).unlink(missing_ok=True)
            if (adapter / name).is_file():
                shutil.copyfile(adapter / name, out / name)


def write_shards(weights: Iterator[tuple[str, Tensor]], out: Path) -> None:
    """Write tensors to safetensors files of about `SHARD_BYTES`, with an index."""
    places: dict[str, str] = {}
    held: dict[str, Tensor] = {}
    size = 0
    for name, tensor in weights:
        if size and size + tensor.nbytes > SHARD_BYTES:
            write_shard(held, places, out)
            size = 0
        held[name] = tensor.contiguous()
        size += tensor.nbytes
    write_shard(held, places, out)
    index: Mapping[str, Any] = {"metadata": {}, "weight_map": places}
    (out / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")


def write_shard(held: dict[str, Tensor], places: dict[str, str], out: Path) -> None:
    """Write tensors to the next file, note it as their place, and forget them."""
    name = f"model-{len(set(places.values())) + 1:05d}.safetensors"
    save_file(held, out / name, metadata={"format": "pt"})
    places.update(dict.fromkeys(held, name))
    held.clear()
