"""Runs the graphs that explain a model, which `planforge export --outputs explain` adds to a bundle."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from ..backends.backend import Array, Arrays, Program
from ..backends.ort_backend import OrtCpuBackend
from ..bundle.bundle import Bundle
from ..errors import ClosedError, InputError


class ExplanationGraphs:
    """A bundle's graphs that explain its model, on ONNX Runtime's CPU; each is opened when it first runs.

    They are in fp32, whatever precision answers. Safe to use from several threads, which take turns.
    """

    def __init__(self, bundle: Bundle, threads: int | None = None) -> None:
        self.bundle = bundle
        self.threads = threads
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
            raise InputError(
                f"{method} runs graphs that {self.bundle.folder} does not have: export it again with"
                " --outputs explain (fp32 among its precisions), or use occlusion, which any bundle can",
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
        artifact = self.artifacts[graph]
        with self.lock:
            if self.closed:
                raise ClosedError
            if graph not in self.programs:
                self.programs[graph] = OrtCpuBackend(self.threads).open(self.bundle, artifact)
            return self.programs[graph].run(inputs, {}, outputs)

    def close(self) -> None:
        """Free the engine; closing twice is fine."""
        with self.lock:
            self.closed = True
            for program in self.programs.values():
                program.close()
            self.programs.clear()
