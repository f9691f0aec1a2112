"""The files next to a graph in Hugging Face's folders: config, tokenizer and generation config."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

from ...runtime.bundle.artifact import Artifact
from ...runtime.bundle.bundle import Bundle
from ...runtime.bundle.manifest import Manifest
from ..task_traits import TRAITS
from .links import FilePlacer

Change: TypeAlias = Callable[[dict[str, Any]], dict[str, Any]]
TARGET = "target"  # the folder of a translator's second tokenizer


def describe_decoder(manifest: Manifest, artifact: Artifact) -> dict[str, Any]:
    """Return config.json of a decoder: the sizes of its cache come from the graph, not from the family."""
    assert manifest.generation is not None
    heads, head_size = read_cache_sizes(artifact)
    layers = count_layers(artifact)
    query_heads = count_query_heads(manifest)
    if manifest.family == "gpt2":
        sizes = {
            "n_layer": layers,
            "n_head": query_heads,
            "n_embd": query_heads * head_size,
            "n_positions": manifest.max_length,
        }
        model_type = "gpt2"
    else:
        sizes = {
            "num_hidden_layers": layers,
            "num_attention_heads": query_heads,
            "num_key_value_heads": heads,
            "head_dim": head_size,
            "hidden_size": query_heads * head_size,  # of which optimum takes a head's size, not of head_dim
            "max_position_embeddings": manifest.max_length,
        }
        if "intermediate_size" in manifest.config:  # no decoder that was imported says it
            sizes["intermediate_size"] = int(manifest.config["intermediate_size"])
        model_type = "llama"
    return {
        "model_type": model_type,
        "architectures": ["GPT2LMHeadModel" if model_type == "gpt2" else "LlamaForCausalLM"],
        "vocab_size": read_vocabulary_size(artifact),
        **sizes,
        **describe_special_tokens(manifest),
        "use_cache": True,
    }


def count_query_heads(manifest: Manifest) -> int:
    """Return a decoder's heads of queries. An imported one's n_head is that of keys and values."""
    config = manifest.config
    return int(config.get("query_heads") or config.get("n_head") or config["num_attention_heads"])


def describe_special_tokens(manifest: Manifest) -> dict[str, Any]:
    """Return the ids of special tokens under Hugging Face's names, without those that are not set."""
    defaults = manifest.generation
    assert defaults is not None
    values = {
        "bos_token_id": defaults.bos,
        "eos_token_id": list(defaults.eos) if len(defaults.eos) != 1 else defaults.eos[0],
        "pad_token_id": choose_padding(manifest),
        "decoder_start_token_id": defaults.decoder_start,
        "forced_bos_token_id": defaults.forced_bos,
        "forced_eos_token_id": defaults.forced_eos,
    }
    return {name: value for name, value in values.items() if value is not None}


def choose_padding(manifest: Manifest) -> int | None:
    """Return the token that pads rows of a batch; any will do, as the mask hides it."""
    defaults = manifest.generation
    assert defaults is not None
    if defaults.pad is not None:
        return defaults.pad
    return defaults.eos[0] if defaults.eos else 0


def read_cache_sizes(artifact: Artifact) -> tuple[int, int]:
    """Return a decoder's heads of keys and values, and their size."""
    axes = artifact.input("past.0.key").axes
    assert isinstance(axes[1], int) and isinstance(axes[3], int)
    return axes[1], axes[3]


def count_layers(artifact: Artifact) -> int:
    return sum(spec.role.startswith("past.") and spec.role.endswith(".key") for spec in artifact.inputs)


def read_vocabulary_size(artifact: Artifact) -> int:
    width = artifact.output("logits").axes[-1]
    assert isinstance(width, int)
    return width


def write_tokenizer(
    bundle: Bundle,
    folder: Path,
    placer: FilePlacer,
    change: Change = lambda tokenizer: tokenizer,
    settings: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Write tokenizer.json, tokenizer_config.json and the chat template, of a target's in the folder TARGET.

    `change` gets and returns the content of each tokenizer.json; `settings` are further ones of
    tokenizer_config.json.
    """
    manifest = bundle.manifest
    for name, place in zip(manifest.tokenizer["files"], (folder, folder / TARGET), strict=False):
        own = bundle.path(str(name))
        before = json.loads(own.read_bytes())
        content = change(before)
        place.mkdir(exist_ok=True)
        if content == before:
            placer.place(own, place / "tokenizer.json")
        else:
            write_json(place / "tokenizer.json", content)
        config: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": manifest.max_length,
            "clean_up_tokenization_spaces": False,
            "padding_side": "left" if TRAITS[manifest.task].continues_texts else "right",
            "model_input_names": list_model_inputs(manifest),
            **name_special_tokens(manifest, content),
            **settings,
        }
        if "chat_template" in manifest.tokenizer:
            file = bundle.path(str(manifest.tokenizer["chat_template"]["file"]))
            config["chat_template"] = file.read_text(encoding="utf-8")
            (place / "chat_template.jinja").write_text(config["chat_template"], encoding="utf-8")
            if "tool_use" in manifest.tokenizer["chat_template"]:
                tool_use = bundle.path(str(manifest.tokenizer["chat_template"]["tool_use"]))
                (place / "additional_chat_templates").mkdir(exist_ok=True)
                (place / "additional_chat_templates" / "tool_use.jinja").write_bytes(tool_use.read_bytes())
        write_json(place / "tokenizer_config.json", config)


def list_model_inputs(manifest: Manifest) -> list[str]:
    """Return a tokenizer's outputs that its model reads: for an encoder, segments too if it has them."""
    segments = any(spec.role == "segments" for artifact in manifest.artifacts for spec in artifact.inputs)
    return ["input_ids", *(["token_type_ids"] if segments else []), "attention_mask"]


def name_special_tokens(manifest: Manifest, tokenizer: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens of a tokenizer.json under the names that Hugging Face gives them."""
    texts = {int(added["id"]): str(added["content"]) for added in tokenizer.get("added_tokens", [])}
    if manifest.encoder is not None:
        named: dict[str, int | None] = {
            f"{role}_token": number for role, number in manifest.encoder.tokens.items()
        }
    else:
        ids = describe_special_tokens(manifest)
        ends = ids["eos_token_id"]
        named = {
            "bos_token": ids.get("bos_token_id"),
            "eos_token": ends[0] if isinstance(ends, list) and ends else ends,
            "pad_token": ids.get("pad_token_id"),
        }
    tokens = {name: texts[n] for name, n in named.items() if n is not None and n in texts}
    if isinstance(unknown := tokenizer["model"].get("unk_token"), str):
        tokens["unk_token"] = unknown
    return tokens | {
        str(k): str(v) for k, v in manifest.tokenizer.get("chat_template", {}).get("tokens", {}).items()
    }


def write_json(path: Path, value: Mapping[str, Any] | Sequence[Any]) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
