"""Reads the layers of a plan through TensorRT's engine inspector, and the PyTorch module of each.

Only a machine that runs the plan can ask the inspector: the library loads no plan without a driver. What
TensorRT-RTX listed as it built a plan lies beside it, and is read anywhere. The inspector's text:
https://docs.nvidia.com/deeplearning/tensorrt/latest/inference-library/engine-tools.html
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from ...runtime.backends.backend import LoadRequest
from ...runtime.backends.device_buffer import make_buffer
from ...runtime.backends.plan_compatibility import make_rebuild_command
from ...runtime.backends.tensorrt_backend import TensorRtBackend
from ...runtime.backends.tensorrt_library import LIBRARIES
from ...runtime.backends.tensorrt_program import Shapes, TensorRtProgram
from ...runtime.bundle.bundle import Bundle
from ...runtime.bundle.manifest import Plan
from ...runtime.errors import BackendError, BackendUnavailableError, BundleError
from .profiles import Profile

RUNS = 20  # timed runs of each profile
WARM_UP_RUNS = 3  # before them

PROFILE = re.compile(r" \[profile (\d+)\]")  # in names of all profiles but the first
MYELIN = re.compile(r"_myl(\d+)_\d+$")  # behind the names of a compiled subgraph's layers: its number
SHORT_FORMAT = re.compile(r"^\(\w+\) ")  # "(Linear) Row major linear format"
NODE = re.compile(r"\[ONNX Layer: (.+?)\](?=$|[\x1e\x1f\[])")  # in a layer's metadata
ENDS = re.compile(r"^\{ForeignNode\[(.*)\.\.\.(.*)\]\}$")  # first and last of the nodes that were fused
COPY = re.compile(r"^Reformatting CopyNode for (?:Input|Output) Tensor \d+ to ")


@dataclass(frozen=True)
class LayerTensor:
    """An input or output of a layer; `format` is TensorRT's text, with the element type.

    A dimension is -1, or has its name, where it follows from a call's shapes. None where even their number is
    not known.
    """

    name: str
    dimensions: tuple[int | str, ...] | None
    format: str


@dataclass(frozen=True)
class Layer:
    """A layer of a plan.

    Attributes:
        name: TensorRT's.
        type: TensorRT's, such as "CaskGemmConvolution"; "" where the plan keeps names alone.
        nodes: the ONNX nodes that it computes, as far as the plan says.
        modules: their modules in PyTorch, each once.
        time_ms: the median of its runs, in milliseconds; None where it was not measured.
    """

    name: str
    type: str
    nodes: tuple[str, ...]
    modules: tuple[str, ...]
    inputs: tuple[LayerTensor, ...] = ()
    outputs: tuple[LayerTensor, ...] = ()
    time_ms: float | None = None


@dataclass(frozen=True)
class ProfileLayers:
    """The layers of one profile, at the shapes that it is optimized for."""

    name: str
    shapes: Mapping[str, tuple[int, ...]]  # of each input
    layers: tuple[Layer, ...]


@dataclass(frozen=True)
class PlanLayers:
    """The layers of a plan, profile by profile; `gpu` is None where they were read without one."""

    plan: Plan
    gpu: str | None
    profiles: tuple[ProfileLayers, ...]


def read_plan_layers(
    bundle: Bundle, plan: Plan, modules: Mapping[str, str], runs: int = 0, device: int = 0
) -> PlanLayers:
    """Read a plan's layers on one of this machine's GPUs, and run each profile `runs` times to measure them.

    Args:
        bundle: it lists the plan.
        plan: to read.
        modules: the PyTorch module of each ONNX node, by the node's name.
        runs: on inputs of zeros, after `WARM_UP_RUNS`; 0 measures nothing.
        device: the GPU's number.

    Raises:
        BackendUnavailableError: the plan does not run here; says where, and what works here.
        BackendError: the library refuses the plan, or it keeps nothing of its layers.
    """
    artifact = bundle.manifest.artifact(plan.built_from)
    # The backend takes a verified graph's best plan; here it has no choice, as the precision is named.
    manifest = dataclasses.replace(bundle.manifest, artifacts=(artifact,), plans=(plan,))
    alone = Bundle(bundle.folder, manifest)
    detailed = dataclasses.replace(plan, profiling="detailed")
    again = make_rebuild_command(bundle, plan.engine, plan=detailed)
    try:
        backend = TensorRtBackend(
            plan.engine, alone, LoadRequest(precision=artifact.precision, device=device)
        )
    except BackendUnavailableError as error:
        raise BackendUnavailableError(
            f"TensorRT reads the layers of {plan.file} only on a machine that runs it: {error}."
            f" {describe_way_to_layers(bundle, plan, again, runs > 0)}"
        ) from error
    program = backend.open(alone, backend.artifact(alone, artifact.graph, None))
    if program.runtime_config is not None:  # TensorRT-RTX's, whose own graphs would hide the layers
        program.runtime_config.cuda_graph_strategy = program.trt.CudaGraphStrategy.DISABLED
    try:
        found = []
        for index, profile in enumerate(plan.profiles):
            shapes = tuple((name, lengths[1]) for name, lengths in program.profiles[index].items())
            layers = read_layers(program, index, shapes, modules, runs)
            found.append(ProfileLayers(str(profile.get("name")), dict(shapes), layers))
    finally:
        program.close()
    if not all(profile.layers for profile in found):
        raise BackendError(f"{plan.file} keeps nothing of its layers; build it again: {again}")
    return PlanLayers(plan, backend.device.gpu.name, tuple(found))


def describe_way_to_layers(bundle: Bundle, plan: Plan, again: str, is_timed: bool) -> str:
    """Return what shows the layers of a plan that does not run here; `again` builds it with all of them.

    Who did not want their times is shown the nodes of its graph anyway.
    """
    show = f"`planforge inspect {bundle.folder} --layers`"
    graph = bundle.folder / bundle.manifest.artifact(plan.built_from).file
    nodes = f"; `planforge inspect {graph} --layers` shows the nodes of its graph here" if is_timed else ""
    if plan.layers is not None:
        return f"Here, {show} shows them as TensorRT listed them at its build{nodes}"
    if LIBRARIES[plan.engine].sms and plan.profiling != "detailed":  # it is built without a GPU
        return f"Here, `{again}` keeps a list of them at its build, which {show} shows{nodes}"
    first = "" if plan.profiling == "detailed" else f"`{again}`, then "
    return f"There, {first}{show}{nodes}"


def read_listed_layers(bundle: Bundle, plan: Plan, modules: Mapping[str, str]) -> PlanLayers | None:
    """Return a plan's layers as TensorRT listed them when it built the plan; None where it keeps no list.

    Raises:
        BundleError: the list is missing, has changed, or cannot be read.
    """
    if plan.layers is None:
        return None
    artifact = bundle.manifest.artifact(plan.built_from)
    text = bundle.path(plan.layers).read_text(encoding="utf-8")
    profiles = []
    try:
        for index, described in enumerate(plan.profiles):
            profile = Profile.from_json(described)
            shapes = {spec.name: profile.list_shapes(spec)[1] for spec in artifact.inputs}
            profiles.append(ProfileLayers(profile.name, shapes, parse_layers(text, index, modules, {})))
    except (AttributeError, KeyError, TypeError, BackendError) as error:  # whoever made the bundle wrote it
        again = make_rebuild_command(bundle, plan.engine, plan=plan)
        raise BundleError(f"{plan.layers} is no list of layers; build the plan again: {again}") from error
    return PlanLayers(plan, None, tuple(profiles))


def read_layers(
    program: TensorRtProgram, index: int, shapes: Shapes, modules: Mapping[str, str], runs: int
) -> tuple[Layer, ...]:
    """Return the layers of one profile at some shapes, which tell the inspector dimensions and formats."""
    with program.turn(), program.wrap_errors():
        context = program.open_state(index).context
        program.set_shapes(program.states[index], shapes)
        inspector = program.engine.create_engine_inspector()
        inspector.execution_context = context
        text = inspector.get_engine_information(program.trt.LayerInformationFormat.JSON)
        times = measure_layers(program, context, shapes, runs) if runs else {}
    return parse_layers(text, index, modules, times)


def measure_layers(
    program: TensorRtProgram, context: Any, shapes: Shapes, runs: int
) -> dict[tuple[str, int], float]:
    """Return the median milliseconds of each layer, by its name and its place among those of one name."""
    sizes = {**dict(shapes), **{name: tuple(context.get_tensor_shape(name)) for name in program.outputs}}
    buffers = {
        name: make_buffer(program.device, name, sizes[name], program.dtypes[name])
        for name in program.tensors
        if name not in program.aliases
    }
    for name in program.tensors:
        if not context.set_tensor_address(name, buffers[program.aliases.get(name, name)].address):
            raise BackendError(f"{program.name} refuses the address of {name!r}")
    profiler = make_profiler(program.trt)
    context.profiler = profiler
    times: dict[tuple[str, int], list[float]] = defaultdict(list)
    for run in range(WARM_UP_RUNS + runs):
        profiler.reported.clear()
        if not context.execute_async_v3(int(program.device.stream)):
            raise BackendError(f"{program.name} failed while running")
        program.device.synchronise()
        seen: Counter[str] = Counter()
        for reported, time_ms in profiler.reported if run >= WARM_UP_RUNS else ():
            name = PROFILE.sub("", reported)
            times[name, seen[name]].append(time_ms)
            seen[name] += 1
    return {key: median(found) for key, found in times.items()}


def make_profiler(trt: Any) -> Any:
    """Return an `IProfiler` of the module `trt` that collects what it is told in `reported`."""

    class Profiler(trt.IProfiler):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProfiler.__init__(self)
            self.reported: list[tuple[str, float]] = []

        def report_layer_time(self, layer_name: str, ms: float) -> None:
            self.reported.append((layer_name, float(ms)))

    return Profiler()


def parse_layers(
    text: str, profile: int, modules: Mapping[str, str], times: Mapping[tuple[str, int], float]
) -> tuple[Layer, ...]:
    """Return the layers of a profile from the inspector's JSON.

    A plan that was not built with --profiling detailed has names in place of descriptions.
    """
    try:
        described = json.loads(text, strict=False)["Layers"]  # with separators of ASCII inside its texts
    except (ValueError, KeyError, TypeError) as error:
        raise BackendError(f"the engine inspector's text cannot be read: {text[:200]!r}") from error
    layers: list[Mapping[str, Any]] = [{"Name": one} if isinstance(one, str) else one for one in described]
    seen: Counter[str] = Counter()
    found = []
    for layer, own in zip(layers, find_profiles(layers), strict=True):
        if own != profile:
            continue
        name = str(layer.get("Name", ""))
        bare = PROFILE.sub("", name)
        nodes = find_nodes(bare, str(layer.get("Metadata", "")))
        found.append(
            Layer(
                name,
                str(layer.get("LayerType", "")),
                nodes,
                tuple(dict.fromkeys(modules[node] for node in nodes if modules.get(node))),
                read_tensors(layer.get("Inputs", ())),
                read_tensors(layer.get("Outputs", ())),
                times.get((bare, seen[bare])),
            )
        )
        seen[bare] += 1
    if times and all(layer.time_ms is None for layer in found):
        raise BackendError(f"TensorRT timed {next(iter(times))[0]!r}, which is none of the plan's layers")
    return tuple(found)


def find_profiles(layers: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the number of each layer's profile.

    Its name tells it, or a tensor that it has. What tells it of one layer of a compiled subgraph tells it of
    all; a subgraph without is of the same profile as the one before it.
    """
    told: list[int | None] = []
    subgraphs: dict[str, int] = {}
    names = [str(layer.get("Name", "")) for layer in layers]
    for layer, name in zip(layers, names, strict=True):
        tensors = [*layer.get("Inputs", ()), *layer.get("Outputs", ())]
        match = next(filter(None, map(PROFILE.search, (name, *(str(t.get("Name")) for t in tensors)))), None)
        told.append(int(match[1]) if match else None)
        if match and (subgraph := MYELIN.search(name)):
            subgraphs[subgraph[1]] = int(match[1])
    found = []
    before = 0
    for name, number in zip(names, told, strict=True):
        subgraph = MYELIN.search(name)
        if subgraph:
            before = subgraphs.get(subgraph[1], before)
        found.append(number if number is not None else before if subgraph else 0)
    return found


def read_tensors(described: Sequence[Mapping[str, Any]]) -> tuple[LayerTensor, ...]:
    """Return the tensors of a layer, from the inspector's descriptions."""
    return tuple(
        LayerTensor(
            str(tensor.get("Name", "")),
            tuple(tensor.get("Dimensions", ())),
            describe_format(tensor),
        )
        for tensor in described
    )


def describe_format(tensor: Mapping[str, Any]) -> str:
    """Return a tensor's format with its element type, which TensorRT-RTX 1.7 tells in two fields."""
    if "Format/Datatype" in tensor:
        return str(tensor["Format/Datatype"])
    parts = (SHORT_FORMAT.sub("", str(tensor.get("Format", ""))), str(tensor.get("Datatype", "")))
    return ", ".join(filter(None, parts))


def find_nodes(name: str, metadata: str) -> tuple[str, ...]:
    """Return the ONNX nodes that a layer computes: from its metadata, else from its name, "a + b"."""
    if nodes := NODE.findall(metadata):
        return tuple(dict.fromkeys(nodes))
    if ends := ENDS.match(name):
        return ends[1], ends[2]
    return tuple(COPY.sub("", name).split(" + "))
