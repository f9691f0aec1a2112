"""Runs encoders' graphs in OpenVINO, on the CPU: in fp32, in bf16, and with products of 8-bit rows.

OpenVINO itself rounds to bf16 what an fp32 graph multiplies, on processors that multiply such numbers.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any, NoReturn

import numpy as np

from ..bundle.bundle import Bundle
from ..bundle.manifest import Artifact
from ..errors import BackendError, BackendUnavailableError, ClosedError, suggest_install
from .backend import Array, Arrays, BoundGraph, Buffers, Shape
from .dialects import choose_artifact
from .threads import choose_threads

NAME = "openvino"
TELEMETRY = "openvino_telemetry"
BF16 = "bf16"
# What it rounds products to, by the precisions that it runs; w8a8's graph itself rounds to 8 bits.
HINTS = {"fp32": "f32", BF16: "bf16", "w8a8": "f32"}
NO_BF16 = "this processor multiplies no bf16, as those with AMX or AVX-512 BF16 do"


def import_openvino() -> ModuleType:
    """Return OpenVINO's module, or raise an error that names the extra.

    Its import tells its makers of itself, with an id of this user that it keeps in the home folder, unless
    the package for that is missing: so it is, meanwhile.
    """
    known = sys.modules.get(TELEMETRY)
    if "openvino" not in sys.modules:
        sys.modules[TELEMETRY] = None  # type: ignore[assignment]
    try:
        import openvino
    except ModuleNotFoundError as error:
        raise BackendUnavailableError(f"it needs OpenVINO: {suggest_install('openvino')}") from error
    finally:
        if sys.modules.get(TELEMETRY) is None:
            sys.modules.pop(TELEMETRY, None)
        if known is not None:
            sys.modules[TELEMETRY] = known
    return openvino  # type: ignore[no-any-return]


def explain_no_bf16() -> str:
    """Return why nothing is multiplied in bf16 here; "" where OpenVINO does it."""
    try:
        capabilities = import_openvino().Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    except BackendUnavailableError as error:
        return str(error)
    return "" if "BF16" in capabilities else NO_BF16


class OpenVinoBackend:
    """Opens an encoder's portable graphs in OpenVINO.

    Args:
        threads: see `LoadOptions`, as for the other.
        verify: compare hashes of large files too.
    """

    name = NAME
    widens_half = False
    openings = 1

    def __init__(self, threads: int | None = None, verify: bool = False) -> None:
        import_openvino()
        self.threads = choose_threads(threads)
        self.verify = verify

    def __str__(self) -> str:
        return str(self.threads)

    def artifact(self, bundle: Bundle, graph: str, precision: str | None) -> Artifact:
        """Return a portable graph; raise a BackendUnavailableError where it runs none here."""
        portable = [a for a in bundle.manifest.artifacts if a.graph == graph and a.dialect == "portable"]
        if not any(map(self.runs, portable)):
            raise BackendUnavailableError(
                f"the bundle has no encoder's graph for it: export with --target {NAME} --precision"
                f" {','.join(HINTS)}, or some of them"
            )
        found = choose_artifact(bundle, graph, precision, ("portable",), self.runs)
        if found.precision == BF16 and (reason := explain_no_bf16()):
            raise BackendUnavailableError(reason)
        return found

    def runs(self, artifact: Artifact) -> bool:
        """Tell whether it runs a graph: an encoder's, in a precision of the table."""
        return artifact.precision in HINTS and artifact.graph == "encoder"

    def open(self, bundle: Bundle, artifact: Artifact) -> OpenVinoProgram:
        path = bundle.path(artifact.file, verify=self.verify)
        with bundle.check_meanwhile(artifact.data, verify=self.verify):
            return OpenVinoProgram(str(path), self.threads.count, HINTS[artifact.precision])


class OpenVinoProgram:
    """One ONNX graph, compiled by OpenVINO.

    Args:
        path: the graph.
        threads: to compute with.
        hint: the type of products, "f32" or "bf16".
    """

    captures_steps = False

    def __init__(self, path: str, threads: int, hint: str) -> None:
        options = {
            "INFERENCE_NUM_THREADS": threads,
            "INFERENCE_PRECISION_HINT": hint,
            "PERFORMANCE_HINT": "LATENCY",
            "NUM_STREAMS": 1,
            "ENABLE_CPU_PINNING": False,  # the program's other threads need the cores as well
        }
        with wrap_errors(f"OpenVINO cannot load {os.path.basename(path)}"):
            compiled = import_openvino().Core().compile_model(path, "CPU", options)
            self.dtypes = {port.any_name: port.element_type.to_dtype() for port in compiled.inputs}
            self.outputs = {port.any_name: port for port in compiled.outputs}
            self.request: Any = compiled.create_infer_request()

    def allocate(self, name: str, shape: Shape) -> NoReturn:
        raise BackendError(f"OpenVINO keeps no buffers here, as {name} would be")

    def free_memory(self) -> int | None:
        return None

    def run(self, inputs: Arrays, buffers: Buffers, outputs: Sequence[str] | None = None) -> dict[str, Array]:
        if buffers:
            self.allocate(next(iter(buffers)), ())
        request = self.request
        if request is None:
            raise ClosedError
        given = {name: np.ascontiguousarray(array, self.dtypes[name]) for name, array in inputs.items()}
        with wrap_errors("OpenVINO failed while running"):
            request.infer(given, share_inputs=True)
            # The next run writes to the same memory.
            return {
                name: np.array(request.get_tensor(self.outputs[name]).data)
                for name in (self.outputs if outputs is None else outputs)
            }

    def bind(self, buffers: Buffers, outputs: Sequence[str] | None = None, fixed: bool = False) -> BoundGraph:
        return partial(self.run, buffers=buffers, outputs=outputs)

    def close(self) -> None:
        self.request = None


@contextmanager
def wrap_errors(doing: str) -> Iterator[None]:
    """Raise OpenVINO's exceptions as BackendError, in one line."""
    try:
        yield
    except RuntimeError as error:
        raise BackendError(f"{doing}: {' '.join(str(error).split())}") from error
