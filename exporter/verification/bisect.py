"""Find the first node of a graph whose result is further from the model's than its precision explains.

Two references: PyTorch, for what its modules give, and for the nodes between them the same graph in fp32 and
in its own precision, converted once more from the checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from ...runtime.backends.backend import Array
from ...runtime.bundle.manifest import Artifact
from ...runtime.diagnostics.metrics import plain, spread_of
from ..execution.node_executor import ExecutedProgram, NotFiniteError
from ..execution.trial import Key, Trial
from ..limits import CAPS
from ..tracing.modules import find_layer, find_module, read_results

if TYPE_CHECKING:
    from torch import nn

    from ..reference.rounding import Rounding

PYTORCH = "PyTorch"
# One node's largest error varies more than the logits', which are held to three times the gap. The same
# graph, converted again, is nearer than PyTorch, which rounds in other places.
NODE_FACTOR = 5.0
MODULE_FACTOR = 10.0
CACHE_STEPS = 4  # that a key or value in int8 may be off: rounding moves some to the next


@dataclass(frozen=True)
class Culprit:
    """The first node that leaves its band."""

    artifact: str  # its id
    step: str  # the run of the trial in which it does
    node: str  # its name in the ONNX file
    op_type: str
    value: str  # the name of its result
    module: str  # the path of the PyTorch module that it computes a part of; "" outside of all
    layer: int | None  # the module's layer, if it is in one
    dtype: str  # of the result
    range: tuple[float, float]  # of the result, lowest and highest
    meant: tuple[float, float] | None  # the range that it should have
    # the largest difference, in units of the spread of what was meant; None where not finite
    error: float | None
    allowed: float  # how large the error may be
    witness: str  # the reference that it was compared with

    def to_json(self) -> dict[str, Any]:
        ranges = {
            name: None if ends is None else [plain(end) for end in ends]
            for name, ends in (("range", self.range), ("meant", self.meant))
        }
        return {**vars(self), **ranges}

    def __str__(self) -> str:
        where = f" of {self.module}" if self.module else ""
        layer = "" if self.layer is None else f", layer {self.layer}"
        low, high = self.range
        text = (
            f"{self.artifact}: node {self.node!r} ({self.op_type}, {self.dtype}){where}{layer} is the first"
            f" to leave its band, in the {self.step}: its result {self.value!r} is {low:.4g} to {high:.4g}"
        )
        if self.meant is None or self.error is None:
            return f"{text}, not finite"
        return (
            f"{text}, meant {self.meant[0]:.4g} to {self.meant[1]:.4g}; off by {self.error:.3g} of their"
            f" spread from {self.witness} (at most {self.allowed:.3g})"
        )


@dataclass(frozen=True)
class Band:
    """What a result should be, and how far off it may be in units of its spread."""

    want: Array
    allowed: float
    witness: str


@dataclass(frozen=True)
class Witnesses:
    """The references that the results of a graph are compared with."""

    nodes: Mapping[Key, Band] = field(default_factory=dict)  # results by step and name
    # those of them that are a module's result in PyTorch
    modules: Mapping[Key, Band] = field(default_factory=dict)


class LeftItsBandError(Exception):
    """Ends an execution where its fault is found."""

    def __init__(self, culprit: Culprit) -> None:
        super().__init__(str(culprit))
        self.culprit = culprit


def find_culprit(graph: ir.Model, artifact: Artifact, trial: Trial, witnesses: Witnesses) -> Culprit | None:
    """Execute a graph until a node leaves its band; return None if none does."""

    def hold(node: ir.Node, name: str, array: Array) -> None:
        step = program.runs - 1
        got = remove_padding(trial, step, array)
        for bands in (witnesses.nodes, witnesses.modules):
            band = bands.get((step, name))
            if band is None or got.shape != band.want.shape:
                continue
            error = distance(got, band.want)
            if not error <= band.allowed:
                raise LeftItsBandError(
                    culprit_of(node, name, got, trial.steps[step].name, artifact, band, error)
                )

    program = ExecutedProgram(graph, artifact, hold)
    try:
        trial.drive(program)
    except LeftItsBandError as found:
        return found.culprit
    except NotFiniteError as error:
        step = trial.steps[program.runs - 1].name
        return culprit_of(error.node, error.result, error.array, step, artifact, None, math.inf)
    return None


def culprit_of(
    node: ir.Node, name: str, got: Array, step: str, artifact: Artifact, band: Band | None, error: float
) -> Culprit:
    module = find_module(node)
    return Culprit(
        artifact=artifact.id,
        step=step,
        node=node.name or name,
        op_type=node.op_type,
        value=name,
        module=module,
        layer=find_layer(module),
        dtype=got.dtype.name,
        range=ends_of(got),
        meant=None if band is None else ends_of(band.want),
        error=error if math.isfinite(error) else None,
        allowed=0.0 if band is None else band.allowed,
        witness="" if band is None else band.witness,
    )


def remove_padding(trial: Trial, step: int, array: Array) -> Array:
    """Return a result at the tokens: nobody reads what a graph makes of padding, and rounding changes it."""
    tokens = trial.select_tokens(step, array)
    return array if tokens is None else tokens


def ends_of(array: Array) -> tuple[float, float]:
    return float(array.min()), float(array.max())


def distance(got: Array, want: Array) -> float:
    """Return the largest difference in units of the spread of `want`; of integers any at all is infinite."""
    if not want.size:
        return 0.0
    if want.dtype.kind != "f":
        return 0.0 if np.array_equal(got, want) else math.inf
    exact = want.astype(np.float64)
    if not (finite := np.isfinite(exact)).all():  # a mask's -inf has to be one
        if not np.array_equal(got[~finite], exact[~finite]):
            return math.inf
        got = got[finite]
        exact = exact[finite]
        if not exact.size:
            return 0.0
    return float(np.abs(got - exact).max()) / max(spread_of(exact), 1e-6)


def node_bands(
    trial: Trial, artifact: Artifact, full: ir.Model, full_artifact: Artifact, own: ir.Model | None
) -> dict[Key, Band]:
    """Return the bands of a graph's nodes from a healthy graph.

    Args:
        trial: what to run.
        artifact: the graph that is examined.
        full: a healthy graph in fp32.
        full_artifact: what its inputs and outputs are.
        own: a healthy graph in the precision of `artifact`; None where there is none, or it is fp32.
    """
    values = trial.collect_values(full, full_artifact)
    floor = CAPS["fp32"]["max_error"]
    if own is None:
        # Hidden states alone: in scores, and in keys laid out for a product, padding cannot be told apart.
        allowed = CAPS[artifact.precision]["max_error"]
        return {
            key: Band(remove_padding(trial, key[0], array), allowed, full_artifact.id)
            for key, array in values.items()
            if array.ndim == 3 and trial.select_tokens(key[0], array) is not None
        }
    witness = f"{artifact.id}, converted again"
    exact = {key: remove_padding(trial, key[0], array) for key, array in values.items()}
    if artifact.precision == "fp32":
        return {key: Band(array, floor, witness) for key, array in exact.items()}
    bands = {}
    for key, array in trial.collect_values(own, artifact).items():
        array = remove_padding(trial, key[0], array)
        if array.dtype == np.int8 and key in exact and exact[key].dtype.kind == "f":
            steps = array.astype(np.float32)  # int8 steps, which have another unit than the exact ones
            spread = max(spread_of(steps.astype(np.float64)), 1.0) if steps.size else 1.0
            bands[key] = Band(steps, CACHE_STEPS / spread, witness)
        elif key in exact and exact[key].shape == array.shape:
            gap = distance(array.astype(exact[key].dtype), exact[key])
            bands[key] = Band(array, max(floor, NODE_FACTOR * gap), witness)
    return bands


def module_bands(
    trial: Trial,
    graph: ir.Model,
    model: nn.Module,
    rounding: Rounding | None,
    results: Mapping[str, str] | None = None,
) -> dict[Key, Band]:
    """Return the bands of the values that are a module's result, from PyTorch.

    Args:
        trial: what to run.
        graph: the graph that is examined.
        model: the model in PyTorch.
        rounding: what the graph's precision does to its numbers; None for fp32.
        results: the path of the module that a value is the result of; by default as tracing noted it.
    """
    results = read_results(graph) if results is None else results
    exact = trial.collect_module_results(model)
    rounded = exact
    if rounding is not None:
        with rounding.apply(model):
            rounded = trial.collect_module_results(model, rounding)
    bands = {}
    for step in range(len(trial.steps)):
        for name, path in results.items():
            want = trial.gather_results(step, exact, path)
            near = trial.gather_results(step, rounded, path)
            if want is not None and near is not None:
                allowed = max(CAPS["fp32"]["max_error"], MODULE_FACTOR * distance(near, want))
                bands[step, name] = Band(want, allowed, PYTORCH)
    return bands
