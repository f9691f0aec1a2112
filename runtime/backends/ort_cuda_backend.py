"""ONNX Runtime's CUDA provider, with the cache and all that stays between steps in the GPU's memory."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ..bundle.artifact import IN_HALF
from ..bundle.bundle import Bundle
from ..bundle.export_again import suggest_export_again
from ..bundle.manifest import Artifact
from ..errors import BackendUnavailableError, suggest_install
from .backend import Array, Arrays, BoundGraph, Buffer, Buffers, LoadRequest, Shape
from .cuda_memory import Device
from .device_buffer import DeviceBuffer, DeviceProgram, check_buffers, make_buffer
from .dialects import CUDA_DIALECTS, choose_artifact, explain_misfit_on_cuda, refuse_older_gpu
from .ort_program import CPU, OrtProgram, import_onnxruntime
from .placement import Placement, read_placement
from .requirements import check_version

PROVIDER = "CUDAExecutionProvider"
# The better first; those below fp16 where they are asked for.
PRECISIONS = ("fp16", "fp32", "w8a16", "w4a16", "fp16-kv8", "w8a16-kv8", "w4a16-kv8")


class OrtCudaBackend:
    """Opens a bundle's graphs on an NVIDIA GPU; those in fp16 where none is asked for and they passed."""

    name = "ort-cuda"

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
        return choose_artifact(
            bundle,
            graph,
            self.precision,
            CUDA_DIALECTS,
            lambda artifact: not explain_misfit_on_cuda(artifact, self.cpu_nodes),
        )

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

    "int8" and "int4" mean such weights in graphs that compute in fp16.
    """
    manifest = bundle.manifest
    graphs = {artifact.graph for artifact in manifest.artifacts}
    wanted = IN_HALF.get(wanted, wanted) if wanted else manifest.default_precision
    misfits = [(a, explain_misfit_on_cuda(a, cpu_nodes)) for a in manifest.artifacts]
    for precision in PRECISIONS if wanted is None else (wanted,):
        fitting = [a for a, why in misfits if a.precision == precision and not why]
        right = wanted is not None or precision == "fp32" or all(a.passed for a in fitting)
        if precision in PRECISIONS and right and {a.graph for a in fitting} == graphs:
            return precision
    for artifact, why in misfits:
        asked = PRECISIONS if wanted is None else (wanted,)
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
    """

    def __init__(self, path: Path, device: Device, cpu_nodes: bool = False) -> None:
        options = {"device_id": device.gpu.index, "user_compute_stream": int(device.stream), "use_tf32": 0}
        settings = {name: str(value) for name, value in options.items()}
        super().__init__(path, providers=[(PROVIDER, settings), *CPU])
        if self.session.get_providers()[0] != PROVIDER:  # it goes on without, where a library is missing
            raise BackendUnavailableError(
                f"ONNX Runtime could not start {PROVIDER}, usually because cuDNN or another CUDA library is"
                f" missing: {suggest_install('gpu')}"
            )
        self.placement = read_placement(self.session, PROVIDER)
        if self.placement is not None and not cpu_nodes:
            self.placement.refuse_others(path)
        self.device = device
        device.programs += 1

    def allocate(self, name: str, shape: Shape) -> DeviceBuffer:  # type: ignore[override]
        with self.turn():
            return make_buffer(self.device, name, shape, self.find_dtype(name))

    def run(self, inputs: Arrays, buffers: Buffers, outputs: Sequence[str] | None = None) -> dict[str, Array]:
        on_device = check_buffers(buffers, self.output_names, self)
        with self.turn():
            return super().run(inputs, on_device, outputs)

    def bind(self, buffers: Buffers, outputs: Sequence[str] | None = None) -> BoundGraph:
        return partial(self.run, buffers=buffers, outputs=outputs)

    def bind_buffer(self, binding: Any, name: str, buffer: Buffer) -> None:
        assert isinstance(buffer, DeviceBuffer)
        bind = binding.bind_output if name in self.output_names else binding.bind_input
        bind(name, "cuda", self.device.gpu.index, buffer.dtype.type, buffer.shape, buffer.address)

    def execute(self, session: Any, binding: Any) -> None:
        super().execute(session, binding)
        self.device.synchronise()

    def close(self) -> None:
        """Free the session; waits for a step that is running. Closing twice is fine."""
        with self.device.lock:
            if not self.closed:
                self.closed = True
                super().close()
                self.device.leave()
