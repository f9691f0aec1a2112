"""Gives PyTorch the values that a graph stores, so that modules differ only by their computation."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import onnx_ir as ir
import torch
from torch import nn

from ...runtime.bundle.bundle import Bundle
from ...runtime.bundle.manifest import Artifact
from ..passes.quantized_weight import StoredWeight
from ..passes.storage import read_weights
from ..passes.weight_files import load_graph
from ..passes.weights import ParameterRef
from ..tasks.rounding import ExchangedWeights, round_to, untie

Types = Mapping[str, "ir.DataType | None"]
FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16)


@dataclass(frozen=True)
class StoredValues:
    """The values of a model that its graphs store differently from PyTorch."""

    weights: list[StoredWeight]  # the quantized ones
    types: Types  # of the others, under all their names
    # Tied weights of which a graph quantizes one of lookup and product, and the class that keeps floats.
    untied: Mapping[nn.Parameter, type[nn.Module]]


def read_stored(bundle: Bundle, artifact: Artifact, model: nn.Module) -> StoredValues:
    """Return the stored values of a graph, and of the graph that it runs with.

    A graph's own weight counts before the other graph's, under any of its names.
    """
    together = [artifact]  # with the graph that it runs with
    for other in bundle.manifest.artifacts:
        alike = (other.dialect, other.precision) == (artifact.dialect, artifact.precision)
        together += [other] if alike and other.graph != artifact.graph else []
    parameters = dict(model.named_parameters(remove_duplicate=False))
    weights: list[StoredWeight] = []
    types: dict[str, ir.DataType | None] = {}
    untied: dict[nn.Parameter, type[nn.Module]] = {}
    for other in together:
        graph = load_graph(bundle.path(other.file)).graph
        own = read_weights(graph, other.quantization.get("rows", {}))
        known = {*types, *(name for weight in weights for name in weight.names)}
        taken = {parameters[name] for name in known & parameters.keys()}  # under any of their names
        kept = [w for w in own if not any(parameters.get(name) in taken for name in w.names)]
        constants = [(ParameterRef.read(v).parameter, v.dtype) for v in graph.initializers.values()]
        floats: Types = {name: dtype for name, dtype in constants if dtype in FLOATS}
        in_floats = {parameters[name]: dtype for name, dtype in floats.items() if name in parameters}
        for weight in kept:
            both = [parameters[name] for name in weight.names if parameters.get(name) in in_floats]
            untied |= dict.fromkeys(both, nn.Linear if weight.is_table else nn.Embedding)
        weights += kept
        tied = {name: in_floats[tensor] for name, tensor in parameters.items() if tensor in in_floats}
        types = {**floats, **tied, **types}
    return StoredValues(weights, types, untied)


@contextmanager
def store_weights(model: nn.Module, stored: StoredValues) -> Iterator[None]:
    """Give a model the values that graphs store, inside the context: codes, and weights in fp16."""
    quantized = dict(model.named_parameters(remove_duplicate=False))
    with untie(model, stored.untied):
        parameters = dict(model.named_parameters(remove_duplicate=False))
        tables = dict(model.named_buffers(remove_duplicate=False))
        exchanged = ExchangedWeights(model)
        try:
            for weight in stored.weights:
                if all(name in quantized for name in weight.names):
                    exchange(exchanged, [quantized[name] for name in weight.names], weight)
            codes = {
                quantized[name] for weight in stored.weights for name in weight.names if name in quantized
            }
            is_half = ir.DataType.FLOAT16 in stored.types.values()
            for name, tensor in {**parameters, **tables}.items() if is_half else ():
                if tensor in codes:
                    continue
                # Other exporters' tables, such as of frequencies, have names of their own.
                is_own = name in parameters or name.endswith("inv_freq")
                usual = ir.DataType.FLOAT16 if is_own else None
                if stored.types.get(name, usual) == ir.DataType.FLOAT16:
                    exchanged.put(cast(nn.Parameter, tensor), round_to(torch.float16, tensor.data))
            yield
        finally:
            exchanged.put_back()


def exchange(exchanged: ExchangedWeights, parameters: Sequence[nn.Parameter], weight: StoredWeight) -> None:
    """Let parameters hold the values of the rows of a quantized weight, one below the other."""
    whole = weight.read(slice(None)).dequantize()
    if weight.rows is not None and weight.rows.smoothing is not None:
        whole = whole / weight.rows.smoothing
    parts = torch.split(torch.from_numpy(whole), [len(parameter) for parameter in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        exchanged.put(parameter, part)


def find_hindrance(model: nn.Module, weights: Sequence[StoredWeight], is_import: bool) -> str:
    """Return the reason why a model cannot use a graph's integers; "" if it can."""
    known = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    forms: dict[str, set[bool]] = defaultdict(set)
    for weight in weights:
        if is_import and not known.issuperset(weight.names):
            return f"{weight.names[0]!r} is not the name of a weight of the checkpoint"
        for name in weight.names:
            forms[name].add(weight.rows is None)
    twice = [name for name, own in forms.items() if len(own) > 1]
    return f"{twice[0]!r} is stored in two forms" if twice else ""
