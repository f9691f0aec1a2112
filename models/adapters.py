"""Reads adapters in peft's layout, and computes the weights that they change, by peft's rules.

A linear layer has a weight (O, I) and a bias (O,); GPT-2's Conv1D and an embedding have theirs transposed.

LoRA (Hu and others, 2021): W + s * B @ A, A (r, I), B (O, r), s = alpha / r, by rsLoRA alpha / sqrt(r)
DoRA (Liu and others, 2024): the rows of W + s * B @ A, scaled to the lengths m (O,)
IA3 (Liu and others, 2022): the rows of W and b, or the columns of W of a feed-forward layer, times l
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .folder import read_file, read_json

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
PART = re.compile(
    r"(.*)\.(lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector|ia3_l)"
    r"(?:\.default)?(\.weight|\.bias)?"
)
WRAPPED = re.compile(r"\.(base_layer|modules_to_save(\.default)?)(?=\.)")
# Settings of peft 0.21 that this reads, or that change no number of a finished adapter.
READ = {
    "peft_type", "task_type", "r", "lora_alpha", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern",
    "fan_in_fan_out", "bias", "lora_bias", "modules_to_save", "feedforward_modules", "ensure_weight_tying",
}  # fmt: skip
NO_MATTER = {
    "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "lora_dropout",
    "init_lora_weights", "init_ia3_weights", "loftq_config", "eva_config", "corda_config",
    "lora_ga_config", "runtime_config", "megatron_core", "qalora_group_size",
}  # fmt: skip
KINDS = ("LORA", "IA3")
TRANSPOSED_TYPES = ("gpt2", "openai-gpt")  # whose linear layers are Conv1D
WAY_OUT = "merge it with peft: model.merge_and_unload().save_pretrained(FOLDER), and export that folder"


@dataclass(frozen=True)
class ModuleChange:
    """The change that an adapter makes to one module's weight, and to its bias.

    Attributes:
        a: (r, I), or of an embedding (r, V).
        b: (O, r).
        scale: of b @ a.
        lengths: of the rows of the result (O,), by DoRA.
        bias: to add to the bias (O,), scaled.
        factors: of IA3: (1, I), or (O, 1).
        is_embedding: whether the weight is an embedding's, (V, O).
    """

    a: Tensor | None = None
    b: Tensor | None = None
    scale: float = 1.0
    lengths: Tensor | None = None
    bias: Tensor | None = None
    factors: Tensor | None = None
    is_embedding: bool = False


@dataclass(frozen=True)
class Adapter:
    """An adapter's folder.

    Attributes:
        folder: holds adapter_config.json and adapter_model.safetensors.
        settings: the former.
        changes: by the names of modules in the model that it was trained in.
        tensors: whole ones that take the place of the base's, by their names: of modules_to_save, and
            trained biases.
    """

    folder: Path
    settings: Mapping[str, Any]
    changes: Mapping[str, ModuleChange] = field(default_factory=dict)
    tensors: Mapping[str, Tensor] = field(default_factory=dict)


def read_adapter(folder: Path) -> Adapter:
    """Read an adapter that peft wrote.

    Raises:
        ValueError: a file is missing, damaged or a pickle; a kind or a setting that is not computed here, or
            a rank that differs from the file's; names it, and says what to do.
    """
    if not (folder / CONFIG).is_file():
        raise ValueError(f"{folder} has no {CONFIG}; give the folder that peft's save_pretrained wrote")
    settings = read_json(folder / CONFIG)
    check_settings(folder, settings)
    if not (folder / WEIGHTS).is_file():
        pickles = sorted(path.name for path in folder.glob("*.bin"))
        why = f" (only {pickles[0]}, a pickle, which is never read)" if pickles else ""
        raise ValueError(
            f"{folder} has no {WEIGHTS}{why}; load it with peft and save_pretrained(FOLDER,"
            " safe_serialization=True)"
        )
    parts: dict[str, dict[str, Tensor]] = {}
    tensors: dict[str, Tensor] = {}
    for published, tensor in read_file(folder / WEIGHTS).items():
        name = published.removeprefix(PREFIX)
        match = PART.fullmatch(name)
        if match is None:
            tensors[WRAPPED.sub("", name)] = tensor
        else:
            part = match[2] + (".bias" if match[3] == ".bias" else "")
            parts.setdefault(match[1], {})[part] = tensor.to(torch.float32)
    if not parts and not tensors:
        raise ValueError(f"{folder / WEIGHTS} holds no weights")
    changes = {module: read_change(folder, module, found, settings) for module, found in parts.items()}
    return Adapter(folder, settings, changes, tensors)


def check_settings(folder: Path, settings: Mapping[str, Any]) -> None:
    """Refuse kinds of adapters, and settings, that change numbers in ways that are not computed here."""
    kind = settings.get("peft_type")
    if kind not in KINDS:
        raise ValueError(
            f"{folder}: peft_type {kind!r} is not one of {', '.join(KINDS)} (LoRA, rsLoRA and DoRA are LORA);"
            f" {WAY_OUT}"
        )
    unknown = sorted(name for name in settings.keys() - READ - NO_MATTER if settings[name])
    if unknown:
        raise ValueError(f"{folder}: {unknown[0]} = {settings[unknown[0]]!r} is not computed; {WAY_OUT}")


def read_change(
    folder: Path, module: str, parts: Mapping[str, Tensor], settings: Mapping[str, Any]
) -> ModuleChange:
    """Return a module's change from its parts; refuse a rank or alpha that is not the file's."""
    if "ia3_l" in parts:
        return ModuleChange(factors=parts["ia3_l"])
    is_embedding = "lora_embedding_A" in parts
    kind = "lora_embedding_" if is_embedding else "lora_"
    a, b = (parts.get(f"{kind}{letter}") for letter in "AB")
    if a is None or b is None or a.dim() != 2 or b.dim() != 2:
        raise ValueError(f"{folder}: {module} has {', '.join(sorted(parts))}, expected matrices A and B")
    rank = find_pattern(settings.get("rank_pattern"), module, settings.get("r"))
    alpha = find_pattern(settings.get("alpha_pattern"), module, settings.get("lora_alpha"))
    if type(rank) is not int or rank < 1 or not isinstance(alpha, int | float):
        raise ValueError(
            f"{folder / CONFIG}: r = {rank!r} and lora_alpha = {alpha!r} of {module} are not numbers"
        )
    if a.shape[0] != rank or b.shape[1] != rank:
        raise ValueError(
            f"{folder}: {module} has A {list(a.shape)} and B {list(b.shape)}, but {CONFIG} says rank {rank}:"
            " its scale would be wrong"
        )
    scale = alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)
    lengths = parts.get("lora_magnitude_vector")
    if bool(settings.get("use_dora")) != (lengths is not None):
        raise ValueError(f"{folder}: {CONFIG} and {WEIGHTS} disagree whether {module} is of DoRA")
    bias = parts.get("lora_B.bias")
    return ModuleChange(
        a, b, scale, lengths, None if bias is None else scale * bias, is_embedding=is_embedding
    )


def find_pattern(patterns: Any, module: str, default: Any) -> Any:
    """Return a rank or alpha: of the first pattern that is the end of a module's name, or else `default`."""
    for pattern, value in (patterns if isinstance(patterns, dict) else {}).items():
        try:
            is_meant = re.match(rf"(.*\.)?({pattern})$", module) is not None
        except re.error as error:
            raise ValueError(f"{CONFIG} has the pattern {pattern!r}, which is none: {error}") from error
        if is_meant:
            return value
    return default


def change_weight(weight: Tensor, change: ModuleChange, is_transposed: bool) -> Tensor:
    """Return a module's weight in fp32 with an adapter in it.

    Args:
        weight: (O, I); transposed, or of an embedding, (I, O).
        change: the adapter's.
        is_transposed: whether the module is a Conv1D.

    Raises:
        ValueError: the shapes do not fit; gives both.
    """
    turned = is_transposed or change.is_embedding
    old = weight.to(torch.float32)
    old = old.T if turned else old
    if change.factors is not None:
        factors = change.factors
        if factors.dim() != 2 or any(n not in (1, m) for n, m in zip(factors.shape, old.shape, strict=True)):
            raise ValueError(f"factors {list(factors.shape)} for a weight {list(old.shape)}")
        new = old * factors
    else:
        assert change.a is not None and change.b is not None
        if (change.b.shape[0], change.a.shape[1]) != tuple(old.shape):
            raise ValueError(
                f"B {list(change.b.shape)} times A {list(change.a.shape)} for a weight {list(old.shape)}"
            )
        new = old + change.scale * (change.b @ change.a)
        if change.lengths is not None:
            lengths = change.lengths.reshape(-1)
            new = new * (lengths / torch.linalg.norm(new, dim=1))[:, None]
    return (new.T if turned else new).contiguous()


def change_bias(bias: Tensor | None, change: ModuleChange) -> Tensor | None:
    """Return a module's bias (O,) in fp32 with an adapter in it; None where it stays as it is."""
    if change.factors is not None and bias is not None:
        # A feed-forward layer's factors are of its input, so that they leave its bias as it is.
        is_of_output = change.factors.shape[1] == 1
        return bias.to(torch.float32) * change.factors.reshape(-1) if is_of_output else None
    if change.bias is not None:
        return change.bias if bias is None else bias.to(torch.float32) + change.bias
    return None


def find_other_kind(change: ModuleChange) -> str:
    """Return by what a change goes beyond a product of A and B; "" where it does not."""
    if change.factors is not None:
        return "IA3"
    if change.lengths is not None:
        return "DoRA"
    if change.is_embedding:
        return "LoRA of an embedding"
    return "" if change.bias is None else "a bias"
