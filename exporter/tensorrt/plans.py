"""Builds TensorRT plans from a bundle's graphs and adds them to its manifest, without torch."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeAlias

from ...runtime.backends.architectures import describe_sms
from ...runtime.backends.plan_compatibility import find_sides
from ...runtime.backends.tensorrt_library import LIBRARIES, is_installed
from ...runtime.bundle.bundle import Bundle
from ...runtime.bundle.export_again import suggest_export_again
from ...runtime.bundle.manifest import Artifact, FileEntry, Manifest, Plan
from ...runtime.bundle.plan import make_network_name
from ...runtime.errors import InputError
from ...runtime.suggest import did_you_mean
from ..bundle.names import name_by_content
from ..bundle.writer import install_change, list_file_entries, open_staging_folder
from ..errors import BuildError
from ..precisions import expand_names
from ..targets import INSTALLED, NAMES, find_target
from ..task_traits import TRAITS
from .build import USUAL, Options, PlanRequest, build_plan, resolve_architectures
from .choices import (
    Group,
    check_kernels,
    check_target,
    choose_groups,
    is_elsewhere,
    make_board_error,
    warn_of_left_out,
    warn_of_refused,
)
from .memory import check_plan_memory, estimate_memory
from .plan_graphs import find_plan_graphs
from .profiles import Profile, derive_profiles

log = logging.getLogger("planforge")

Progress: TypeAlias = Callable[[str], None]

TARGETS_OF_ENGINES = {"tensorrt-rtx": "rtx", "tensorrt": INSTALLED}
USUAL_TARGETS = ("cpu", "rtx")  # both dialects; "rtx" gets a plan too where TensorRT-RTX is installed


@dataclasses.dataclass(frozen=True)
class BuildResult:
    """The changes that a build made to a bundle.

    Attributes:
        bundle: the bundle's folder.
        plans: those that were added.
        replaced: those that are gone, since one of `plans` is of the same graph, engine, GPUs and lengths.
    """

    bundle: Path
    plans: tuple[Plan, ...]
    replaced: tuple[Plan, ...] = ()


def build(
    bundle: str | Path,
    *,
    target: str | None = None,
    engine: str | None = None,
    sms: Sequence[str] | None = None,
    precisions: Sequence[str] | None = None,
    limits: Mapping[str, int] | None = None,
    options: Options = USUAL,
    progress: Progress = lambda _: None,
) -> BuildResult:
    """Build a TensorRT plan from a bundle's graph and add it; the bundle stays whole throughout.

    Plans for other engines, GPUs or lengths stay, and `load` takes the one that fits best (see
    `runtime.backends.plan_compatibility.choose_plan`). A plan of the same graph, engine, GPUs and lengths is
    replaced.

    Args:
        bundle: the folder that `export` wrote.
        target: a row of the targets table that builds plans; "rtx" by default.
        engine: instead of a target, the library: "tensorrt-rtx" or "tensorrt", in the version installed.
        sms: GPU architectures, such as ("sm86", "sm89"); by default all of the target's that have kernels
            for what the graphs compute.
        precisions: those to build plans of, such as ("fp16", "int4"); by default all that compute in fp16.
        limits: a smaller largest "batch", "length", "height" or "width" than the graph was exported for.
        options: workspace, timing cache, stripped and compatible plans, and those that pick tokens.
        progress: called with a line when a stage begins, and for every plan that was built again or replaced.

    Raises:
        BundleError: no bundle there, or a file of it has changed.
        BackendUnavailableError: the engine is not installed; names the extra.
        BuildError: TensorRT refused; names the ONNX node.
    """
    opened = Bundle.open(bundle)
    name = choose_target(opened, target, engine, options)
    wanted = [] if precisions is None else expand_names(precisions, in_half=True)
    check_target(name, wanted)
    if sms and not is_elsewhere(name):
        check_kernels(name, wanted, resolve_architectures(find_target(name).engine, sms))
    chosen = opened if precisions is None else choose_precisions(opened, wanted)
    warn_of_left_out(chosen, [name], sms)
    with open_staging_folder(opened.folder) as staging:
        new = build_plans_for(chosen, name, sms, limits, staging, progress, options)
        entries = list_file_entries(staging)
        before, after = install_change(staging, opened, lambda now: replace_plans(now, new, entries))
    replaced = [plan for plan in before.plans if plan.file not in after.files]
    for plan in new:
        if plan.file in before.files:
            progress(f"built {plan.file} again, and TensorRT gave the same bytes")
    for plan in replaced:
        alike = any(dataclasses.replace(plan, file=one.file, layers=one.layers) == one for one in new)
        why = "; TensorRT gave other bytes" if alike else ", with other options or of another version"
        progress(f"replaced {plan.file}, which was for the same graph, GPUs and lengths{why}")
    return BuildResult(opened.folder, tuple(new), tuple(replaced))


def choose_target(bundle: Bundle, target: str | None, engine: str | None, options: Options) -> str:
    """Return the name of the target to build for; refuse targets without plans, and tasks without them."""
    if target is not None and engine is not None:
        raise InputError(f"give a target ({target}) or an engine ({engine}), not both")
    if engine is not None and engine not in TARGETS_OF_ENGINES:
        raise InputError(
            f"engine {engine!r} is not one of {', '.join(LIBRARIES)}{did_you_mean(engine, LIBRARIES)}"
        )
    name = target or TARGETS_OF_ENGINES[engine or "tensorrt-rtx"]
    if not find_target(name).plans:
        plans = [name for name in NAMES if find_target(name).plans]
        raise InputError(f"target {name!r} runs ONNX and needs no plan; plans are for {', '.join(plans)}")
    if options.candidates and not TRAITS[bundle.manifest.task].continues_texts:
        raise InputError(f"--top-k is only for text generation: leave it out for {bundle.manifest.task}")
    return name


def choose_precisions(bundle: Bundle, wanted: Sequence[str]) -> Bundle:
    """Return the bundle as if it had no graphs but those of these precisions."""
    manifest = bundle.manifest
    known = dict.fromkeys(artifact.precision for artifact in manifest.artifacts if artifact.is_half)
    for name in wanted:
        if name not in known:
            raise InputError(
                f"precision {name!r}: the bundle has no such graph that plans are built from; it has"
                f" {', '.join(known) or 'none'}; {suggest_export_again(bundle, precisions=[name])}"
            )
    kept = tuple(artifact for artifact in manifest.artifacts if artifact.precision in wanted)
    return Bundle(bundle.folder, dataclasses.replace(manifest, artifacts=kept))


def replace_plans(manifest: Manifest, new: Sequence[Plan], entries: Mapping[str, FileEntry]) -> Manifest:
    """Return a manifest with new plans and their files' entries, without plans of the same settings."""
    configurations = {plan.list_settings() for plan in new}
    kept = tuple(plan for plan in manifest.plans if plan.list_settings() not in configurations)
    gone = {name for plan in manifest.plans if plan not in kept for name in plan.list_files()}
    files = {name: entry for name, entry in manifest.files.items() if name not in gone}
    return dataclasses.replace(manifest, plans=(*kept, *new), files={**files, **entries})


def build_plans(
    staging: Path,
    manifest: Manifest,
    targets: Sequence[str],
    sms: Sequence[str] | None,
    progress: Progress,
    refused: Callable[[str, BuildError], None] | None,
    options: Options = USUAL,
) -> list[Plan]:
    """Build the plans of an export's targets. A default target's missing engine is logged, not an error.

    Where TensorRT refuses a graph, `refused` is called with the target's name; None makes that an error.
    """
    bundle = Bundle(staging, manifest)
    plans: list[Plan] = []
    for name in targets:
        engine = find_target(name).engine
        if engine not in LIBRARIES:
            continue
        if not is_installed(engine) and tuple(targets) == USUAL_TARGETS:
            log.warning(
                "no plan was built: pip install 'planforge[%s]', then `planforge build BUNDLE --target %s`;"
                " for a CPU alone, export with --target cpu",
                engine,
                name,
            )
            continue
        try:
            plans += build_plans_for(bundle, name, sms, None, staging, progress, options)
        except BuildError as error:
            if refused is None:
                raise
            refused(name, error)
    return plans


def build_plans_for(
    bundle: Bundle,
    target_name: str,
    sms: Sequence[str] | None,
    limits: Mapping[str, int] | None,
    folder: Path,
    progress: Progress,
    options: Options = USUAL,
) -> list[Plan]:
    """Build a target's plans, one for each graph and precision, below `folder`.

    `warn_of_left_out` has told which precisions get none.
    """
    graphs = find_plan_graphs(bundle, find_target(target_name).dialect)
    if is_elsewhere(target_name):
        raise make_board_error(target_name, "copy the bundle", bundle.folder.name)
    profiles = plan_profiles(graphs, limits or {}, options)
    if options.max_memory is not None:
        derive = partial(plan_profiles, graphs, options=USUAL)
        check_plan_memory(bundle, graphs, limits or {}, derive, options.max_memory)
    groups, _ = choose_groups(bundle, target_name, sms)
    plans: list[Plan] = []
    refused: list[BuildError] = []
    for group in groups:
        try:
            plans += build_together(bundle, group, target_name, profiles, folder, progress, options)
        except BuildError as error:
            refused.append(error)
    if not plans:
        raise refused[0]
    warn_of_refused(refused)
    return plans


def build_together(
    bundle: Bundle,
    group: Group,
    target_name: str,
    profiles: Mapping[str, Sequence[Profile]],
    folder: Path,
    progress: Progress,
    options: Options,
) -> list[Plan]:
    """Build the plans of the graphs of one precision, which are of no use without each other."""
    architectures = group.architectures
    plans: list[Plan] = []
    for artifact in group.graphs:
        where = describe_sms(architectures) or "this GPU"
        progress(f"building a {find_target(target_name).engine} plan of {artifact.id} for {where}")
        own = profiles[artifact.id]
        try:
            plans.append(
                build_plan_of_graph(bundle, artifact, target_name, architectures, own, folder, options)
            )
        except BuildError as error:
            if not plans:
                raise
            for name in (name for plan in plans for name in plan.list_files()):
                (folder / name).unlink()
            dropped = ", ".join(plan.built_from for plan in plans)
            raise BuildError(f"{error}\n  the plan of {dropped} was built, but was removed, too") from error
    return plans


def plan_profiles(
    graphs: Sequence[Artifact], limits: Mapping[str, int], options: Options
) -> dict[str, tuple[Profile, ...]]:
    """Return the profiles of each graph by its id; refuse lengths that any of them does not allow."""
    sides = dict.fromkeys(side for graph in graphs for side in find_sides(graph))
    known = ("batch", *(sides or ("length",)))  # prompts of pictures are always as long
    for option, lengths in (("--max", limits), *(("--opt", lengths) for lengths in options.opt)):
        if unknown := set(lengths) - set(known):
            raise InputError(f"{option} {sorted(unknown)[0]}=...: an axis is {' or '.join(known)}")
    maxima = {f"max_{axis}": limits.get(axis) for axis in known}
    return {graph.id: derive_profiles(graph, **maxima, opt=options.opt) for graph in graphs}


def build_plan_of_graph(
    bundle: Bundle,
    artifact: Artifact,
    target_name: str,
    architectures: tuple[str, ...],
    profiles: Sequence[Profile],
    folder: Path,
    options: Options,
) -> Plan:
    """Build one graph's plan below `folder`."""
    target = find_target(target_name)
    files = bundle.manifest.files
    path = folder / "plans" / f"{artifact.graph}.{target_name}.{artifact.precision}.plan"
    path.parent.mkdir(exist_ok=True)
    for data in artifact.data:
        bundle.path(data)
    plan = build_plan(
        PlanRequest(
            bundle.path(artifact.file),
            artifact,
            profiles,
            path,
            engine=target.engine,
            sms=architectures,
            options=options,
            release=target.version if target.engine == "tensorrt" and target_name != INSTALLED else None,
            name=make_network_name(artifact, {name: entry.sha256 for name, entry in files.items()}),
        )
    )
    if plan.layers is not None:
        plan = dataclasses.replace(plan, layers=f"plans/{name_by_content(folder / plan.layers)[0].name}")
    path, _ = name_by_content(path)  # TensorRT may give other bytes when it builds a plan again
    tokenizers = bundle.manifest.tokenizer["files"]
    sources = {name: files[name].sha256 for name in (artifact.file, *artifact.data, *tokenizers)}
    memory = estimate_memory(bundle.path(artifact.file), artifact, profiles)
    described = tuple({**p, "memory": m} for p, m in zip(plan.profiles, memory, strict=True))
    return dataclasses.replace(plan, file=f"plans/{path.name}", sources=sources, profiles=described)
