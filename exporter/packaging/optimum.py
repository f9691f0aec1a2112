"""A folder that optimum's ORTModelFor... classes load."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ...runtime.bundle.artifact import Artifact
from ...runtime.bundle.bundle import Bundle
from .encoders import convert_encoder, describe_encoder, find_head
from .folder import write_graph
from .graphs import add_position_ids, name_cache_as_hugging_face, read_graph, take_attention_mask
from .hugging_face import count_layers, describe_decoder, write_json, write_tokenizer
from .links import FilePlacer
from .sentences import write_sentence_files
from .settings import describe_generation


def write(bundle: Bundle, artifacts: Sequence[Artifact], folder: Path, placer: FilePlacer) -> None:
    """Write model.onnx with its weights, config.json and the tokenizer's files."""
    (artifact,) = artifacts
    manifest = bundle.manifest
    model = read_graph(bundle, artifact)
    if manifest.encoder is not None:
        convert_encoder(model.graph, manifest, artifact)
        config = describe_encoder(manifest)
        if find_head(manifest) is None:
            write_sentence_files(manifest, folder)
    else:
        take_attention_mask(model.graph, all_rows=True)
        add_position_ids(model.graph)
        name_cache_as_hugging_face(model.graph, count_layers(artifact))
        config = describe_decoder(manifest, artifact)
        write_json(folder / "generation_config.json", describe_generation(manifest))
    write_graph(bundle, artifact, model, folder / "model.onnx", "model.onnx_data", placer)
    write_json(folder / "config.json", config)
    write_tokenizer(bundle, folder, placer)
