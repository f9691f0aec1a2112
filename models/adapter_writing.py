"""Writes the tables of adapters that stay beside their base model; see `adapter_tables`.

I inputs and O outputs of a linear layer, N adapters, r the largest rank of a layer
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from .adapter_merge import Merge
from .adapter_tables import FILE, NAMES
from .adapters import Adapter, ModuleChange, find_other_kind
from .checkpoint import describe, empty_model
from .derived_folder import link_files
from .experts import Experts
from .language_model import LanguageModel
from .weights import place_rows

MERGE = "merge it instead: --adapter FOLDER"
ROWS = 2**32  # more than any weight has; numbers a row of one of many weights


def write_adapter_tables(base: Path, adapters: Mapping[str, Adapter], out: Path) -> None:
    """Write a checkpoint's folder that holds a base model's files, and the tables of adapters.

    Args:
        base: the base model's folder.
        adapters: by their names.
        out: an empty folder.

    Raises:
        ValueError: the base is no decoder that is written here, an adapter is of another base model, or one
            changes what no table holds; names it.
    """
    description = describe(base)
    model = empty_model(description)
    if not isinstance(model, LanguageModel):
        raise ValueError(f"{base} is no decoder, and only those keep adapters beside them; {MERGE}")
    merges = {name: Merge(base, adapter) for name, adapter in adapters.items()}
    for name, merge in merges.items():
        refuse_whole_changes(name, merge)
    merge = next(iter(merges.values()))
    published = list(merge.shapes)
    numbered = number_rows(merge.shapes, merge.is_transposed)
    prefix = description.family.prefix
    rows = place_rows(description, {name.removeprefix(prefix): ids for name, ids in numbered.items()})
    layers = list_adaptable(model)
    tables: dict[str, Tensor] = {}
    left = {name: set(merge.changes) for name, merge in merges.items()}
    for weight in sorted(layers & rows.keys()):
        numbers = rows[weight][:, 0]
        sources = sorted(set((numbers // ROWS).tolist()))
        modules = {source: published[source].removesuffix(".weight") for source in sources}
        changes = [
            {source: merge.changes[module] for source, module in modules.items() if module in merge.changes}
            for merge in merges.values()
        ]
        if not any(changes):
            continue
        for remaining in left.values():
            remaining.difference_update(modules.values())
        path = weight.removesuffix(".weight")
        a, b = make_table(changes, numbers)
        tables[f"{path}.adapters.a"] = a
        tables[f"{path}.adapters.b"] = b
    for name, modules_left in left.items():
        if modules_left:
            raise ValueError(
                f"the adapter {name} changes {min(modules_left)}, which has no rows of its own for each text;"
                f" {MERGE}"
            )
    link_files(base, out)
    save_file(tables, out / FILE, metadata={NAMES: json.dumps(list(adapters))})


def list_adaptable(model: LanguageModel) -> set[str]:
    """Return the weights of the linear layers that read whole texts, so that each row has an adapter.

    The head reads rows of several texts, and so do experts and what chooses them.
    """
    modules = dict(model.named_modules())
    routed = tuple(f"{path}." for path, module in modules.items() if isinstance(module, Experts))
    linears = {path for path, module in modules.items() if isinstance(module, nn.Linear)} - {"lm_head"}
    return {f"{path}.weight" for path in linears if not path.startswith(routed)}


def refuse_whole_changes(name: str, merge: Merge) -> None:
    """Refuse an adapter that does more than add products of A and B to linear layers."""
    for module, change in merge.changes.items():
        shape = merge.shapes[f"{module}.weight"]
        kind = find_other_kind(change)
        if kind:
            raise ValueError(f"the adapter {name} changes {module} by {kind}, which no table holds; {MERGE}")
        assert change.a is not None and change.b is not None
        wanted = (change.b.shape[0], change.a.shape[1])
        if wanted != (tuple(reversed(shape)) if merge.is_transposed else tuple(shape)):
            raise ValueError(
                f"the adapter {name}: {module} has B {list(change.b.shape)} times A {list(change.a.shape)},"
                f" but {list(shape)} in {merge.base}: it is of another base model"
            )
    if merge.tensors:
        whole = min(merge.tensors)
        raise ValueError(f"the adapter {name} has its own {whole}, which no table holds; {MERGE}")


def make_table(changes: Sequence[Mapping[int, ModuleChange]], numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Return the table of a weight, r rows for each slot: a ((N + 1) * r, I) and b ((N + 1) * r, O), scaled.

    Args:
        changes: of each adapter, by the number of the published weight that it changes.
        numbers: of the published rows (O,) that the weight is made of.
    """
    ranks = [sum(len(change.a) for change in own.values() if change.a is not None) for own in changes]
    first: Any = next(change for own in changes for change in own.values())
    a = torch.zeros(len(changes) + 1, max(ranks), first.a.shape[1])
    b = torch.zeros(len(changes) + 1, max(ranks), len(numbers))
    for slot, own in enumerate(changes, 1):
        begin = 0
        for source, change in own.items():
            assert change.a is not None and change.b is not None
            end = begin + len(change.a)
            here = numbers // ROWS == source
            a[slot, begin:end] = change.a
            b[slot, begin:end, here] = change.scale * change.b[numbers[here] % ROWS].T
            begin = end
    return a.flatten(0, 1), b.flatten(0, 1)


def number_rows(shapes: Mapping[str, Sequence[int]], is_transposed: bool) -> dict[str, Tensor]:
    """Return for each published matrix the numbers (O, 1) of its rows, which tell its place too."""
    return {
        name: ROWS * place + torch.arange(shape[1] if is_transposed else shape[0])[:, None]
        for place, (name, shape) in enumerate(shapes.items())
        if len(shape) == 2
    }
