"""Reads a checkpoint's weights under our names, in fp32 or in the types that they are published in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor, nn

from .folder import read_published_weights, weight_files
from .llama import Llama
from .rotary import SAVED_ROTARY

if TYPE_CHECKING:
    from .families import Description
    from .sentence_transformers import SentenceModules

Report: TypeAlias = Callable[[int, int], None]  # bytes that were read, and the bytes of all


def read_weights(
    description: Description, keep_types: bool = False, report: Report = lambda done, total: None
) -> dict[str, Tensor]:
    """Return every weight under our names.

    Args:
        description: says where they lie, and what they are called there.
        keep_types: leave them in their published types and, as far as possible, in their files, which are
            mapped; else they are float32.
        report: called with the bytes that were read, and with those of all.

    Raises:
        ValueError: a weight of the wrong height, or two of one name with different values; names both.
    """
    family = description.family
    weights = dict[str, Tensor]()
    rename = family.rename(description.config_json)
    folders = description.weight_folders
    total = sum(path.stat().st_size for folder in folders.values() for path in weight_files(folder))
    done = 0
    for before, (path, published, tensor) in read_parts(folders):
        done += tensor.nbytes
        report(done, total)
        name = rename(before + published.removeprefix(family.prefix))
        if name is None:
            continue
        for piece, part in split_weight(description, path, name, tensor).items():
            part = family.converted(piece, part)
            part = part if keep_types else part.to(torch.float32).contiguous()
            if piece in weights and not same_numbers(weights[piece], part):
                raise ValueError(f"{path} holds {piece} twice, with different values")
            weights[piece] = part
    family.adjust(weights, description.config_json)
    for stand_in, name in family.stand_ins.items():
        if (own := weights.pop(stand_in, None)) is not None:
            is_tied = getattr(description.config, "tie_word_embeddings", False)
            if is_tied and not same_numbers(own, weights.get(name, own)):
                raise ValueError(f"{description.folder} holds {name} twice, with different values")
            weights.setdefault(name, own)
    if description.modules is not None:
        weights |= read_sentence_weights(description.modules)
    return weights


def split_weight(description: Description, path: Path, name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Return the weights that a published one holds, one below the other, by our names; mostly itself."""
    rows = description.family.parts(description.config, name)
    if not rows:
        return {name: tensor}
    if len(tensor) != sum(rows.values()):
        raise ValueError(f"{path}: {name} has {len(tensor)} rows, config.json means {sum(rows.values())}")
    return dict(zip(rows, torch.split(tensor, list(rows.values())), strict=True))


def read_parts(folders: Mapping[str, Path]) -> Iterator[tuple[str, tuple[Path, str, Tensor]]]:
    """Yield each folder's weights, with what stands before their names."""
    for before, folder in folders.items():
        for weight in read_published_weights(folder):
            yield before, weight


def read_sentence_weights(modules: SentenceModules) -> dict[str, Tensor]:
    """Return the weights of the layers after pooling."""
    weights = {}
    for name, own, folders in (
        ("dense", "linear.", modules.dense_folders),
        ("norms", "norm.", modules.norm_folders),
    ):
        for index, folder in enumerate(folders):
            for _, published, tensor in read_published_weights(folder):
                weights[f"sentence.{name}.{index}.{published.removeprefix(own)}"] = tensor.to(torch.float32)
    return weights


def leave_out_rotary(folder: Path, model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Take saved rotary tables out of the weights; refuse those that differ from config.json's."""
    if not isinstance(model, Llama):
        return
    for name in [name for name in weights if SAVED_ROTARY.fullmatch(name)]:
        match = SAVED_ROTARY.fullmatch(name)
        layer = None if match is None else match[1]
        if layer is not None and int(layer) >= model.config.num_hidden_layers:
            continue  # refused as unexpected
        tables = model.rotary if layer is None else model.tables_of(int(layer))
        saved = weights.pop(name)
        if tables is not None and not tables.agrees_with(name.rpartition(".")[2], saved):
            raise ValueError(
                f"{folder}: {name} differs from config.json's rotary settings, and transformers ignores"
                " it: if the settings are right, save the model again with transformers"
            )


def same_numbers(one: Tensor, other: Tensor) -> bool:
    """Tell whether two tensors, whatever their types, have the same shape and values."""
    if one.dtype != other.dtype:
        one = one.to(torch.float32)
        other = other.to(torch.float32)
    return torch.equal(one, other)
