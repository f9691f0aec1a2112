"""ONNX Runtime's CUDA provider, with the cache and all that stays between steps in the GPU's memory."""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ..bundle.artifact import IN_HALF
from ..bundle.bundle import Bundle
from ..bundle.export_again import suggest_export_again
from ..bundle.manifest import Artifact
from ..errors import BackendError, BackendUnavailableError, suggest_install
from .backend import Array, Arrays, BoundGraph, Buffer, Buffers, LoadRequest, Shape
from .captured_step import LOGITS, NO_GRAPH, NOT_CAPTURED, ON_HOST, CapturedGraphs, CapturedStep
from .cuda_memory import Device
from .device_buffer import DeviceBuffer, DeviceProgram, Staging, check_buffers, make_buffer
from .dialects import CUDA_DIALECTS, choose_artifact, explain_misfit_on_cuda, refuse_older_gpu
from .ort_program import CPU, OrtProgram, import_onnxruntime
from .placement import Placement, read_placement
from .requirements import check_version
from .token_choice import TokenChoice, add_candidates, choose_on_host

log = logging.getLogger("planforge")

PROVIDER = "CUDAExecutionProvider"
# The better first; those below fp16 last.
PRECISIONS = ("fp16", "fp32", "w8a16", "w4a16", "fp16-kv8", "w8a16-kv8", "w4a16-kv8")


class OrtCudaBackend:
    """Opens a bundle's graphs on an NVIDIA GPU; those in fp16 where none is asked for and they passed."""

    name = "ort-cuda"
    widens_half = False
    openings = 1

    def __init__(self, bundle: Bundle, request: LoadRequest) -> None:
        self.cpu_nodes = request.cpu_nodes
        self.precision = choose_precision(bundle, request.precision, self.cpu_nodes)
        ort = import_onnxruntime()
        if PROVIDER not in ort.get_available_providers():
            raise BackendUnavailableError(
                f"the ONNX Runtime here has no {PROVIDER}: pip uninstall onnxruntime, then"
                f" {suggest_install('gpu')}"
            )
        self.device = Device(request.device)
        if hasattr(ort, "preload_dlls"):  # of pip's packages, which the provider does not find by itself
            with contextlib.redirect_stdout(io.StringIO()):  # what it misses the provider says too
                ort.preload_dlls()
        self.version = str(ort.__version__)
        self.verify = request.verify
        self.placements: dict[str, Placement] = {}  # by the ids of the graphs that were opened

    def __str__(self) -> str:
        return f"{self.device.gpu.name}, {self.precision}"

    def artifact(self, bundle: Bundle, graph: str, precision: str | None) -> Artifact:
        chosen = choose_artifact(
            bundle,
            graph,
            self.precision,
            CUDA_DIALECTS,
            lambda artifact: not explain_misfit_on_cuda(artifact, self.cpu_nodes),
        )
        return add_candidates(chosen) if chosen.keeps_cache else chosen

    def open(self, bundle: Bundle, artifact: Artifact) -> OrtCudaProgram:
        check_version(artifact, self.version)
        refuse_older_gpu(artifact, self.device.gpu.sm)
        path = bundle.path(artifact.file, verify=self.verify)
        with bundle.check_meanwhile(artifact.data, verify=self.verify), self.device.turn():
            program = OrtCudaProgram(path, self.device, self.cpu_nodes)
        if program.placement is not None:
            self.placements[artifact.id] = program.placement
        return program


def choose_precision(bundle: Bundle, wanted: str | None, cpu_nodes: bool) -> str:
    """Return the precision to run, or raise an error if the bundle has no graphs in it that run there.

    "int8" and "int4" mean such weights in graphs that compute in fp16. The bundle's default comes first where
    none is wanted, and where it has no graphs for a GPU, as one that was measured on a CPU, the others do.
    """
    manifest = bundle.manifest
    graphs = {artifact.graph for artifact in manifest.artifacts}
    wanted = IN_HALF.get(wanted, wanted) if wanted else None
    default = manifest.default_precision
    asked = (wanted,) if wanted else (*([IN_HALF.get(default, default)] if default else []), *PRECISIONS)
    misfits = [(a, explain_misfit_on_cuda(a, cpu_nodes)) for a in manifest.artifacts]
    for precision in asked:
        fitting = [a for a, why in misfits if a.precision == precision and not why]
        right = wanted is not None or precision == "fp32" or all(a.passed for a in fitting)
        if precision in PRECISIONS and right and {a.graph for a in fitting} == graphs:
            return precision
    for artifact, why in misfits:
        if why and artifact.dialect in CUDA_DIALECTS and artifact.precision in set(asked) & set(PRECISIONS):
            again = suggest_export_again(bundle, precisions=[artifact.precision], targets=["cuda"])
            raise BackendUnavailableError(f"{why}; {again}")
    missing = wanted if wanted in PRECISIONS else "fp16"
    raise BackendUnavailableError(
        f"the bundle has no graphs in {wanted or 'fp16 or fp32'} that ONNX Runtime runs on a GPU;"
        f" {suggest_export_again(bundle, precisions=[missing], targets=['cuda'])}"
    )


class OrtCudaProgram(DeviceProgram, OrtProgram):
    """One ONNX graph in a session on a GPU. It works on the device's own stream.

    Args:
        path: the graph.
        device: the GPU.
        cpu_nodes: whether nodes that compute more than shapes may run on the CPU.

    Attributes:
        captures_steps: whether ONNX Runtime can capture CUDA graphs of it: no node computes on the CPU what
            another one needs on the GPU, and the inputs tell the shapes of all results.
        graphs: those that it has captured.
    """

    def __init__(self, path: Path, device: Device, cpu_nodes: bool = False) -> None:
        options = {"device_id": device.gpu.index, "user_compute_stream": int(device.stream), "use_tf32": 0}
        self.name = path.name
        error = self.try_session(path, {**options, "enable_cuda_graph": 1})
        if error:
            self.open_session(path, options)
            log.warning(NOT_CAPTURED, path.name, error)
        if self.session.get_providers()[0] != PROVIDER:  # it goes on without, where a library is missing
            raise BackendUnavailableError(
                f"ONNX Runtime could not start {PROVIDER}, usually because cuDNN or another CUDA library is"
                f" missing: {suggest_install('gpu')}"
            )
        self.axes = {
            tensor.name: tuple(tensor.shape)
            for tensor in (*self.session.get_inputs(), *self.session.get_outputs())
        }
        self.known_axes = self.list_known_axes()
        self.captures_steps = not error and self.tells_shapes(self.output_names)
        self.graphs = CapturedGraphs(path.name)
        if not self.captures_steps:
            self.graphs.limit = 0
        self.staging: dict[str, Staging] = {}
        self.choice = TokenChoice(device, type(self))
        self.placement = read_placement(self.session, PROVIDER, self.graphs, path)
        if self.placement is not None and not cpu_nodes:
            self.placement.refuse_others(path)
        self.device = device
        device.programs += 1

    def try_session(self, path: Path, options: Mapping[str, int]) -> str:
        """Open the session; return why it cannot be opened, or nothing."""
        try:
            self.open_session(path, options)
        except BackendError as error:
            return str(error)
        return ""

    def open_session(self, path: Path, options: Mapping[str, int]) -> None:
        settings = {name: str(value) for name, value in options.items()}
        OrtProgram.__init__(self, path, providers=[(PROVIDER, settings), *CPU])

    def allocate(self, name: str, shape: Shape) -> DeviceBuffer:  # type: ignore[override]
        with self.turn():
            return make_buffer(self.device, name, shape, self.find_dtype(name))

    def run(self, inputs: Arrays, buffers: Buffers, outputs: Sequence[str] | None = None) -> dict[str, Array]:
        on_device = check_buffers(buffers, self.output_names, self)
        chosen = [name for name in outputs or () if name not in self.output_names]
        own = [name for name in outputs or () if name in self.output_names]
        with self.turn():
            if not chosen:
                return super().run(inputs, on_device, outputs)
            if not self.tells_shapes([LOGITS]):
                results = super().run(inputs, on_device, [*own, LOGITS])
                results |= choose_on_host(results[LOGITS])
                return {name: results[name] for name in (*own, *chosen)}
            shapes = {name: array.shape for name, array in inputs.items()}
            shapes |= {name: buffer.shape for name, buffer in buffers.items()}
            shape = self.infer_shapes([LOGITS], self.read_lengths(shapes))[LOGITS]
            logits = self.find_staging(LOGITS).on_device(shape)
            results = super().run(inputs, {**on_device, LOGITS: logits}, own)
            return results | self.choice.choose(logits, chosen)

    def bind(self, buffers: Buffers, outputs: Sequence[str] | None = None, fixed: bool = False) -> BoundGraph:
        if not (fixed and self.captures_steps):
            return partial(self.run, buffers=buffers, outputs=outputs)
        step = CapturedStep(self, buffers, outputs)
        self.steps.add(step)
        return step

    def bind_buffer(self, binding: Any, name: str, buffer: Buffer) -> None:
        assert isinstance(buffer, DeviceBuffer)
        bind = binding.bind_output if name in self.output_names else binding.bind_input
        bind(name, "cuda", self.device.gpu.index, buffer.dtype.type, buffer.shape, buffer.address)

    def execute(self, session: Any, binding: Any) -> None:
        self.run_numbered(binding, NO_GRAPH)
        self.device.synchronise()

    def run_numbered(self, binding: Any, number: int) -> None:
        """Replay the captured graph of a number, or capture it; `NO_GRAPH` launches each kernel."""
        options = import_onnxruntime().RunOptions()
        options.add_run_config_entry("gpu_graph_id", str(number))
        self.find_session().run_with_iobinding(binding, options)

    def find_staging(self, name: str) -> Staging:
        """Return the memory of an input or result on both sides, which all steps use one after another."""
        if name not in self.staging:
            self.staging[name] = Staging(self.device, name, self.find_dtype(name))
        return self.staging[name]

    def read_lengths(self, shapes: Mapping[str, Shape]) -> dict[Any, int]:
        """Return the lengths that axes have in tensors of these shapes, by the axes' names."""
        lengths: dict[Any, int] = {}
        for name, shape in shapes.items():
            lengths.update(zip(self.axes[name], shape, strict=True))
        return lengths

    def list_known_axes(self) -> set[Any]:
        """Return the names of the axes whose lengths the inputs tell."""
        names = {tensor.name for tensor in self.session.get_inputs()}
        return {axis for name in names for axis in self.axes[name]} | (names & set(ON_HOST))

    def tells_shapes(self, results: Sequence[str]) -> bool:
        """Return whether each axis of results has a length, or a name that the inputs tell the length of."""
        axes = {axis for name in results for axis in self.axes[name]}
        return all(isinstance(axis, int) or (axis and axis in self.known_axes) for axis in axes)

    def infer_shapes(self, results: Sequence[str], lengths: Mapping[Any, int]) -> dict[str, Shape]:
        """Return the shapes of results, each of whose axes has a length or a name."""
        return {
            name: tuple(axis if isinstance(axis, int) else lengths[axis] for axis in self.axes[name])
            for name in results
        }

    def close(self) -> None:
        """Free the session; waits for a step that is running. Closing twice is fine."""
        with self.device.lock:
            if self.closed:
                return
            self.closed = True
        with self.device.turn():
            self.choice.close()
            self.staging.clear()
            super().close()
            self.device.leave()
