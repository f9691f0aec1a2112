"""Reads a folder that optimum wrote, and refuses what cannot be imported."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import onnx_ir as ir
from onnxscript import version_converter

from ..errors import CheckpointError, shorten_error
from ..passes.weight_files import FileTensor, explain_refusal, replace_external
from ..passes.weights import EXTERNAL_FROM_BYTES, make_lazy_tensor
from ..passes.widen import widen
from .mapped import load_mapped
from .quantized import check_form, check_reference, mark_kept

WIDENED = "planforge.widened"  # in a read graph's `meta`: whether its file computes in half precision
NOT_OF_TEXT = ("pixel_values", "input_features", "input_values")
LENGTHS = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length")
HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads", "encoder_attention_heads")
LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
TRANSFORMERS = "transformers"  # the `producer_name` of graphs that transformers_worker.py wrote
MIN_OPSET = 18  # reductions take their axes as an input from here on; older graphs are converted
# optimum's names for the graphs of one model. A merged decoder has the others in the branches of an If.
ENCODER = "encoder_model.onnx"
MERGED = "decoder_model_merged.onnx"
LATER = "decoder_with_past_model.onnx"
FIRST = "decoder_model.onnx"  # the first step, which projects the source's keys and values
ALONE = ("model.onnx", MERGED, LATER)


@dataclass(frozen=True)
class Folder:
    """A folder's config.json, and the graphs to import."""

    path: Path
    config: Mapping[str, Any]
    model: Path  # the graph of a decoder or an encoder; of an encoder-decoder the decoder's
    encoder: Path | None = None  # of an encoder-decoder
    first: Path | None = None  # the decoder's first step; None where `model` has it, or the encoder its part

    @property
    def exporter(self) -> str:
        """Return what wrote the graphs, "transformers" or "optimum"."""
        return TRANSFORMERS if self.read.producer_name == TRANSFORMERS else "optimum"

    @property
    def architecture(self) -> str:
        """Return the class of the model in transformers, such as LlamaForCausalLM."""
        return read_architecture(self.config)

    @property
    def graph(self) -> ir.Model:
        """Return a new copy of `model`, to change freely; its weights are mapped, not copied."""
        return self.read.clone()

    @property
    def read(self) -> ir.Model:
        """Return `model`, which must not be changed."""
        return self.graphs[self.model]

    @cached_property
    def graphs(self) -> Mapping[Path, ir.Model]:
        """Return all graphs by their files; each is read once and must not be changed."""
        paths = (self.model, self.encoder, self.first)
        return {path: read_graph(path) for path in paths if path is not None}

    def check_comparable(self, has_weights: bool) -> None:
        """Refuse quantized graphs that a comparison cannot prove: with a checkpoint's weights, or without."""
        for path, graph in self.graphs.items():
            check_reference(graph, path, has_weights, rounds=self.encoder is None)

    def read_integer(self, names: tuple[str, ...]) -> int | None:
        """Return the first of some settings that is an integer."""
        return next((self.config[n] for n in names if type(self.config.get(n)) is int), None)

    def require_integer(self, what: str, names: tuple[str, ...]) -> int:
        """Return the first of some settings that is an integer; if none is, name what config.json lacks."""
        value = self.read_integer(names)
        if value is None:
            raise CheckpointError(f"{self.path / 'config.json'} has no {what}: set {' or '.join(names)}")
        return value


def read_architecture(config: Mapping[str, Any]) -> str:
    """Return the name of the model's class in a config.json; "" where it says nothing."""
    named = config.get("architectures")
    return named[0] if isinstance(named, list) and named and isinstance(named[0], str) else ""


def has_weights(folder: Path) -> bool:
    """Tell whether a folder has weights that transformers can read."""
    return any(folder.glob("*.safetensors")) or any(folder.glob("*/*.safetensors"))


def read_folder(path: Path) -> Folder:
    """Find the graphs in a folder."""
    from ...models.folder import read_json

    if (path / "manifest.json").is_file():
        raise CheckpointError(f"{path} is a bundle already: planforge run {path}")
    try:
        config = read_json(path / "config.json")
    except ValueError as error:
        raise CheckpointError(f"{error}; give a folder that `optimum-cli export onnx` wrote") from error
    graphs = sorted(file.name for file in path.glob("*.onnx"))
    if not graphs:
        pickles = sorted(file.name for file in path.glob("*.bin"))
        why = f" (only {pickles[0]}, a pickle, which is never read)" if pickles else ""
        raise CheckpointError(
            f"{path} has no .onnx file{why}; make one: optimum-cli export onnx --model CHECKPOINT --task"
            " TASK FOLDER; or planforge export CHECKPOINT"
        )
    if ENCODER in graphs:
        if MERGED in graphs:
            return Folder(path, config, path / MERGED, path / ENCODER)
        if LATER in graphs and FIRST in graphs:
            return Folder(path, config, path / LATER, path / ENCODER, path / FIRST)
        if LATER in graphs and read_graph(path / LATER).producer_name == TRANSFORMERS:
            return Folder(path, config, path / LATER, path / ENCODER)
    elif found := next((name for name in ALONE if name in graphs), None):
        return Folder(path, config, path / found)
    raise CheckpointError(
        f"{path} has {', '.join(graphs)}; expected are {ALONE[0]}, or {ENCODER} with {MERGED}, or with"
        f" {FIRST} and {LATER}, as `optimum-cli export onnx` writes them"
    )


def read_graph(path: Path) -> ir.Model:
    """Load a graph; refuse files that are not ONNX, that read other files, or that hold no text model."""
    if not path.is_file():
        raise CheckpointError(f"{path} is not a regular file, so it is not read")
    try:
        is_linked = path.is_symlink() or path.stat().st_nlink > 1  # onnx_ir maps nothing through a link
        model = ir.load(path) if is_linked else load_mapped(path)
    except Exception as error:  # protobuf's own errors
        raise CheckpointError(f"{path} is not an ONNX file: {shorten_error(error)}") from error
    map_files(model, path)
    check_form(model, path)
    if (opset := model.opset_imports.get("", 0)) < MIN_OPSET:
        try:
            version_converter.convert_version(model, MIN_OPSET, fallback=True)
        except Exception as error:  # onnxscript's own
            raise CheckpointError(
                f"{path} has opset {opset} and cannot be brought to {MIN_OPSET}: {shorten_error(error)}"
            ) from error
        if model.opset_imports.get("", 0) < MIN_OPSET:
            raise CheckpointError(
                f"{path} has opset {opset} and cannot be brought to {MIN_OPSET}; export it again:"
                f" optimum-cli export onnx --opset {MIN_OPSET}"
            )
    mark_kept(model)  # only now: a conversion may lose what is noted at nodes
    for value in (*model.graph.inputs, *model.graph.outputs):
        if value.dtype in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16):
            raise CheckpointError(
                f"{path} has {value.name!r} in half precision, and inputs and outputs must be in fp32; export"
                " it in fp32, then import it with --precision fp16"
            )
    model.meta[WIDENED] = widen(model)
    names = {str(value.name) for value in model.graph.inputs}
    if found := sorted(names.intersection(NOT_OF_TEXT)):
        raise CheckpointError(f"{path.parent} is not a text model: its graph has the input {found[0]}")
    return model


def map_files(model: ir.Model, path: Path) -> None:
    """Map weights only while they are read; some of optimum's lie in Constant nodes."""
    if model.functions:  # where weights may lie; optimum writes none
        raise CheckpointError(
            f"{path} has functions of its own; inline them: onnx.inliner.inline_local_functions"
        )
    for graph in model.graphs():
        for node in graph:
            if any(attribute.type == ir.AttributeType.TENSORS for attribute in node.attributes.values()):
                raise CheckpointError(f"{path} has a list of tensors in {node.op_type}, which is not read")
    maps: dict[Path, mmap.mmap] = {}
    replace_external(model, lambda weight: map_weight(weight, path, maps))


def map_weight(weight: ir.ExternalTensor, path: Path, maps: dict[Path, mmap.mmap]) -> ir.TensorProtocol:
    """Return a tensor that is read from its file when it is used; a small one is read now."""
    location = str(weight.location)
    shown = location if location.isprintable() else repr(location)
    if (why := explain_refusal(path, location)) is not None:
        raise CheckpointError(f"{path} has weights in {shown}, {why}")
    weight = FileTensor(weight, path, maps)
    try:
        array = weight.numpy()
    except Exception as error:  # onnx_ir's own
        raise CheckpointError(
            f"{path} has weights in {shown}, which cannot be read: {shorten_error(error)}"
        ) from error
    if weight.nbytes < EXTERNAL_FROM_BYTES:
        return ir.tensor(array.copy(), name=weight.name)
    return make_lazy_tensor(weight.numpy, weight.shape.numpy(), weight.dtype.numpy(), str(weight.name))
