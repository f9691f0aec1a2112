"""A folder that optimum's ORTModelFor... classes load."""

from __future__ import annotations

from pathlib import Path

from ...runtime.bundle.artifact import Artifact
from ...runtime.bundle.bundle import Bundle
from .encoders import describe_encoder, name_outputs_as_hugging_face
from .folder import write_graph
from .graphs import add_position_ids, name_cache_as_hugging_face, read_graph, take_attention_mask
from .hugging_face import count_layers, describe_decoder, describe_generation, write_json, write_tokenizer


def write(bundle: Bundle, artifact: Artifact, folder: Path) -> None:
    """Write model.onnx with its weights, config.json and the tokenizer's files."""
    manifest = bundle.manifest
    model = read_graph(bundle, artifact)
    if manifest.encoder is not None:
        head = next(iter(manifest.encoder.heads), None)
        name_outputs_as_hugging_face(model.graph, artifact, head)
        config = describe_encoder(manifest, head)
    else:
        take_attention_mask(model.graph, all_rows=True)
        add_position_ids(model.graph)
        name_cache_as_hugging_face(model.graph, count_layers(artifact))
        config = describe_decoder(manifest, artifact)
        write_json(folder / "generation_config.json", describe_generation(manifest))
    write_graph(bundle, artifact, model, folder / "model.onnx", "model.onnx_data")
    write_json(folder / "config.json", config)
    write_tokenizer(bundle, folder)
