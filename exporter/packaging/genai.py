"""A folder for onnxruntime-genai: Python, C#, C++ and Java."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...runtime.bundle.artifact import Artifact
from ...runtime.bundle.bundle import Bundle
from ...runtime.bundle.manifest import Manifest
from .folder import write_graph
from .graphs import read_graph, take_attention_mask
from .hugging_face import (
    choose_padding,
    count_layers,
    count_query_heads,
    read_cache_sizes,
    read_vocabulary_size,
    write_json,
    write_tokenizer,
)
from .links import FilePlacer
from .settings import list_settings, warn_about_unknown

# Settings that its search has; it refuses a file with another one.
KNOWN = (
    "do_sample",
    "temperature",
    "top_k",
    "top_p",
    "repetition_penalty",
    "num_beams",
    "length_penalty",
    "no_repeat_ngram_size",
)


def write(bundle: Bundle, artifacts: Sequence[Artifact], folder: Path, placer: FilePlacer) -> None:
    """Write model.onnx with its weights, genai_config.json and the tokenizer's files."""
    (artifact,) = artifacts
    model = read_graph(bundle, artifact)
    take_attention_mask(model.graph, all_rows=False)
    write_graph(bundle, artifact, model, folder / "model.onnx", "model.onnx.data", placer)
    write_json(folder / "genai_config.json", describe(bundle, artifact))
    write_tokenizer(bundle, folder, placer, settings=describe_frame(bundle.manifest))


def describe_frame(manifest: Manifest) -> dict[str, Any]:
    """Return, for tokenizer_config.json, what genai's tokenizer puts before a text with add_special_tokens.

    It does not read a tokenizer.json's template, and without these would put an end token behind the text.
    """
    defaults = manifest.generation
    assert defaults is not None
    return {"add_bos_token": True, "add_eos_token": False} if defaults.prefix else {}


def describe(bundle: Bundle, artifact: Artifact) -> dict[str, Any]:
    """Return genai_config.json. The type "decoder" takes any names of inputs, and the shapes from here."""
    manifest = bundle.manifest
    defaults = manifest.generation
    assert defaults is not None
    heads, head_size = read_cache_sizes(artifact)
    query_heads = count_query_heads(manifest)
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
        "search": describe_search(manifest),
    }


def describe_search(manifest: Manifest) -> dict[str, Any]:
    """Return the settings that genai's search has."""
    defaults = manifest.generation
    assert defaults is not None
    settings = list_settings(manifest)
    known = {name: settings.pop(name) for name in KNOWN if name in settings}
    if settings.get("early_stopping") is True:
        del settings["early_stopping"]  # it has both, but not "never"
    warn_about_unknown("onnxruntime-genai", settings, settings)
    if defaults.do_sample:
        known = {"top_p": 1.0, **known}  # without one, and with top_k off, it takes the likeliest token
    return {
        "max_length": manifest.max_length,
        "past_present_share_buffer": True,
        "early_stopping": defaults.early_stopping is True,  # its own default is true
        **known,
    }


def choose_providers(artifact: Artifact) -> list[dict[str, Any]]:
    """Return the engines that genai tries before the CPU: graphs that compute in fp16 are for a GPU."""
    return [{"cuda": {}}] if artifact.is_half else []
