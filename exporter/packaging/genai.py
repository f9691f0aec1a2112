"""A folder for onnxruntime-genai: Python, C#, C++ and Java."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...runtime.bundle.artifact import Artifact
from ...runtime.bundle.bundle import Bundle
from .folder import write_graph
from .graphs import read_graph, take_attention_mask
from .hugging_face import (
    choose_padding,
    count_layers,
    read_cache_sizes,
    read_vocabulary_size,
    write_json,
    write_tokenizer,
)


def write(bundle: Bundle, artifacts: Sequence[Artifact], folder: Path) -> None:
    """Write model.onnx with its weights, genai_config.json and the tokenizer's files."""
    (artifact,) = artifacts
    model = read_graph(bundle, artifact)
    take_attention_mask(model.graph, all_rows=False)
    write_graph(bundle, artifact, model, folder / "model.onnx", "model.onnx.data")
    write_json(folder / "genai_config.json", describe(bundle, artifact))
    write_tokenizer(bundle, folder)


def describe(bundle: Bundle, artifact: Artifact) -> dict[str, Any]:
    """Return genai_config.json. The type "decoder" takes any names of inputs, and the shapes from here."""
    manifest = bundle.manifest
    defaults = manifest.generation
    assert defaults is not None
    heads, head_size = read_cache_sizes(artifact)
    query_heads = int(manifest.config.get("n_head") or manifest.config["num_attention_heads"])
    decoder = {
        "session_options": {"log_id": "onnxruntime-genai", "provider_options": choose_providers(artifact)},
        "filename": "model.onnx",
        "head_size": head_size,
        "hidden_size": query_heads * head_size,
        "num_attention_heads": query_heads,
        "num_key_value_heads": heads,
        "num_hidden_layers": count_layers(artifact),
        "inputs": {
            "input_ids": "input_ids",
            "attention_mask": "attention_mask",
            "past_key_names": "cache.%d.key",
            "past_value_names": "cache.%d.value",
        },
        "outputs": {
            "logits": "logits",
            "present_key_names": "present.%d.key",
            "present_value_names": "present.%d.value",
        },
    }
    search = {
        "max_length": manifest.max_length,
        "past_present_share_buffer": True,
        "do_sample": defaults.do_sample,
        "num_beams": defaults.num_beams,
        "repetition_penalty": defaults.repetition_penalty,
        "temperature": defaults.temperature,
        "top_k": defaults.top_k,
        "top_p": defaults.top_p,
    }
    return {
        "model": {
            "type": "decoder",
            "bos_token_id": defaults.bos if defaults.bos is not None else choose_padding(manifest),
            "eos_token_id": list(defaults.eos),
            "pad_token_id": choose_padding(manifest),
            "vocab_size": read_vocabulary_size(artifact),
            "context_length": manifest.max_length,
            "decoder": decoder,
        },
        "search": {name: value for name, value in search.items() if value is not None},
    }


def choose_providers(artifact: Artifact) -> list[dict[str, Any]]:
    """Return the engines that genai tries before the CPU: fp16 is for a GPU."""
    return [{"cuda": {}}] if artifact.precision == "fp16" else []
