"""Runs the graphs that explain a model, which `planforge export --outputs explain` adds to a bundle."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from weakref import WeakKeyDictionary

from ...backends.backend import Array, Arrays, Program
from ...backends.ort_backend import OrtCpuBackend
from ...bundle.bundle import Bundle
from ...bundle.export_again import suggest_export_again
from ...bundle.manifest import Axis, TensorSpec
from ...errors import ClosedError, InputError
from ...memory_budget import MemoryBudget
from ...model import Model

GRADIENT_FACTOR = 6  # bytes of a gradient to those of the layers' results; from 4 to 7 were measured
WAY_OUT = "Explain a shorter text, or by fewer methods"


_graphs: WeakKeyDictionary[Model, ExplanationGraphs] = WeakKeyDictionary()
_lock = threading.Lock()


def find_graphs(model: Model) -> ExplanationGraphs:
    """Return the graphs that explain a model that was loaded, which close with it."""
    with _lock:
        graphs = _graphs.get(model)
        if graphs is None:
            graphs = _graphs[model] = ExplanationGraphs(model.bundle, model.threads, model.budget)
            model.close_with(graphs.close)
    return graphs


class ExplanationGraphs:
    """A bundle's graphs that explain its model, on ONNX Runtime's CPU; each is opened when it first runs.

    They are in fp32, whatever precision answers. Safe to use from several threads, which take turns.
    """

    def __init__(
        self, bundle: Bundle, threads: int | None = None, budget: MemoryBudget | None = None
    ) -> None:
        self.bundle = bundle
        self.threads = threads
        self.budget = MemoryBudget(None) if budget is None else budget
        self.artifacts = {artifact.graph: artifact for artifact in bundle.manifest.explanations}
        self.programs: dict[str, Program] = {}
        self.closed = False
        self.lock = threading.Lock()

    @property
    def name(self) -> str:
        """The bundle's name: that of its folder."""
        return self.bundle.folder.resolve().name

    def __bool__(self) -> bool:
        return bool(self.artifacts)

    def need(self, method: str) -> None:
        """Refuse a method that runs graphs which the bundle does not have."""
        if not self.artifacts:
            again = suggest_export_again(self.bundle, precisions=["fp32"], outputs=["explain"])
            raise InputError(
                f"{method} needs graphs that {self.bundle.folder} does not have: {again}, or use occlusion,"
                " which works with any bundle",
                option="methods",
            )

    def has_input(self, graph: str, name: str) -> bool:
        """Return whether a graph has an input of this name."""
        return any(spec.name == name for spec in self.artifacts[graph].inputs)

    def list_outputs(self, graph: str, prefix: str) -> list[str]:
        """Return the names of a graph's outputs that begin so, one of each layer, in their order."""
        return [spec.name for spec in self.artifacts[graph].outputs if spec.name.startswith(prefix)]

    def run(self, graph: str, inputs: Arrays, outputs: Sequence[str] | None = None) -> dict[str, Array]:
        """Return a graph's outputs by their names; all unless some are named."""
        needed = self.estimate_bytes(graph, inputs, outputs)
        # Who waits for memory holds no lock: whoever closes the model, or has the memory, may need it.
        with self.budget.reserve(needed, f"the graph {graph} of explanations", WAY_OUT), self.lock:
            if self.closed:
                raise ClosedError
            if graph not in self.programs:
                self.programs[graph] = self.open(graph)
            return self.programs[graph].run(inputs, {}, outputs)

    def open(self, graph: str) -> Program:
        """Open a graph, whose session has weights of its own."""
        artifact = self.artifacts[graph]
        count = self.bundle.manifest.count_weight_bytes(artifact)
        self.budget.check(count, f"the weights of explanations ({graph})", "Occlusion needs none of them")
        program = OrtCpuBackend(self.threads).open(self.bundle, artifact)
        self.budget.weight_bytes += count
        return program

    @contextmanager
    def lend(self) -> Iterator[None]:
        """Let the block explain; under a memory limit the weights of the graphs are given back behind it."""
        try:
            yield
        finally:
            if self.budget.limit is not None:
                self.free()

    def free(self) -> None:
        """Close the graphs that are open; one that is run again is opened again."""
        with self.lock:
            for graph, program in self.programs.items():
                program.close()
                weights = self.bundle.manifest.count_weight_bytes(self.artifacts[graph])
                self.budget.weight_bytes -= weights
            self.programs.clear()

    def count_state_bytes(self, asked: int) -> int:
        """Return the bytes that a decoder's lens takes for a state: logits, and a comparison of each."""
        return int(self.bundle.manifest.tokenizer["vocab_size"]) * (12 + 9 * asked)

    def estimate_bytes(self, graph: str, inputs: Arrays, outputs: Sequence[str] | None = None) -> int:
        """Return about how many bytes a run takes: of a gradient, of all that the layers compute."""
        lengths: dict[str, int] = {
            axis.name: length
            for spec in self.artifacts[graph].inputs
            for axis, length in zip(spec.axes, inputs[spec.name].shape, strict=True)
            if isinstance(axis, Axis)
        }
        if graph == "gradient":
            layers = self.artifacts["layers"].outputs
            return GRADIENT_FACTOR * sum(count_bytes(spec, lengths) for spec in layers)
        if "asked" in lengths:  # the lens of a decoder
            return lengths["states"] * self.count_state_bytes(lengths["asked"])
        specs = self.artifacts[graph].outputs
        return sum(count_bytes(spec, lengths) for spec in specs if outputs is None or spec.name in outputs)

    def close(self) -> None:
        """Free the engine; closing twice is fine."""
        self.closed = True
        self.free()


def count_bytes(spec: TensorSpec, lengths: Mapping[str, int]) -> int:
    """Return the bytes of a result of fp32 or int64 whose dynamic axes have these lengths."""
    shape: list[int] = [lengths[axis.name] if isinstance(axis, Axis) else axis for axis in spec.axes]
    return math.prod(shape) * (8 if spec.dtype == "int64" else 4)
