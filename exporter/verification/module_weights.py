"""Gives PyTorch the values that a graph stores, so that modules differ by what they compute alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
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
from ..tasks.rounding import ExchangedWeights, round_to

Types = Mapping[str, "ir.DataType | None"]


def read_stored(bundle: Bundle, artifact: Artifact, model: nn.Module) -> tuple[list[StoredWeight], Types]:
    """Return a graph's quantized weights, with those of the graph that it runs with, and all weights' types.

    A graph's own weight counts before the other graph's, under any of its names.
    """
    together = [artifact]  # with the graph that it runs with
    for other in bundle.manifest.artifacts:
        alike = (other.dialect, other.precision) == (artifact.dialect, artifact.precision)
        together += [other] if alike and other.graph != artifact.graph else []
    parameters = dict(model.named_parameters(remove_duplicate=False))
    weights: list[StoredWeight] = []
    types: dict[str, ir.DataType | None] = {}
    for other in together:
        graph = load_graph(bundle.path(other.file)).graph
        own = read_weights(graph, other.quantization.get("rows", {}))
        known = {*types, *(name for weight in weights for name in weight.names)}
        taken = {parameters[name] for name in known & parameters.keys()}  # under any of their names
        weights += [w for w in own if not any(parameters.get(name) in taken for name in w.names)]
        types = {ParameterRef.read(v).parameter: v.dtype for v in graph.initializers.values()} | types
    return weights, types


@contextmanager
def store_weights(model: nn.Module, weights: Sequence[StoredWeight], types: Types) -> Iterator[None]:
    """Give a model the values that graphs store, inside the context: codes, and weights in fp16."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    tables = dict(model.named_buffers(remove_duplicate=False))
    exchanged = ExchangedWeights(model)
    try:
        for weight in weights:
            if not all(name in parameters for name in weight.names):
                continue
            whole = weight.read(slice(None)).dequantize()
            if weight.rows is not None and weight.rows.smoothing is not None:
                whole = whole / weight.rows.smoothing
            parts = torch.split(torch.from_numpy(whole), [len(parameters[name]) for name in weight.names])
            for name, part in zip(weight.names, parts, strict=True):
                exchanged.put(parameters[name], part)
        is_half = ir.DataType.FLOAT16 in types.values()
        for name, tensor in {**parameters, **tables}.items() if is_half else ():
            # Other exporters' tables, such as of frequencies, have names of their own.
            is_own = name in parameters or name.endswith("inv_freq")
            if types.get(name, ir.DataType.FLOAT16 if is_own else None) == ir.DataType.FLOAT16:
                exchanged.put(cast(nn.Parameter, tensor), round_to(torch.float16, tensor.data))
        yield
    finally:
        exchanged.put_back()


def find_hindrance(model: nn.Module, weights: Sequence[StoredWeight], is_import: bool) -> str:
    """Return why a model cannot be given a graph's integers; "" where it can."""
    known = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    forms: dict[str, set[bool]] = defaultdict(set)
    for weight in weights:
        if is_import and not known.issuperset(weight.names):
            return f"{weight.names[0]!r} is no weight of the checkpoint by this name"
        for name in weight.names:
            forms[name].add(weight.rows is None)
    twice = [name for name, own in forms.items() if len(own) > 1]
    return f"{twice[0]!r} is stored in two forms" if twice else ""
