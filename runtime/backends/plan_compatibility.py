"""Checks by the manifest whether a plan runs here, before anything is loaded."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..bundle.artifact import IN_HALF, Artifact, Axis
from ..bundle.bundle import Bundle
from ..bundle.export_again import suggest_export_again
from ..bundle.manifest import Plan
from ..errors import BackendUnavailableError
from .architectures import JETSON, describe_sm, describe_sms
from .tensorrt_library import LIBRARIES

SIDE = re.compile(r"(\w+) = (\d+) \* (height|width)")  # a constraint of graphs of pictures


@dataclass(frozen=True)
class Host:
    """The machine that a plan is to run on."""

    version: str  # of the installed library
    sm: str  # the GPU's compute capability, such as "sm86"
    cuda: tuple[int, int]  # the newest version that the driver has, such as (13, 0)


def find_plans(bundle: Bundle, library: str, precision: str | None) -> dict[str, list[Plan]]:
    """Return a library's usable plans, by the graph they were built from, or raise why there are none.

    "int8" and "int4" mean plans with such weights. Without a precision it is the bundle's default if that was
    chosen by measurement, else any whose graph passed verification.
    """
    manifest = bundle.manifest
    wanted = IN_HALF.get(precision, precision) if precision else manifest.default_precision
    usable: dict[str, list[Plan]] = {artifact.graph: [] for artifact in manifest.artifacts}
    reasons = [f"the bundle has no plan of {library}; {describe_way_to_plan(bundle, library)}"]
    for plan in manifest.plans:
        artifact = manifest.artifact(plan.built_from)
        if plan.engine != library:
            continue
        if wanted not in (None, artifact.precision):
            default = "" if precision else ", its default"
            reasons.append(f"its plan is {artifact.precision}, wanted is {wanted}{default}")
        elif precision is None and not artifact.passed:
            reasons.append(f"{artifact.id} was not verified; name precision={artifact.precision!r} to run it")
        elif changed := find_changed_source(plan, bundle):
            reasons.append(f"{changed}; {make_rebuild_command(bundle, library)}")
        else:
            usable[artifact.graph].append(plan)
    if not all(usable.values()):
        raise BackendUnavailableError(reasons[-1])
    return usable


def keep_first_precision(bundle: Bundle, plans: dict[str, list[Plan]]) -> dict[str, list[Plan]]:
    """Return the plans of the first precision, as given at export, in which every graph has one."""
    own = {a.id: a.precision for a in bundle.manifest.artifacts}
    for precision in dict.fromkeys(own.values()):
        kept = {graph: [p for p in some if own[p.built_from] == precision] for graph, some in plans.items()}
        if all(kept.values()):
            return kept
    return plans


def describe_way_to_plan(bundle: Bundle, library: str) -> str:
    """Return the command that builds a plan; without the graphs for it, the one that exports them."""
    artifacts = bundle.manifest.artifacts
    of_encoders = {"encoder": ("portable",)}
    of_decoders = ("inplace",) if library == "tensorrt-rtx" else ("inplace", "portable")
    ready = {a.graph for a in artifacts if a.is_half and a.dialect in of_encoders.get(a.graph, of_decoders)}
    if ready == {a.graph for a in artifacts}:
        return f"make one: {make_rebuild_command(bundle, library)}"
    targets = ["rtx"] if library == "tensorrt-rtx" else ["rtx", "portable"]
    again = suggest_export_again(bundle, precisions=["fp16"], targets=targets)
    return f"it has no graphs for one either; {again}"


def find_changed_source(plan: Plan, bundle: Bundle) -> str:
    """Return which source of a plan has changed in the bundle since; empty where none has."""
    artifact = bundle.manifest.artifact(plan.built_from)
    for name, sha256 in plan.sources.items():
        entry = bundle.manifest.files.get(name)
        if entry is None or entry.sha256 != sha256:
            return f"its plan was built from another {name}"
    if plan.sources and artifact.file not in plan.sources:
        return f"its plan was built from another graph than {artifact.file}"
    return ""


def explain_misfit(plan: Plan, host: Host, bundle: Bundle) -> str:
    """Return why a plan does not run on a host, and what to do; empty where it runs."""
    again = f"; {make_rebuild_command(bundle, plan.engine, host.sm, plan)}"
    if LIBRARIES[plan.engine].sms and host.sm not in LIBRARIES[plan.engine].sms:
        again = ", which it does not know: use backend='ort-cuda', or a plan of TensorRT"
    if plan.sms and not any(covers(sm, host.sm) for sm in plan.sms):
        return f"its plan is for {describe_sms(plan.sms)}, this GPU is {describe_sm(host.sm)}{again}"
    if plan.version != host.version and not (plan.compatible and reads(host.version, plan.version)):
        return f"its plan was built by {plan.engine} {plan.version}, installed is {host.version}{again}"
    if plan.cuda is not None and host.cuda < parse_version(plan.cuda):
        version = ".".join(map(str, host.cuda))
        return f"its plan needs a driver with CUDA {plan.cuda}, this one has {version}; update the driver"
    return ""


def choose_plan(plans: Sequence[Plan], max_length: int | None, gpu_memory: int) -> Plan:
    """Return the plan to run, of several of one graph that all run on this machine.

    What comes first decides; what follows decides between plans that are alike in it:

    1. A plan that holds `max_length` tokens; without a wish, as many as any of the plans holds. Where none
       does, the one that holds most.
    2. A plan whose estimated memory, at its largest shapes, this GPU has.
    3. The fewest tokens: a cache has as many slots as its plan, whatever a call needs.
    4. The largest batch, since any number of texts may come.
    5. One of this GPU's own, before one for later GPUs too, which is slower as a rule.
    6. The one that was built last: the plans are in the order of the manifest.
    """
    wanted = max_length or max(plan.find_longest("tokens") for plan in plans)

    def rank(place: int) -> tuple[int, bool, int, int, bool, int]:
        plan = plans[place]
        length = plan.find_longest("tokens")
        fits = plan.estimate_memory() <= gpu_memory
        return min(length, wanted), fits, -length, plan.find_longest("batch"), not plan.compatible, place

    return plans[max(range(len(plans)), key=rank)]


def covers(listed: str, present: str) -> bool:
    """Tell whether a listed architecture, "sm86" or "sm80+" for it and all later ones, covers the GPU's."""
    if listed.endswith("+"):  # hardware compatibility is not for Jetson
        return int(present[2:]) >= int(listed[2:-1]) and present not in JETSON
    return listed == present


def reads(installed: str, built: str) -> bool:
    """Tell whether a library reads an older version-compatible plan, of its own or the last major version.

    Source: https://docs.nvidia.com/deeplearning/tensorrt/latest/inference-library/engine-compatibility.html
    """
    before = {11: 10, 10: 8}
    here = parse_version(installed)
    then = parse_version(built)
    return then <= here and then[0] in (here[0], before.get(here[0]))


def parse_version(text: str) -> tuple[int, int]:
    """Return (13, 0) for "13.0"."""
    major, minor = text.split(".")[:2]
    return int(major), int(minor)


def make_rebuild_command(
    bundle: Bundle,
    library: str,
    sm: str | None = None,
    plan: Plan | None = None,
    limits: Mapping[str, int] | None = None,
) -> str:
    """Return the command that builds a plan for this machine, with the options of `plan`.

    `limits` has a "batch" or a "length" that the new plan takes at most, instead of what `plan` takes.
    """
    command = f"planforge build {bundle.folder} --target {'rtx' if library == 'tensorrt-rtx' else library}"
    if library == "tensorrt-rtx" and (sm or plan):
        command += f" --sm {sm or ','.join(plan.sms if plan else ())}"
    if plan is not None:
        command += "".join(f" {option}" for option in list_shape_options(bundle, plan, limits or {}))
        if plan.weights:
            command += " --strip"
        if plan.compatible:
            command += " --compatible"
        if plan.candidates:
            command += f" --top-k {plan.candidates}"
        if plan.builder_level is not None:
            command += f" --builder-level {plan.builder_level}"
        if plan.profiling is not None:
            command += f" --profiling {plan.profiling}"
    return command


def name_option_axes(artifact: Artifact) -> dict[str, str]:
    """Return the axes that the options "batch" and "length" of plans set, of a translator its sources'."""
    names = {axis.name for spec in artifact.inputs for axis in spec.axes if isinstance(axis, Axis)}
    options = {
        "batch": "sources" if "sources" in names else "batch",
        "length": "source_tokens" if "source_tokens" in names else "tokens",
    }
    return {option: axis for option, axis in options.items() if axis in names}


def find_sides(artifact: Artifact) -> dict[str, tuple[str, int]]:
    """Return the axes of a picture's "height" and "width", each with the pixels in one of it.

    They are in the constraints, as in "picture_height = 8 * height". A graph without pictures has none.
    """
    found = {}
    for text in artifact.constraints:
        if match := SIDE.fullmatch(text):
            is_whole = artifact.has_axis(match[1])
            found[match[3]] = (match[1], 1) if is_whole else (match[3], int(match[2]))
    return {side: (axis, pixels) for side, (axis, pixels) in found.items() if artifact.has_axis(axis)}


def list_shape_options(bundle: Bundle, plan: Plan, limits: Mapping[str, int]) -> Iterator[str]:
    """Yield a plan's precision, where others have plans too, and its --max and --opt, where not the usual."""
    manifest = bundle.manifest
    artifact = manifest.artifact(plan.built_from)
    if len({one.precision for one in manifest.artifacts if one.is_half}) > 1:
        yield f"--precision {artifact.precision}"
    axes = {axis.name: axis for spec in artifact.inputs for axis in spec.axes if isinstance(axis, Axis)}
    sides = find_sides(artifact)
    names = {option: (axis, 1) for option, axis in name_option_axes(artifact).items()} | sides
    if manifest.images is not None:
        names.pop("length", None)  # prompts are always as long
    # All profiles of a decoder follow from its prefill's.
    lengths = [p["axes"] for p in plan.profiles if not artifact.keeps_cache or p.get("name") == "prefill"]
    if not lengths or not all(axis in axes and axis in one for axis, _ in names.values() for one in lengths):
        return
    high = {o: pixels * max(one[axis][2] for one in lengths) for o, (axis, pixels) in names.items()}
    kept = {o: high[o] for o, (axis, pixels) in names.items() if high[o] < pixels * axes[axis].max}
    if most := {**kept, **limits}:
        yield f"--max {format_lengths(most)}"
    usual = {o: min(pixels * axes[axis].opt, high[o]) for o, (axis, pixels) in names.items()}
    best = []
    for one in lengths:
        lengths_of_one = {o: pixels * one[axis][1] for o, (axis, pixels) in names.items()}
        best += [lengths_of_one] if lengths_of_one not in best else []
    first = [] if artifact.keeps_cache or artifact.keeps_state or sides else [{**usual, "batch": 1}]
    if any(one not in (usual, *first) for one in best) or any(one not in best for one in (usual, *first)):
        yield from (f"--opt {format_lengths(one)}" for one in best)


def format_lengths(lengths: Mapping[str, int]) -> str:
    """Return lengths as --max and --opt take them: batch=8,length=128."""
    return ",".join(f"{name}={length}" for name, length in lengths.items())
