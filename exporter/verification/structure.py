"""Compares a graph's file without running it: its attributes, and its weights with the checkpoint's.

An epsilon that is a tenth of the right one, or weights that are 1 % off, may hide behind rounding.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import onnx_ir as ir

from ...runtime.apps.check.outcome import Comparison
from ...runtime.backends.backend import Array, Arrays
from ...runtime.backends.dialects import CUDA_DIALECTS
from ...runtime.bundle.bundle import Bundle
from ...runtime.bundle.manifest import Artifact
from ..host_inputs import find_late_inputs
from ..passes.kv_cache import list_cache_scales
from ..passes.quantized_weight import StoredWeight
from ..passes.storage import read_weights
from ..passes.weight_files import load_graph
from ..passes.weights import ParameterRef
from ..tracing.modules import find_module
from .attributes import (
    NORMS,
    SINGLE,
    blame,
    describe_node,
    find_altered_ids,
    find_wrong_cache_scales,
    find_wrong_epsilons,
)
from .finite import find_not_finite, list_constants
from .quantized_rows import Products, find_wrong_rows
from .quantized_weights import Rows, check_quantized_weights

READING = "reading the graph"  # in the place of an engine
CASE = "weights and modules"
MOST = 3  # faults of a kind that are reported
FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16)
PRODUCTS = ("MatMul", "Gemm")
NEAR = 0.1  # of a tensor's length: what is nearer to it should be it


def compare_structure(
    bundle: Bundle,
    artifact: Artifact,
    tensors: Arrays | None = None,
    cache_scales: Arrays | None = None,
    rows: Rows = lambda name: None,
    same_texts: bool = False,
    row_products: Products | None = None,
) -> Comparison:
    """Compare a graph's file with the model, as far as that is given.

    Args:
        bundle: has the graph.
        artifact: the graph.
        tensors: the checkpoint's, to compare weights with; without them epsilons with the config's.
        cache_scales: what int8 caches need.
        rows: gives what a weight's product reads of real text (M, K), by its name.
        same_texts: whether `cache_scales` come from the texts that the export had.
        row_products: how those texts have an encoder's int8 products round what they read.
    """
    graph = load_graph(bundle.path(artifact.file)).graph
    is_ours = not bundle.manifest.source.get("exporter")  # others scale, and name their weights, as they like
    weights: list[str] = []
    rules = artifact.quantization.get("rows", {})
    stored = read_weights(graph, rules)
    if tensors is not None:
        weights += check_weights(graph, tensors, stored, is_ours)
        weights += check_quantized_weights(stored, tensors, rows, is_ours)
    runs_on_cuda = artifact.is_half and artifact.dialect in CUDA_DIALECTS
    failures = [
        *shorten(find_wrong_epsilons(graph, bundle.manifest.config) if tensors is None else ()),
        *shorten(find_not_finite(graph)),
        *shorten(filter(None, weights)),
        *shorten(find_wrong_cache_scales(graph, cache_scales or {}, same_texts)),
        *shorten(find_wrong_rows(stored, rules, row_products or {})),
        *shorten(find_altered_ids(graph) if is_ours else ()),
        *shorten(blame(w.node, f"{describe_node(w.node)} {fault}") for w in stored for fault in w.faults),
        *shorten(describe_late_inputs(graph) if runs_on_cuda else ()),
    ]
    return report_reading(artifact.id, "attributes" if tensors is None else CASE, len(weights), failures)


def describe_late_inputs(graph: ir.Graph) -> Iterator[str]:
    """Yield nodes that read a GPU's results on the host: they run correctly on a CPU, but not on a GPU."""
    for node, value in find_late_inputs(graph):
        words = f"{describe_node(node)} reads {value.name!r} on the host before a GPU has computed it"
        yield blame(node, words)


def compare_files(name: str, model: ir.Model, other: ir.Model, against: str) -> Comparison:
    """Compare two graphs: attributes of nodes of the same name, and weights of the same name."""
    theirs = {(str(node.name), node.op_type): node for node in other.graph if node.name}
    failures = [
        f"{describe_node(node)} has {key} {one:g}, in {against} it is {two:g}"
        for node in model.graph
        if (twin := theirs.get((str(node.name), node.op_type))) is not None
        for key, one, two in find_different_attributes(node, twin)
    ]
    tensors = {
        ParameterRef.read(value).parameter: constant for value, constant, _ in list_weights(other.graph)
    }
    weights = [weight for weight in list_weights(model.graph) if weight[1].size > 1]
    compared = 0
    for value, constant, node in weights:  # a scalar, such as a mask's, may be another
        expected = tensors.get(ParameterRef.read(value).parameter)
        if expected is not None and constant.shape == expected.shape:
            compared += 1
            if fault := describe_difference(constant.numpy(), expected.numpy(), f"that of {against}"):
                failures.append(f"weight {value.name!r} of {describe_node(node)} {fault}")
    case = f"attributes and {compared} of {len(weights)} weights, against {against}"
    return report_reading(name, case, compared, shorten(failures))


def report_reading(artifact: str, case: str, weights: int, failures: Sequence[str]) -> Comparison:
    """Return the findings of reading a graph, with the number of weights that were compared."""
    return Comparison(
        {"weights": weights}, {}, tuple(failures), artifact=artifact, backend=READING, case=case
    )


def shorten(faults: Iterable[str]) -> list[str]:
    """Return the first faults of a kind, and how many more there are."""
    found = list(faults)
    return found if len(found) <= MOST else [*found[:MOST], f"and {len(found) - MOST} more like it"]


def list_weights(graph: ir.Graph) -> list[tuple[ir.Value, ir.TensorProtocol, ir.Node]]:
    """Return the constants that are floats, with their values and the first node that reads each."""
    found = [(value, value.const_value, list(value.uses())) for value in graph.initializers.values()]
    return [
        (value, constant, uses[0].node)
        for value, constant, uses in found
        if constant is not None and constant.dtype in FLOATS and uses
    ]


def find_different_attributes(node: ir.Node, other: ir.Node) -> Iterator[tuple[str, float, float]]:
    """Yield the float attributes that both nodes have, and that differ."""
    for key, attribute in node.attributes.items():
        twin = other.attributes.get(key)
        if twin is not None and attribute.type == twin.type == ir.AttributeType.FLOAT:
            one = attribute.as_float()
            two = twin.as_float()
            if not math.isclose(one, two, rel_tol=SINGLE):
                yield key, one, two


def check_weights(
    graph: ir.Graph, tensors: Arrays, stored: Sequence[StoredWeight], is_ours: bool
) -> Iterator[str]:
    """Yield the faults of each weight that is kept as floats, or ""; see `check_quantized_weights`."""
    biases = {weight.biases: weight.bias_names for weight in stored}
    known: set[ir.Value | None] = {value for weight in stored for value in weight.constants}
    known |= {scale for _, _, scale in list_cache_scales(graph)}  # which `find_wrong_cache_scales` reads
    by_size: dict[int, list[str]] = {}
    for value, constant, node in list_constants(graph):
        parameter = ParameterRef.read(value)
        words = f"weight {value.name!r} of {describe_node(node)}"
        if parameter.parameter in tensors:
            expected = parameter.of(tensors[parameter.parameter], constant.shape.numpy())
            fault = describe_difference(constant.numpy(), expected)
            if isinstance(constant, ir.ExternalTensor):
                constant.release()  # what is mapped counts as this process's memory
        elif value in biases and all(name in tensors for name in biases[value]):
            expected = np.concatenate([tensors[name] for name in biases[value]])
            fault = describe_difference(constant.numpy(), expected)
        elif value in known or is_setting(value, constant.numpy()):
            continue
        elif is_ours:
            fault = "is not a tensor of the checkpoint"
        else:
            by_size = by_size or index_by_size(tensors)
            fault = describe_unnamed(value, constant.numpy(), tensors, by_size)
        yield blame(node, f"{words} {fault}") if fault else ""


def is_setting(value: ir.Value, got: Array) -> bool:
    """Tell whether a constant is no weight: a single number, a size, or the scale and bias of a bare norm.

    Modules' results show whether it is the right one.
    """

    def sets(node: ir.Node, index: int) -> bool:
        if node.op_type == "InstanceNormalization":  # a GroupNorm's own scale and bias follow it
            return index > 0 and bool((got == (1 if index == 1 else 0)).all())
        return node.op_type == "Resize" and index > 0

    return got.size == 1 or all(sets(use.node, use.idx) for use in value.uses())


def index_by_size(tensors: Arrays) -> dict[int, list[str]]:
    """Return the names of tensors by how many values they have."""
    found: dict[int, list[str]] = {}
    for name in tensors:
        found.setdefault(tensors[name].size, []).append(name)
    return found


def describe_unnamed(value: ir.Value, got: Array, tensors: Arrays, by_size: dict[int, list[str]]) -> str:
    """Return how another exporter's constant, with its own name, differs from the checkpoint.

    It may be any tensor of as many values. If it is none it must not be near one; and vectors that are
    added to products, or scale norms, must be one, like matrices that are multiplied by.
    """
    nearest = ""
    scales_norms = all(is_scale_of_norm(use.node, use.idx) for use in value.uses())
    for name in by_size.get(got.size, []):
        expected = tensors[name].reshape(-1)
        fault = describe_difference(got.reshape(-1), expected, f"the checkpoint's {name!r}")
        if not fault or (scales_norms and not describe_difference(got.reshape(-1), expected + 1)):
            return ""  # some norms scale by 1 + weight
        off = float(np.linalg.norm(got.reshape(-1).astype(np.float64) - expected))
        if off <= NEAR * float(np.linalg.norm(expected.astype(np.float64))):
            nearest = fault
    if nearest:
        return nearest
    if all(has_no_effect(use.node, use.idx, got, tensors) for use in value.uses()):
        return ""
    is_weight = any(reads_as_weight(use.node, value) for use in value.uses())
    return "is not a tensor of the checkpoint" if is_weight else ""


def is_scale_of_norm(node: ir.Node, index: int) -> bool:
    """Tell whether an input of a node is the scale of a norm."""
    return node.op_type in NORMS and index == (2 if node.op_type.startswith("Skip") else 1)


def has_no_effect(node: ir.Node, index: int, got: Array, tensors: Arrays) -> bool:
    """Tell whether a constant is a norm's scale of ones or bias of zeros that the checkpoint does without."""
    if node.op_type not in NORMS:
        return False
    is_bias = index == (3 if node.op_type.startswith("Skip") else 2)
    module = find_module(node)
    # Of a norm that is no module of its own, as it has no weights: then no norm of the model has any.
    own = f"{module}.{'bias' if is_bias else 'weight'}" if module else "norm"
    has_own = any(name.endswith(own) if module else own in name.lower() for name in tensors)
    return bool((got == (0 if is_bias else 1)).all()) and not has_own


def reads_as_weight(node: ir.Node, value: ir.Value) -> bool:
    """Tell whether a node multiplies by a matrix, adds a vector to a product, or scales a norm by it."""
    rank = 0 if value.shape is None else len(value.shape)
    if node.op_type in PRODUCTS or node.op_type == "MatMulNBits":
        return rank == 2 or (rank == 1 and node.op_type != "MatMul")
    if node.op_type in NORMS:
        return True
    if node.op_type != "Add" or rank != 1:
        return False
    others = [other.producer() for other in node.inputs if other is not None and other is not value]
    return any(other is not None and other.op_type in PRODUCTS for other in others)


def describe_difference(got: Array, expected: Array, whose: str = "the checkpoint's") -> str:
    """Return in words how `got` differs from `expected` in the coarser of both types; "" if it does not."""
    if got.shape != expected.shape:
        return f"is {got.shape}, {whose} is {expected.shape}"
    coarser = min(got.dtype, expected.dtype, key=lambda dtype: dtype.itemsize)
    if np.array_equal(got.astype(coarser, copy=False), expected.astype(coarser, copy=False)):
        return ""
    differs = got.astype(coarser, copy=False) != expected.astype(coarser, copy=False)
    off = np.abs(got.astype(np.float64) - expected).max()
    first = [int(place) for place in np.unravel_index(differs.argmax(), differs.shape)]
    where = f"in {np.count_nonzero(differs)} of {differs.size} values, first at {first}"
    return f"is not {whose}: off by up to {off:.3g} of {np.abs(expected).max():.3g} {where}"
