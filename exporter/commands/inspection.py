"""Describes the content of a bundle, an .onnx file or a .plan for `planforge inspect`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ...runtime.apps.commands.tables import format_size
from ...runtime.apps.proof.changes import summarize
from ...runtime.apps.proof.evidence import read_whole_evidence
from ...runtime.backends.architectures import describe_sms
from ...runtime.backends.dialects import CPU_DIALECTS
from ...runtime.backends.ort_backend import OrtCpuBackend
from ...runtime.bundle.bundle import Bundle
from ...runtime.bundle.export_again import extrapolates, find_context
from ...runtime.bundle.json_reader import FILE_NAME
from ...runtime.bundle.manifest import Artifact, Axis, Manifest, Plan, TensorSpec
from ...runtime.bundle.plan import sum_profile_memory
from ...runtime.errors import InputError
from ...runtime.memory_needs import sum_memory
from ...runtime.search.layout import INDEX
from ...runtime.search.vector_store import STORE
from ...runtime.suggest import did_you_mean
from ...runtime.text.batching import TOKEN_BUDGET
from ..checkpoints.source import suggest_export
from ..errors import ExporterError, shorten_error
from ..task_traits import TRAITS
from .checkpoint_findings import inspect_adapter, inspect_checkpoint, inspect_gguf
from .evidence_tables import make_short_rows
from .findings import Inspection, Section, make_file_section
from .kernel_count import count_kernels, describe_kernels
from .search_folders import inspect_index, inspect_store

INSPECTED = (
    "a bundle (the folder that `planforge export` wrote), a checkpoint, an adapter, a .gguf file, a store of"
    " vectors, an index of texts, an .onnx file or a .plan file"
)
CONFIG = "config.json"  # of a checkpoint
ADAPTER = "adapter_config.json"  # of what peft wrote
NOT_RUN = "not run"  # what can be said of a plan without its GPU: everything here only reads

# Tensors that each layer has two of, by what their roles begin with.
CACHES = {
    "cross.": "what is read of the source",
    "past.": "cache",
    "present.": "cache",
    "state.": "states",
    "next_state.": "states",
}


def inspect(path: str | Path) -> Inspection:
    """Inspect the folder of a bundle, a checkpoint, a store or an index, or a .gguf, .onnx or .plan file."""
    path = Path(path)
    if path.is_dir():
        kinds = {FILE_NAME: inspect_bundle, STORE.file: inspect_store, INDEX.file: inspect_index}
        if not any(path.glob("*.onnx")):  # which are to be imported
            kinds[CONFIG] = inspect_checkpoint
            kinds[ADAPTER] = inspect_adapter
        found = (kind for name, kind in kinds.items() if (path / name).is_file())
        return next(found, inspect_bundle)(path)
    refuse_missing(path)
    if path.suffix == ".onnx":
        return inspect_onnx(path)
    if path.suffix.lower() == ".gguf":
        return inspect_gguf(path)
    if path.suffix in (".plan", ".engine"):
        return inspect_plan(path)
    raise InputError(f"{path} cannot be inspected; give {INSPECTED}")


def refuse_missing(path: Path) -> None:
    """Refuse a file that is not there; name one that was perhaps meant, or how a demo becomes a bundle."""
    if not path.is_file():
        names = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        hint = suggest_export(str(path), "inspect") or did_you_mean(path.name, names)
        raise InputError(f"{path} does not exist; give {INSPECTED}{hint}")


def inspect_bundle(folder: Path) -> Inspection:
    """List artifacts with their axes and ranges, plans with their architectures, files with their sizes."""
    bundle = Bundle.open(folder)
    manifest = bundle.manifest
    sizes = measure_parts(bundle)
    columns: tuple[str, ...] = ("graph", "opset", "padding", "size", "weights of", "against PyTorch")
    sections: list[Section] = [
        (f"{folder}: {manifest.family}, {manifest.task}", ("", ""), list_head_rows(manifest, sizes)),
        ("graphs", columns, list_graph_rows(manifest)),
    ]
    sections.append(make_memory_section(manifest))
    ids_by_tensors: dict[tuple[tuple[str, ...], ...], list[str]] = {}
    for artifact in (*manifest.artifacts, *manifest.explanations):
        ids_by_tensors.setdefault(tuple(list_tensor_rows(artifact)), []).append(artifact.id)
    for rows, ids in ids_by_tensors.items():
        sections.append((f"tensors of {', '.join(ids)}", ("tensor", "role", "type", "axes"), rows))
    value = {**json.loads(manifest.to_json()), "bytes": sizes}
    if manifest.plans:
        columns = ("plan", "engine", "built from", "architectures", "profiles", "size")
        title = f"plans: {NOT_RUN} (`planforge selftest {folder}` runs one, on a machine with its GPU)"
        sections.append((title, columns, [make_plan_row(manifest, plan) for plan in manifest.plans]))
        value["checks"] = {"plans": NOT_RUN}
    if proofs := read_whole_evidence(bundle):
        columns = ("evidence", "texts", "result", "ms", "device", "measured")
        sections.append(("evidence of `planforge prove`", columns, make_short_rows(proofs)))
        value["evidence"] = [summarize(proof) for proof in proofs]
    sections.append(make_file_section(folder, manifest.files))
    return Inspection(value, sections)


def make_memory_section(manifest: Manifest) -> Section:
    """Return the memory that each precision needs on a CPU, for one row of full length and for the most rows.

    Of the dialects of a precision it is the fastest one's.
    """
    rows = []
    for precision in dict.fromkeys(a.precision for a in manifest.artifacts):
        own = [a for a in manifest.artifacts if a.precision == precision]
        graphs = [
            min((a for a in own if a.graph == name), key=lambda a: CPU_DIALECTS.index(a.dialect))
            for name in dict.fromkeys(a.graph for a in own if a.dialect in CPU_DIALECTS)
        ]
        length = min(
            [manifest.max_length, *(graph.axis("tokens").max for graph in graphs if graph.has_axis("tokens"))]
        )
        most = min((graph.axis("batch").max for graph in graphs), default=1)
        if manifest.encoder is not None:  # texts run together up to so many tokens
            most = max(1, min(most, TOKEN_BUDGET // length))
        for batch in dict.fromkeys((1, most)) if graphs else ():
            need = sum_memory(manifest, graphs, batch, length, OrtCpuBackend.widens_half)
            sizes = (need.weights, need.cache, need.activations, need.total)
            what = f"{batch} x {length} tokens" if need.length else f"{batch} of the usual size"
            rows.append((precision, what, *map(format_size, sizes)))
    title = "memory on a CPU, without Python, engine and tokenizer"
    return title, ("precision", "batch", "weights", "cache", "activations", "sum"), rows


def measure_parts(bundle: Bundle) -> dict[str, int]:
    """Return the bytes of a bundle's folders and of its manifest, each file counted once."""
    sizes: Counter[str] = Counter()
    for name, entry in bundle.manifest.files.items():
        sizes[name.partition("/")[0]] += entry.bytes
    sizes[FILE_NAME] = (bundle.folder / FILE_NAME).stat().st_size
    return dict(sizes.most_common())


def list_graph_rows(manifest: Manifest) -> list[tuple[str, ...]]:
    """Return a row of each graph, whose size leaves out weights that a graph above it counts."""
    rows: list[tuple[str, ...]] = []
    owners: dict[str, str] = {}  # of each file the first graph that reads it
    for a in (*manifest.artifacts, *manifest.explanations):
        own = [name for name in (a.file, *a.data) if owners.setdefault(name, a.id) == a.id]
        others = dict.fromkeys(owners[name] for name in a.data if name not in own)
        size = sum_sizes(manifest, *own)
        rows.append((a.id, str(a.opset), a.padding_side, size, ", ".join(others), describe_gate(a)))
    return rows


def list_head_rows(manifest: Manifest, sizes: Mapping[str, int]) -> list[tuple[str, str]]:
    source = manifest.source
    by = f", exported by {source['exporter']}" if source.get("exporter") else ""
    rows = [
        ("source", f"{source.get('argument')} ({source.get('kind')}){by}"),
        ("context", describe_context(manifest)),
        ("precision", describe_precisions(manifest)),
        *list_encoder_rows(manifest),
    ]
    vocabulary = str(manifest.tokenizer.get("vocab_size"))
    defaults = manifest.generation
    if TRAITS[manifest.task].has_sources and defaults is not None:
        beams = "greedy" if defaults.num_beams == 1 else f"{defaults.num_beams} beams"
        rows.append(("searches", f"{beams}, at most {defaults.max_new_tokens} new tokens"))
        counts = [manifest.config.get(f"{side}_vocab_size") for side in ("source", "target")]
        vocabulary = f"{counts[0]} of the source, {counts[1]} of the target"
    if defaults is not None and defaults.adapters:
        rows.append(("adapters", f"{', '.join(defaults.adapters)}: a request names one, or none"))
    parts = ", ".join(f"{name} {format_size(size)}" for name, size in sizes.items())
    return [
        *rows,
        ("vocabulary", vocabulary),
        ("size", f"{format_size(sum(sizes.values()))}: {parts}"),
        ("made by", ", ".join(f"{name} {version}" for name, version in manifest.tools.items())),
    ]


def describe_precisions(manifest: Manifest) -> str:
    """Return the precision that load() takes unless told otherwise, why, and the others."""
    precisions = list(dict.fromkeys(artifact.precision for artifact in manifest.artifacts))
    if not precisions:
        return "no graph"
    default = manifest.default_precision or precisions[0]
    why = "set by `planforge bench`" if manifest.default_precision else "the first that was exported"
    why += f", on {manifest.default_backend}" if manifest.default_backend else ""
    others = [precision for precision in precisions if precision != default]
    return f"{default} by default ({why}){'; also ' if others else ''}{', '.join(others)}"


def list_encoder_rows(manifest: Manifest) -> list[tuple[str, str]]:
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


def describe_context(manifest: Manifest) -> str:
    """Return how long a text may be, and how long the model's texts were where that is less."""
    words = f"{manifest.max_length} tokens"
    if extrapolates(manifest):
        words += (
            f"; trained with {find_context(manifest)}, positions behind them are computed (--extrapolate)"
        )
    return words


def describe_gate(artifact: Artifact) -> str:
    """Return whether a graph was found equal to PyTorch's model, and by which figures."""
    if not artifact.gate:
        return "not verified"
    values = ", ".join(f"{name} {value:.2g}" for name, value in find_worst(artifact).items())
    return f"{'passed' if artifact.passed else 'FAILED'}: {values}"


def find_worst(artifact: Artifact) -> dict[str, float]:
    """Return the metrics that a graph was verified by; of several outputs the worst.

    Of a model with a head they are those of its results, not of the hidden states below.
    """
    measured = artifact.gate.get("measured")
    below = [s.name for s in artifact.outputs if s.role.startswith("hidden.") or s.role == "pooler_output"]
    has_head = len(below) < len(artifact.outputs)
    worst: dict[str, float] = {}
    for name, value in measured.items() if isinstance(measured, dict) else ():
        output, _, metric = name.rpartition(".")
        if has_head and output in below:
            continue
        if not isinstance(value, float) or (metric == "mean_cosine_gap" and not value):
            continue  # the latter of fewer texts than have a mean
        worst[metric] = max(value, worst.get(metric, 0.0))
    return worst


def list_tensor_rows(artifact: Artifact) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for side, specs in (("in", artifact.inputs), ("out", artifact.outputs)):
        for spec in specs:
            if not spec.role.startswith(tuple(CACHES)):
                rows.append((f"{side}  {spec.name}", spec.role, spec.dtype, describe_axes(spec)))
        alias = ", at the input's address" if side == "out" and artifact.aliases else ""
        for kind, what in CACHES.items():
            if caches := [spec for spec in specs if spec.role.startswith(kind)]:
                names = f"{side}  {caches[0].name} … {caches[-1].name}"
                about = f"{what}, {len(caches)} tensors{alias}"
                rows.append((names, about, caches[0].dtype, describe_axes(caches[0])))
    return rows


def describe_axes(spec: TensorSpec) -> str:
    """Return each axis with its range, as in "batch 1..8 x 12 x past 0..1023 x 64"."""
    return " x ".join(
        f"{axis.name} {axis.min}..{axis.max}" if isinstance(axis, Axis) else str(axis) for axis in spec.axes
    )


def make_plan_row(manifest: Manifest, plan: Plan) -> tuple[str, ...]:
    return (
        plan.file,
        f"{plan.engine} {plan.version}",
        plan.built_from + describe_extras(plan),
        describe_sms(plan.sms) or "the GPU it was built on",
        ", ".join(describe_profile(profile) for profile in plan.profiles),
        sum_sizes(manifest, plan.file),
    )


def describe_extras(plan: Plan) -> str:
    """Return the options that a plan was built with, as in ", without weights, picks 64 tokens"."""
    extras = ""
    if plan.weights:
        extras += ", without weights"
    if plan.candidates:
        extras += f", picks {plan.candidates} tokens"
    if plan.compatible:
        extras += ", for later versions too"
    if plan.builder_level is not None:
        extras += f", builder level {plan.builder_level}"
    if plan.profiling is not None:
        extras += f", profiling {plan.profiling}"
    return extras


def describe_profile(profile: Mapping[str, Any]) -> str:
    """Return a profile with its ranges and memory, as in "decode (batch 1..8, about 312.0 MB)"."""
    memory = describe_memory(profile)
    return f"{describe_ranges(profile).removesuffix(')')}{', about ' if memory else ''}{memory})"


def describe_ranges(profile: Mapping[str, Any]) -> str:
    """Return a profile with its ranges, as in "decode (batch 1..8 best 1, tokens 1..1)"."""
    ranges = [
        f"{name} {axis[0]}..{axis[2]}" + (f" best {axis[1]}" if axis[0] < axis[2] else "")
        for name, axis in profile["axes"].items()
        if name in ("batch", "tokens", "slots")
    ]
    return f"{profile.get('name')} ({', '.join(ranges)})"


def describe_memory(profile: Mapping[str, Any]) -> str:
    """Return the GPU memory that a profile needs, as in "312.0 MB"; "" where that is not known."""
    memory = sum_profile_memory(profile)
    return format_size(memory) if memory else ""


def inspect_onnx(path: Path) -> Inspection:
    """List inputs, outputs, operators and weights of any ONNX file; weights are not read."""
    import onnx_ir as ir

    try:
        model = ir.load(path)
    except Exception as error:
        raise ExporterError(f"{path} is not an ONNX file: {shorten_error(error)}") from error
    graph = model.graph
    try:
        weights = sum(v.const_value.nbytes for v in graph.initializers.values() if v.const_value is not None)
    except (TypeError, ValueError, OverflowError) as error:  # for an unknown type, or an invalid shape
        raise ExporterError(f"{path} has a weight that cannot be read: {shorten_error(error)}") from error
    counts = Counter(f"{node.domain}.{node.op_type}".removeprefix(".") for node in graph)
    operators = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    opsets = {domain or "ai.onnx": opset for domain, opset in graph.opset_imports.items()}
    rows = [
        (side, str(value.name), str(value.dtype), " x ".join(map(str, value.shape or ())))
        for side, values in (("in", graph.inputs), ("out", graph.outputs))
        for value in values
    ]
    found = {
        "file": path.name,
        "opsets": opsets,
        "operators": dict(operators),
        "weight_bytes": weights,
        "tensors": [{"name": n, "side": side, "dtype": d, "shape": shape} for side, n, d, shape in rows],
    }
    kernels = count_kernels(path)
    found["gpu_kernels"] = None if kernels is None else asdict(kernels)
    head = [
        ("opsets", ", ".join(f"{k} {v}" for k, v in opsets.items())),
        ("weights", format_size(weights)),
        ("operators", ", ".join(f"{name} {count}" for name, count in operators)),
    ]
    if kernels is not None:
        head.append(("without a GPU kernel", "{1} of {0} nodes".format(*describe_kernels(kernels))))
    tensors = [(f"{side}  {name}", dtype, shape) for side, name, dtype, shape in rows]
    return Inspection(found, [(path.name, ("", ""), head), ("tensors", ("tensor", "type", "shape"), tensors)])


def inspect_plan(path: Path) -> Inspection:
    """Return facts from a plan that need no driver, and its entry in the bundle's manifest."""
    from ..tensorrt.build import summarize_plan

    summary = dict(summarize_plan(path))
    rows = [(key, str(value)) for key, value in summary.items()]
    for _, plan in list_entries(path):
        summary["entry"] = plan.to_json()
        sms = describe_sms(plan.sms) or "the GPU it was built on"
        rows.append(("entry", f"{plan.engine} {plan.version} from {plan.built_from} for {sms}"))
    summary["plan"] = NOT_RUN
    rows.append(("plan", NOT_RUN))
    return Inspection(summary, [(path.name, ("", ""), rows)])


def list_entries(path: Path) -> Iterator[tuple[Bundle, Plan]]:
    """Yield the bundle around a plan file that lists it, with the plan's entry."""
    for folder in (path.parent, path.parent.parent):
        if (folder / "manifest.json").is_file():
            bundle = Bundle.open(folder)
            for plan in bundle.manifest.plans:
                if (folder / plan.file).resolve() == path.resolve():
                    yield bundle, plan


def sum_sizes(manifest: Manifest, *names: str) -> str:
    return format_size(sum(manifest.files[name].bytes for name in names))
