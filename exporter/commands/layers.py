"""Describes the layers of plans for `planforge inspect --layers`: as tables, JSON and a picture."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...runtime.backends.plan_compatibility import make_rebuild_command
from ...runtime.bundle.bundle import Bundle
from ...runtime.bundle.manifest import Plan
from ...runtime.errors import InputError, PlanForgeError
from .inspection import Inspection, Section, list_entries

if TYPE_CHECKING:
    from ..tensorrt.layers import Layer, LayerTensor, PlanLayers, ProfileLayers

SHOWN = 2  # modules of one layer in a table; --json has all
COLUMNS = ("layer", "type", "module", "in", "out")


def inspect_layers(path: Path, is_timed: bool, plot: Path | None = None) -> Inspection:
    """Read the layers of a plan, or of those of a bundle's plans that run here; see `read_plan_layers`."""
    from ...runtime.apps.diagnostics.plots import make_figure
    from ..tensorrt.layers import RUNS, read_plan_layers

    if plot is not None:
        make_figure(plot, 1, 1)  # refuses a name or a machine without pictures before anything runs
    bundle, plans = find_plans(path)
    found: list[PlanLayers] = []
    failed: dict[str, PlanForgeError] = {}
    for plan in plans:
        try:
            modules = map_modules(bundle.path(bundle.manifest.artifact(plan.built_from).file))
            found.append(read_plan_layers(bundle, plan, modules, RUNS if is_timed else 0))
        except PlanForgeError as error:
            failed[plan.file] = error
    if not found:
        raise next(iter(failed.values()))
    if plot is not None:
        draw(found, plot)
    told = {file: str(error) for file, error in failed.items()}
    value = {"plans": [describe_plan(one) for one in found], "left_out": told}
    sections = [make_section(one.plan, profile) for one in found for profile in one.profiles]
    notes = [f"{file} was left out: {error}" for file, error in told.items()]
    return Inspection(value, sections, [*list_notes(bundle, found), *notes])


def find_plans(path: Path) -> tuple[Bundle, Sequence[Plan]]:
    """Return the bundle that has a plan, or all plans of a bundle; refuse what has none."""
    if path.is_dir():
        bundle = Bundle.open(path)
        if not bundle.manifest.plans:
            raise InputError(f"--layers: {path} has no plan; build one: planforge build {path}")
        return bundle, bundle.manifest.plans
    for bundle, plan in list_entries(path):
        return bundle, [plan]
    raise InputError(f"--layers: {path} is no plan of a bundle; give a bundle, or a .plan file in its plans/")


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


def make_section(plan: Plan, profile: ProfileLayers) -> Section:
    """Return the table of one profile's layers, with the time of each where it was measured."""
    times = [layer.time_ms for layer in profile.layers if layer.time_ms is not None]
    title = f"{plan.file}, profile {describe_profile(profile)}, {len(profile.layers)} layers"
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
    return f"{format_shape(tensor.dimensions)} {tensor.format}".strip()


def format_shape(shape: Sequence[int]) -> str:
    """Return a shape as in "8x128"."""
    return "x".join(map(str, shape))


def list_notes(bundle: Bundle, found: Sequence[PlanLayers]) -> Iterator[str]:
    """Yield how to build plans again that keep only the names of their layers."""
    for one in found:
        if not any(layer.type for profile in one.profiles for layer in profile.layers):
            detailed = replace(one.plan, profiling="detailed")
            again = make_rebuild_command(bundle, one.plan.engine, plan=detailed)
            yield f"{one.plan.file} keeps only names of its layers; for types, formats and nodes: {again}"


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
