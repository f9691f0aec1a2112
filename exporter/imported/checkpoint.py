"""The base class of imported checkpoints, whose graphs others traced."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from ...models.folder import read_json
from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.source import Source
from ..checkpoints.tokenizers.files import read_settings
from ..errors import CheckpointError, raise_checkpoint_errors
from ..tracing.recipes import Recipe, TraceOptions
from .folder import LENGTHS, Folder
from .shapes import fold_shapes
from .signature import set_signature

if TYPE_CHECKING:
    from ...models.quantized_files import FileCodes

Tensors = Mapping[str, npt.NDArray[np.float32]]

NO_LIMIT = 10**20  # transformers writes 1e30 for a tokenizer without a length


def check_source(source: Source, found: Folder) -> None:
    """Refuse a checkpoint of another kind than the graphs."""
    with raise_checkpoint_errors():
        config = read_json(source.folder / "config.json", missing={})
    for name in ("model_type", "vocab_size"):
        ours = config.get(name)
        theirs = found.config.get(name)
        if ours is not None and theirs is not None and ours != theirs:
            raise CheckpointError(
                f"{source.folder} has {name} {ours!r}, but the model in {found.path} has {theirs!r}; pass the"
                " checkpoint that it was exported from as --source"
            )
    ours = read_rope_theta(config)
    # The former is the value that optimum's transformers has read.
    theirs = found.config.get("rope_theta", read_rope_theta(found.config))
    if ours is not None and theirs is not None and ours != theirs:
        raise CheckpointError(
            f"the checkpoint {source.folder} has rope_theta {ours}, the graphs of {found.path} have {theirs}:"
            " optimum uses transformers before 5, which ignores rope_parameters. Use `planforge export"
            " CHECKPOINT --optimum-python PATH`, which passes them on, instead of optimum-cli and import"
        )


def read_rope_theta(config: Mapping[str, Any]) -> Any:
    """Return rope_theta from the place where transformers 5, or an older version, writes it."""
    parameters = config.get("rope_parameters")
    return (parameters if isinstance(parameters, dict) else config).get("rope_theta")


class ImportedCheckpoint(Checkpoint):
    """A model in the folder `found`; `source` has weights that transformers can read."""

    max_rows: int  # the largest batch, where an import names none

    def __init__(
        self,
        source: Source,
        found: Folder,
        max_batch: int | None = None,
        max_length: int | None = None,
        shared: bool = True,  # whether to try attention over shared buffers
    ) -> None:
        self.source = source
        self.exporter = found.exporter
        has_tokenizer = (source.folder / "tokenizer.json").is_file()  # the exporter's copy is rewritten
        self.folder = source.folder if has_tokenizer else found.path
        self.config_json = dict(found.config)
        self.family = str(found.config.get("model_type"))
        check_source(source, found)
        self.read_graphs(found)
        self.config = self.read_config(found)
        self.read_tokenizers()
        length = self.choose_length(max_length, self.read_context(found))
        self.choices = TraceOptions(max_batch or self.max_rows, length)
        self.recipes = self.read_recipes(shared)
        self.generation = self.read_generation()
        self.encoder = self.read_encoder()

    @abstractmethod
    def read_graphs(self, found: Folder) -> None:
        """Load and simplify the graphs."""

    @abstractmethod
    def read_config(self, found: Folder) -> Any:
        """Return the settings that recipes and the runtime need."""

    @abstractmethod
    def read_recipes(self, shared: bool) -> dict[str, Recipe]:
        """Return recipes of `portable`, and of `ort` where attention over shared buffers is possible."""

    @abstractmethod
    def prepare_graphs(self, tensors: Tensors) -> None:
        """Prepare the graphs once for all recipes; `tensors` are the checkpoint's by name."""

    @abstractmethod
    def make_graph(self, recipe: Recipe) -> ir.Model:
        """Return a copy of a recipe's graph, with the attention of its dialect."""

    def read_codes(self) -> Mapping[str, FileCodes]:
        from ...models.dequantize import read_codes

        with raise_checkpoint_errors():
            return read_codes(self.source.folder)

    def make_graphs(self, wanted: set[str], tensors: Tensors) -> dict[str, ir.Model]:
        """Return graphs with weights by their recipes' ids; `tensors` are the checkpoint's by name."""
        self.prepare_graphs(tensors)
        made = {}
        for name in sorted(wanted):
            recipe = self.recipes[name]
            made[name] = self.make_graph(recipe)
            set_signature(made[name], recipe.inputs, recipe.outputs)
            if recipe.keeps_cache and recipe.dialect == "ort":
                fold_shapes(made[name])
        return made

    def read_context(self, found: Folder) -> int:
        """Return the most tokens that the model takes."""
        return found.require_integer("length", LENGTHS)

    def read_tokenizer_length(self) -> int | None:
        """Return the length at which the checkpoint's tokenizer cuts texts, if it has one."""
        length = read_settings(self.folder).get("model_max_length")
        return length if type(length) is int and self.traits.min_length <= length < NO_LIMIT else None
