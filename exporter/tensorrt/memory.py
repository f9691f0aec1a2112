"""Estimates the GPU memory that a plan needs, from its graph and without a GPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from ...runtime.backends.plan_compatibility import find_sides, format_lengths, name_option_axes
from ...runtime.bundle.bundle import Bundle
from ...runtime.bundle.manifest import Artifact
from ...runtime.errors import MemoryLimitError
from ...runtime.memory_budget import find_largest
from ..axis_lengths import compute_length
from ..errors import BuildError
from .plan_graphs import group_by_precision
from .profiles import Profile

if TYPE_CHECKING:
    from onnx import TypeProto

PARTS = {"weights": "of weights", "tensors": "of inputs, outputs and caches", "between": "between layers"}
ALIVE = 2  # the largest results that exist at one time: what a layer reads, and what it writes


def estimate_memory(graph: Path, artifact: Artifact, profiles: Sequence[Profile]) -> list[dict[str, int]]:
    """Estimate the bytes on the device for each profile's largest shapes.

    "weights" are those that the graph reads of its files, which others may share; "tensors" are inputs,
    outputs and caches, where what is written in place counts once; "between" are the largest intermediate
    results, `ALIVE` of them.
    """
    import onnx

    model = onnx.load(graph, load_external_data=False)
    weights = sum(
        int(entry.value)
        for tensor in model.graph.initializer
        for entry in tensor.external_data
        if entry.key == "length"
    )
    between = [value.type.tensor_type for value in model.graph.value_info]
    found = []
    for profile in profiles:
        lengths = {name: high for name, (_, _, high) in profile.axes.items()}
        outputs = [spec for spec in artifact.outputs if spec.name not in artifact.aliases]
        tensors = sum(
            math.prod(a if isinstance(a, int) else lengths.get(a, 1) for a in spec.axis_names())
            * np.dtype(spec.dtype).itemsize
            for spec in (*artifact.inputs, *outputs)
        )
        sizes = sorted(count_bytes(tensor, lengths) for tensor in between)
        found.append({"weights": weights, "tensors": tensors, "between": sum(sizes[-ALIVE:])})
    return found


def count_bytes(tensor: TypeProto.Tensor, lengths: Mapping[str, int]) -> int:
    """Return a tensor's largest size in bytes; 0 for an unknown shape, or one of numbers alone (a weight)."""
    from onnx import helper

    if not any(d.dim_param for d in tensor.shape.dim):
        return 0
    dims = [compute_length(d.dim_param, lengths) or d.dim_value for d in tensor.shape.dim]
    return math.prod(dims) * np.dtype(helper.tensor_dtype_to_np_dtype(tensor.elem_type)).itemsize


Derive: TypeAlias = Callable[[Mapping[str, int]], Mapping[str, Sequence[Profile]]]


def check_plan_memory(
    bundle: Bundle, graphs: Sequence[Artifact], lengths: Mapping[str, int], derive: Derive, limit: int
) -> None:
    """Refuse plans that need more than a limit at their largest shapes, and say what would fit.

    Args:
        bundle: that has the graphs.
        graphs: that plans are built of.
        lengths: the maxima that were asked for, by the names of --max; else the graphs' own count.
        derive: returns the profiles of each graph, by its id, for such maxima.
        limit: in bytes.

    Raises:
        MemoryLimitError: plans of one precision, which run together, need more.
    """
    most = {**list_maxima(graphs), **lengths}
    precisions = group_by_precision(graphs)
    needs = [add_up_plans(bundle, own, derive(most)) for own in precisions]
    for own, need in zip(precisions, needs, strict=True):
        if sum(need.values()) <= limit:
            continue

        def fits(maxima: Mapping[str, int], graphs: Sequence[Artifact] = own) -> bool:
            try:
                return sum(add_up_plans(bundle, graphs, derive(maxima)).values()) <= limit
            except BuildError:  # shorter than a plan may be
                return False

        shapes = " or ".join(f"--max {format_lengths(one)}" for one in list_fitting(graphs, most, fits))
        others = [
            two[0].precision
            for two, sizes in zip(precisions, needs, strict=True)
            if sum(sizes.values()) <= limit
        ]
        hints = [f"{shapes} would fit"] if shapes else []
        hints += [f"{', '.join(others)} would fit (--precision)"] if others else []
        parts = ", ".join(f"{need[part] / 1e6:.1f} MB {words}" for part, words in PARTS.items())
        raise MemoryLimitError(
            f"a plan in {own[0].precision} needs about {sum(need.values()) / 1e6:.1f} MB on the GPU for"
            f" {format_lengths(most)}: {parts}; --max-memory is {limit / 1e6:.1f} MB."
            f" {'; '.join(hints) or 'No smaller shape alone would fit'}",
            needed=sum(need.values()),
            limit=limit,
        )


def list_maxima(graphs: Sequence[Artifact]) -> dict[str, int]:
    """Return the graphs' largest shapes by the names of --max: batch, and length, or height and width."""
    found: dict[str, int] = {}
    for graph in graphs:
        sides = find_sides(graph)
        axes = sides or {option: (axis, 1) for option, axis in name_option_axes(graph).items()}
        for option, (axis, pixels) in axes.items():
            found[option] = max(found.get(option, 0), pixels * graph.axis(axis).max)
        found["batch"] = max(found.get("batch", 0), graph.axis(name_option_axes(graph)["batch"]).max)
    if "height" in found:
        found.pop("length", None)  # prompts of pictures are always as long
    return dict(sorted(found.items()))


def list_fitting(
    graphs: Sequence[Artifact], most: Mapping[str, int], fits: Callable[[Mapping[str, int]], bool]
) -> Iterator[dict[str, int]]:
    """Yield maxima that would fit if they alone were smaller: a batch, and a length or a square."""
    step = max((pixels for graph in graphs for _, pixels in find_sides(graph).values()), default=1)
    for options, unit in ((("batch",), 1), (("length",), 1), (("height", "width"), step)):
        if not set(options) <= set(most):
            continue

        def shrink(number: int, options: Sequence[str] = options, unit: int = unit) -> dict[str, int]:
            return dict.fromkeys(options, number * unit)

        largest = min(most[option] for option in options) // unit
        if number := find_largest(lambda number: fits({**most, **shrink(number)}), largest - 1):
            yield shrink(number)


def add_up_plans(
    bundle: Bundle, graphs: Sequence[Artifact], profiles: Mapping[str, Sequence[Profile]]
) -> dict[str, int]:
    """Return the bytes of plans that run together, by their parts; of each its largest profile's."""
    total = dict.fromkeys(PARTS, 0)
    for graph in graphs:
        needs = estimate_memory(bundle.locate(graph.file), graph, profiles[graph.id])
        worst = max(needs, key=lambda need: sum(need.values()))
        total = {part: size + worst[part] for part, size in total.items()}
    return total
