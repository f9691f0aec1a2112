"""Derives the manifest's entry of each graph from the checkpoint again, and compares it with the graph.

What a user chose is taken from the manifest: the longest text, the largest batch, further outputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from ...runtime.apps.check.differences import describe_differences
from ...runtime.bundle.artifact import PAIR_TOP
from ...runtime.bundle.bundle import Bundle
from ...runtime.bundle.manifest import Artifact, Axis, TensorSpec
from ..graphs import make_artifact
from ..number_formats import sum_pairs
from ..passes.kv_cache import list_cache_scales
from ..passes.quantized_weight import StoredWeight
from ..passes.storage import read_weights
from ..passes.weight_files import load_graph
from ..precisions import PRECISIONS, Precision
from ..tracing.recipes import Recipe
from .explain import remove_fitted_head

WHOSE = "the checkpoint's is"
MOST = 6  # differences that are told
BOUNDS = {"min": "at least", "opt": "tuned for", "max": "at most"}
LENGTHS = ("slots", "tokens", "total", "source_tokens")  # axes that are as long as a text may be


def compare_artifacts(bundle: Bundle, recipes: Mapping[str, Recipe] | None) -> tuple[int, list[str]]:
    """Compare the manifest's entry of each graph; `recipes` are the checkpoint's, unknown for imports."""
    found: dict[str, list[str]] = {}
    for artifact in bundle.manifest.artifacts:
        for fault in list_faults(bundle, artifact, recipes):
            ids = found.setdefault(fault, [])
            if artifact.id not in ids:
                ids.append(artifact.id)
    failures = [f"{', '.join(ids)}: {fault}" for fault, ids in found.items()]
    more = [f"and {len(failures) - MOST} more like it"] if len(failures) > MOST else []
    return len(bundle.manifest.artifacts), [*failures[:MOST], *more]


def list_faults(bundle: Bundle, artifact: Artifact, recipes: Mapping[str, Recipe] | None) -> Iterator[str]:
    """Yield the faults of one graph's entry."""
    manifest = bundle.manifest
    if artifact.precision not in PRECISIONS:
        yield f"precision {artifact.precision!r} is none of {', '.join(PRECISIONS)}"
        return
    graph = load_graph(bundle.path(artifact.file)).graph
    yield from compare_precision(artifact, graph, is_ours=recipes is not None)
    opset = graph.opset_imports.get("")
    if artifact.opset != opset:
        yield f"opset is {artifact.opset}, the graph's is {opset}"
    if recipes is None:
        yield from compare_lengths(artifact, manifest.max_length)
    elif artifact.recipe_id not in recipes:
        yield f"the checkpoint has no graph {artifact.recipe_id}, only {', '.join(recipes)}"
    else:
        bare = remove_fitted_head(artifact, manifest)
        expected = make_artifact(recipes[artifact.recipe_id], artifact.precision, "", "")
        yield from compare_specs("input", bare.inputs, expected.inputs)
        yield from compare_specs("output", bare.outputs, expected.outputs)
        yield from describe_differences(describe_rest(bare), describe_rest(expected), WHOSE)


def describe_rest(artifact: Artifact) -> dict[str, object]:
    """Return, as plain JSON, what follows from the recipe besides inputs and outputs."""
    return {
        "padding_side": artifact.padding_side,
        "aliases": dict(artifact.aliases),
        "constraints": list(artifact.constraints),
        "window": artifact.window,
    }


def compare_specs(kind: str, got: Sequence[TensorSpec], expected: Sequence[TensorSpec]) -> Iterator[str]:
    """Yield the differences of inputs or outputs; an axis that many of them have gives one text."""
    names = [spec.name for spec in got]
    wanted = [spec.name for spec in expected]
    if names != wanted:
        yield from describe_differences({f"{kind}s": names}, {f"{kind}s": wanted}, WHOSE)
        return
    for one, other in zip(got, expected, strict=True):
        if one.role != other.role:
            yield f"{kind} {one.name!r} has the role {one.role}, {WHOSE} {other.role}"
        if one.dtype != other.dtype:
            yield f"{kind} {one.name!r} has the type {one.dtype}, {WHOSE} {other.dtype}"
        if one.axis_names() != other.axis_names():
            yield f"{kind} {one.name!r} has the axes {one.axis_names()}, {WHOSE} {other.axis_names()}"
            continue
        for axis, own in zip(one.axes, other.axes, strict=True):
            if isinstance(axis, Axis) and isinstance(own, Axis):
                yield from compare_axes(axis, own)


def compare_axes(axis: Axis, expected: Axis) -> Iterator[str]:
    for bound, words in BOUNDS.items():
        length = getattr(axis, bound)
        own = getattr(expected, bound)
        if length != own:
            yield f"axis {axis.name} is {words} {length}, {WHOSE} {own}"


def compare_lengths(artifact: Artifact, longest: int) -> Iterator[str]:
    """Yield the axes of another exporter's graph that are shorter or longer than a text may be."""
    for spec in (*artifact.inputs, *artifact.outputs):
        for axis in spec.axes:
            if isinstance(axis, Axis) and axis.name in LENGTHS and axis.max != longest:
                yield f"axis {axis.name} is at most {axis.max}, and the longest text has {longest} tokens"
    side = "left" if artifact.recipe_id == "decoder.portable" else "right"
    if artifact.padding_side != side:
        yield f"padding_side is {artifact.padding_side!r}, of a graph {artifact.recipe_id} it is {side!r}"


def compare_precision(artifact: Artifact, graph: ir.Graph, is_ours: bool) -> Iterator[str]:
    """Yield faults where a precision's name does not match the graph's weights and caches."""
    kind = PRECISIONS[artifact.precision]
    label = f"precision is {artifact.precision}"
    stored = read_weights(graph, artifact.quantization.get("rows", {}))
    bits = {weight.names[0]: weight.format.bits for weight in stored if weight.rows is None}
    yield from compare_bits(label, artifact, kind, bits)
    if kind.weight_bits and not stored:
        yield f"{label}, and no weight of its graph is kept in {kind.weight_bits} bits"
    has_products = any(weight.rows is not None for weight in stored)
    if kind.rows is not None and not has_products:
        yield f"{label}, and no product of its graph reads 8 bits"
    if has_products != bool(artifact.quantization.get("rows")):
        yield f"quantization.rows and the graph's 8-bit products do not belong together, and {label}"
    if not artifact.may_saturate:
        yield from find_saturating(stored)
    caches = [node for node in graph if node.op_type == "GroupQueryAttention"]
    in_int8 = len({node for node, _, scale in list_cache_scales(graph) if scale is not None})
    if in_int8 != (len(caches) if kind.cache_bits else 0):
        yield f"{label}, and {in_int8} of {len(caches)} caches of its graph are in int8"
    if not is_ours:  # another exporter's graph in fp32 may have a checkpoint's half precision
        return
    matrices = [v for v in graph.initializers.values() if v.shape is not None and len(v.shape) == 2]
    halves = sum(value.dtype == ir.DataType.FLOAT16 for value in matrices)
    if (halves > 0) != kind.is_half:
        yield f"{label}, and {halves} of {len(matrices)} matrices of its graph are in fp16"


def find_saturating(stored: Iterable[StoredWeight]) -> Iterator[str]:
    """Yield the weights whose products need exact kernels, of a graph whose manifest says that none does."""
    for weight in stored:
        if weight.rows is None:
            continue
        most = int(sum_pairs(weight.read(slice(None)).codes.astype(np.int16)).max())
        if most > PAIR_TOP:
            name = weight.names[0]
            yield f"quantization.pair_top is {PAIR_TOP}, and two codes of {name!r} add up to {most}"


def compare_bits(label: str, artifact: Artifact, kind: Precision, stored: Mapping[str, int]) -> Iterator[str]:
    """Yield the weights whose bits differ from those of a precision and its exceptions."""
    recorded = artifact.quantization.get("bits")
    if recorded != kind.weight_bits:
        yield f"{label}, and quantization.bits is {recorded}"
    others = artifact.quantization.get("other_bits", {})
    wrong = {name: bits for name, bits in stored.items() if bits != others.get(name, kind.weight_bits)}
    if wrong:
        first = next(iter(wrong))
        yield (
            f"{label}, and {len(wrong)} of {len(stored)} weights of its graph have other bits: {first!r} has"
            f" {wrong[first]}"
        )
