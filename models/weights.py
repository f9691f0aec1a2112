"""Reads a checkpoint's weights under our names, in fp32 or in the types that they are published in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor, nn

from .adapter_tables import FILE
from .causal_encoder import CausalEncoderConfig
from .causal_names import add_score_rows
from .dequantize import read_codes
from .folder import read_file, read_published_weights, weight_files
from .llama import Llama
from .quantized_files import FileCodes
from .rotary import SAVED_ROTARY
from .static_files import read_table

PROJECTION = "linear.weight"  # of Stanford's ColBERT, among the transformer's weights

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
    modules = description.modules
    weights: dict[str, Tensor] = {}
    if modules is not None and modules.is_static:
        weights = read_table(modules)
    else:
        weights = read_transformer(description, keep_types, report)
    if modules is not None:
        weights |= read_sentence_weights(modules)
    if description.adapters:
        weights |= read_file(description.folder / FILE)
    if description.query is not None:
        of_query = read_weights(description.query, keep_types)
        weights |= {f"query.{name}": weight for name, weight in of_query.items()}
    return weights


def read_transformer(description: Description, keep_types: bool, report: Report) -> dict[str, Tensor]:
    """Return the weights that a model's own files have, under our names."""
    family = description.family
    weights: dict[str, Tensor] = {}
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
    if PROJECTION in weights and description.modules is not None:
        weights["token_vectors.dense.0.weight"] = weights.pop(PROJECTION)
    family.adjust(weights, description.config_json)
    for stand_in, name in family.stand_ins.items():
        if (own := weights.pop(stand_in, None)) is not None:
            is_tied = getattr(description.config, "tie_word_embeddings", False)
            if is_tied and not same_numbers(own, weights.get(name, own)):
                raise ValueError(f"{description.folder} holds {name} twice, with different values")
            weights.setdefault(name, own)
    if isinstance(description.config, CausalEncoderConfig):
        add_score_rows(weights, description.config)
    return weights


def split_weight(description: Description, path: Path, name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Return the weights that a published one holds, one below the other, by our names; mostly itself."""
    rows = description.family.parts(description.config, name)
    if not rows:
        return {name: tensor}
    if tensor.ndim == 3:  # those of several experts
        tensor = tensor.flatten(0, 1)
    if len(tensor) != sum(rows.values()):
        raise ValueError(f"{path}: {name} has {len(tensor)} rows, config.json means {sum(rows.values())}")
    return dict(zip(rows, torch.split(tensor, list(rows.values())), strict=True))


def join_weights(weights: dict[str, Tensor], apart: tuple[str, ...], joined: str) -> None:
    """Join weights of modules of these names into that of one module, one below the other."""
    for first in [name for name in weights if f".{apart[0]}." in name]:
        names = [first.replace(apart[0], part) for part in apart]
        parts = [weights[name] for name in names if name in weights]
        if len({part.shape[1:] for part in parts}) == 1 and len(parts) == len(names):
            weights[first.replace(apart[0], joined)] = torch.cat(parts)
            for name in names:
                del weights[name]


def read_kept_codes(description: Description) -> dict[str, FileCodes]:
    """Return the codes that a checkpoint's files had of its weights, under our names.

    Those of one of our weights that several published ones make up are joined where they are of one kind.
    """
    kinds: dict[tuple[int, bytes], dict[str, FileCodes]] = {}
    for before, folder in description.weight_folders.items():
        for published, weight in read_codes(folder).items():
            order = b"" if weight.order is None else weight.order.tobytes()
            name = before + published.removeprefix(description.family.prefix)
            kinds.setdefault((weight.bits, order), {})[name] = weight
    found: dict[str, FileCodes] = {}
    for kind in kinds.values():
        one = next(iter(kind.values()))
        codes, scales, zeros = (
            place_rows(description, {n: torch.from_numpy(getattr(w, part)) for n, w in kind.items()})
            for part in ("codes", "scales", "zeros")
        )
        for name in codes:
            own = (codes[name].numpy(), scales[name].numpy(), zeros[name].numpy())
            found[name] = replace(one, codes=own[0], scales=own[1], zeros=own[2])
    return found


def place_rows(description: Description, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return what belongs to the rows of published weights by our names, cut and joined as the weights are.

    Args:
        description: of the checkpoint.
        tensors: (O, ...) of each weight, whose name is without the family's prefix.
    """
    family = description.family
    rename = family.rename(description.config_json)
    found: dict[str, Tensor] = {}
    for published, tensor in tensors.items():
        if (name := rename(published)) is not None:
            heights = family.parts(description.config, name) or {name: len(tensor)}
            found |= zip(heights, torch.split(tensor, list(heights.values())), strict=True)
    family.adjust(found, description.config_json)
    return found


def read_parts(folders: Mapping[str, Path]) -> Iterator[tuple[str, tuple[Path, str, Tensor]]]:
    """Yield each folder's weights, with what stands before their names."""
    for before, folder in folders.items():
        for weight in read_published_weights(folder):
            yield before, weight


def read_sentence_weights(modules: SentenceModules) -> dict[str, Tensor]:
    """Return the weights of the layers that make vectors."""
    weights: dict[str, Tensor] = {}
    for name, layer in (("sparse", "linear"), ("token_vectors", "dense.0")):
        if (path := modules.extra_heads.get(name)) is not None:
            for published, tensor in read_file(path).items():
                weights[f"{name}.{layer}.{published}"] = tensor.to(torch.float32)
    before = "sentence" if modules.sentence is not None else "token_vectors"
    if modules.pair_scores is not None:
        before = "heads.sequence_classification"
    for name, own, folders in (
        ("dense", "linear.", modules.dense_folders),
        ("norms", "norm.", modules.norm_folders),
    ):
        for index, folder in enumerate(folders):
            for _, published, tensor in read_published_weights(folder):
                weights[f"{before}.{name}.{index}.{published.removeprefix(own)}"] = tensor.to(torch.float32)
    return weights


def leave_out_rotary(folder: Path, model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Take saved rotary tables out of the weights; refuse those that differ from config.json's."""
    for path, part in model.named_modules():
        if isinstance(part, Llama):
            leave_out_llama_rotary(folder, part, f"{path}." if path else "", weights)


def leave_out_llama_rotary(folder: Path, model: Llama, prefix: str, weights: dict[str, Tensor]) -> None:
    """Take saved rotary tables of a Llama out of weights, whose names have a prefix."""
    for name in list(weights):
        match = SAVED_ROTARY.fullmatch(name.removeprefix(prefix)) if name.startswith(prefix) else None
        if match is None:
            continue
        layer = match[1]
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
