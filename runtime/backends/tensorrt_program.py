"""One plan on a GPU: its profiles, contexts, staging memory and captured steps."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from ..errors import BackendError, ClosedError, InputError
from .backend import Array, Arrays, BoundGraph, Buffers, Shape
from .cuda_memory import Device, Graph, Memory
from .device_buffer import DeviceBuffer, DeviceProgram, Staging, check_buffers, make_buffer
from .runtime_cache import RuntimeCache
from .tensorrt_library import NUMPY_TYPES

log = logging.getLogger("planforge")

MAX_SHAPES = 1024  # combinations of shapes that are remembered
Range: TypeAlias = tuple[Shape, ...]  # smallest, best, largest
Shapes: TypeAlias = tuple[tuple[str, Shape], ...]


@dataclass(frozen=True)
class Step:
    """All that a captured graph depends on."""

    profile: int
    shapes: Shapes
    outputs: tuple[str, ...]
    addresses: tuple[int, ...]


@dataclass
class ProfileState:
    """One profile's context, the last step it was set up for, and the CUDA graph captured of it."""

    context: Any
    shapes: Shapes = ()
    last: Step | None = None
    graph: Graph | None = None

    def forget(self) -> None:
        """Drop the last step and its graph, before the context is set up for another one."""
        self.last = None
        if self.graph is not None:
            self.graph.close()
            self.graph = None


class TensorRtProgram(DeviceProgram):
    """One plan, loaded.

    Host arrays go through pinned memory, and a step's launches are captured in a CUDA graph as soon as the
    step is repeated; TensorRT-RTX captures by itself. Weights are inputs that are the same at every step and
    have no profiles.
    """

    captures_steps = False  # of shapes that callers choose for it

    def __init__(
        self,
        trt: Any,
        engine: Any,
        device: Device,
        name: str,  # for messages
        cache: RuntimeCache | None,
        hint: Callable[[str, int, int], str],  # what to do about an input's axis of a length
        weights: Mapping[str, DeviceBuffer],
    ) -> None:
        self.trt = trt
        self.engine = engine
        self.device = device
        self.name = name
        self.hint = hint
        self.cache = cache
        device.programs += 1
        self.weights = dict(weights)
        names = [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)]
        self.tensors = [name for name in names if name not in weights]
        self.dtypes = {t: NUMPY_TYPES[engine.get_tensor_dtype(t).name] for t in self.tensors}
        is_input = {t: engine.get_tensor_mode(t) == trt.TensorIOMode.INPUT for t in self.tensors}
        self.inputs = [t for t in self.tensors if is_input[t]]
        self.outputs = [t for t in self.tensors if not is_input[t]]
        self.aliases = find_aliases(engine, self.outputs)
        self.profiles: list[dict[str, Range]] = [
            {t: tuple(map(tuple, engine.get_tensor_profile_shape(t, profile))) for t in self.inputs}
            for profile in range(engine.num_optimization_profiles)
        ]
        self.states: dict[int, ProfileState] = {}
        self.staging = {t: Staging(device, t, self.dtypes[t]) for t in self.tensors}
        self.activations: Memory | None = None
        self.resolved: dict[Shapes, tuple[int, dict[str, Shape]]] = {}
        self.captures = cache is None
        self.runtime_config = None if cache is None else make_rtx_config(trt, engine, cache)

    def allocate(self, name: str, shape: Shape) -> DeviceBuffer:
        with self.turn():
            return make_buffer(self.device, name, shape, self.find_dtype(name))

    def find_dtype(self, name: str) -> np.dtype[Any]:
        if name not in self.dtypes:
            raise BackendError(f"{self.name} has no tensor {name!r}; it has {', '.join(self.dtypes)}")
        return self.dtypes[name]

    def run(self, inputs: Arrays, buffers: Buffers, outputs: Sequence[str] | None = None) -> dict[str, Array]:
        if self.closed:
            raise ClosedError  # before a wrong argument is said; `turn` says it for sure
        bound = check_buffers(buffers, self.outputs, self)
        given: dict[str, Shape] = {name: array.shape for name, array in inputs.items()}
        given |= {name: buffer.shape for name, buffer in bound.items()}
        if missing := [name for name in self.inputs if name not in given]:
            raise InputError(f"{self.name}: input {missing[0]!r} was not given")
        shapes = tuple((name, given[name]) for name in self.inputs)
        wanted = tuple(n for n in (self.outputs if outputs is None else outputs) if n not in bound)
        with self.turn(), self.wrap_errors():
            profile, sizes = self.resolve_shapes(shapes)
            for name, array in inputs.items():
                self.staging[name].on_host(array.shape)[...] = array
            results = {name: self.staging[name].on_host(sizes[name]) for name in wanted}
            addresses = self.find_addresses(bound, sizes)

            def work() -> None:
                for name in inputs:
                    self.staging[name].upload(sizes[name])
                if not self.states[profile].context.execute_async_v3(int(self.device.stream)):
                    raise BackendError(f"{self.name} failed while running")
                for name in wanted:
                    self.staging[name].download(sizes[name])

            pinned = tuple(self.staging[name].host_address for name in (*inputs, *wanted))
            step = Step(profile, shapes, wanted, (*addresses.values(), *pinned))
            self.launch(step, addresses, work)
            self.device.synchronise()
            return {name: array.copy() for name, array in results.items()}

    @contextmanager
    def wrap_errors(self) -> Iterator[None]:
        """Raise the library's exceptions as BackendError."""
        try:
            yield
        except RuntimeError as error:
            raise BackendError(f"{self.name}: {' '.join(str(error).split())}") from error

    def launch(self, step: Step, addresses: Mapping[str, int], work: Callable[[], None]) -> None:
        """Do the work, from the second time in succession on as one captured graph."""
        state = self.states[step.profile]
        if state.last != step:
            state.forget()
            self.set_shapes(state, step.shapes)
            for name, address in addresses.items():
                if not state.context.set_tensor_address(name, address):
                    raise BackendError(f"{self.name} refuses the address of {name!r}")
            work()
            state.last = step
            return
        if state.graph is None and self.captures:
            state.graph = self.device.capture(work)
            self.captures = state.graph is not None
            if not self.captures:
                log.info("%s cannot be captured in a CUDA graph; each step is launched separately", self.name)
        if state.graph is not None:
            state.graph.launch()
        else:
            work()

    def set_shapes(self, state: ProfileState, shapes: Shapes) -> None:
        if state.shapes == shapes:
            return
        state.forget()
        state.shapes = ()
        for name, shape in shapes:
            if not state.context.set_input_shape(name, shape):
                raise BackendError(f"{self.name} refuses the shape {shape} of {name!r}")
        state.shapes = shapes

    def bind(self, buffers: Buffers, outputs: Sequence[str] | None = None, fixed: bool = False) -> BoundGraph:
        return partial(self.run, buffers=buffers, outputs=outputs)

    def resolve_shapes(self, shapes: Shapes) -> tuple[int, dict[str, Shape]]:
        """Return the profile for inputs of these shapes, and every tensor's shape."""
        if shapes not in self.resolved:
            profile = self.choose_profile(shapes)
            state = self.open_state(profile)
            self.set_shapes(state, shapes)
            sizes = {name: tuple(state.context.get_tensor_shape(name)) for name in self.outputs}
            if len(self.resolved) >= MAX_SHAPES:
                self.resolved.clear()
            self.resolved[shapes] = profile, {**dict(shapes), **sizes}
        return self.resolved[shapes]

    def find_addresses(self, bound: Mapping[str, DeviceBuffer], sizes: Mapping[str, Shape]) -> dict[str, int]:
        """Return every tensor's address."""
        for output, source in self.aliases.items():
            if output in bound and (source not in bound or bound[output].address != bound[source].address):
                raise InputError(f"{self.name}: {output!r} must be bound to the buffer of {source!r}")
        for name, buffer in bound.items():
            if buffer.shape != sizes[name]:
                raise InputError(f"buffer {name!r} has shape {buffer.shape}, {sizes[name]} is needed")
        return {
            name: (bound[name] if name in bound else self.staging[name].on_device(sizes[name])).address
            for name in self.tensors
        }

    def choose_profile(self, shapes: Shapes) -> int:
        """Return the profile that takes these shapes; of several, the one tuned nearest to them."""
        fitting = [
            index
            for index, profile in enumerate(self.profiles)
            if all(fits(shape, profile[name]) for name, shape in shapes)
        ]
        if not fitting:
            raise InputError(f"{self.name} {self.describe_misfit(shapes)}")
        return min(fitting, key=lambda i: sum(measure_distance(s, self.profiles[i][n]) for n, s in shapes))

    def describe_misfit(self, shapes: Shapes) -> str:
        """Return which shape is outside the profile that takes most of the shapes."""
        misses = [
            [(n, s, profile[n]) for n, s in shapes if not fits(s, profile[n])] for profile in self.profiles
        ]
        name, shape, (low, _, high) = min(misses, key=len)[0]
        if len(shape) != len(low):
            return f"takes no shape {shape} of input {name!r}, which has {len(low)} axes"
        axis = next(i for i, n in enumerate(shape) if not low[i] <= n <= high[i])
        return (
            f"takes {low[axis]} to {high[axis]} on axis {axis} of input {name!r}, not {shape[axis]};"
            f" {self.hint(name, axis, shape[axis])}"
        )

    def open_state(self, profile: int) -> ProfileState:
        """Return a profile's context; all contexts share one piece of memory for activations."""
        if profile not in self.states:
            if self.activations is None:
                size = max(count_activation_bytes(self.engine, index) for index in range(len(self.profiles)))
                self.activations = self.device.allocate(size, f"the activations of {self.name}")
            context = self.make_context(profile)
            if context is None:
                raise BackendError(f"{self.name}: no context could be made")
            if not context.set_optimization_profile_async(profile, int(self.device.stream)):
                raise BackendError(f"{self.name}: profile {profile} cannot be set")
            self.device.synchronise()
            for name, buffer in self.weights.items():
                if not context.set_tensor_address(name, buffer.address):
                    raise BackendError(f"{self.name} refuses the address of {name!r}")
            if hasattr(context, "set_device_memory"):
                context.set_device_memory(self.activations.address, self.activations.size)
            else:  # below 10.1
                context.device_memory = self.activations.address
            self.states[profile] = ProfileState(context)
        return self.states[profile]

    def make_context(self, profile: int) -> Any:
        if self.runtime_config is not None:
            # A new shape waits for kernels of its own only where shapes repeat.
            strategies = self.trt.DynamicShapesKernelSpecializationStrategy
            eager = only_the_batch_varies(self.profiles[profile])
            self.runtime_config.dynamic_shapes_kernel_specialization_strategy = (
                strategies.EAGER if eager else strategies.LAZY
            )
            return self.engine.create_execution_context(self.runtime_config)
        strategy = getattr(self.trt, "ExecutionContextAllocationStrategy", None)
        if strategy is None:  # below 10.0
            return self.engine.create_execution_context_without_device_memory()
        return self.engine.create_execution_context(strategy.USER_MANAGED)

    def close(self) -> None:
        """Free the plan; waits for a step that is running. Closing twice is fine."""
        with self.device.lock:
            if self.closed:
                return
            self.closed = True
        with self.device.turn():
            self.device.synchronise()
            if self.cache is not None and self.runtime_config is not None:
                self.cache.save(self.runtime_config.get_runtime_cache().serialize())
            for state in self.states.values():
                state.forget()
            self.states.clear()
            self.staging.clear()
            self.weights.clear()
            self.activations = self.runtime_config = self.engine = None
            self.device.leave()


def make_rtx_config(trt: Any, engine: Any, cache: RuntimeCache) -> Any:
    """Return TensorRT-RTX's configuration: its own CUDA graphs, and a cache of compiled kernels."""
    config = engine.create_runtime_config()
    config.set_execution_context_allocation_strategy(trt.ExecutionContextAllocationStrategy.USER_MANAGED)
    config.cuda_graph_strategy = trt.CudaGraphStrategy.WHOLE_GRAPH_CAPTURE
    kernels = config.create_runtime_cache()
    if (content := cache.load()) is not None and not kernels.deserialize(content):
        log.info("%s was not accepted by this TensorRT-RTX and will be written again", cache.path.name)
    config.set_runtime_cache(kernels)
    return config


def find_aliases(engine: Any, outputs: Sequence[str]) -> dict[str, str]:
    """Return the outputs that are written at an input's address, with that input."""
    if not hasattr(engine, "get_aliased_input_tensor"):  # below 10.15, which has no such operator
        return {}
    aliases = {name: engine.get_aliased_input_tensor(name) for name in outputs}
    return {name: source for name, source in aliases.items() if source}


def fits(shape: Shape, lengths: Range) -> bool:
    low, _, high = lengths
    return len(shape) == len(low) and all(a <= n <= b for a, n, b in zip(low, shape, high, strict=True))


def only_the_batch_varies(profile: Mapping[str, Range]) -> bool:
    """Tell whether every axis but the first has one length: a decode step in fixed slots."""
    return all(low[1:] == high[1:] for low, _, high in profile.values())


def measure_distance(shape: Shape, lengths: Range) -> float:
    """Return how far a shape is from what a profile is tuned for, in powers of two."""
    best = lengths[1]
    return math.fsum(abs(math.log2((n + 1) / (b + 1))) for n, b in zip(shape, best, strict=True))


def count_activation_bytes(engine: Any, profile: int) -> int:
    """Return the device memory that a context needs beside weights, inputs and outputs."""
    if hasattr(engine, "get_device_memory_size_for_profile_v2"):
        return int(engine.get_device_memory_size_for_profile_v2(profile))
    if hasattr(engine, "get_device_memory_size_for_profile"):
        return int(engine.get_device_memory_size_for_profile(profile))
    return int(engine.device_memory_size)  # below 10.0: of the largest profile
