"""What `planforge inspect` shows of a bundle, an .onnx file or a .plan, as tables and as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from ...runtime.bundle.bundle import Bundle
from ...runtime.bundle.manifest import Artifact, Axis, Manifest, Plan, TensorSpec
from ...runtime.commands.tables import size_text, table
from ...runtime.errors import InputError
from ..errors import ExporterError, first_line

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ..fitting.fitting import FitResult


Section: TypeAlias = tuple[str, Sequence[str], Sequence[Sequence[str]]]  # title, columns, rows


NOT_RUN = "not run"  # what can be said of a plan without its GPU: everything here only reads

# Tensors that each layer has two of, by what their roles begin with.
CACHES = {"past.": "cache", "present.": "cache", "cross.": "keys and values of the source"}


@dataclass(frozen=True)
class Inspection:
    """What was found, as JSON and as tables.

    Attributes:
        value: what --json prints.
        sections: the tables.
    """

    value: Mapping[str, Any]
    sections: Sequence[Section]

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON."""
        return dict(self.value)

    def tables(self) -> list[RenderableType]:
        """Return the tables for a terminal."""
        return [table(*section) for section in self.sections]


def inspect(path: str | Path) -> Inspection:
    """Inspect a bundle's folder, an .onnx file or a .plan file.

    Raises:
        PlanForgeError: there is nothing at `path`, or it is none of the three.
    """
    path = Path(path)
    if path.is_dir():
        return inspect_bundle(path)
    if not path.is_file():
        raise InputError(f"{path} does not exist; give a bundle's folder, an .onnx file or a .plan file")
    if path.suffix == ".onnx":
        return inspect_onnx(path)
    if path.suffix in (".plan", ".engine"):
        return inspect_plan(path)
    raise InputError(f"{path} is neither a bundle's folder nor an .onnx or .plan file")


def inspect_bundle(folder: Path) -> Inspection:
    """List artifacts with their axes and ranges, plans with their architectures, files with their sizes."""
    bundle = Bundle.open(folder)
    manifest = bundle.manifest
    sections: list[Section] = [
        (f"{folder}: {manifest.family}, {manifest.task}", ("", ""), head_rows(manifest))
    ]
    for artifact in manifest.artifacts:
        title = f"{artifact.id}: opset {artifact.opset}, padding {artifact.padding_side}, "
        title += gate_text(artifact)
        sections.append((title, ("tensor", "role", "type", "axes"), tensor_rows(artifact)))
    if manifest.plans:
        columns = ("plan", "engine", "built from", "architectures", "profiles", "size")
        title = f"plans: {NOT_RUN} (`planforge selftest {folder}` runs one, on a machine with its GPU)"
        sections.append((title, columns, [plan_row(manifest, plan) for plan in manifest.plans]))
    files = [
        (name, size_text(entry.bytes), file_state(folder / name, entry.bytes))
        for name, entry in sorted(manifest.files.items())
    ]
    sections.append(("files", ("file", "size", "state"), files))
    value = json.loads(manifest.to_json())
    if manifest.plans:
        value["checks"] = {"plans": NOT_RUN}
    return Inspection(value, sections)


def summarize_bundle(folder: Path) -> Inspection:
    """Summarize what an export or build made, in a screenful."""
    manifest = Bundle.open(folder).manifest
    graphs = [
        (a.id, f"opset {a.opset}", size_of(manifest, a.file, *a.data), gate_text(a))
        for a in manifest.artifacts
    ]
    plans = []
    for p in manifest.plans:
        source = f"from {p.built_from}"
        plans.append((p.file, " ".join(p.sms), size_of(manifest, p.file), source + extras_text(p)))
        plans += [
            (
                f"  {ranges_text(profile)}",
                "at its largest shapes",
                memory.removeprefix(", about "),
                "of GPU memory",
            )
            for profile in p.profiles
            if (memory := memory_text(profile))
        ]
    total = size_of(manifest, *manifest.files)
    title = f"{folder}: {manifest.family}, {total}"
    return Inspection(json.loads(manifest.to_json()), [(title, ("", "", "", ""), [*graphs, *plans])])


def head_rows(manifest: Manifest) -> list[tuple[str, str]]:
    return [
        ("source", source_text(manifest)),
        ("context", f"{manifest.max_length} tokens"),
        ("runs in", default_text(manifest)),
        *encoder_rows(manifest),
        *translation_rows(manifest),
        ("vocabulary", vocabulary_text(manifest)),
        ("size", size_of(manifest, *manifest.files)),
        ("made by", ", ".join(f"{name} {version}" for name, version in manifest.tools.items())),
    ]


def source_text(manifest: Manifest) -> str:
    """Return the checkpoint, and who exported it."""
    source = manifest.source
    by = f", exported by {source['exporter']}" if source.get("exporter") else ""
    return f"{source.get('argument')} ({source.get('kind')}){by}"


def default_text(manifest: Manifest) -> str:
    """Return the precision that load() takes unless told otherwise."""
    if manifest.default_precision is not None:
        return f"{manifest.default_precision}, which `planforge bench` found the best here"
    return f"{manifest.artifacts[0].precision}, the first" if manifest.artifacts else "no graph"


def vocabulary_text(manifest: Manifest) -> str:
    source, target = (manifest.config.get(f"{side}_vocab_size") for side in ("source", "target"))
    both = f"{source} of the source, {target} of the target"
    return both if manifest.task == "translation" else str(manifest.tokenizer.get("vocab_size"))


def translation_rows(manifest: Manifest) -> list[tuple[str, str]]:
    """Return how an encoder-decoder searches unless told otherwise."""
    defaults = manifest.generation
    if manifest.task != "translation" or defaults is None:
        return []
    beams = "greedy" if defaults.num_beams == 1 else f"{defaults.num_beams} beams"
    return [("searches", f"{beams}, at most {defaults.max_new_tokens} new tokens")]


def encoder_rows(manifest: Manifest) -> list[tuple[str, str]]:
    """Return an encoder's heads, pooling, labels, classifier and prompts."""
    encoder = manifest.encoder
    if encoder is None:
        return []
    roles = {spec.role.partition(".")[0] for a in manifest.artifacts for spec in a.outputs}
    rows = [("heads", ", ".join(encoder.heads) or "none: it embeds texts")]
    if roles & {"hidden", "sentence_embedding"}:
        rows.append(("embeds by", f"{encoder.pooling} pooling{', normalized' if encoder.normalize else ''}"))
    if encoder.labels:
        rows.append(("labels", ", ".join(encoder.labels[:20]) + (" ..." if len(encoder.labels) > 20 else "")))
    if encoder.fitted is not None:
        rows.append(("classifier", f"fitted to {encoder.fitted.features}"))
    if encoder.prompts:
        rows.append(("prompts", ", ".join(encoder.prompts)))
    return rows


def gate_text(artifact: Artifact) -> str:
    if not artifact.gate:
        return "not verified"
    measured = artifact.gate.get("measured")
    measured = measured if isinstance(measured, dict) else {}
    worst: dict[str, float] = {}  # of an encoder each output has its own
    for name, value in measured.items():
        if isinstance(value, float):
            metric = name.rpartition(".")[2]
            if metric == "mean_cosine_gap" and not value:
                continue  # of fewer texts than have a mean
            worst[metric] = max(value, worst.get(metric, 0.0))
    numbers = ", ".join(f"{name} {value:.2g}" for name, value in worst.items())
    return f"{'verified' if artifact.gate.get('passed') else 'FAILED'} ({numbers})"


def tensor_rows(artifact: Artifact) -> list[tuple[str, str, str, str]]:
    rows = []
    for side, specs in (("in", artifact.inputs), ("out", artifact.outputs)):
        grouped = {spec.role: kind for spec in specs for kind in CACHES if spec.role.startswith(kind)}
        for spec in (spec for spec in specs if spec.role not in grouped):
            rows.append((f"{side}  {spec.name}", spec.role, spec.dtype, axes_text(spec)))
        for kind in dict.fromkeys(grouped.values()):
            caches = [spec for spec in specs if grouped.get(spec.role) == kind]
            alias = ", at the input's address" if side == "out" and artifact.aliases else ""
            rows.append(
                (
                    f"{side}  {caches[0].name} … {caches[-1].name}",
                    f"{CACHES[kind]}, {len(caches)} tensors{alias}",
                    caches[0].dtype,
                    axes_text(caches[0]),
                )
            )
    return rows


def axes_text(spec: TensorSpec) -> str:
    """Return each axis with its range, as in "batch 1..8 x 12 x past 0..1023 x 64"."""
    return " x ".join(
        f"{axis.name} {axis.min}..{axis.max}" if isinstance(axis, Axis) else str(axis) for axis in spec.axes
    )


def file_state(path: Path, size: int) -> str:
    """Return a file's state as far as it shows without hashing; `planforge verify` hashes."""
    if not path.is_file():
        return "MISSING"
    return "there" if path.stat().st_size == size else f"CHANGED: has {size_text(path.stat().st_size)}"


def plan_row(manifest: Manifest, plan: Plan) -> tuple[str, ...]:
    return (
        plan.file,
        f"{plan.engine} {plan.version}",
        plan.built_from + extras_text(plan),
        " ".join(plan.sms) or "the GPU it was built on",
        ", ".join(profile_text(profile) for profile in plan.profiles),
        size_of(manifest, plan.file),
    )


def extras_text(plan: Plan) -> str:
    """Return what a plan was built with, as in ", without weights, picks 64 tokens"."""
    text = ""
    if plan.weights:
        text += ", without weights"
    if plan.candidates:
        text += f", picks {plan.candidates} tokens"
    if plan.compatible:
        text += ", for later versions too"
    return text


def profile_text(profile: Mapping[str, Any]) -> str:
    """Return a profile with its ranges and memory."""
    return f"{ranges_text(profile).removesuffix(')')}{memory_text(profile)})"


def ranges_text(profile: Mapping[str, Any]) -> str:
    """Return a profile with its ranges, as in "decode (batch 1..8, tokens 1..1)"."""
    axes = profile.get("axes")
    ranges = []
    if isinstance(axes, dict):
        for name, axis in axes.items():
            if name in ("batch", "tokens", "slots"):
                ranges.append(f"{name} {axis[0]}..{axis[2]}")
    return f"{profile.get('name')} ({', '.join(ranges)})"


def memory_text(profile: Mapping[str, Any]) -> str:
    """Return the GPU memory that a profile needs, as in ", about 312 MB"."""
    memory = profile.get("memory")
    if not isinstance(memory, dict) or not all(isinstance(size, int) for size in memory.values()):
        return ""
    return f", about {size_text(sum(memory.values()))}"


def inspect_onnx(path: Path) -> Inspection:
    """List inputs, outputs, operators and weights of any ONNX file; weights are not read."""
    import onnx_ir as ir

    try:
        model = ir.load(path)
    except Exception as error:
        raise ExporterError(f"{path} is not an ONNX file: {first_line(error)}") from error
    graph = model.graph
    counts: dict[str, int] = {}
    for node in graph:
        name = f"{node.domain}.{node.op_type}" if node.domain else node.op_type
        counts[name] = counts.get(name, 0) + 1
    weights = sum(v.const_value.nbytes for v in graph.initializers.values() if v.const_value is not None)
    tensors = [
        {
            "name": tensor.name,
            "side": side,
            "dtype": str(tensor.dtype),
            "shape": " x ".join(str(dim) for dim in tensor.shape or ()),
        }
        for side, values in (("in", graph.inputs), ("out", graph.outputs))
        for tensor in values
    ]
    opsets = {domain or "ai.onnx": opset for domain, opset in graph.opset_imports.items()}
    operators = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    value = {
        "file": path.name,
        "opsets": opsets,
        "operators": dict(operators),
        "weight_bytes": weights,
        "tensors": tensors,
    }
    head = [
        ("opsets", ", ".join(f"{k} {v}" for k, v in opsets.items())),
        ("weights", size_text(weights)),
        ("operators", ", ".join(f"{name} {count}" for name, count in operators)),
    ]
    rows = [(f"{t['side']}  {t['name']}", str(t["dtype"]), str(t["shape"])) for t in tensors]
    return Inspection(value, [(path.name, ("", ""), head), ("tensors", ("tensor", "type", "shape"), rows)])


def inspect_plan(path: Path) -> Inspection:
    """Return what a plan shows without a driver, and what its bundle's manifest says of it."""
    from ..tensorrt.build import plan_summary

    summary = dict(plan_summary(path))
    for folder in (path.parent, path.parent.parent):
        if (folder / "manifest.json").is_file():
            for plan in Bundle.open(folder).manifest.plans:
                if (folder / plan.file).resolve() == path.resolve():
                    summary["passport"] = plan.to_json()
    summary["plan"] = NOT_RUN
    rows = [
        (key, passport_text(value) if key == "passport" else str(value)) for key, value in summary.items()
    ]
    return Inspection(summary, [(path.name, ("", ""), rows)])


def passport_text(passport: Mapping[str, Any]) -> str:
    sms = " ".join(passport["sms"]) or "the GPU it was built on"
    return f"{passport['engine']} {passport['version']} from {passport['built_from']} for {sms}"


def fit_tables(result: FitResult) -> list[RenderableType]:
    """Return a classifier's accuracy and confusion matrix."""
    held_out = sum(map(sum, result.confusion))
    head = [
        ("accuracy", f"{result.accuracy:.4f} on {held_out} held-out texts"),
        ("fitted to", f"{result.training} texts, C {result.C:g}"),
        ("picture", str(result.picture)),
    ]
    rows = [(label, *map(str, counts)) for label, counts in zip(result.labels, result.confusion, strict=True)]
    return [
        table(str(result.bundle), ("", ""), head),
        table("held-out texts", ("true \\ predicted", *result.labels), rows),
    ]


def size_of(manifest: Manifest, *names: str) -> str:
    return size_text(sum(manifest.files[name].bytes for name in names))
