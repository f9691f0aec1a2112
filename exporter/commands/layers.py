"""Describes the layers of plans, and the nodes of graphs, for `planforge inspect --layers`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...runtime.backends.plan_compatibility import make_rebuild_command
from ...runtime.bundle.bundle import Bundle
from ...runtime.bundle.manifest import Plan
from ...runtime.errors import BackendUnavailableError, InputError, PlanForgeError
from .findings import Inspection, Section
from .inspection import list_entries, refuse_missing

if TYPE_CHECKING:
    import onnx_ir as ir

    from ..tensorrt.layers import Layer, LayerTensor, PlanLayers, ProfileLayers

SHOWN = 2  # modules of one layer in a table; --json has all
COLUMNS = ("layer", "type", "module", "in", "out")


@dataclass
class Found:
    """The layers of plans, the nodes of graphs in place of others, and what to say below."""

    plans: list[PlanLayers] = field(default_factory=list)
    graphs: dict[str, tuple[Layer, ...]] = field(default_factory=dict)  # by the file's name
    in_place_of: dict[str, list[str]] = field(
        default_factory=dict
    )  # by a graph's file the plans that it is for
    left_out: dict[str, PlanForgeError] = field(default_factory=dict)  # by the plan's file
    notes: list[str] = field(default_factory=list)

    def describe(self) -> Inspection:
        """Return tables and plain JSON."""
        told = {file: str(error) for file, error in self.left_out.items()}
        value = {
            "plans": [describe_plan(one) for one in self.plans],
            "graphs": [
                {"file": file, "layers": list(map(asdict, nodes))} for file, nodes in self.graphs.items()
            ],
            "left_out": told,
        }
        sections = [make_section(one, profile) for one in self.plans for profile in one.profiles]
        sections += [
            (self.name_graph(file), COLUMNS, [tuple(list_cells(node)) for node in nodes])
            for file, nodes in self.graphs.items()
        ]
        notes = [f"left out: {text if file in text else f'{file}: {text}'}" for file, text in told.items()]
        return Inspection(value, sections, [*self.notes, *notes])

    def name_graph(self, file: str) -> str:
        """Return the title of a graph's table."""
        title = f"{file}, {len(self.graphs[file])} nodes"
        plans = " and ".join(self.in_place_of.get(file, ()))
        told = f", in place of the layers of {plans}, which cannot be read here: see below" if plans else ""
        return title + told


def inspect_layers(path: Path, is_timed: bool, plot: Path | None = None) -> Inspection:
    """Read the layers of a plan, of all plans of a bundle, or the nodes of an .onnx file.

    In place of a plan that cannot be read here, they are as TensorRT listed them at its build, else the nodes
    of its graph. What is timed must run: see `read_plan_layers`.
    """
    from ...runtime.apps.diagnostics.plots import make_figure

    if plot is not None:
        make_figure(plot, 1, 1)  # refuses a name or a machine without pictures before anything runs
    if path.suffix == ".onnx":
        if is_timed:
            raise InputError(
                f"--time measures the layers of plans, and {path} is a graph: give a bundle or a plan"
            )
        refuse_missing(path)
        return Found(graphs={path.name: read_nodes(path)}).describe()
    bundle, plans = find_plans(path)
    found = Found()
    for plan in plans:
        add_plan(found, bundle, plan, is_timed)
    if is_timed and not found.plans:
        raise next(
            iter(found.left_out.values()),
            InputError(f"--time: {path} has no plan; build one: planforge build {path}"),
        )
    if not plans:
        found.notes.append(
            f"{path} has no plan, so these are the nodes of its graphs; build one: planforge build {path}"
        )
        for artifact in bundle.manifest.artifacts:
            found.graphs[artifact.file] = read_nodes(bundle.path(artifact.file))
    if plot is not None:
        draw(found.plans, plot)
    return found.describe()


def add_plan(found: Found, bundle: Bundle, plan: Plan, is_timed: bool) -> None:
    """Add the layers of a plan, or what can be shown in their place, with a line that says so."""
    from ..tensorrt.layers import RUNS, read_listed_layers, read_plan_layers

    graph = bundle.manifest.artifact(plan.built_from).file
    try:
        modules = map_modules(bundle.path(graph))
        try:
            layers = read_plan_layers(bundle, plan, modules, RUNS if is_timed else 0)
        except BackendUnavailableError:
            listed = None if is_timed else read_listed_layers(bundle, plan, modules)
            if listed is None:
                raise
            layers = listed
            found.notes.append(
                f"{plan.file} is shown as TensorRT listed it at its build; where it runs, `planforge inspect"
                f" {bundle.folder} --layers --time` adds the shapes of a call (here -1) and times"
            )
    except PlanForgeError as error:
        found.left_out[plan.file] = error
        if not is_timed:
            with suppress(PlanForgeError):  # what is wrong with a bundle's file, the plan's line says
                found.graphs[graph] = read_nodes(bundle.path(graph))
                found.in_place_of.setdefault(graph, []).append(plan.file)
        return
    found.plans.append(layers)
    found.notes += list_notes(bundle, layers)


def find_plans(path: Path) -> tuple[Bundle, Sequence[Plan]]:
    """Return the bundle that has a plan, or all plans of a bundle; refuse what is neither."""
    if path.is_dir():
        bundle = Bundle.open(path)
        return bundle, bundle.manifest.plans
    refuse_missing(path)
    for bundle, plan in list_entries(path):
        return bundle, [plan]
    raise InputError(
        f"--layers: {path} is no plan of a bundle; give a bundle, a .plan file in its plans/, or an .onnx"
    )


def read_nodes(path: Path) -> tuple[Layer, ...]:
    """Return the nodes of an ONNX file, those of branches too, as layers: a node's type is its operator.

    Weights are not among the inputs, and are not read. Types and shapes are those that ONNX infers.
    """
    from ..linting.lint import name_node
    from ..linting.model import LintModel
    from ..tensorrt.layers import Layer
    from ..tracing.modules import find_module

    return tuple(
        Layer(
            name_node(node),
            f"{node.domain}.{node.op_type}".removeprefix("."),
            (name_node(node),),
            tuple(filter(None, [find_module(node)])),
            tuple(describe_value(v) for v in node.inputs if v is not None and not v.is_initializer()),
            tuple(describe_value(v) for v in node.outputs),
        )
        for node in LintModel.load(path, in_bundle=False).nodes
    )


def describe_value(value: ir.Value) -> LayerTensor:
    """Return a value of a graph as a layer's tensor: its format is its element type."""
    from ..linting.model import dims_of, name_type, type_of
    from ..tensorrt.layers import LayerTensor

    dims = dims_of(value)
    dtype = type_of(value)
    dimensions = None if dims is None else tuple("?" if dim is None else dim for dim in dims)
    return LayerTensor(str(value.name), dimensions, "" if dtype is None else name_type(dtype))


def map_modules(graph: Path) -> dict[str, str]:
    """Return the path of each ONNX node's PyTorch module, by the node's name; "" where it has none."""
    import onnx_ir as ir

    from ..tracing.modules import find_module

    return {str(node.name): find_module(node) for node in ir.load(graph).graph}


def describe_plan(found: PlanLayers) -> dict[str, Any]:
    """Return a plan's layers as plain JSON."""
    plan = found.plan
    names = ("file", "built_from", "engine", "version")
    return {
        **{name: getattr(plan, name) for name in names},
        "gpu": found.gpu,
        "profiles": [asdict(profile) for profile in found.profiles],
    }


def make_section(found: PlanLayers, profile: ProfileLayers) -> Section:
    """Return the table of one profile's layers, with the time of each where it was measured."""
    times = [layer.time_ms for layer in profile.layers if layer.time_ms is not None]
    title = f"{found.plan.file}, profile {describe_profile(profile)}, {len(profile.layers)} layers"
    rows = [tuple(list_cells(layer)) for layer in profile.layers]
    if not times:
        return title, COLUMNS, rows
    timed = [
        (*row, "" if layer.time_ms is None else f"{layer.time_ms:.4f}")
        for row, layer in zip(rows, profile.layers, strict=True)
    ]
    return f"{title}, {sum(times):.4f} ms", (*COLUMNS, "ms"), timed


def describe_profile(profile: ProfileLayers) -> str:
    """Return a profile with its shapes, as in "encode (input_ids 8x128)"; of equal shapes the first."""
    first: dict[tuple[int, ...], str] = {}
    for name, shape in profile.shapes.items():
        first.setdefault(shape, name)
    return f"{profile.name} ({', '.join(f'{name} {format_shape(shape)}' for shape, name in first.items())})"


def list_cells(layer: Layer) -> Iterator[str]:
    """Yield a layer's cells; control characters would end a line of a terminal."""
    yield layer.name.replace("\x1e", " + ").replace("\x1f", " + ")
    yield layer.type
    rest = len(layer.modules) - SHOWN
    yield ", ".join(layer.modules[:SHOWN]) + (f" and {rest} more" if rest > 0 else "")
    for tensors in (layer.inputs, layer.outputs):
        yield ", ".join(describe_tensor(tensor) for tensor in tensors)


def describe_tensor(tensor: LayerTensor) -> str:
    """Return a tensor's dimensions and format, as in "1x128x384 Row major linear FP16 format"."""
    return f"{format_shape(tensor.dimensions or ())} {tensor.format}".strip()


def format_shape(shape: Sequence[int | str]) -> str:
    """Return a shape as in "8x128", with names as in "batch x 128"."""
    return (" x " if any(isinstance(dim, str) for dim in shape) else "x").join(map(str, shape))


def list_notes(bundle: Bundle, found: PlanLayers) -> Iterator[str]:
    """Yield how to build a plan again that keeps only the names of its layers."""
    if not any(layer.type for profile in found.profiles for layer in profile.layers):
        detailed = replace(found.plan, profiling="detailed")
        again = make_rebuild_command(bundle, found.plan.engine, plan=detailed)
        yield f"{found.plan.file} keeps only names of its layers; for types, formats and nodes: {again}"


def draw(found: Sequence[PlanLayers], path: Path) -> None:
    """Draw the time of each module, a panel for each profile."""
    from ...runtime.apps.diagnostics.plots import draw_times

    panels = []
    for one in found:
        for profile in one.profiles:
            times: dict[str, float] = defaultdict(float)
            for layer in profile.layers:
                name = layer.modules[0] if layer.modules else "no module"
                times[f"{name} ..." if len(layer.modules) > 1 else name] += layer.time_ms or 0.0
            shape = format_shape(next(iter(profile.shapes.values())))
            panels.append((f"{one.plan.built_from}, {profile.name} {shape}", times))
    draw_times(panels, f"{found[0].gpu}: milliseconds of each module's layers", path)
