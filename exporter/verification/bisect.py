"""Finds the first node of a graph whose result differs from the model's by more than its precision explains.

Two references: PyTorch, for what its modules give, and for the nodes between them the same graph in fp32 and
in its own precision, converted once more from the checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import onnx_ir as ir

from ...runtime.apps.check.metrics import make_plain, measure_spread
from ...runtime.backends.backend import Array
from ...runtime.bundle.manifest import Artifact
from ..execution.node_executor import ExecutedProgram, NodeExecutor, NotFiniteError
from ..execution.replay import Key, Replay
from ..limits import CAPS, measure_distance
from ..tracing.modules import find_layer, find_module

if TYPE_CHECKING:
    from torch import nn

    from ..tasks.rounding import Rounding

PYTORCH = "PyTorch"
# One node's largest error varies more than the logits', which may be off by three times the gap. The same
# graph, converted again, is nearer than PyTorch, which rounds in other places.
NODE_FACTOR = 5.0
MODULE_FACTOR = 10.0
CACHE_STEPS = 4  # that a key or value in int8 may be off: rounding moves some to the next


@dataclass(frozen=True)
class FirstMismatch:
    """The first node whose result leaves its tolerance."""

    artifact: str  # its id
    step: str  # the run of the replay in which it does
    node: str  # its name in the ONNX file
    op_type: str
    value: str  # the name of its result
    module: str  # the path of the PyTorch module that it computes a part of; "" outside of all
    layer: int | None  # the module's layer, if it is in one
    dtype: str  # of the result
    range: tuple[float, float]  # of the result, lowest and highest
    expected: tuple[float, float] | None  # the range that it should have
    # the largest difference, in units of the spread of what is expected; None where not finite
    error: float | None
    allowed: float  # how large the error may be
    reference: str  # the reference that it was compared with
    # its own and the expected one, if they differ
    shapes: tuple[tuple[int, ...], tuple[int, ...]] | None = None

    def to_json(self) -> dict[str, Any]:
        fields = dict(vars(self))
        expected = fields.pop("expected")
        return {
            **fields,
            "range": [make_plain(end) for end in self.range],
            "expected": None if expected is None else [make_plain(end) for end in expected],
        }

    def __str__(self) -> str:
        where = f" of {self.module}" if self.module else ""
        layer = "" if self.layer is None else f", layer {self.layer}"
        text = (
            f"{self.artifact}: node {self.node!r} ({self.op_type}, {self.dtype}){where}{layer} is the first"
            f" to exceed its tolerance, in the {self.step}: its result {self.value!r} is"
            f" {format_range(self.range)}"
        )
        if self.expected is None:
            return f"{text}, not finite"
        if self.shapes is not None:
            own, shape = self.shapes
            return f"{text}, of shape {list(own)}, expected {list(shape)}"
        expected = format_range(self.expected)
        text += ", the expected range" if expected == format_range(self.range) else f", expected {expected}"
        if self.error is None:  # true or false, integers, or an infinity in another place
            return f"{text}; not that of {self.reference}"
        return (
            f"{text}; off by {self.error:.3g} of their spread from {self.reference}"
            f" (at most {self.allowed:.3g})"
        )


def format_range(ends: tuple[float, float]) -> str:
    """Return a range as messages show it, such as "-1.5 to 2.25"."""
    return f"{ends[0]:.4g} to {ends[1]:.4g}"


@dataclass(frozen=True)
class Tolerance:
    """The expected value of a result, and the allowed difference in units of its spread."""

    want: Array
    allowed: float
    reference: str


Tolerances: TypeAlias = Mapping[Key, Tolerance]  # what one reference says of a graph's results


class ToleranceExceededError(Exception):
    """An error that ends an execution at the node at fault."""

    def __init__(self, mismatch: FirstMismatch) -> None:
        self.mismatch = mismatch


def find_first_mismatch(
    graph: ir.Model,
    artifact: Artifact,
    replay: Replay,
    references: Sequence[Tolerances],
    *,
    same_shapes: bool = False,
) -> FirstMismatch | None:
    """Execute a graph until a node leaves its tolerance; return None if none does.

    A result whose shape is another than its tolerance's is passed over, as another dialect may lay it out so,
    unless `same_shapes` says that the tolerances are of the very same graph.
    """

    def describe(
        node: ir.Node, name: str, got: Array, tolerance: Tolerance | None = None, error: float = math.inf
    ) -> FirstMismatch:
        module = find_module(node)
        return FirstMismatch(
            artifact=artifact.id,
            step=replay.steps[program.runs - 1].name,
            node=node.name or name,
            op_type=node.op_type,
            value=name,
            module=module,
            layer=find_layer(module),
            dtype=got.dtype.name,
            range=find_range(got),
            expected=None if tolerance is None else find_range(tolerance.want),
            error=error if math.isfinite(error) else None,
            allowed=0.0 if tolerance is None else tolerance.allowed,
            reference="" if tolerance is None else tolerance.reference,
            shapes=None
            if tolerance is None or got.shape == tolerance.want.shape
            else (got.shape, tolerance.want.shape),
        )

    def check(node: ir.Node, name: str, array: Array) -> None:
        step = program.runs - 1
        if not replay.steps[step].is_compared:
            return
        got = replay.select_compared(step, name, array)
        for tolerances in references:
            tolerance = tolerances.get((step, name))
            if tolerance is None:
                continue
            if got.shape != tolerance.want.shape and not same_shapes:
                continue
            error = measure_distance(got, tolerance.want)
            if not error <= tolerance.allowed:
                raise ToleranceExceededError(describe(node, name, got, tolerance, error))

    program = ExecutedProgram(NodeExecutor(graph, check), artifact)
    try:
        replay.drive(program)
    except ToleranceExceededError as found:
        return found.mismatch
    except NotFiniteError as error:
        return describe(error.node, error.result, error.array)
    return None


def find_range(array: Array) -> tuple[float, float]:
    return float(array.min()), float(array.max())


def make_node_tolerances(
    replay: Replay, artifact: Artifact, full: ir.Model, full_artifact: Artifact, own: ir.Model
) -> dict[Key, Tolerance]:
    """Return the tolerances of a graph's nodes, from healthy graphs in fp32 and in its own precision."""
    reference = f"{artifact.id}, converted again"
    floor = CAPS["fp32"]["max_error"]
    exact = replay.collect_values(full, full_artifact)
    if artifact.precision == "fp32":
        return {key: Tolerance(array, floor, reference) for key, array in exact.items()}
    cast = find_cast_results(own)
    exact = {(step, cast[name]): array for (step, name), array in exact.items() if name in cast} | exact
    tolerances = {}
    for key, array in replay.collect_values(own, artifact).items():
        if array.dtype == np.int8 and key in exact and exact[key].dtype.kind == "f":
            steps = array.astype(np.float32)  # int8 steps, which have another unit than the exact ones
            spread = max(measure_spread(steps.astype(np.float64)), 1.0) if steps.size else 1.0
            tolerances[key] = Tolerance(steps, CACHE_STEPS / spread, reference)
        elif key in exact and exact[key].shape == array.shape:
            gap = measure_distance(array.astype(exact[key].dtype), exact[key])
            tolerances[key] = Tolerance(array, max(floor, NODE_FACTOR * gap), reference)
    return tolerances


def find_cast_results(model: ir.Model) -> dict[str, str]:
    """Return the results of a graph that a Cast gives, each with the value that it reads.

    In fp32 the node before gives the result itself, by that name: so it can be compared, not only the Cast.
    """
    return {
        str(result.name): str(cast.inputs[0].name)
        for result in model.graph.outputs
        if (cast := result.producer()) is not None and cast.op_type == "Cast" and cast.inputs[0] is not None
    }


def make_module_tolerances(
    replay: Replay, model: nn.Module, rounding: Rounding | None, results: Mapping[str, str]
) -> dict[Key, Tolerance]:
    """Return the tolerances of modules' results, from PyTorch; `results` has their paths by value."""
    exact = replay.collect_module_results(model)
    rounded = exact
    if rounding is not None:
        with rounding.apply(model):
            rounded = replay.collect_module_results(model, rounding)
    tolerances = {}
    for step in range(len(replay.steps)):
        for name, path in results.items():
            want = replay.gather_results(step, exact, path)
            near = replay.gather_results(step, rounded, path)
            if want is not None and near is not None:
                allowed = max(CAPS["fp32"]["max_error"], MODULE_FACTOR * measure_distance(near, want))
                tolerances[step, name] = Tolerance(want, allowed, PYTORCH)
    return tolerances
