"""Describes a checkpoint for `planforge inspect`: how it would be exported, and what is missing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any

from ...runtime.apps.commands.tables import format_size
from ..errors import raise_checkpoint_errors
from .findings import Inspection

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "spiece.model", "source.spm", "vocab.txt", "vocab.json")
SHOWN = 8  # settings that a message lists


def inspect_checkpoint(folder: Path) -> Inspection:
    """Say of which kind a checkpoint is, how `planforge export` would read it, and what stops it."""
    from ...models.folder import read_json

    with raise_checkpoint_errors():
        config = dict(read_json(folder / "config.json"))
    kind = str(config.get("model_type", ""))
    how, reason = find_way(folder, config)
    missing = list(find_missing(folder))
    value: dict[str, Any] = {"model_type": kind, "class": read_class(config), "export": how}
    rows = [("model", f"{kind or 'no model_type'}, {read_class(config) or 'no class'}")]
    if weights := describe_weights(folder):
        value["weights"] = weights
        types = ", ".join(f"{count:,} in {name}" for name, count in weights["types"].items())
        rows.append(
            ("weights", f"{weights['parameters']:,} numbers, {format_size(weights['bytes'])}: {types}")
        )
    rows.append(("export", f"{how}: {reason}" if reason else how))
    if reason:
        value["reason"] = reason
    rows.append(("missing", ", ".join(missing) or "nothing"))
    value["missing"] = missing
    if how != NATIVELY and (near := find_nearest(config)):
        name, shared, unknown = near
        value["nearest"] = {"model_type": name, "shared": shared, "unknown": unknown}
        others = ", ".join(unknown[:SHOWN]) + (", ..." if len(unknown) > SHOWN else "")
        more = f"; it lacks {others}" if unknown else ""
        rows.append(("nearest family", f"{name}, which shares {shared} settings{more} (docs/add-a-model.md)"))
    return Inspection(value, [(f"{folder}: a checkpoint", ("", ""), rows)])


def inspect_gguf(path: Path) -> Inspection:
    """Say what a file of llama.cpp holds, and how `planforge export` would read it."""
    from ...models.gguf_file import read_gguf
    from ...models.gguf_names import read_config
    from ...models.gguf_tokenizer import make_tokenizer

    with raise_checkpoint_errors():
        file = read_gguf(path)
    types = Counter(tensor.type for tensor in file.tensors.values())
    how = NATIVELY
    reason = "weights quantized by llama.cpp are read first"
    try:
        read_config(file)
        make_tokenizer(file)
    except (ValueError, TypeError, IndexError, KeyError) as error:
        how = REFUSED
        reason = str(error)
    size = path.stat().st_size
    value = {"architecture": file.architecture, "types": dict(types), "bytes": size, "export": how}
    listed = ", ".join(f"{count} tensors of {name}" for name, count in types.most_common())
    rows = [
        ("model", file.architecture),
        ("weights", f"{format_size(size)}: {listed}"),
        ("export", f"{how}: {reason}"),
    ]
    return Inspection({**value, "reason": reason}, [(f"{path}: a file of llama.cpp", ("", ""), rows)])


def inspect_adapter(folder: Path) -> Inspection:
    """Say what an adapter changes, and how it is exported with its base model."""
    from ...models.adapters import find_other_kind, read_adapter

    with raise_checkpoint_errors():
        adapter = read_adapter(folder)
    base = str(adapter.settings.get("base_model_name_or_path") or "")
    ranks = sorted({len(change.a) for change in adapter.changes.values() if change.a is not None})
    kinds = sorted({find_other_kind(change) or "LoRA" for change in adapter.changes.values()})
    stays = kinds == ["LoRA"] and not adapter.tensors
    changes = f"{len(adapter.changes)} modules by {', '.join(kinds)}"
    changes += f", of rank {', '.join(map(str, ranks))}" if ranks else ""
    changes += f"; {len(adapter.tensors)} whole weights" if adapter.tensors else ""
    export = "planforge export BASE --adapter FOLDER merges it"
    export += "; --adapter NAME=FOLDER keeps it beside a decoder" if stays else ""
    value = {"base": base, "kinds": kinds, "ranks": ranks, "modules": len(adapter.changes), "stays": stays}
    rows = [("base model", base or "not named"), ("changes", changes), ("export", export)]
    return Inspection(value, [(f"{folder}: an adapter of peft", ("", ""), rows)])


NATIVELY = "natively"
TRACED = "traced from transformers"
REFUSED = "refused"


def find_way(folder: Path, config: Mapping[str, Any]) -> tuple[str, str]:
    """Return how a checkpoint is exported, and why not, or what becomes of its weights."""
    from ...models.checkpoint import describe
    from ...models.dequantize import find_settings
    from ...models.quantized_files import find_method
    from ..checkpoints.source import refuse_unread
    from ..imported.architectures import choose_task, has_reference_model

    first = ""
    try:
        refuse_unread(folder, config)
        if (settings := find_settings(folder, config)) is not None:
            first = f"weights quantized by {find_method(folder, settings).name} are read first"
        if has_reference_model(folder):
            if not first:
                describe(folder)
            return NATIVELY, first
        choose_task(folder)
    except Exception as error:  # whatever a checkpoint brings
        return REFUSED, str(error)
    try:
        import transformers
        import transformers.exporters
    except ImportError:
        return REFUSED, "needs transformers 5: pip install 'planforge[export]'"
    if config.get("model_type") in transformers.CONFIG_MAPPING:
        return TRACED, first
    return REFUSED, f"transformers {transformers.__version__} has no {config.get('model_type')!r} either"


def find_missing(folder: Path) -> Iterable[str]:
    """Yield the files that an export needs and the folder lacks."""
    if not any(folder.glob("*.safetensors")) and not (folder / "modules.json").is_file():
        yield "model.safetensors"
    if not any((folder / name).is_file() for name in TOKENIZERS):
        yield "a tokenizer, such as tokenizer.json"


def read_class(config: Mapping[str, Any]) -> str:
    from ..imported.folder import read_architecture

    return read_architecture(config)


def describe_weights(folder: Path) -> dict[str, Any]:
    """Return the count of a checkpoint's numbers, their types, and the bytes of its files; {} without any."""
    from ...models.folder import read_headers, weight_files

    try:
        headers = read_headers(folder)
    except ValueError:
        return {}
    types: Counter[str] = Counter()
    for tensor in headers.values():
        types[tensor.dtype] += prod(tensor.shape)
    size = sum(path.stat().st_size for path in weight_files(folder))
    return {"parameters": sum(types.values()), "types": dict(types.most_common()), "bytes": size}


def find_nearest(config: Mapping[str, Any]) -> tuple[str, int, list[str]] | None:
    """Return the native family whose settings are most like a config.json's.

    Returns:
        Its model_type, how many settings both have beside those of every model, and those that it lacks.
    """
    try:
        import transformers
    except ImportError:
        return None
    from ...models.families import FAMILIES

    usual = set(transformers.PreTrainedConfig().to_dict())
    own = set(config) - usual - {"architectures", "model_type", "transformers_version", "torch_dtype"}
    best: tuple[float, str, set[str]] = (0.0, "", set())
    for kind in FAMILIES:
        if kind not in transformers.CONFIG_MAPPING:
            continue
        theirs = set(transformers.CONFIG_MAPPING[kind]().to_dict()) - usual
        likeness = len(own & theirs) / max(1, len(own | theirs))
        best = max(best, (likeness, kind, theirs), key=lambda one: one[0])
    return (best[1], len(own & best[2]), sorted(own - best[2])) if best[1] else None
