"""Saves reference models as folders in Hugging Face's layout, which `load_model` reads."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from safetensors.torch import save_file
from torch import Tensor

from .bert import Bert
from .bert_names import CLASSIFIERS
from .bert_saving import CLASS_NAMES, describe_bert, publish_bert
from .causal_encoder import CausalEncoder, CausalEncoderConfig
from .causal_saving import add_head_to_layout
from .families import FAMILIES, Family
from .folder import SINGLE
from .gpt2 import GPT2
from .gpt2_saving import CLASS_NAMES as GPT_NAMES
from .gpt2_saving import describe_gpt2, publish_gpt2
from .llama import Llama, LlamaConfig
from .llama_saving import SAVED_TYPES, describe_llama, publish_llama
from .marian_names import config_json_of, translate_to_marian
from .recurrent import Recurrent
from .retro import Retro
from .transformer import Transformer

SavedModel: TypeAlias = GPT2 | Transformer | Bert | Llama | Recurrent | Retro | CausalEncoder


def describe_transformer(model: Transformer, model_type: str) -> dict[str, Any]:
    return config_json_of(model.config) if model_type == "marian" else asdict(model.config)


def publish_transformer(
    model: Transformer, model_type: str, weights: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    if model_type == "transformer":
        return dict(weights)
    published = {
        translate_to_marian(name): tensor[None] if name == "output.bias" else tensor
        for name, tensor in weights.items()
    }
    words = model.source.words.weight
    if model.config.share_embeddings and model.config.tie_word_embeddings:
        published["model.shared.weight"] = published.pop("model.encoder.embed_tokens.weight")
    elif model.config.share_embeddings:  # where the output is not tied, transformers 5 ties nothing
        for name in ("model.shared.weight", "model.decoder.embed_tokens.weight"):
            published[name] = words.clone()
    return published


@dataclass(frozen=True)
class Layout:
    """The layouts that a class of models has.

    Attributes:
        types: values of model_type, the usual one first.
        describe: returns config.json's settings of a model for a model_type.
        publish: returns its weights by their published names, of those by our names.
    """

    types: Sequence[str]
    describe: Callable[[Any, str], dict[str, Any]]
    publish: Callable[[Any, str, Mapping[str, Tensor]], dict[str, Tensor]]


def make_own_layout(model_type: str) -> Layout:
    """Return the layout of a model that nobody else reads: the names are our own."""
    return Layout(
        (model_type,),
        lambda model, model_type: asdict(model.config),
        lambda model, model_type, weights: dict(weights),
    )


LAYOUTS: Mapping[type[Any], Layout] = {
    GPT2: Layout(tuple(GPT_NAMES), describe_gpt2, publish_gpt2),
    Transformer: Layout(("transformer", "marian"), describe_transformer, publish_transformer),
    Bert: Layout(tuple(CLASS_NAMES), describe_bert, publish_bert),
    Recurrent: make_own_layout("recurrent"),
    Retro: make_own_layout("retro"),
    Llama: Layout(SAVED_TYPES, describe_llama, publish_llama),
}
# With a head, by their decoder.
LAYOUTS_WITH_HEAD: Mapping[type[Any], Layout] = {
    kind: add_head_to_layout(LAYOUTS[kind]) for kind in (GPT2, Llama)
}


def save_model(
    model: SavedModel,
    folder: str | Path,
    model_type: str | None = None,
    labels: Sequence[str] = (),
    settings: Mapping[str, Any] | None = None,
) -> None:
    """Write config.json and model.safetensors, so that `load_model` and transformers read them.

    Args:
        model: its weights are written in the type that they have.
        folder: created if it does not exist. The tokenizer's files are the caller's to add.
        model_type: of config.json; the first that fits the model when None. A Transformer is "transformer",
            which transformers does not read, or "marian"; nor does it read a Recurrent's.
        labels: the names of a classifier's classes; LABEL_0 and so on without any.
        settings: other members of config.json, such as eos_token_id.

    Raises:
        ValueError: the model has the caller's own parts, or settings that no such config.json can have, or
            labels or settings contradict it; nothing is written.
    """
    if isinstance(model, Transformer) and (own := model.custom_parts()):
        raise ValueError(
            f"a Transformer with its own {' and '.join(own)} cannot be saved: it runs in PyTorch only"
        )
    layout = find_layout(model)
    if model_type is not None and model_type not in layout.types:
        raise ValueError(f"model_type={model_type!r} is not one of {', '.join(layout.types)}")
    config = find_config(model, layout, layout.types if model_type is None else (model_type,))
    config |= name_labels(model, labels)
    for name, value in (settings or {}).items():
        if config.get(name) not in (None, value):
            raise ValueError(f"settings has {name}={value!r}, but the model has {name}={config[name]!r}")
    published = layout.publish(model, config["model_type"], dict(model.named_parameters()))
    weights = {name: tensor.detach().contiguous() for name, tensor in published.items()}
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({**config, **(settings or {})}, indent=2) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")
    save_file(weights, folder / SINGLE, metadata={"format": "pt"})


def find_layout(model: SavedModel) -> Layout:
    """Return the layouts of a model; of one that reads whole texts those of its decoder with a head."""
    if isinstance(model, CausalEncoder):
        return LAYOUTS_WITH_HEAD[type(model.decoder)]
    for kind, layout in LAYOUTS.items():
        if isinstance(model, kind):
            return layout
    kinds: list[type[Any]] = [*LAYOUTS, CausalEncoder]
    names = ", ".join(kind.__name__ for kind in kinds)
    raise ValueError(f"a {type(model).__name__} cannot be saved; what can is {names}")


def check_saved(model: SavedModel) -> None:
    """Refuse a model that `save_model` cannot write, by a ValueError; its weights may have any values."""
    layout = find_layout(model)
    find_config(model, layout, layout.types)


def find_config(model: SavedModel, layout: Layout, types: Sequence[str]) -> dict[str, Any]:
    """Return the config.json of the first model_type that is read as the model's own config."""
    shapes = {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}
    reasons = []
    for model_type in types:
        try:
            config = {"model_type": model_type, **layout.describe(model, model_type)}
            read = complete_rotary(find_family(model, model_type).read_config(config, shapes))
        except ValueError as error:
            reasons.append(f"{model_type}: {error}")
            continue
        change = find_change(read, complete_rotary(model.config))
        if change is None:
            return config
        reasons.append(f"{model_type}: {change}")
    raise ValueError(
        f"this {type(model).__name__} cannot be saved as {'; or as '.join(reasons[:2])}. Train such a model"
        " with transformers' Trainer, and export the folder that it writes"
    )


def find_change(read: Any, own: Any) -> str | None:
    """Return how a config that would be read differs from a model's own in a setting; None if it does not."""
    for name in (field.name for field in fields(own)):
        found = getattr(read, name)
        wanted = getattr(own, name)
        if found == wanted:
            continue
        if is_dataclass(found) and type(found) is type(wanted):
            return find_change(found, wanted)
        return f"{name} would be read as {found!r}, not {wanted!r}"
    return None


def find_family(model: SavedModel, model_type: str) -> Family:
    """Return the family that a model's folder is read by."""
    family = FAMILIES[model_type]
    if not isinstance(model, CausalEncoder):
        return family
    assert family.with_head is not None
    return family.with_head


def complete_rotary(config: Any) -> Any:
    """Return a config whose rotations all have an original context: if not stretched, the context."""
    if isinstance(config, CausalEncoderConfig):
        return replace(config, decoder=complete_rotary(config.decoder))
    if not isinstance(config, LlamaConfig):
        return config
    rotations: dict[str, Any] = {
        name: replace(rotary, original_max_position_embeddings=config.context)
        for name, rotary in (("rotary", config.rotary), ("window_rotary", config.window_rotary))
        if rotary is not None
        and (rotary.rope_type == "default" or not rotary.original_max_position_embeddings)
    }
    return replace(config, **rotations)


def name_labels(model: SavedModel, labels: Sequence[str]) -> dict[str, Any]:
    """Return config.json's names of a classifier's classes; nothing for other models.

    Raises:
        ValueError: there are not as many names as classes.
    """
    count = 0
    if isinstance(model, Bert | CausalEncoder) and set(CLASSIFIERS.values()) & set(model.config.heads):
        count = model.config.num_labels
    if labels and len(labels) != count:
        raise ValueError(f"got {len(labels)} labels; the model has {count} classes")
    names = labels or [f"LABEL_{number}" for number in range(count)]
    if not names:
        return {}
    return {
        "id2label": {str(number): label for number, label in enumerate(names)},
        "label2id": {label: number for number, label in enumerate(names)},
    }
