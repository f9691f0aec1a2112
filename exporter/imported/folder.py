"""A folder that optimum wrote, and what of it cannot be taken."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir

from ..errors import CheckpointError, first_line

NOT_OF_TEXT = ("pixel_values", "input_features", "input_values")
LENGTHS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length")
HEADS = ("num_attention_heads", "n_head", "num_heads")


@dataclass(frozen=True)
class Folder:
    """Its config.json and its one graph.

    Attributes:
        config: as it stands.
    """

    path: Path
    config: Mapping[str, Any]
    graph: Path

    def whole(self, names: tuple[str, ...]) -> int | None:
        """The first of some settings that is a whole number."""
        return next((self.config[n] for n in names if type(self.config.get(n)) is int), None)


def read_folder(path: Path) -> Folder:
    """Finds a decoder's graph.

    Raises:
        CheckpointError: no ONNX file, several that belong together, not a model of text; says what there is.
    """
    from ...models.folder import read_json

    try:
        config = read_json(path / "config.json")
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    graphs = sorted(file.name for file in path.glob("*.onnx"))
    if not graphs:
        pickles = sorted(file.name for file in path.glob("*.bin"))
        why = f"only {pickles[0]}, a pickle, which is never read" if pickles else "none"
        raise CheckpointError(
            f"{path} has no .onnx file ({why}); make one: optimum-cli export onnx --model CHECKPOINT"
            " --task text-generation-with-past FOLDER"
        )
    if graphs != ["model.onnx"]:
        raise CheckpointError(
            f"{path} has {', '.join(graphs)}; this version imports decoders, which are one model.onnx"
        )
    return Folder(path, config, path / graphs[0])


def load_graph(folder: Folder) -> ir.Model:
    """The graph.

    Raises:
        CheckpointError: it cannot be read, or is not of text.
    """
    try:
        model = ir.load(folder.graph)
    except Exception as error:  # protobuf's own errors
        raise CheckpointError(f"{folder.graph} is not an ONNX file: {first_line(error)}") from error
    names = {str(value.name) for value in model.graph.inputs}
    if found := sorted(names.intersection(NOT_OF_TEXT)):
        raise CheckpointError(f"{folder.path} is no model of text: its graph reads {found[0]}")
    return model
