"""Traces a checkpoint's model in transformers to the graphs that an import reads; a child process runs it.

transformers.exporters replaces parts of torch while it traces, so no other work shares its process.

B batch, T tokens of this step, P cached tokens, S tokens of a source
"""

from __future__ import annotations

import inspect
import json
import sys
import traceback
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
import transformers
from torch import Tensor, nn
from transformers.exporters.configs import OnnxConfig
from transformers.exporters.exporter_onnx import OnnxExporter

from .folder import TRANSFORMERS

Shapes = dict[str, Any]
KeysAndValues = Mapping[str, Tensor]  # "key" and "value"

BATCH = 2  # sizes of the examples that are traced; all differ, as equal ones would count as one axis
TOKENS = 3
PAST = 5
SOURCE = 7
TOKEN = 4  # the id of every token; no special one of any usual vocabulary
ANY = torch.export.Dim.AUTO
STATES_AND_LOGITS = ("last_hidden_state", "logits", "start_logits", "end_logits")  # the outputs of an encoder


POOLER = "pooler"  # of the names of weights that no output of an encoder needs


class Graph(nn.Module, ABC):
    """A part of a model of transformers that becomes one graph; arguments and results are dictionaries."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    @abstractmethod
    def make_example(self) -> tuple[dict[str, Any], Shapes]:
        """Return arguments to trace `forward` with, and which of their axes are free."""


class Encoder(Graph):
    """A model without a cache."""

    def forward(self, **given: Tensor) -> dict[str, Tensor]:
        """Return hidden states, or a head's logits, of ids and masks (B, T)."""
        outputs = self.model(**given)
        return {name: outputs[name] for name in outputs if name in STATES_AND_LOGITS}

    def make_example(self) -> tuple[dict[str, Any], Shapes]:
        fill = {"input_ids": TOKEN, "attention_mask": 1}
        kinds = getattr(self.model.config, "type_vocab_size", 0)
        if kinds and kinds > 1 and takes(self.model, "token_type_ids"):
            fill["token_type_ids"] = 0
        example = {name: torch.full((BATCH, TOKENS), value) for name, value in fill.items()}
        return example, allow_rows(example)


class Decoder(Graph):
    """A step of a decoder that generates text."""

    def forward(self, past_key_values: Mapping[str, KeysAndValues], **given: Tensor) -> dict[str, Any]:
        """Return logits of ids (B, T), and the caches that `past_key_values` grow to."""
        cache = make_cache(past_key_values.values())
        outputs = self.model(past_key_values=cache, use_cache=True, **given)
        return {"logits": outputs.logits, "present": read_cache(cache)}

    def make_example(self) -> tuple[dict[str, Any], Shapes]:
        cache = transformers.DynamicCache()
        self.model(input_ids=torch.full((BATCH, PAST), TOKEN), past_key_values=cache, use_cache=True)
        example: dict[str, Any] = {
            "past_key_values": read_cache(cache),
            "input_ids": torch.full((BATCH, TOKENS), TOKEN),
            "attention_mask": torch.ones(BATCH, PAST + TOKENS, dtype=torch.long),
        }
        if takes(self.model, "position_ids"):
            example["position_ids"] = torch.arange(PAST, PAST + TOKENS).expand(BATCH, -1).contiguous()
        return example, {**allow_rows(example), "past_key_values": allow_lengths(example["past_key_values"])}


class SourceEncoder(Graph):
    """The encoder of an encoder-decoder, and what the decoder's layers make of its states."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Any]:
        """Return each layer's keys and values of a source (B, S)."""
        cache = transformers.EncoderDecoderCache(transformers.DynamicCache(), transformers.DynamicCache())
        self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            decoder_input_ids=torch.full_like(input_ids[:, :1], TOKEN),
            past_key_values=cache,
            use_cache=True,
        )
        source = read_cache(cache.cross_attention_cache)
        return {"present": {layer: {"encoder": kept} for layer, kept in source.items()}}

    def make_example(self) -> tuple[dict[str, Any], Shapes]:
        ids = torch.full((BATCH, SOURCE), TOKEN)
        example = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        return example, allow_rows(example)


class TargetDecoder(Graph):
    """A step of an encoder-decoder's decoder."""

    def forward(
        self,
        input_ids: Tensor,
        encoder_attention_mask: Tensor,
        past_key_values: Mapping[str, Mapping[str, KeysAndValues]],
    ) -> dict[str, Any]:
        """Return logits of ids (B, T), and the caches of the layers' own tokens."""
        layers = past_key_values.values()
        cache = transformers.EncoderDecoderCache(
            make_cache(layer["decoder"] for layer in layers), make_cache(layer["encoder"] for layer in layers)
        )
        cache.is_updated = dict.fromkeys(range(len(layers)), True)
        width = self.model.get_encoder().config.hidden_size
        # Nothing reads the states themselves, as all layers have their keys and values.
        states = torch.zeros(*encoder_attention_mask.shape, width)
        outputs = self.model(
            encoder_outputs=(states,),
            attention_mask=encoder_attention_mask,
            decoder_input_ids=input_ids,
            past_key_values=cache,
            use_cache=True,
        )
        own = read_cache(cache.self_attention_cache)
        return {
            "logits": outputs.logits,
            "present": {layer: {"decoder": kept} for layer, kept in own.items()},
        }

    def make_example(self) -> tuple[dict[str, Any], Shapes]:
        cache = transformers.EncoderDecoderCache(transformers.DynamicCache(), transformers.DynamicCache())
        source = torch.full((BATCH, SOURCE), TOKEN)
        past = torch.full((BATCH, PAST), TOKEN)
        self.model(input_ids=source, decoder_input_ids=past, past_key_values=cache, use_cache=True)
        own = read_cache(cache.self_attention_cache)
        given = read_cache(cache.cross_attention_cache)
        caches = {layer: {"decoder": own[layer], "encoder": given[layer]} for layer in own}
        example = {
            "input_ids": torch.full((BATCH, TOKENS), TOKEN),
            "encoder_attention_mask": torch.ones_like(source),
            "past_key_values": caches,
        }
        lengths = {layer: allow_lengths(kinds) for layer, kinds in caches.items()}
        return example, {**allow_rows(example), "past_key_values": lengths}


def takes(model: nn.Module, name: str) -> bool:
    """Tell whether a model's forward has an argument."""
    return name in inspect.signature(model.forward).parameters


def make_cache(layers: Iterable[KeysAndValues]) -> Any:
    """Return a cache of layers' keys and values (B, H, P, D). It has no windows: masks have them."""
    return transformers.DynamicCache([(layer["key"], layer["value"]) for layer in layers])


def read_cache(cache: Any) -> dict[str, dict[str, Tensor]]:
    """Return a cache's keys and values by layer."""
    return {str(i): {"key": one.keys, "value": one.values} for i, one in enumerate(cache.layers)}


def allow_rows(example: Mapping[str, Any]) -> dict[str, Any]:
    """Return which axes of ids and masks (B, T) are free: both."""
    return {name: {0: ANY, 1: ANY} for name in example}


def allow_lengths(caches: Mapping[str, KeysAndValues]) -> Shapes:
    """Return which axes of (B, H, P, D) are free: B and P."""
    return {name: {kind: {0: ANY, 2: ANY} for kind in kinds} for name, kinds in caches.items()}


def trace(step: Any, path: Path) -> None:
    """Write the graph of a step, with its weights beside it."""
    with torch.no_grad():
        example, shapes = step.make_example()
    model = OnnxExporter().export(step, example, OnnxConfig(dynamic=True, dynamic_shapes=shapes)).program
    read_fixed_axes(model)
    model.producer_name = TRANSFORMERS
    ir.save(model, path, external_data=f"{path.name}_data")


def read_fixed_axes(model: ir.Model) -> None:
    """Make integers of axes that are called by one, such as "4", which is how the exporter writes some."""
    computed = [value for node in model.graph.all_nodes() for value in node.outputs]
    for value in (*model.graph.inputs, *model.graph.outputs, *computed):
        if value.shape is not None:
            value.shape = ir.Shape([int(str(axis)) if str(axis).isdigit() else axis for axis in value.shape])


def load(checkpoint: Path, class_name: str) -> Any:
    """Load a checkpoint in fp32, with attention in plain operators.

    Raises:
        ValueError: the files lack weights of the model, which transformers would make up.
    """
    model, found = getattr(transformers, class_name).from_pretrained(
        checkpoint,
        dtype=torch.float32,
        attn_implementation="eager",
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=True,
        output_loading_info=True,
    )
    lacking = [*found["missing_keys"], *map(str, found["mismatched_keys"])]
    if lacking := sorted(name for name in lacking if POOLER not in name):
        raise ValueError(
            f"{len(lacking)} weights of {type(model).__name__} are missing, such as {lacking[0]}"
        )
    return model.eval().requires_grad_(False)


def write(model: Any, kind: str, out: Path) -> None:
    """Trace the graphs of a kind of model."""
    if kind == "translator":
        trace(SourceEncoder(model), out / "encoder_model.onnx")
        trace(TargetDecoder(model), out / "decoder_with_past_model.onnx")
    else:
        trace(Decoder(model) if kind == "decoder" else Encoder(model), out / "model.onnx")


def find_place(model: nn.Module, error: BaseException) -> str:
    """Return the last module of a model in whose forward an error was raised, and its line."""
    names = {module: name for name, module in model.named_modules()}
    place = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module) and module in names:
            file = Path(frame.f_code.co_filename).name
            place = f"{names[module] or type(module).__name__} ({type(module).__name__}, {file}:{line})"
    return place


def main(arguments: list[str]) -> None:
    """Write a CHECKPOINT's graphs, read as a CLASS, of a KIND, to OUT; one line of JSON says an error."""
    checkpoint, class_name, kind, out = arguments
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    model = None
    try:
        model = load(Path(checkpoint), class_name)
        write(model, kind, Path(out))
    except Exception as error:
        place = "" if model is None else find_place(model, error)
        said = {"reason": f"{type(error).__name__}: {error}", "place": place, "loaded": model is not None}
        print(json.dumps(said), flush=True)
        sys.exit(1)
    model.config.save_pretrained(out)
    if not Path(checkpoint, "tokenizer.json").is_file():
        transformers.AutoTokenizer.from_pretrained(checkpoint, local_files_only=True).save_pretrained(out)
