"""Removes from a bundle the graphs and plans that the machines do not need to which it is shipped."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..runtime.backends.architectures import find_sm, suggest_series
from ..runtime.backends.dialects import CPU_DIALECTS, PLANS_ONLY
from ..runtime.backends.plan_compatibility import covers, reads
from ..runtime.bundle.artifact import IN_HALF
from ..runtime.bundle.bundle import Bundle
from ..runtime.bundle.manifest import Artifact, FileEntry, Manifest, Plan
from ..runtime.errors import InputError
from .bundle.evidence import prune_evidence
from .bundle.names import name_export
from .bundle.writer import install_change, open_staging_folder
from .precisions import PRECISIONS, expand_names
from .targets import NAMES, Target, find_target, find_target_of_plan, suggest_target
from .tensorrt.choices import has_kernels
from .verification.explanations import PREFIX as EXPLANATIONS
from .verification.report import prune_checks

CPU = "cpu"
NAMED = (CPU, "cuda", "portable", "rtx")  # targets that an error names, if the bundle has graphs for them
SM = re.compile(r"sm[0-9]{2,3}")  # a GPU architecture


@dataclass(frozen=True)
class PruneResult:
    """The changes that pruning made to a bundle.

    Attributes:
        bundle: the bundle's folder.
        kept: ids of the graphs that are left.
        removed: the files that are gone, by their names.
        bytes_before: of all files that the manifest listed.
        bytes_after: of all that it lists now.
    """

    bundle: Path
    kept: tuple[str, ...]
    removed: dict[str, FileEntry]
    bytes_before: int
    bytes_after: int

    def to_json(self) -> dict[str, Any]:
        """Return the fields of `planforge prune --json`."""
        removed = {name: entry.bytes for name, entry in self.removed.items()}
        return {**vars(self), "bundle": str(self.bundle), "removed": removed}


@dataclass(frozen=True)
class Keep:
    """Names what stays in a bundle: everything of an empty field."""

    targets: tuple[str, ...]
    precisions: tuple[str, ...]
    sms: tuple[str, ...] = ()  # GPU architectures, for which plans are


def prune(
    bundle: str | Path, *, keep: Sequence[str], progress: Callable[[str], None] = lambda _: None
) -> PruneResult:
    """Remove the graphs and plans that some targets and precisions do not need; the bundle stays whole.

    The files that only they used go too, and what the bundle's checks say of them. Of TensorRT's targets the
    plans stay that their version built, and the graphs in fp16 that plans are built from.

    Args:
        bundle: the folder that `export` wrote; it is changed in place, by one step.
        keep: names of precisions, targets and GPU architectures, such as ("int8", "cpu") or ("rtx", "sm89").
            Without a precision all that the targets have stay; without a target all that the precisions are
            for; without an architecture the plans for all.
        progress: called with a line when a stage begins.

    Raises:
        InputError: a name is unknown, the bundle has nothing of it, or the names together leave nothing.
        BundleError: no bundle there, or a file of it has changed.
        OutputError: the bundle cannot be written, or was replaced meanwhile; nothing was changed.
    """
    opened = Bundle.open(bundle)
    wanted = parse_keep(keep, opened)
    choose_plans(opened, wanted, choose_graphs(opened, wanted))  # before anything is written
    progress("removing what is not needed")
    with open_staging_folder(opened.folder) as staging:
        before, after = install_change(
            staging, opened, lambda now: prune_manifest(Bundle(opened.folder, now), wanted, staging)
        )
    return PruneResult(
        opened.folder,
        tuple(artifact.id for artifact in after.artifacts),
        {name: entry for name, entry in before.files.items() if name not in after.files},
        *(sum(entry.bytes for entry in manifest.files.values()) for manifest in (before, after)),
    )


def parse_keep(names: Sequence[str], bundle: Bundle) -> Keep:
    """Return the targets, precisions and GPUs of these names; refuse unknown ones, and none at all.

    int8 stands for w8a16 if the bundle has no graphs in int8, or all targets run on GPUs.
    """
    names = [names] if isinstance(names, str) else list(dict.fromkeys(names))
    names = [sm if SM.fullmatch(sm := find_sm(name)) else name for name in names]
    if not names:
        raise InputError(
            f"keep=[] leaves nothing; name some of what {bundle.folder} has: {describe_names(bundle)}"
        )
    known = (*PRECISIONS, *IN_HALF, *NAMES)
    sms = tuple(name for name in names if SM.fullmatch(name))
    for name in names:
        if name not in (*known, *sms):
            raise InputError(
                f"keep={name!r} is no precision, target or GPU; {bundle.folder} has"
                f" {describe_names(bundle)}{suggest_series(name) or suggest_target(name, known)}"
            )
    present = list_precisions(bundle.manifest.artifacts)
    targets = [name for name in names if name in NAMES]
    in_half = bool(targets) and all(find_target(name).multiplies_in_half for name in targets)
    precisions = expand_names([name for name in names if name not in (*targets, *sms)], in_half)
    halves = {name: IN_HALF.get(name) for name in precisions if name not in present}
    precisions = [str(own) if (own := halves.get(name)) in present else name for name in precisions]
    return Keep(tuple(targets), tuple(precisions), sms)


def describe_names(bundle: Bundle) -> str:
    """Return in words the precisions, targets and GPUs that a bundle has something for."""
    manifest = bundle.manifest
    sms = list_sms(manifest.plans)
    return (
        f"the precisions {', '.join(list_precisions(manifest.artifacts))}, the targets"
        f" {', '.join(list_targets(manifest))}{', and plans for ' if sms else ''}{', '.join(sms)}"
    )


def list_targets(manifest: Manifest) -> list[str]:
    """Return the targets that a bundle has graphs for: those without a version, and those of its plans."""
    built = [find_target_of_plan(plan.engine, plan.version).name for plan in manifest.plans]
    names = dict.fromkeys((*NAMED, *built))
    on_cpu = list_slow_graphs(manifest, list_precisions(manifest.artifacts))
    return [name for name in names if list_graphs(manifest, find_target(name)) or (name == CPU and on_cpu)]


def list_sms(plans: Sequence[Plan]) -> list[str]:
    """Return the GPU architectures that plans are for, each once."""
    return list(dict.fromkeys(sm for plan in plans for sm in plan.sms))


def prune_manifest(bundle: Bundle, keep: Keep, staging: Path) -> Manifest:
    """Return the manifest of what stays in a bundle, and stage the checks that have to be written anew."""
    manifest = bundle.manifest
    artifacts = choose_graphs(bundle, keep)
    weights = {name for artifact in artifacts for name in artifact.data}
    explanations = tuple(a for a in manifest.explanations if weights.issuperset(a.data))
    precisions = {artifact.precision for artifact in artifacts}
    pruned = dataclasses.replace(
        manifest,
        artifacts=tuple(artifacts),
        explanations=explanations,
        plans=choose_plans(bundle, keep, artifacts),
        default_precision=manifest.default_precision if manifest.default_precision in precisions else None,
    )
    gone = set(manifest.list_graph_files()) - set(pruned.list_graph_files())
    if not explanations:
        gone |= {name for name in manifest.files if name.startswith(EXPLANATIONS)}
    files = {name: entry for name, entry in manifest.files.items() if name not in gone}
    pruned = prune_checks(bundle, dataclasses.replace(pruned, files=files), staging)
    return name_export(prune_evidence(bundle, pruned, staging))


def choose_graphs(bundle: Bundle, keep: Keep) -> list[Artifact]:
    """Return the graphs that stay, in the manifest's order.

    Raises:
        InputError: the bundle has nothing of a name, or nothing of it is left by the others.
    """
    manifest = bundle.manifest
    everything = keep_whole(manifest, manifest.artifacts)
    by_target = {name: list_graphs(manifest, find_target(name), keep.sms) for name in keep.targets}
    if CPU in by_target:
        by_target[CPU] = add_slow_graphs(manifest, by_target, keep.precisions)
    on = f" on {', '.join(keep.sms)}" if keep.targets and keep.sms else ""
    for name, graphs in by_target.items():
        if not graphs:
            raise InputError(
                f"keep={name!r}: {bundle.folder} has no graphs for that target{on}; it has some for"
                f" {', '.join(list_targets(manifest))}"
            )
    available = [a for graphs in by_target.values() for a in graphs] if keep.targets else everything
    precisions = list_precisions(available)
    for precision in keep.precisions:
        if precision not in precisions:
            more = list_slow_graphs(manifest, list_precisions(everything)) if CPU in by_target else []
            raise InputError(
                f"keep={precision!r}: {bundle.folder} has no graphs in that precision{describe_for(keep)}{on}"
                f"; it has some in {', '.join(list_precisions([*available, *more]))}"
            )
    kept = [a for a in available if a.precision in (keep.precisions or precisions)]
    for name, graphs in by_target.items():
        if not any(artifact in kept for artifact in graphs):
            raise InputError(
                f"keep={','.join((*keep.precisions, *keep.targets))!r} leaves nothing that {name} runs: of"
                f" {bundle.folder} it runs {', '.join(list_precisions(graphs))}; name one of these too, or"
                f" leave out {name}"
            )
    return [artifact for artifact in manifest.artifacts if artifact in kept]


def describe_for(keep: Keep) -> str:
    """Return in words the targets that something is for, with a space before; "" if none is named."""
    return f" for {', '.join(keep.targets)}" if keep.targets else ""


def add_slow_graphs(
    manifest: Manifest, by_target: Mapping[str, Sequence[Artifact]], precisions: Sequence[str]
) -> list[Artifact]:
    """Return the graphs for a CPU with those that it only runs slowly, such as in fp16, which has to cast.

    They are for who names their precision, unless another target's graphs are meant, and where a CPU has no
    others.
    """
    fast = list(by_target[CPU])
    own = [artifact for artifact in fast if artifact.precision in (precisions or list_precisions(fast))]
    if own and not precisions:
        return fast
    others = {artifact.precision for graphs in by_target.values() for artifact in graphs}
    asked = precisions or list_precisions(manifest.artifacts)
    return fast + list_slow_graphs(manifest, [name for name in asked if not own or name not in others])


def list_slow_graphs(manifest: Manifest, precisions: Collection[str]) -> list[Artifact]:
    """Return the graphs in some precisions that `load` takes on a CPU, whatever target they are for."""
    names = [name for name in precisions if name not in PLANS_ONLY]
    fastest: dict[tuple[str, str], Artifact] = {}
    for dialect in CPU_DIALECTS:
        for artifact in manifest.artifacts:
            if artifact.dialect == dialect and artifact.precision in names:
                fastest.setdefault((artifact.graph, artifact.precision), artifact)
    return keep_whole(manifest, list(fastest.values()))


def choose_plans(bundle: Bundle, keep: Keep, artifacts: Sequence[Artifact]) -> tuple[Plan, ...]:
    """Return the plans of these graphs that stay, in the manifest's order.

    Raises:
        InputError: none of them is for a GPU that is named.
    """
    ids = {artifact.id for artifact in artifacts}
    plans = [p for p in bundle.manifest.plans if p.built_from in ids and is_for(p, keep.targets)]
    for sm in keep.sms:
        if not any(runs_on(plan, sm) for plan in plans):
            raise InputError(
                f"keep={sm!r}: {bundle.folder} has no plan for that GPU{describe_for(keep)}; it has"
                f" {', '.join(list_sms(plans)) or 'none'}"
            )
    return tuple(plan for plan in plans if not keep.sms or any(runs_on(plan, sm) for sm in keep.sms))


def runs_on(plan: Plan, sm: str) -> bool:
    """Tell whether a plan is for a GPU architecture; one that names none is for the GPU it was built on."""
    return not plan.sms or any(covers(listed, sm) for listed in plan.sms)


def list_graphs(manifest: Manifest, target: Target, sms: Sequence[str] = ()) -> list[Artifact]:
    """Return the graphs of a bundle that a target runs, or builds plans from; for some GPUs, if named."""
    taken = [artifact for artifact in manifest.artifacts if takes(manifest, target, artifact)]
    if target.plans and sms:
        taken = [one for one in taken if any(has_kernels(one.precision, [sm]) for sm in sms)]
    return keep_whole(manifest, taken)


def takes(manifest: Manifest, target: Target, artifact: Artifact) -> bool:
    """Tell whether a target runs a graph: one that an export writes for it, else the portable one.

    ONNX Runtime's targets take weights that are quantized for fp16 in their own dialect alone. TensorRT runs
    plans, which are built from graphs in fp16, and from a portable decoder only if that is the target's own
    dialect or another exporter's.
    """
    own = target.find_dialect(artifact.keeps_cache, artifact.precision)
    is_refused = own == target.dialect and artifact.precision in target.without
    others = [a for a in manifest.artifacts if a.graph == artifact.graph and a.dialect == own]
    if target.plans and not artifact.is_half:
        return False
    if PRECISIONS[artifact.precision].quantizes_in_half and not target.plans and artifact.dialect != own:
        return False
    if artifact.dialect == own:
        return not is_refused
    if artifact.dialect != "portable" or (is_refused and others):
        return False
    if target.plans and artifact.keeps_cache and not manifest.source.get("exporter"):
        return False
    return all(other.precision != artifact.precision for other in others)


def keep_whole(manifest: Manifest, artifacts: Sequence[Artifact]) -> list[Artifact]:
    """Return the graphs of the precisions that have all of the model's: an encoder, and its decoder."""
    needed = {artifact.graph for artifact in manifest.artifacts}
    return [
        artifact
        for artifact in artifacts
        if {other.graph for other in artifacts if other.precision == artifact.precision} == needed
    ]


def list_precisions(artifacts: Sequence[Artifact]) -> list[str]:
    """Return the precisions of graphs, each once."""
    return list(dict.fromkeys(artifact.precision for artifact in artifacts))


def is_for(plan: Plan, targets: Sequence[str]) -> bool:
    """Tell whether a plan is for one of these targets, by the engine and the version that built it."""
    built = find_target_of_plan(plan.engine, plan.version)
    named = [target for target in map(find_target, targets) if target.engine == plan.engine]
    return not targets or any(
        target.version == built.version
        or (plan.compatible and reads("{}.{}".format(*target.version), plan.version))
        for target in named
    )
