"""The command that exports a bundle again: with all that its manifest names, and what was missing."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path, PureWindowsPath
from typing import Any

from .bundle import Bundle
from .manifest import Artifact, Axis, Manifest
from .plan import RTX_SMS

CONTEXTS = ("max_positions", "max_position_embeddings")  # settings of models that compute positions
TARGETS = {"portable": "portable", "inplace": "rtx"}  # that give a dialect


def suggest_export_again(
    bundle: Bundle,
    *,
    precisions: Sequence[str] = (),
    targets: Sequence[str] = (),
    outputs: Sequence[str] = (),
) -> str:
    """Return "export it again: `planforge ...`", with all that the bundle has and what is named here beside.

    Args:
        bundle: to be replaced.
        precisions: that it should have, too; what `run` takes stays the same.
        targets: that it should have graphs of, too.
        outputs: that its graphs should have, too.
    """
    import shlex  # a quicker start without it

    manifest = bundle.manifest
    graphs = manifest.artifacts
    built_for = {sm for plan in manifest.plans if plan.engine == "tensorrt-rtx" for sm in plan.sms}
    there = [*map(find_target, graphs), *(["rtx"] if built_for else [])]
    words = [
        *name_origin(bundle),
        *name_adapters(bundle),
        *("-o", str(bundle.folder), "--force"),
        *("--precision", ",".join(dict.fromkeys([*(a.precision for a in graphs), *precisions]))),
        *("--target", ",".join(dict.fromkeys([*there, *targets]))),
    ]
    if built_for and built_for != set(RTX_SMS):
        words += ["--sm", ",".join(sm for sm in RTX_SMS if sm in built_for)]
    if wanted := dict.fromkeys([*read_chosen_outputs(manifest), *outputs]):
        words += ["--outputs", ",".join(wanted)]
    if most := find_max_batch(manifest):
        words += ["--max-batch", str(most)]
    words += ["--max-length", str(manifest.max_length)]
    if extrapolates(manifest):
        words.append("--extrapolate")
    is_fitted = manifest.encoder is not None and manifest.encoder.fitted is not None
    fitted = ", then fit its head again" if is_fitted else ""
    return f"export it again: `planforge {shlex.join(words)}`{fitted}"


def name_origin(bundle: Bundle) -> list[str]:
    """Return the command and the model that a bundle was made by: of other exporters' graphs `import`."""
    model = name_checkpoint(bundle)
    if bundle.manifest.source.get("exporter") in (None, "transformers"):
        return ["export", model]
    is_folder = bundle.manifest.source.get("kind") == "folder" and Path(model).is_absolute()
    if is_folder and any(Path(model).glob("*.onnx")):  # it was looked at before
        return ["import", model]
    return ["import", "FOLDER", "--source", model]  # what optimum wrote is nowhere named


def name_adapters(bundle: Bundle) -> list[str]:
    """Return the options that name the adapters of a bundle, merged or beside its model."""
    recorded = bundle.manifest.source
    merged = recorded.get("adapter")
    beside = recorded.get("adapters")
    words = [] if merged is None else [find_place(bundle, str(merged))]
    if isinstance(beside, Mapping):
        words += [f"{name}={find_place(bundle, str(place))}" for name, place in beside.items()]
    return [word for given in words for word in ("--adapter", given)]


def name_checkpoint(bundle: Bundle) -> str:
    """Return what a user types for the checkpoint: of a folder that is not here, its name alone."""
    recorded = bundle.manifest.source
    argument = restore_argument(recorded, bundle.folder)
    if recorded.get("kind") == "folder":
        return find_place(bundle, str(recorded.get("argument", ""))) or "MODEL"
    return argument or "MODEL"


def find_place(bundle: Bundle, recorded: str) -> str:
    """Return the whole path of a recorded folder or file; of one that is not here, its name alone."""
    path = bundle.folder / recorded
    is_here = is_recorded_place(recorded) and path.exists()
    return str(path.resolve()) if is_here else PureWindowsPath(recorded).name


def find_target(artifact: Artifact) -> str:
    """Return a target that gives a graph; "rtx" stands for the cache in place."""
    return TARGETS.get(artifact.dialect) or ("cuda" if artifact.is_half else "cpu")


def restore_argument(recorded: Mapping[str, Any], bundle: Path) -> str:
    """Return the MODEL argument that finds a manifest's checkpoint again: of a hub model, its very commit."""
    argument = str(recorded.get("argument", ""))
    if recorded.get("kind") == "folder":
        return str(bundle / argument)
    commit = recorded.get("commit")
    return f"{argument.partition('@')[0]}@{commit}" if commit else argument


def is_recorded_place(argument: str) -> bool:
    """Tell whether an export may have written a folder's path: a relative one, or one on a Windows drive.

    Windows asks the network for what begins with two slashes of either kind, and an automounter may for any
    whole path.
    """
    place = PureWindowsPath(argument)  # takes / and \\ alike
    return not place.anchor or re.fullmatch(r"[A-Za-z]:\\", place.anchor) is not None


def find_max_batch(manifest: Manifest) -> int | None:
    """Return the largest batch that was chosen at export, as most of the graphs have it."""
    found: Counter[int] = Counter()
    for artifact in manifest.artifacts:
        axes = {axis.name: axis for spec in artifact.inputs for axis in spec.axes if isinstance(axis, Axis)}
        batch = axes.get("sources") or axes.get("batch")  # a translation's decoder has several beams of each
        if batch is not None:
            found[batch.max] += 1
    return found.most_common(1)[0][0] if found else None


def extrapolates(manifest: Manifest) -> bool:
    """Tell whether a bundle takes longer texts than its model was trained with."""
    context = find_context(manifest)
    return context is not None and manifest.max_length > context


def find_context(manifest: Manifest) -> int | None:
    """Return how many tokens the model was trained with; None where its settings do not say."""
    context = next((manifest.config[name] for name in CONTEXTS if name in manifest.config), None)
    return context if isinstance(context, int) else None


def read_chosen_outputs(manifest: Manifest) -> tuple[str, ...]:
    """Return the `outputs` that were chosen at export."""
    names = [spec.name for artifact in manifest.artifacts for spec in artifact.outputs]
    chosen = [n for n in names if n.startswith("hidden_states.") or n == "pooler_output"]
    chosen += ["cross_attentions" for n in names if n.startswith("cross_attentions.")]
    chosen += ["explain"] if manifest.explanations else []
    return tuple(dict.fromkeys(chosen))
