"""A graph in ONNX Runtime: its session, and steps whose buffers are bound."""

from __future__ import annotations

import logging
import os
import sys
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import numpy as np

from ..bundle.manifest import Artifact
from ..errors import BackendError, BackendUnavailableError, ClosedError, suggest_install
from .backend import Array, ArrayBuffer, Arrays, BoundGraph, Buffer, Buffers, Shape
from .huge_pages import HugePages
from .requirements import EXACT_PRODUCTS, products_saturate
from .threads import choose_threads

log = logging.getLogger("planforge")

CPU = ("CPUExecutionProvider",)
BINDING = "ONNX Runtime cannot bind its buffers"
RUNNING = "ONNX Runtime failed while running"

# The fused kernel takes 5 us for a row of 768 and 1,025 for 256 rows; Add, Add and LayerNormalization take 2
# and 158 (ORT 1.31.1, 2 threads).
SLOW_FUSIONS = ["SkipLayerNormFusion"]
# For a root mean square computed in fp32 within an fp16 graph: an error of 8e-3 instead of 4e-4.
COARSE_FUSIONS = ["SimplifiedLayerNormFusion"]
# It moves a QuantizeLinear before a Transpose, for which fp8 has no kernel (ORT 1.31.1).
MOVED_ROUNDING = ["QDQPropagationTransformer"]

# A product of weights in int8 or int4 behind a DequantizeLinear multiplies what was chosen; ONNX Runtime
# would round its rows to int8 as well, which no other engine does.
EXACT_WEIGHTS = {"session.qdq_matmulnbits_accuracy_level": "1"}

# Workers that wait for more work spin for tens of milliseconds unless told otherwise, on cores that another
# model or program needs by then. Between two kernels, and from token to token, they need not sleep.
SPINNING = {
    "session.intra_op.allow_spinning": "1",
    "session.intra_op.spin_duration_us": "200",  # ONNX Runtime below 1.26 passes over it, hence the next
    "session.force_spinning_stop": "1",  # no spinning after a run, only in it
}
# Checks need no haste, and spinning takes a fifteenth of their CPU time.
SLEEPING = {"session.intra_op.allow_spinning": "0"}


def import_onnxruntime() -> ModuleType:
    """Return ONNX Runtime's module, or raise an error that names the extra."""
    # Its telemetry writes a file with an id of this machine, `.ses`, into the folder for temporary files.
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    try:
        import onnxruntime
    except ModuleNotFoundError as error:
        raise BackendUnavailableError(
            f"it needs ONNX Runtime: {suggest_install('cpu')}, or with an NVIDIA GPU {suggest_install('gpu')}"
        ) from error
    return onnxruntime  # type: ignore[no-any-return]


class OrtBuffer(ArrayBuffer):
    """Host memory that ONNX Runtime reads and writes without a copy."""

    def __init__(self, array: Array) -> None:
        super().__init__(array)
        self.value = import_onnxruntime().OrtValue.ortvalue_from_numpy(array)  # shares the memory


class OrtProgram:
    """One ONNX graph in an ONNX Runtime session."""

    captures_steps = False

    def __init__(
        self,
        path: Path,
        threads: int | None = None,
        providers: Sequence[Any] = CPU,
        disabled: Sequence[str] = SLOW_FUSIONS,
        optimized: bool = False,
        spinning: bool = True,
        may_saturate: bool = True,
    ) -> None:
        options = make_options(threads, spinning, may_saturate)
        if optimized:  # and saved by ONNX Runtime
            options.graph_optimization_level = import_onnxruntime().GraphOptimizationLevel.ORT_DISABLE_ALL
        if tuple(providers) != CPU:  # so that the session tells which provider has which node
            options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
        self.dtypes: dict[str, np.dtype[Any]] = {}
        self.huge_pages = HugePages(wanted=tuple(providers) == CPU)
        with wrap_ort_errors(f"ONNX Runtime cannot load {path.name}"), self.huge_pages:
            self.session = make_session(path, options, providers, disabled)
            self.output_names = [tensor.name for tensor in self.session.get_outputs()]
            tensors = (*self.session.get_inputs(), *self.session.get_outputs())
            types = {tensor.name: tensor.type for tensor in tensors}
        for name, kind in types.items():
            if kind not in NUMPY_TYPES:
                raise BackendError(f"{path.name}: {name} has type {kind}, which is not supported")
            self.dtypes[name] = NUMPY_TYPES[kind]
        self.steps: weakref.WeakSet[Any] = weakref.WeakSet()  # that were bound for many runs

    def allocate(self, name: str, shape: Shape) -> OrtBuffer:
        return OrtBuffer(np.zeros(shape, self.find_dtype(name)))  # untouched pages take no memory

    def free_memory(self) -> int | None:
        return None

    def find_dtype(self, name: str) -> np.dtype[Any]:
        if name not in self.dtypes:
            raise BackendError(f"the graph has no tensor {name!r}; it has {', '.join(self.dtypes)}")
        return self.dtypes[name]

    def run(self, inputs: Arrays, buffers: Buffers, outputs: Sequence[str] | None = None) -> dict[str, Array]:
        return OrtStep(self, buffers, outputs)(inputs)

    def bind(self, buffers: Buffers, outputs: Sequence[str] | None = None, fixed: bool = False) -> BoundGraph:
        step = OrtStep(self, buffers, outputs)
        self.steps.add(step)
        return step

    def execute(self, session: Any, binding: Any) -> None:
        """Let the engine compute one step; its results are there when it returns."""
        session.run_with_iobinding(binding)

    def find_session(self) -> Any:
        session = self.session
        if session is None:
            raise ClosedError
        return session

    def bind_buffer(self, binding: Any, name: str, buffer: Buffer) -> None:
        assert isinstance(buffer, OrtBuffer)
        if name in self.output_names:
            binding.bind_ortvalue_output(name, buffer.value)
        else:
            binding.bind_ortvalue_input(name, buffer.value)

    def close(self) -> None:
        """Drop the session, which bindings keep too. Closing twice is fine."""
        self.session = None
        self.huge_pages.forget()
        for step in self.steps:
            step.binding = None


class OrtStep:
    """A graph bound to its buffers once; calls with inputs of equal shapes bind nothing any more.

    Args:
        program: the graph; when it is closed, it frees the binding too, which would keep its weights.
        buffers: by input or output name; their memory must live as long as the step.
        outputs: the outputs to compute; all unless given.
    """

    def __init__(self, program: OrtProgram, buffers: Buffers, outputs: Sequence[str] | None) -> None:
        self.program = program
        self.buffers = buffers
        wanted = program.output_names if outputs is None else outputs
        self.names = [name for name in wanted if name not in buffers]  # of the outputs that are returned
        self.bound = [name for name in buffers if name in program.output_names] + self.names  # in ORT's order
        self.inputs: dict[str, Array] = {}  # the arrays that are bound
        self.results: dict[str, Array] = {}  # that are bound; none while ONNX Runtime allocates them
        self.shapes: dict[str, Shape] = {}  # of the results
        self.binding: Any = program.find_session().io_binding()
        with wrap_ort_errors(BINDING):
            for name, buffer in buffers.items():
                program.bind_buffer(self.binding, name, buffer)

    def __call__(self, inputs: Arrays) -> dict[str, Array]:
        # A step that runs keeps both, also where another thread closes meanwhile.
        session = self.program.find_session()
        binding = self.binding
        if not self.inputs:  # at the first call, and where all inputs are in buffers
            return self.run_first(session, binding, inputs)
        for name, array in inputs.items():
            bound = self.inputs.get(name)
            if bound is None or bound.shape != array.shape:
                return self.run_first(session, binding, inputs)
            bound[...] = array
        self.bind_results(binding)
        try:  # without a context manager's calls: a step leaves all code cold, and each takes 5 us
            self.program.execute(session, binding)
        except Exception as error:
            raise_ort_error(RUNNING, error)
        return dict(self.results)

    def run_first(self, session: Any, binding: Any, inputs: Arrays) -> dict[str, Array]:
        """Run on inputs of shapes that the last call did not have, or on none.

        ONNX Runtime allocates the results.
        """
        self.program.huge_pages.collapse_when_due()
        # Rows one behind the other, else ONNX Runtime would bind a copy, which no later call writes to.
        bound = {
            name: np.array(array, self.program.find_dtype(name), order="C") for name, array in inputs.items()
        }
        self.inputs = {}
        self.results = {}
        with wrap_ort_errors(RUNNING):
            for name, array in bound.items():
                binding.bind_cpu_input(name, array)
            for name in self.names:
                binding.bind_output(name, "cpu")
            self.program.execute(session, binding)
        values = dict(zip(self.bound, binding.get_outputs(), strict=True))
        results = {name: values[name].numpy() for name in self.names}
        self.shapes = {name: array.shape for name, array in results.items()}
        self.inputs = bound
        return results

    def bind_results(self, binding: Any) -> None:
        """Let the results go where the last call's went, or into new arrays where somebody has those still.

        Memory that is new at each step costs more than all other work here: the first touch of its pages.
        """
        if not self.names or (self.results and count_references(self.results) == UNSHARED):
            return
        results = {
            name: np.empty(shape, self.program.find_dtype(name)) for name, shape in self.shapes.items()
        }
        self.results = {}  # until all are bound, whatever interrupts that
        with wrap_ort_errors(BINDING):
            for name, array in results.items():
                binding.bind_output(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
        self.results = results


def count_references(arrays: dict[str, Array]) -> int:
    """Return how many references the array has that most refer to; a view of it is one too."""
    return max(map(sys.getrefcount, arrays.values()))


UNSHARED = count_references({"unshared": np.empty(1)})  # counting takes some, in each Python others


def list_disabled(artifact: Artifact) -> list[str]:
    """Return the optimizers that a graph does better without."""
    moved = MOVED_ROUNDING if artifact.precision.endswith("a8") else []
    return [*SLOW_FUSIONS, *(COARSE_FUSIONS if artifact.is_half else []), *moved]


def make_options(threads: int | None, spinning: bool = True, may_saturate: bool = True) -> Any:
    """Return the options of a session that computes; products that may saturate have exact kernels."""
    options = import_onnxruntime().SessionOptions()
    options.log_severity_level = 4  # errors come as exceptions, so not on stderr too
    options.intra_op_num_threads = choose_threads(threads).count
    exact = EXACT_PRODUCTS if may_saturate and products_saturate() else {}
    for name, value in {**(SPINNING if spinning else SLEEPING), **EXACT_WEIGHTS, **exact}.items():
        options.add_session_config_entry(name, value)
    return options


def make_session(
    model: Path | bytes, options: Any, providers: Sequence[Any] = CPU, disabled: Sequence[str] = ()
) -> Any:
    """Return an ONNX Runtime session with its own threads, or on the global pool where the program made one.

    A program that calls set_global_thread_pool_sizes can have no session with threads of its own.
    """
    ort = import_onnxruntime()
    # Without enable_fallback=0 it prints on stdout what went wrong, and tries the same again.
    arguments = {"providers": list(providers), "enable_fallback": 0, "disabled_optimizers": list(disabled)}
    # A pattern is one block for all results of a run of one shape. It lies beside what other shapes needed:
    # twice the memory for about 2 % of an encoder's time (benchmarks/results/memory_patterns.json).
    options.enable_mem_pattern = tuple(providers) != CPU
    try:
        return ort.InferenceSession(model, options, **arguments)
    except RuntimeError as error:
        if "use_per_session_threads" not in str(error):
            raise
    name = model.name if isinstance(model, Path) else "a graph"
    log.info("%s runs on ONNX Runtime's global thread pool, which this program made", name)
    options.use_per_session_threads = False
    options.intra_op_num_threads = 0  # it warns of any other number
    return ort.InferenceSession(model, options, **arguments)


def open_plain_session(model: Path | bytes, optimized: bool = True, keeps_memory: bool = True) -> Any:
    """Return a session for checks, not for speed: silent, and its threads sleep as soon as they are idle.

    Threads that spin, ONNX Runtime's default, take 25 ms of a core for each session that is closed. Without
    `keeps_memory` what a run needed is given back at its end.
    """
    ort = import_onnxruntime()
    options = ort.SessionOptions()
    options.log_severity_level = 4  # errors come as exceptions
    for name, value in {**SLEEPING, **EXACT_WEIGHTS}.items():
        options.add_session_config_entry(name, value)
    options.enable_cpu_mem_arena = keeps_memory
    if not optimized:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return make_session(model, options)


@contextmanager
def wrap_ort_errors(doing: str) -> Iterator[None]:
    """Raise ONNX Runtime's exceptions as BackendError, in one line."""
    try:
        yield
    except Exception as error:
        raise_ort_error(doing, error)


def raise_ort_error(doing: str, error: Exception) -> NoReturn:
    """Raise an exception of ONNX Runtime as a BackendError, in one line; any other as it is."""
    # Session creation raises ONNX Runtime's own exceptions, a run with IO binding RuntimeError; a damaged
    # graph's names may be no text.
    if isinstance(error, RuntimeError | UnicodeDecodeError) or type(error).__module__.startswith(
        "onnxruntime"
    ):
        raise BackendError(f"{doing}: {' '.join(str(error).split())}") from error
    raise error


NUMPY_TYPES: dict[str, np.dtype[Any]] = {
    "tensor(float)": np.dtype(np.float32),
    "tensor(float16)": np.dtype(np.float16),
    "tensor(int64)": np.dtype(np.int64),
    "tensor(int32)": np.dtype(np.int32),
    "tensor(bool)": np.dtype(np.bool_),
    "tensor(int8)": np.dtype(np.int8),
    "tensor(uint8)": np.dtype(np.uint8),
}
