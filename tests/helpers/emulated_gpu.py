"""TensorRT on an emulated GPU: the small surface that the backend uses, executed by ONNX Runtime.

A context computes with what it was told when it was enqueued, refuses what a profile does not take, writes
an aliased output nowhere but over its input, and makes a captured graph worthless when it is told something
else. What an older release of TensorRT has not, it has not either.
"""
# ruff: noqa: N802 (the names are TensorRT's)

from __future__ import annotations

import enum
import hashlib
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest

from planforge.exporter.tensorrt.candidates import add_candidates
from planforge.exporter.tensorrt.profiles import Profile
from planforge.runtime.backends.ort_program import OrtProgram
from planforge.runtime.backends.tensorrt_library import NUMPY_TYPES
from planforge.runtime.bundle.artifact import SLOTS
from planforge.runtime.bundle.bundle import Bundle
from planforge.runtime.bundle.manifest import Artifact, Axis, Plan, TensorSpec

from .emulated_cuda import EmulatedCuda, IllegalAddressError
from .emulated_inspector import EmulatedInspector, list_layers
from .tensorrt_surface import VERSIONS, Surface

# Names that the backend asks for only where they are.
OF_TENSORRT = {
    *(
        "get_aliased_input_tensor",
        "get_device_memory_size_for_profile_v2",
        "get_device_memory_size_for_profile",
    ),
    *("set_device_memory", "device_memory", "device_memory_size"),
    "create_execution_context_without_device_memory",
}


@dataclass
class EmulatedPlan:
    """What a plan file holds, read from the bundle that lists it."""

    graph: Path
    artifact: Artifact
    profiles: Sequence[Profile]
    weights: tuple[TensorSpec, ...] = ()  # that it reads as inputs
    name: str = "Unnamed Network 0"  # as the plan's own bytes have it
    profiling: str | None = None  # what was kept of its layers


class Released:
    """What has only the names of a release, where one is given."""

    interface = ""
    surface: Surface | None = None

    def __getattribute__(self, name: str) -> Any:
        known = object.__getattribute__
        surface = known(self, "surface")
        path = f"{known(self, 'interface')}.{name}"
        if surface is not None and name in OF_TENSORRT and not surface.has(path):
            raise AttributeError(f"TensorRT {surface.version} has no {path}")
        return known(self, name)


class EmulatedEngine(Released):
    """An `ICudaEngine` of TensorRT 10.15, TensorRT-RTX 1.7, or older."""

    interface = "ICudaEngine"

    def __init__(self, trt: EmulatedTensorRt, plan: EmulatedPlan) -> None:
        self.trt = trt
        self.plan = plan
        self.surface = trt.surface
        self.inputs = (*plan.artifact.inputs, *plan.weights)
        self.specs = {spec.name: spec for spec in (*self.inputs, *plan.artifact.outputs)}
        self.name = plan.name
        self.num_io_tensors = len(self.specs)
        self.num_optimization_profiles = len(plan.profiles)
        self.program = OrtProgram(plan.graph, 1)

    def get_tensor_name(self, index: int) -> str:
        return list(self.specs)[index]

    def get_tensor_mode(self, name: str) -> Any:
        modes = self.trt.TensorIOMode
        return modes.INPUT if self.specs[name] in self.inputs else modes.OUTPUT

    def get_tensor_dtype(self, name: str) -> Any:
        names = {str(dtype): name for name, dtype in NUMPY_TYPES.items()}
        return SimpleNamespace(name=names[self.specs[name].dtype])

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        slots = {axes[SLOTS][2] for p in self.plan.profiles if SLOTS in (axes := p.axes)}
        fixed = {SLOTS: slots.pop()} if slots else {}
        names = self.specs[name].axis_names()
        return tuple(axis if isinstance(axis, int) else fixed.get(axis, -1) for axis in names)

    def get_tensor_profile_shape(self, name: str, index: int) -> list[tuple[int, ...]]:
        assert self.specs[name] not in self.plan.weights, "a weight has no profile"
        return self.plan.profiles[index].list_shapes(self.specs[name])

    def get_aliased_input_tensor(self, name: str) -> str | None:
        return self.plan.artifact.aliases.get(name)

    def memory_of(self, index: int) -> int:
        return 1000 * (1 + index)

    def get_device_memory_size_for_profile_v2(self, index: int) -> int:
        return self.memory_of(index)

    def get_device_memory_size_for_profile(self, index: int) -> int:
        return self.memory_of(index)

    @property
    def device_memory_size(self) -> int:
        return self.memory_of(self.num_optimization_profiles - 1)

    def create_execution_context(self, how: Any) -> EmulatedContext:
        return EmulatedContext(self, how)

    def create_execution_context_without_device_memory(self) -> EmulatedContext:
        return EmulatedContext(self, "USER_MANAGED")

    def create_engine_inspector(self) -> EmulatedInspector:
        return EmulatedInspector(self)

    def create_runtime_config(self) -> EmulatedRuntimeConfig:
        return EmulatedRuntimeConfig()


class EmulatedRuntimeConfig:
    """An `IRuntimeConfig`."""

    cuda_graph_strategy = "DISABLED"
    dynamic_shapes_kernel_specialization_strategy = "LAZY"

    def set_execution_context_allocation_strategy(self, strategy: str) -> None:
        self.strategy = strategy

    def create_runtime_cache(self) -> EmulatedRuntimeCache:
        return EmulatedRuntimeCache()

    def set_runtime_cache(self, cache: EmulatedRuntimeCache) -> None:
        self.cache = cache

    def get_runtime_cache(self) -> EmulatedRuntimeCache:
        return self.cache


class EmulatedRuntimeCache:
    """An `IRuntimeCache`. It is kept only where a test asks for it, as bundles are shared."""

    kept = False
    content = b""

    def deserialize(self, content: bytes) -> bool:
        self.content = content
        return content.startswith(b"kernels")

    def serialize(self) -> bytes:
        return self.content or (b"kernels of this GPU" if self.kept else b"")


class EmulatedContext(Released):
    """An `IExecutionContext` that takes nothing for granted."""

    interface = "IExecutionContext"

    def __init__(self, engine: EmulatedEngine, how: Any) -> None:
        assert getattr(how, "strategy", how) == "USER_MANAGED"
        self.engine = engine
        self.cuda = engine.trt.cuda
        self.surface = engine.trt.surface
        self.profiler: Any = None
        self.is_graph = getattr(how, "cuda_graph_strategy", "DISABLED") != "DISABLED"  # of one layer
        self.strategy = getattr(how, "dynamic_shapes_kernel_specialization_strategy", None)
        self.changes = 0  # of shapes and addresses
        self.profile: int | None = None
        self.fixed = {s.name: tuple(a for a in s.axes if isinstance(a, int)) for s in engine.plan.weights}
        self.shapes = dict(self.fixed)
        self.addresses: dict[str, int] = {}
        self.memory = (0, 0)

    def set_optimization_profile_async(self, index: int, stream: int) -> bool:
        self.profile = index
        self.shapes = dict(self.fixed)
        return True

    def set_device_memory(self, address: int, size: int) -> None:
        self.memory = (address, size)

    @property
    def device_memory(self) -> int:
        return self.memory[0]

    @device_memory.setter
    def device_memory(self, address: int) -> None:
        self.memory = (address, self.engine.memory_of(self.engine.num_optimization_profiles - 1))

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        assert self.profile is not None
        low, _, high = self.engine.get_tensor_profile_shape(name, self.profile)
        if len(shape) != len(low) or not all(a <= n <= b for a, n, b in zip(low, shape, high, strict=True)):
            return False
        self.changes += self.shapes.get(name) != shape
        self.shapes[name] = shape
        return True

    def set_tensor_address(self, name: str, address: int) -> bool:
        self.changes += self.addresses.get(name) != address
        self.addresses[name] = address
        return name in self.engine.specs

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        lengths: dict[str, int] = {}
        for spec in self.engine.plan.artifact.inputs:
            for axis, length in zip(
                spec.axes, self.shapes.get(spec.name, (-1,) * len(spec.axes)), strict=True
            ):
                if isinstance(axis, Axis):
                    lengths[axis.name] = length
        for text in self.engine.plan.artifact.constraints:
            if match := re.fullmatch(r"(\w+) = (\d+) \* (\w+)", text):
                whole, factor, part = match[1], int(match[2]), match[3]
                if part in lengths:
                    lengths[whole] = factor * lengths[part]
                elif whole in lengths:
                    lengths[part] = lengths[whole] // factor
        axes = self.engine.specs[name].axes
        return tuple(lengths.get(a.name, -1) if isinstance(a, Axis) else a for a in axes)

    def execute_async_v3(self, stream: int) -> bool:
        engine = self.engine
        cuda = self.cuda
        inputs = [spec.name for spec in engine.inputs]
        addresses = dict(self.addresses)
        shapes = dict(self.shapes)
        memory = self.memory
        aliases = engine.plan.artifact.aliases
        ready = set(shapes) == set(inputs) and set(addresses) == set(engine.specs)
        needed = engine.memory_of(self.profile or 0)
        if not ready or memory[1] < needed or any(addresses[o] != addresses[i] for o, i in aliases.items()):
            return False
        dtypes = {name: np.dtype(spec.dtype) for name, spec in engine.specs.items()}

        changes = None if cuda.captured is None else self.changes

        def work() -> None:
            if changes not in (None, self.changes):
                raise IllegalAddressError("a graph of another state of its context")
            cuda.at(*memory).fill(0xFF)
            values = {}
            for name in inputs:
                size = int(np.prod(shapes[name])) * dtypes[name].itemsize
                values[name] = cuda.at(addresses[name], size).view(dtypes[name]).reshape(shapes[name]).copy()
            try:
                results = engine.program.run(values, {})
            except Exception as error:  # an index out of the vocabulary is an illegal read on a GPU
                raise IllegalAddressError(str(error)) from error
            for name, result in results.items():
                cuda.at(addresses[name], result.nbytes)[:] = np.frombuffer(result.tobytes(), np.uint8)
            if self.profiler is not None and not self.is_graph:
                for number, layer in enumerate(list_layers(engine, self, self.profile or 0), 1):
                    self.profiler.report_layer_time(layer["Name"], number / 1024)

        cuda.ask(stream, work)
        return True


class EmulatedTensorRt(ModuleType):
    """In place of the module `tensorrt` (10.15) or `tensorrt_rtx`; knows the plans of some bundles."""

    TensorIOMode = SimpleNamespace(INPUT="INPUT", OUTPUT="OUTPUT")
    ExecutionContextAllocationStrategy = SimpleNamespace(USER_MANAGED="USER_MANAGED", STATIC="STATIC")
    CudaGraphStrategy = SimpleNamespace(WHOLE_GRAPH_CAPTURE="WHOLE_GRAPH_CAPTURE", DISABLED="DISABLED")
    LayerInformationFormat = SimpleNamespace(JSON="JSON")
    IProfiler = object
    DynamicShapesKernelSpecializationStrategy = SimpleNamespace(EAGER="EAGER", LAZY="LAZY")
    EngineValidity = SimpleNamespace(VALID="VALID", INVALID="INVALID")
    EngineInvalidityDiagnostics = enum.IntEnum(
        "EngineInvalidityDiagnostics", {"VERSION_MISMATCH": 1, "UNSUPPORTED_CC": 2, "OLD_CUDA_DRIVER": 4}
    )
    invalid = 0  # what the library's validity call finds wrong with every plan

    class ILogger:
        Severity = SimpleNamespace(WARNING=2)

        def __init__(self) -> None:
            pass

    def __init__(
        self, name: str, version: str, cuda: EmulatedCuda, plans: Mapping[str, EmulatedPlan]
    ) -> None:
        super().__init__(name)
        self.__version__ = version
        self.cuda = cuda
        self.plans = plans
        self.engines: list[EmulatedEngine] = []
        release = ".".join(version.split(".")[:2])
        self.surface = Surface(release) if name == "tensorrt" and release in VERSIONS else None
        if self.surface is not None and not self.surface.has("ExecutionContextAllocationStrategy"):
            self.__class__ = EmulatedTensorRt8

    def Runtime(self, logger: Any) -> Any:
        validity = (self.EngineValidity.INVALID if self.invalid else self.EngineValidity.VALID, self.invalid)
        own = {"get_engine_validity": lambda content: validity} if self.__name__ == "tensorrt_rtx" else {}
        return SimpleNamespace(deserialize_cuda_engine=lambda content: self.engine(content, logger), **own)

    def engine(self, content: bytes, logger: Any) -> EmulatedEngine | None:
        plan = self.plans.get(hashlib.sha256(content).hexdigest())
        if plan is None:
            logger.log(1, "the magic tag does not match")
            return None
        self.engines.append(EmulatedEngine(self, plan))
        return self.engines[-1]


class EmulatedTensorRt8(EmulatedTensorRt):
    """Without what came with TensorRT 10."""

    def __getattribute__(self, name: str) -> Any:
        if name == "ExecutionContextAllocationStrategy":
            raise AttributeError(name)
        return super().__getattribute__(name)


def plans_in(bundle: Path) -> dict[str, EmulatedPlan]:
    """A bundle's plans by their sha256."""
    opened = Bundle.open(bundle)
    manifest = opened.manifest
    return {manifest.files[plan.file].sha256: emulate_plan(opened, plan) for plan in manifest.plans}


def emulate_plan(bundle: Bundle, plan: Plan) -> EmulatedPlan:
    artifact = bundle.manifest.artifact(plan.built_from)
    profiles = [Profile.from_json(value) for value in plan.profiles]
    weights = tuple(TensorSpec(w.name, "weight", w.dtype, w.shape) for w in plan.weights)
    name = name_in(bundle.folder / plan.file)
    if not weights and not plan.candidates:
        graph = bundle.folder / artifact.file
        return EmulatedPlan(graph, artifact, profiles, name=name, profiling=plan.profiling)
    model = onnx.load(bundle.folder / artifact.file)
    make_inputs_of(model, {weight.name for weight in weights})
    if plan.candidates:
        add_candidates(model, artifact, plan.candidates)
        artifact = artifact.add_candidates(plan.candidates)
    changed = bundle.folder.with_suffix(".changed.onnx")  # beside the bundle
    onnx.save(model, changed)
    return EmulatedPlan(changed, artifact, profiles, weights, name, plan.profiling)


def name_in(plan: Path) -> str:
    """The name of the network in a plan's own bytes, as the real TensorRT-RTX wrote it."""
    match = re.search(rb"planforge [\w.-]+ [0-9a-f]{64}", plan.read_bytes())
    return match[0].decode() if match else EmulatedPlan.name


def make_inputs_of(model: onnx.ModelProto, names: Collection[str]) -> None:
    """Makes inputs of a graph's weights."""
    for tensor in [t for t in model.graph.initializer if t.name in names]:
        value = onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
        model.graph.input.append(value)
        model.graph.initializer.remove(tensor)


@contextmanager
def emulated_gpu(
    bundle: Path,
    library: str = "tensorrt-rtx",
    version: str | None = None,
    others: Sequence[Path] = (),
    **machine: Any,
) -> Iterator[EmulatedCuda]:
    """A machine with a GPU, its driver and one library, on which the plans of one bundle run.

    Args:
        others: bundles whose plans are what they are, whichever bundle lists them.
    """
    cuda = EmulatedCuda(**machine)
    plan = next(p for p in Bundle.open(bundle).manifest.plans if p.engine == library)
    module = library.replace("-", "_")
    package = ModuleType("cuda.bindings")
    package.runtime = cuda  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "cuda", ModuleType("cuda"))
        patch.setitem(sys.modules, "cuda.bindings", package)
        plans = plans_in(bundle)
        for other in others:
            plans |= plans_in(other)
        trt = EmulatedTensorRt(module, version or plan.version, cuda, plans)
        patch.setitem(sys.modules, module, trt)
        yield cuda
