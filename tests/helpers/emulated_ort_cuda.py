"""ONNX Runtime with a CUDA provider, on an emulated GPU: what it reads and writes there, the CPU computes.

Host and device are apart, as on a real one. A step happens when its stream is synchronised; until then its
results are not there. What a node reads on the host, though a GPU computes it, is zero when it is read: an
H200 did so to GroupQueryAttention. A node without a kernel on a GPU, by ONNX Runtime's own list, is on the
CPU, such as GroupQueryAttention in fp32, and the session tells so.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from planforge.runtime.backends import ort_cuda_backend, ort_program
from planforge.runtime.backends.captured_step import NO_GRAPH

from .cuda_kernels import NUMPY_NAMES, has_kernel
from .emulated_cuda import EmulatedCuda

PROVIDER = "CUDAExecutionProvider"
CPU_PROVIDER = "CPUExecutionProvider"
# The inputs that a kernel on a GPU reads on the host, of the operators in our graphs.
ON_HOST = {
    "Expand": [1],
    "GroupQueryAttention": [6],
    "Range": [0, 1, 2],
    "Reshape": [1],
    "Resize": [1, 2, 3],
    "Slice": [1, 2, 3, 4],
    "Squeeze": [1],
    "TopK": [1],
    "Unsqueeze": [1],
}
GRAPH_BYTES = 4096  # that a captured graph takes


def name_types(graph: onnx.GraphProto) -> dict[str, str]:
    """The types of a graph's tensors as numpy names them, by the tensors' names."""
    values = (*graph.input, *graph.value_info, *graph.output)
    numbers = {value.name: value.type.tensor_type.elem_type for value in values}
    numbers |= {weight.name: weight.data_type for weight in graph.initializer}
    names = {name: onnx.TensorProto.DataType.Name(number).lower() for name, number in numbers.items()}
    return {name: NUMPY_NAMES.get(dtype, dtype) for name, dtype in names.items()}


class PlacedGraph:
    """A graph as the CUDA provider runs it: which node is where, and which values come too late."""

    def __init__(self, path: Path) -> None:
        self.model = onnx.load(path)
        graph = self.model.graph
        self.given = {value.name for value in (*graph.input, *graph.initializer)}
        types = name_types(graph)
        self.on_cpu: list[onnx.NodeProto] = []
        self.on_gpu: list[onnx.NodeProto] = []
        shapes: set[str] = set()  # values on the host
        late: list[tuple[onnx.NodeProto, int]] = []
        limited: list[onnx.NodeProto] = []  # attention, which reads no slot from the total on
        for node in graph.node:
            wanted = ON_HOST.get(node.op_type, [])
            computed = [(i, name) for i, name in enumerate(node.input) if name and name not in self.given]
            if not has_kernel(node, types):
                self.on_cpu.append(node)
                continue
            if node.op_type == "Shape" or (
                computed and all(name in shapes and i not in wanted for i, name in computed)
            ):
                shapes.update(node.output)
                self.on_cpu.append(node)
                continue
            self.on_gpu.append(node)
            if node.op_type == "GroupQueryAttention" and node.input[6] in self.given:
                limited += [node]
            late += [(node, i) for i, name in computed if i in wanted and name not in shapes]
        self.late = [node.op_type for node, _ in late]
        self.copied = [  # to the GPU, of what the CPU computes
            f"{name} of {node.name}"
            for node in self.on_gpu
            for index, name in enumerate(node.input)
            if name in shapes and index not in ON_HOST.get(node.op_type, [])
        ]
        one = onnx.helper.make_tensor("emulated.one", onnx.TensorProto.INT32, [], [1])
        graph.initializer.append(one)
        for node in limited:
            names = [f"{name}.{node.output[0]}" for name in ("most", "last")]
            most = onnx.helper.make_node("Sub", [node.input[6], one.name], names[:1])
            last = onnx.helper.make_node("Min", [node.input[5], names[0]], names[1:])
            graph.node.insert(list(graph.node).index(node), most)
            graph.node.insert(list(graph.node).index(node), last)
            node.input[5] = names[1]
        for node, index in late:
            before = onnx.helper.make_node("Sub", [node.input[index]] * 2, [f"late.{index}.{node.output[0]}"])
            graph.node.insert(list(graph.node).index(node), before)
            node.input[index] = before.output[0]

    def make_model(self) -> bytes:
        content: bytes = self.model.SerializeToString()
        return content

    def tell(self) -> list[Any]:
        """What `InferenceSession.get_provider_graph_assignment_info` does."""
        return [
            SimpleNamespace(ep_name=name, get_nodes=lambda nodes=nodes: nodes)
            for name, nodes in ((PROVIDER, self.on_gpu), (CPU_PROVIDER, self.on_cpu))
        ]


class EmulatedBinding:
    """An `IOBinding`: device memory is of the size that is said."""

    def __init__(self, cuda: EmulatedCuda) -> None:
        self.cuda = cuda
        self.inputs: dict[str, Any] = {}
        self.on_device: set[str] = set()  # inputs
        self.outputs: dict[str, tuple[int, tuple[int, ...]] | None] = {}
        self.results: list[Any] = []

    def bind_cpu_input(self, name: str, array: Any) -> None:
        self.inputs[name] = array.copy

    def bind_input(self, name: str, kind: str, index: int, dtype: Any, shape: Any, pointer: int) -> None:
        assert kind == "cuda" and index == 0
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        self.on_device.add(name)
        self.inputs[name] = lambda: self.cuda.at(pointer, size).view(dtype).reshape(shape).copy()

    def bind_output(
        self, name: str, kind: str, index: int = 0, dtype: Any = None, shape: Any = None, pointer: int = 0
    ) -> None:
        assert (kind == "cuda") == bool(pointer)
        self.outputs[name] = (pointer, tuple(shape)) if pointer else None

    def get_outputs(self) -> list[Any]:
        return self.results


class EmulatedSession:
    """An `InferenceSession` that works on the stream it was given."""

    def __init__(
        self, session: Any, placed: PlacedGraph, cuda: EmulatedCuda, providers: Sequence[Any]
    ) -> None:
        cuda.check_no_other_captures("a session was opened")
        self.session = session
        self.placed = placed
        self.cuda = cuda
        self.settings: Mapping[str, str] = providers[0][1]
        self.names = [PROVIDER, CPU_PROVIDER]
        self.threads = threading.local()
        self.captures = 0
        self.replays = 0

    def get_providers(self) -> list[str]:
        return self.names

    def get_provider_graph_assignment_info(self) -> list[Any]:
        return self.placed.tell()

    def get_inputs(self) -> Any:
        return self.session.get_inputs()

    def get_outputs(self) -> Any:
        return self.session.get_outputs()

    def io_binding(self) -> EmulatedBinding:
        return EmulatedBinding(self.cuda)

    def run_with_iobinding(self, binding: EmulatedBinding, options: Any = None) -> None:
        self.cuda.check_no_other_captures("a session ran")
        number = NO_GRAPH
        if self.settings.get("enable_cuda_graph") == "1":
            number = int(options.get_run_config_entry("gpu_graph_id"))
        if number == NO_GRAPH:
            self.launch(binding, dict(binding.inputs))
            return
        graphs = self.find_graphs()
        if number not in graphs:
            self.capture(binding, graphs, number)
        self.replays += 1
        captured, inputs = graphs[number]
        self.launch(captured, inputs)

    def find_graphs(self) -> dict[int, Any]:
        """What this thread has captured."""
        if not hasattr(self.threads, "graphs"):
            self.threads.graphs = {}
        graphs: dict[int, Any] = self.threads.graphs
        return graphs

    def capture(self, binding: EmulatedBinding, graphs: dict[int, Any], number: int) -> None:
        for name, target in binding.outputs.items():
            assert target is not None, f"{name} has no memory of its own"
        with self.cuda.capturing():
            for _ in range(2):  # what a first run allocates is there
                self.launch(binding, dict(binding.inputs))
            if self.cuda.fails_to_capture:
                raise RuntimeError("operation failed due to a previous error during capture")
            captured = EmulatedBinding(self.cuda)
            captured.outputs = dict(binding.outputs)
            inputs = dict(binding.inputs)
            for name, read in inputs.items():
                if name not in binding.on_device:  # a kernel was given the value, not the address
                    value = read()
                    inputs[name] = lambda value=value: value
            graphs[number] = captured, inputs
        self.captures += 1
        self.cuda.graph_bytes += GRAPH_BYTES

    def launch(self, binding: EmulatedBinding, inputs: Mapping[str, Any]) -> None:
        stream = int(self.settings["user_compute_stream"])
        outputs = dict(binding.outputs)
        arrived: dict[str, Any] = {}

        def work() -> None:
            found = self.session.run(list(outputs), {name: read() for name, read in inputs.items()})
            arrived.update(zip(outputs, found, strict=True))
            for name, target in outputs.items():
                if target is not None:
                    assert target[1] == arrived[name].shape, name
                    content = np.frombuffer(arrived[name].tobytes(), np.uint8)
                    self.cuda.at(target[0], arrived[name].nbytes)[:] = content

        self.cuda.ask(stream, work)

        def read_result(name: str) -> Any:
            assert arrived, f"{name} was read before the GPU had computed it"
            return arrived[name]

        binding.results = [SimpleNamespace(numpy=lambda name=name: read_result(name)) for name in outputs]


@contextmanager
def emulated_ort_cuda(available: bool = True, starts: bool = True, **machine: Any) -> Iterator[EmulatedCuda]:
    """A machine with a GPU and an ONNX Runtime for it.

    Args:
        available: whether it has the provider at all.
        starts: whether the provider finds its libraries.
        machine: as of `EmulatedCuda`.
    """
    cuda = EmulatedCuda(**machine)
    package = ModuleType("cuda.bindings")
    package.runtime = cuda  # type: ignore[attr-defined]
    real = ort_program.make_session

    def make_session(
        path: Any, options: Any, providers: Sequence[Any] = ort_program.CPU, disabled: Sequence[str] = ()
    ) -> Any:
        if providers == ort_program.CPU:
            return real(path, options, providers, disabled)
        placed = PlacedGraph(path)
        if providers[0][1].get("enable_cuda_graph") == "1" and (placed.copied or placed.late):
            raise RuntimeError(f"This session cannot use the graph capture feature: {placed.copied}")
        computing = real(placed.make_model(), options, ort_program.CPU, disabled)
        session = EmulatedSession(computing, placed, cuda, providers)
        session.names = session.names if starts and loaded else session.names[1:]
        cuda.sessions.append(session)
        return session

    def preload_dlls() -> None:
        print("what only a person should read")  # as the real one does, on stdout
        loaded.append("CUDA's libraries")

    loaded: list[str] = []
    found = SimpleNamespace(
        __version__=onnxruntime.__version__,
        get_available_providers=lambda: [PROVIDER] * available + ["CPUExecutionProvider"],
        preload_dlls=preload_dlls,
        RunOptions=onnxruntime.RunOptions,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "cuda", ModuleType("cuda"))
        patch.setitem(sys.modules, "cuda.bindings", package)
        patch.setattr(ort_program, "make_session", make_session)
        patch.setattr(ort_cuda_backend, "import_onnxruntime", lambda: found)
        yield cuda
    assert onnxruntime.get_available_providers()  # the real one is back
