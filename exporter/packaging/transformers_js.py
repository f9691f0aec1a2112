"""A folder for transformers.js, in Node and in browsers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir

from ...runtime.bundle.artifact import Artifact
from ...runtime.bundle.bundle import Bundle
from ...runtime.bundle.manifest import Manifest
from ..task_traits import ENCODING, GENERATION, TRAITS, TRANSLATION
from .encoders import convert_encoder, describe_encoder, find_head
from .folder import write_graph
from .graphs import name_cache_as_hugging_face, read_graph, rename_axes, take_attention_mask
from .hugging_face import count_layers, describe_decoder, write_json, write_tokenizer
from .links import FilePlacer
from .sentences import write_sentence_files
from .settings import describe_generation, list_settings, warn_about_unknown
from .tables import spell_out_tables
from .translators import convert_decoder, describe_translator, join_cross_attention

SUFFIXES = {"fp32": "", "fp16": "_fp16", "int8": "_int8", "int4": "_q4"}  # of files, by precision
DTYPES = {"fp32": "fp32", "fp16": "fp16", "int8": "int8", "int4": "q4"}  # as its users name them
SIGMA = {
    "type": "Replace",
    "pattern": {"String": "\N{GREEK CAPITAL LETTER SIGMA}"},
    "content": "\N{GREEK SMALL LETTER SIGMA}",
}
# Settings that it reads and does nothing with.
UNKNOWN = (
    *("top_p", "min_p", "num_beams", "length_penalty", "early_stopping", "renormalize_logits"),
    *("sequence_bias", "exponential_decay_length_penalty", "stop_strings"),
)
# By task and graph: the file's name without suffix.
FILES = {
    (GENERATION.name, "decoder"): "model",
    (ENCODING.name, "encoder"): "model",
    (TRANSLATION.name, "encoder"): "encoder_model",
    (TRANSLATION.name, "decoder"): "decoder_model_merged",
}


def write(bundle: Bundle, artifacts: Sequence[Artifact], folder: Path, placer: FilePlacer) -> None:
    """Write onnx/model*.onnx with their weights, config.json and the tokenizer's files."""
    manifest = bundle.manifest
    external: dict[str, int] = {}
    for artifact in artifacts:
        model = read_graph(bundle, artifact)
        convert(model.graph, manifest, artifact)
        spell_out_tables(model.graph)
        name = f"{FILES[manifest.task, artifact.graph]}{SUFFIXES[artifact.precision]}.onnx"
        write_graph(bundle, artifact, model, folder / "onnx" / name, f"{name}_data", placer, fetched=True)
        external[name] = 1
    config = describe_model(bundle, artifacts)
    config["transformers.js_config"] = {"use_external_data_format": external}
    write_json(folder / "config.json", config)
    if manifest.generation is not None:
        warn_about_unknown("transformers.js", list_settings(manifest), UNKNOWN)
        write_json(folder / "generation_config.json", describe_generation(manifest))
    elif find_head(manifest) is None:
        write_sentence_files(manifest, folder)
    write_tokenizer(bundle, folder, placer, lower_every_sigma)


def convert(graph: ir.Graph, manifest: Manifest, artifact: Artifact) -> None:
    """Give a graph the inputs and outputs that transformers.js knows."""
    if manifest.encoder is not None:
        convert_encoder(graph, manifest, artifact, embedding=True)
        rename_axes((*graph.inputs, *graph.outputs), {"batch": "batch_size", "tokens": "sequence_length"})
    elif artifact.graph == "encoder":
        join_cross_attention(graph)
    elif TRAITS[manifest.task].has_sources:
        convert_decoder(graph, artifact)
    else:
        take_attention_mask(graph, all_rows=False)
        name_cache_as_hugging_face(graph, count_layers(artifact))


def describe_model(bundle: Bundle, artifacts: Sequence[Artifact]) -> dict[str, Any]:
    """Return config.json."""
    manifest = bundle.manifest
    if manifest.encoder is not None:
        return describe_encoder(manifest)
    decoder = next(artifact for artifact in artifacts if artifact.graph == "decoder")
    if TRAITS[manifest.task].has_sources:
        return describe_translator(manifest, decoder)
    return describe_decoder(manifest, decoder)


def lower_every_sigma(tokenizer: dict[str, Any]) -> dict[str, Any]:
    """Return a tokenizer.json that handles the Greek letter sigma in JavaScript as elsewhere.

    JavaScript lower-cases the last \N{GREEK CAPITAL LETTER SIGMA} of a word to
    \N{GREEK SMALL LETTER FINAL SIGMA}, and the library tokenizers each to \N{GREEK SMALL LETTER SIGMA}.
    """
    return {**tokenizer, "normalizer": replace_sigma(tokenizer.get("normalizer"))}


def replace_sigma(normalizer: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return a normalizer that replaces the letter before it lower-cases."""
    if normalizer is None:
        return None
    if normalizer["type"] == "Sequence":
        return {**normalizer, "normalizers": [replace_sigma(part) for part in normalizer["normalizers"]]}
    if normalizer["type"] == "Lowercase" or normalizer.get("lowercase"):
        return {"type": "Sequence", "normalizers": [SIGMA, normalizer]}
    return normalizer
