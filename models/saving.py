"""Saves reference models as folders in Hugging Face's layout, which `load_model` reads."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeAlias

from safetensors.torch import save_file
from torch import Tensor

from .bert import Bert
from .bert_names import CLASSIFIERS
from .bert_saving import CLASS_NAMES, describe_bert, publish_bert
from .families import FAMILIES, gpt2_weight
from .folder import SINGLE
from .gpt2 import GPT2
from .llama import Llama, LlamaConfig
from .llama_saving import SAVED_TYPES, describe_llama, publish_llama
from .marian_names import config_json_of, translate_to_marian
from .transformer import Transformer

SavedModel: TypeAlias = GPT2 | Transformer | Bert | Llama


def describe_gpt2(model: GPT2, model_type: str) -> dict[str, Any]:
    return {"architectures": ["GPT2LMHeadModel"], **asdict(model.config)}


def publish_gpt2(model: GPT2, model_type: str, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    prefix = FAMILIES["gpt2"].prefix
    return {
        ("" if name.startswith("lm_head.") else prefix) + name: gpt2_weight(name, tensor)
        for name, tensor in weights.items()
    }


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


LAYOUTS: Mapping[type[Any], Layout] = {
    GPT2: Layout(("gpt2",), describe_gpt2, publish_gpt2),
    Transformer: Layout(("transformer", "marian"), describe_transformer, publish_transformer),
    Bert: Layout(tuple(CLASS_NAMES), describe_bert, publish_bert),
    Llama: Layout(SAVED_TYPES, describe_llama, publish_llama),
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
            which transformers does not read, or "marian".
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
    layout = next((row for kind, row in LAYOUTS.items() if isinstance(model, kind)), None)
    if layout is None:
        names = ", ".join(kind.__name__ for kind in LAYOUTS)
        raise ValueError(f"a {type(model).__name__} cannot be saved; what can is {names}")
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


def find_config(model: SavedModel, layout: Layout, types: Sequence[str]) -> dict[str, Any]:
    """Return the config.json of the first model_type that is read as the model's own config."""
    shapes = {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}
    reasons = []
    for model_type in types:
        try:
            config = {"model_type": model_type, **layout.describe(model, model_type)}
            read = complete_rotary(FAMILIES[model_type].read_config(config, shapes))
        except ValueError as error:
            reasons.append(f"{model_type}: {error}")
            continue
        wanted = complete_rotary(model.config)
        changed = [f.name for f in fields(read) if getattr(read, f.name) != getattr(wanted, f.name)]
        if not changed:
            return config
        name = changed[0]
        reasons.append(
            f"{model_type}: {name} would be read as {getattr(read, name)!r}, not {getattr(wanted, name)!r}"
        )
    raise ValueError(f"this {type(model).__name__} cannot be saved as {reasons[0]}")


def complete_rotary(config: Any) -> Any:
    """Return a config whose rotations all have an original context: if not stretched, the context."""
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
    is_classifier = isinstance(model, Bert) and bool(set(CLASSIFIERS.values()) & set(model.config.heads))
    count = model.config.num_labels if isinstance(model, Bert) and is_classifier else 0
    if labels and len(labels) != count:
        raise ValueError(f"got {len(labels)} labels; the model has {count} classes")
    names = labels or [f"LABEL_{number}" for number in range(count)]
    if not names:
        return {}
    return {
        "id2label": {str(number): label for number, label in enumerate(names)},
        "label2id": {label: number for number, label in enumerate(names)},
    }
