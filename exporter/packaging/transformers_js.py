"""A folder for transformers.js, in Node and in browsers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...runtime.bundle.artifact import Artifact
from ...runtime.bundle.bundle import Bundle
from .folder import write_graph
from .graphs import name_cache_as_hugging_face, read_graph, take_attention_mask
from .hugging_face import count_layers, describe_decoder, describe_generation, write_json, write_tokenizer
from .tables import spell_out_tables

SUFFIXES = {"fp32": "", "fp16": "_fp16", "int8": "_int8", "int4": "_q4"}  # of files, by precision
DTYPES = {"fp32": "fp32", "fp16": "fp16", "int8": "int8", "int4": "q4"}  # as its users name them


def write(bundle: Bundle, artifacts: Sequence[Artifact], folder: Path) -> None:
    """Write onnx/model*.onnx with their weights, config.json and the tokenizer's files."""
    external: dict[str, int] = {}
    for artifact in artifacts:
        model = read_graph(bundle, artifact)
        take_attention_mask(model.graph, all_rows=False)
        spell_out_tables(model.graph)
        name_cache_as_hugging_face(model.graph, count_layers(artifact))
        name = f"model{SUFFIXES[artifact.precision]}.onnx"
        write_graph(bundle, artifact, model, folder / "onnx" / name, f"{name}_data")
        external[name] = 1
    config: dict[str, Any] = describe_decoder(bundle.manifest, artifacts[0])
    config["transformers.js_config"] = {"use_external_data_format": external}
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", describe_generation(bundle.manifest))
    write_tokenizer(bundle, folder)
