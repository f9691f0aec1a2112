"""Removes from a bundle the graphs and plans that the machines do not need to which it is shipped."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..runtime.backends.plan_compatibility import reads
from ..runtime.bundle.artifact import IN_HALF
from ..runtime.bundle.bundle import Bundle
from ..runtime.bundle.manifest import Artifact, FileEntry, Manifest, Plan
from ..runtime.errors import InputError
from .bundle.evidence import prune_evidence
from .bundle.names import name_export
from .bundle.writer import install_change, open_staging_folder
from .precisions import PRECISIONS, expand_names
from .targets import NAMES, Target, find_target, find_target_of_plan, suggest_target
from .verification.explanations import PREFIX as EXPLANATIONS
from .verification.report import prune_checks

NAMED = ("cpu", "cuda", "portable", "rtx")  # targets that an error names, if the bundle has graphs for them


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


def prune(
    bundle: str | Path, *, keep: Sequence[str], progress: Callable[[str], None] = lambda _: None
) -> PruneResult:
    """Remove the graphs and plans that some targets and precisions do not need; the bundle stays whole.

    The files that only they used go too, and what the bundle's checks say of them. Of TensorRT's targets the
    plans stay that their version built, and the graphs in fp16 that plans are built from.

    Args:
        bundle: the folder that `export` wrote; it is changed in place, by one step.
        keep: names of precisions and targets, such as ("int8", "cpu"). Without a precision all that the
            targets have stay; without a target all that the precisions are for.
        progress: called with a line when a stage begins.

    Raises:
        InputError: a name is unknown, the bundle has nothing of it, or the names together leave nothing.
        BundleError: no bundle there, or a file of it has changed.
        OutputError: the bundle cannot be written, or was replaced meanwhile; nothing was changed.
    """
    opened = Bundle.open(bundle)
    wanted = parse_keep(keep, {artifact.precision for artifact in opened.manifest.artifacts})
    choose_graphs(opened, wanted)  # before anything is written
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


def parse_keep(names: Sequence[str], present: Collection[str]) -> Keep:
    """Return the targets and precisions of these names; refuse unknown ones, and none at all.

    int8 stands for w8a16 if it is not among the `present` precisions, or all targets run on GPUs.
    """
    names = [names] if isinstance(names, str) else list(dict.fromkeys(names))
    if not names:
        raise InputError("keep=[] leaves nothing; name precisions or targets, such as int8 or cpu")
    known = (*PRECISIONS, *IN_HALF, *NAMES)
    for name in names:
        if name not in known:
            raise InputError(
                f"keep={name!r} is neither a precision ({', '.join(PRECISIONS)}) nor a target"
                f" ({', '.join(NAMES)}){suggest_target(name, known)}"
            )
    targets = [name for name in names if name in NAMES]
    in_half = bool(targets) and all(find_target(name).multiplies_in_half for name in targets)
    precisions = expand_names([name for name in names if name not in targets], in_half)
    halves = {name: IN_HALF.get(name) for name in precisions if name not in present}
    precisions = [str(own) if (own := halves.get(name)) in present else name for name in precisions]
    return Keep(tuple(targets), tuple(precisions))


def prune_manifest(bundle: Bundle, keep: Keep, staging: Path) -> Manifest:
    """Return the manifest of what stays in a bundle, and stage the checks that have to be written anew."""
    manifest = bundle.manifest
    artifacts = choose_graphs(bundle, keep)
    weights = {name for artifact in artifacts for name in artifact.data}
    explanations = tuple(a for a in manifest.explanations if weights.issuperset(a.data))
    ids = {artifact.id for artifact in artifacts}
    precisions = {artifact.precision for artifact in artifacts}
    pruned = dataclasses.replace(
        manifest,
        artifacts=tuple(artifacts),
        explanations=explanations,
        plans=tuple(plan for plan in manifest.plans if plan.built_from in ids and is_for(plan, keep.targets)),
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
    by_target = {name: list_graphs(manifest, find_target(name)) for name in keep.targets}
    for name, graphs in by_target.items():
        if not graphs:
            there = [other for other in NAMED if list_graphs(manifest, find_target(other))]
            raise InputError(
                f"keep={name!r}: {bundle.folder} has no graphs for that target; it has some for"
                f" {', '.join(there)}"
            )
    available = [a for graphs in by_target.values() for a in graphs] if keep.targets else everything
    precisions = list_precisions(available)
    for precision in keep.precisions:
        if precision not in precisions:
            where = f" for {', '.join(keep.targets)}" if keep.targets else ""
            raise InputError(
                f"keep={precision!r}: {bundle.folder} has no graphs in that precision{where}; it has some in"
                f" {', '.join(precisions)}"
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


def list_graphs(manifest: Manifest, target: Target) -> list[Artifact]:
    """Return the graphs of a bundle that a target runs, or builds plans from."""
    return keep_whole(manifest, [a for a in manifest.artifacts if takes(manifest, target, a)])


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
