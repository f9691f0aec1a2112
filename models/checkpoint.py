"""Published weights -> our models, and back: folders in Hugging Face's layout.

Reads config.json and safetensors only. Nothing is unpickled, no code from a checkpoint is run, and no file
outside the folder is opened. Problems are ValueErrors that name the file or the tensors.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from .gpt2 import CONV1D, GPT2, MASK_BUFFERS, GPT2Config

MAX_JSON_BYTES = 16 * 2**20
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True)
class Family:
    """How one model_type of Hugging Face maps to one of our models."""

    name: str
    model: Callable[[Any], GPT2]
    config: type[Any]
    prefix: str  # what the published names may begin with
    renamed: Callable[[str, Tensor], tuple[str, Tensor] | None]  # None: not a weight
    refused: Mapping[str, object]  # settings we don't implement, each with the value that means "off"


def gpt2_weight(name: str, tensor: Tensor) -> tuple[str, Tensor] | None:
    """A published GPT-2 tensor as ours; its own inverse."""
    if MASK_BUFFERS.fullmatch(name):
        return None
    return name, tensor.T if CONV1D.fullmatch(name) else tensor


FAMILIES = {
    "gpt2": Family(
        name="gpt2",
        model=GPT2,
        config=GPT2Config,
        prefix="transformer.",
        renamed=gpt2_weight,
        refused={
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "add_cross_attention": False,
        },
    ),
}


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of at most 16 MiB."""
    if not path.is_file():
        raise ValueError(f"{path} does not exist")
    if path.stat().st_size > MAX_JSON_BYTES:
        raise ValueError(f"{path} has {path.stat().st_size} bytes; at most {MAX_JSON_BYTES} are read")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # the latter: nested thousands deep
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, not a {type(value).__name__}")
    return value


def family_of(config: Mapping[str, Any]) -> Family:
    """The family of a config.json, by its model_type."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ValueError(
            f"model_type {model_type!r} has no reference model here; known are {sorted(FAMILIES)}"
        )
    return FAMILIES[model_type]


def config_from_json(config: Mapping[str, Any]) -> Any:
    """Our frozen config from the contents of config.json; refuses settings that we don't implement."""
    family = family_of(config)
    for name, off in family.refused.items():
        if config.get(name, off) != off:
            raise ValueError(f"config.json sets {name}={config[name]!r}; only {off!r} is supported")
    known = {f.name for f in fields(family.config)}
    try:
        return family.config(**{name: value for name, value in config.items() if name in known})
    except (TypeError, ValueError) as error:
        raise ValueError(f"config.json: {error}") from error


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint folder: one, or the shards that its index lists."""
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


def read_weights(folder: Path, family: Family) -> dict[str, Tensor]:
    """Every weight under our names, as float32."""
    weights: dict[str, Tensor] = {}
    for path in weight_files(folder):
        try:
            with safe_open(path, framework="pt") as file:
                for published in file.keys():  # noqa: SIM118 - safe_open is not a mapping
                    renamed = family.renamed(
                        published.removeprefix(family.prefix), file.get_tensor(published)
                    )
                    if renamed is None:
                        continue
                    name, tensor = renamed
                    if name in weights:
                        raise ValueError(f"{path} holds {name} twice, with and without a prefix")
                    weights[name] = tensor.to(torch.float32).contiguous()
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} is not a whole safetensors file: {error}") from error
    return weights


def load_model(folder: Path) -> GPT2:
    """The reference model of a folder in Hugging Face's layout, in fp32 and eval mode.

    Args:
        folder: holds config.json and model.safetensors, or shards with an index.

    Raises:
        ValueError: names the file that is missing or damaged; or, where config and weights disagree,
            every missing and every unexpected name, and both shapes of the others.
    """
    config_json = read_json(folder / "config.json")
    family = family_of(config_json)
    config = config_from_json(config_json)
    with torch.device("meta"):  # no memory and no random numbers: the checkpoint's tensors move in
        model = family.model(config)
    weights = read_weights(folder, family)
    if config.tie_word_embeddings:
        head = weights.pop("lm_head.weight", None)
        if head is not None and not torch.equal(head, weights.get("wte.weight", head)):
            raise ValueError(
                f"{folder}: lm_head.weight differs from wte.weight, but config.json ties them;"
                " set tie_word_embeddings to false if the head is its own"
            )
    check_names_and_shapes(folder, dict(model.named_parameters()), weights)
    model.load_state_dict(weights, assign=True, strict=False)  # compared just now, by name and shape
    if config.tie_word_embeddings:
        model.lm_head.weight = model.wte.weight
    return model.eval().requires_grad_(False)


def check_names_and_shapes(folder: Path, wanted: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> None:
    """Compares a model's parameters with a checkpoint's tensors; lists every difference at once."""
    lines = [f"  missing: {name} {tuple(t.shape)}" for name, t in wanted.items() if name not in found]
    lines += [f"  unexpected: {name} {tuple(t.shape)}" for name, t in found.items() if name not in wanted]
    lines += [
        f"  shape: {name} is {tuple(found[name].shape)}, config.json means {tuple(t.shape)}"
        for name, t in wanted.items()
        if name in found and found[name].shape != t.shape
    ]
    if lines:
        raise ValueError("\n".join([f"{folder}: config.json and the weights disagree", *lines]))


def save_model(model: GPT2, folder: Path) -> None:
    """Writes config.json and model.safetensors so that transformers reads them."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **asdict(model.config)}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    weights = {}
    for name, tensor in model.named_parameters():  # lists a tied head once, as wte
        _, published = gpt2_weight(name, tensor.detach()) or (name, tensor)
        prefix = "" if name.startswith("lm_head.") else FAMILIES["gpt2"].prefix
        weights[prefix + name] = published.contiguous()
    save_file(weights, folder / SINGLE, metadata={"format": "pt"})
