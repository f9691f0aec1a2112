"""Exports a checkpoint, or imports graphs that others traced: to ONNX, plans and a verified bundle."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..runtime.apps.stage_progress import BYTES, StageCounter
from ..runtime.bundle.artifact import DENSE
from ..runtime.bundle.bundle import Bundle
from ..runtime.bundle.manifest import Artifact, Manifest, Plan
from ..runtime.errors import InputError
from .bundle.names import name_export
from .bundle.writer import install, list_file_entries, open_staging_folder, write_manifest
from .calibration.calibration import Calibration, calibrate
from .calibration.convert import write_graphs
from .calibration.prompts import read_prompts
from .checkpoints.checkpoint import Checkpoint
from .checkpoints.source import Source, resolve_source
from .errors import BuildError
from .export_source import add_adapters, check_adapters, choose_exporter, keep_codes_by_default
from .graphs import attach_weights, begin_manifest, check_engine, list_tensors, plan_artifacts
from .imported.candidates import (
    check_import,
    only_shared_buffers_failed,
    read_candidates,
    refuse_damaged_graphs,
)
from .imported.checkpoint import ImportedCheckpoint
from .imported.optimum import export_with_optimum
from .imported.transformers_export import export_with_transformers
from .linting.lint import lint
from .memory import give_back_memory
from .options import Request, parse_request
from .processes import ChildGroup, leave_cores
from .reference_model import OnnxGraphs, load_our_model, load_reference, offload_weights
from .resources import announce_need
from .targets import find_target
from .tasks.explanation import ExplanationCase
from .tasks.gaps import list_first_texts
from .tasks.registry import TASKS
from .tasks.verifier import Verifier, open_verifier
from .tensorrt.choices import warn_of_left_out
from .tensorrt.plans import Progress, build_plans, plan_profiles
from .tracing.trace import finish_trace, start_trace
from .verification.explain import explain
from .verification.explanations import keep_cases, verify_explanations
from .verification.golden_texts import add_golden_texts
from .verification.report import keep_checks
from .verification.verdict import Judged, verify_model

if TYPE_CHECKING:
    import onnx_ir as ir
    from typing_extensions import Unpack

    from ..runtime.apps.check.case import CaseSet
    from .options import ExportOptions
    from .reference_model import ReferenceModel
    from .tracing.recipes import Recipe
    from .tracing.trace import Trace
    from .verification.report import VerificationReport

log = logging.getLogger("planforge")

ADVICE = (
    "int8 and int4 run in attention over shared buffers, which may not be the model's; fp32 and fp16 do"
    " without"
)


@dataclass(frozen=True)
class ExportResult:
    """A finished export.

    Attributes:
        bundle: the folder.
        manifest: what is in it.
        report: how it was verified; None with verify=False.
    """

    bundle: Path
    manifest: Manifest
    report: VerificationReport | None


def export(
    model: str | Path,
    output: str | Path,
    *,
    outputs: Sequence[str] = (),
    adapter: str | Path | Mapping[str, str | Path] | None = None,
    exporter: str = "auto",
    optimum_python: str | None = None,
    progress: Progress = lambda _: None,
    **options: Unpack[ExportOptions],
) -> ExportResult:
    """Export a checkpoint into a bundle, build its plans, and verify it against PyTorch.

    Args:
        model: a demo's name, a folder in Hugging Face's layout, or a hub id: "org/name[@revision]".
        output: the bundle's folder; must not exist unless `force`.
        outputs: of an encoder "hidden_states" (of all layers), "hidden_states.3" (one, 0 being the
            embeddings), "pooler_output"; of an encoder-decoder "cross_attentions".
        adapter: a folder that peft wrote (LoRA, rsLoRA, DoRA or IA3), to merge into the weights; or several
            of LoRA by their names, which stay beside a decoder, so that each request chooses one.
        exporter: "planforge", "transformers", "optimum", or "auto": "transformers", which traces its own
            models, for what has no reference model here.
        optimum_python: the python of an environment that has optimum-onnx; by default this one.
        progress: called with a line as stages begin and go on; some are a `CountedLine`.
        **options: see `ExportOptions`.

    Raises:
        PlanForgeError: SourceError, CheckpointError, OutputError, ExportError, BuildError, VerificationError.
    """
    if isinstance(adapter, Mapping) and options.get("target") is None:
        options["target"] = ["cpu"]  # plans take no adapters
    request = parse_request(output, options)
    source = resolve_source(model)
    if source.quantized_by:
        progress(source.note)
    exporter = choose_exporter(exporter, source.folder, outputs)
    if isinstance(adapter, Mapping):
        check_adapters(adapter, request, exporter, outputs)
    if adapter is not None:
        source = add_adapters(source, adapter, request.verify, progress)
    request = keep_codes_by_default(request, source, options.get("precision"))
    if exporter == "planforge":
        checkpoint = Checkpoint(
            source, request.max_batch, request.max_length, tuple(outputs), request.extrapolate
        )
        return write_bundle([checkpoint], request, progress)
    check_import(request)
    with tempfile.TemporaryDirectory(prefix="planforge-graphs-") as folder:
        graphs = Path(folder, "graphs")
        if exporter == "optimum":
            export_with_optimum(source.folder, graphs, optimum_python, progress)
        else:
            export_with_transformers(source.folder, graphs, progress)
        return import_graphs(graphs, source, request, progress)


def import_folder(
    folder: str | Path,
    output: str | Path,
    *,
    source: str | Path | Source | None = None,
    progress: Progress = lambda _: None,
    **options: Unpack[ExportOptions],
) -> ExportResult:
    """Make a bundle of what optimum-cli, or save_pretrained of an ORTModel, wrote.

    The graphs run through the same caches, precisions and checks as PlanForge's own. For the target cpu a
    decoder's attention becomes ONNX Runtime's over shared buffers; where it is of a form that is not known,
    or is not verified to compute the same, it stays as it is, and a warning says so.

    Args:
        folder: with model.onnx, or an encoder's and a decoder's, config.json and tokenizer files.
        output: the bundle's folder; must not exist unless `force`.
        source: the checkpoint, whose weights transformers reads for verification; by default `folder`. Where
            it has none, the bundle is compared with the folder's graphs as they are.
        progress: as in `export`.
        **options: see `ExportOptions`. A precision is fp32, fp16, int8 or int4.

    Raises:
        PlanForgeError: CheckpointError, ExportError, OutputError, BuildError or VerificationError; nothing is
            left at `output` that was not there before.
    """
    request = parse_request(output, options)
    check_import(request)
    at = Path(folder)
    if not at.is_dir():
        raise InputError(f"FOLDER {str(folder)!r} does not exist; give the folder that optimum wrote")
    origin = Source("folder", str(folder), at) if source is None else resolve_source(source)
    return import_graphs(at, origin, request, progress)


def import_graphs(folder: Path, source: Source, request: Request, progress: Progress) -> ExportResult:
    """Make a bundle of a folder's graphs, with choices that `check_import` accepted."""
    with refuse_damaged_graphs(folder):
        return write_bundle(read_candidates(folder, source, request), request, progress)


def write_bundle(candidates: Iterable[Checkpoint], request: Request, progress: Progress) -> ExportResult:
    """Write a bundle of the first candidate whose graphs compute the model.

    There is another where an import's attention over shared buffers alone fails, and no precision needs it.
    """
    model: ReferenceModel | None = None
    for number, checkpoint in enumerate(candidates):
        artifacts = choose_artifacts(checkpoint, request)
        texts = read_prompts(request.prompts, checkpoint.source.folder)
        if number == 0:
            announce_need(checkpoint, artifacts, request, progress)
        with open_staging_folder(request.output) as staging:
            manifest = begin_manifest(checkpoint, artifacts, staging, request.output)
            if request.verify and not checkpoint.traits.has_word_vectors:
                progress("comparing how texts are read")
                manifest = add_golden_texts(staging, manifest, checkpoint)

            recipes = checkpoint.find_recipes(a.recipe_id for a in (*artifacts, *manifest.explanations))
            traced = {} if checkpoint.exporter else recipes
            with start_trace(checkpoint.source.folder, checkpoint.choices, traced) as trace:
                if model is None:
                    model = load_model(checkpoint, request.needs_reference, progress)
                verifier = None
                if model is not None and request.needs_reference:
                    verifier = compute_answers(Bundle(staging, manifest), model, texts, request, progress)
                    manifest = note_ranges(manifest, verifier.expected)
                graphs = collect_graphs(checkpoint, recipes, trace, model, progress)

            calibration = Calibration()
            if model is not None and verifier is not None:
                kept = checkpoint.read_codes() if checkpoint.source.kept_bits else {}
                calibration = calibrate(verifier, model, graphs, progress, request.quantizer, kept)
                offload_weights(model)  # only its weights are read, while they are written
                give_back_memory()
            manifest = stage_graphs(staging, manifest, graphs, calibration, progress)

            report = None
            with start_plans(Bundle(staging, manifest), request, progress) as plans:
                if model is not None and verifier is not None and request.verify:
                    verifier = dataclasses.replace(verifier, bundle=Bundle(staging, manifest))
                    judged = verify_model(verifier, model, calibration, progress, request.accepted)
                    failed = judged.report.failed_artifacts(manifest)
                    without_shared = only_shared_buffers_failed(checkpoint, failed)
                    if without_shared and not request.needs_shared_buffers:
                        del graphs, verifier, calibration, judged  # the next candidate has its own
                        continue
                    report, explained = localize(verifier, judged, model, checkpoint, graphs, progress)
                    report.raise_if_failed(ADVICE if without_shared else "")
                    rounds = isinstance(model, OnnxGraphs) and model.rounds
                    golden = None if rounds else verifier.collect_golden()
                    manifest = keep_checks(staging, manifest, report, golden, judged.limits)
                    if manifest.explanations:
                        keep_cases(staging, explained)
                built = plans.result()

            files = list_file_entries(staging, known=manifest.files)
            manifest = name_export(dataclasses.replace(manifest, plans=tuple(built), files=files))
            progress("committing the bundle")
            install(staging, manifest, request.output, force=request.force)
            return ExportResult(request.output, manifest, report)
    raise ValueError("there are no graphs to export")


def choose_artifacts(checkpoint: Checkpoint, request: Request) -> list[Artifact]:
    """Return the graphs to write; refuse those that nothing here runs, and shapes that no plan can have.

    Losses are refused that no precision may have: which ones there are is known by now, also of a checkpoint
    whose codes decide it.
    """
    if request.accept and not request.accepted:
        raise InputError("accept is for precisions below fp32; add one, or leave accept out")
    artifacts = plan_artifacts(checkpoint, request.targets, request.precisions)
    if request.plans.opt:
        plan_profiles([a for a in artifacts if a.is_half and a.dialect != "ort"], {}, request.plans)
    if request.verify:
        check_engine(artifacts)
    return artifacts


def load_model(checkpoint: Checkpoint, computes: bool, progress: Progress) -> ReferenceModel | None:
    """Return the model that the graphs' weights come from, and that they are compared with.

    Of a model of ours that computes nothing the weights stay in their files, and are converted to fp32 one by
    one while the graphs are written; an import has its own, and None is returned.
    """
    folder = checkpoint.source.folder
    if not checkpoint.exporter:
        count = StageCounter(progress, "reading weights", BYTES)
        return load_our_model(folder, checkpoint.choices.max_length, keep_types=not computes, report=count)
    if not computes:
        return None
    progress("reading the model to compare with")
    return load_reference(folder, checkpoint.task, checkpoint.encoder)


def compute_answers(
    bundle: Bundle, model: ReferenceModel, texts: Sequence[str], request: Request, progress: Progress
) -> Verifier:
    """Return PyTorch's answers, for a verdict or for calibration alone."""
    alone = TASKS[bundle.manifest.task].calibrates_by
    files = bundle.manifest.source["sha256"]
    return open_verifier(bundle, model, texts, progress, level=request.level or alone, checkpoint=files)


def note_ranges(manifest: Manifest, expected: CaseSet) -> Manifest:
    """Return the manifest with the ranges of the numbers of real texts' vectors, where the model has such."""
    known = expected.answers.get(DENSE, {})
    texts = {*list_first_texts(expected), *expected.list_texts("ranking")} & known.keys()
    if manifest.encoder is None or not texts:
        return manifest
    vectors = np.stack([known[text].values[0] for text in sorted(texts)])
    sides = tuple(tuple(map(float, side)) for side in (vectors.min(0), vectors.max(0)))
    roles = dataclasses.replace(manifest.encoder.roles, ranges=sides)
    return dataclasses.replace(manifest, encoder=dataclasses.replace(manifest.encoder, roles=roles))


def collect_graphs(
    checkpoint: Checkpoint,
    recipes: Mapping[str, Recipe],
    trace: Trace,
    model: ReferenceModel | None,
    progress: Progress,
) -> dict[str, ir.Model]:
    """Return graphs in fp32, with weights, by the ids of their recipes: traced ones, or an import's."""
    if isinstance(checkpoint, ImportedCheckpoint):
        tensors = {} if model is None else {n: tensor.numpy() for n, tensor in list_tensors(model).items()}
        graphs = checkpoint.make_graphs(set(recipes), tensors)
    else:
        graphs = finish_trace(trace, StageCounter(progress, f"tracing {', '.join(recipes)}", "graphs"))
    attach_weights(recipes, graphs, model)
    return graphs


def stage_graphs(
    staging: Path,
    manifest: Manifest,
    graphs: Mapping[str, ir.Model],
    calibration: Calibration,
    progress: Progress,
) -> Manifest:
    """Write the graphs that the manifest names, and the manifest, which now lists their files."""
    everything = (*manifest.artifacts, *manifest.explanations)
    written, entries = write_graphs(graphs, everything, calibration, staging, progress)
    count = len(manifest.artifacts)
    described = [dataclasses.replace(a, quantization=calibration.describe(a)) for a in written[:count]]
    manifest = dataclasses.replace(
        manifest,
        artifacts=tuple(described),
        explanations=tuple(written[count:]),
        files=list_file_entries(staging, known={**manifest.files, **entries}),
    )
    write_manifest(staging, manifest)
    return manifest


@contextlib.contextmanager
def start_plans(bundle: Bundle, request: Request, progress: Progress) -> Iterator[Future[list[Plan]]]:
    """Build plans in child processes while the block runs; they end with the block.

    If another exporter made the graphs, TensorRT's refusal is a warning and no error, as long as some target
    needs no plan.
    """
    targets = request.targets
    builds = [bool(find_target(name).plans) for name in targets]
    children = ChildGroup()

    def warn(target: str, error: BuildError) -> None:
        if children.stopped:
            raise error
        warn_of_refusal(bundle, target, error)

    refused = warn if bundle.manifest.source.get("exporter") and not all(builds) else None
    warn_of_left_out(bundle, targets, request.sms)
    with ThreadPoolExecutor(1) as pool, leave_cores(int(any(builds))):
        try:
            yield pool.submit(
                children.run,
                build_plans,
                bundle.folder,
                bundle.manifest,
                targets,
                request.sms,
                progress,
                refused,
                request.plans,
            )
        finally:
            children.stop()  # the pool waits for its thread


def warn_of_refusal(bundle: Bundle, target: str, error: BuildError) -> None:
    """Log that a target gets no plan, and what lint says of the graphs that plans are built from."""
    log.warning("no plan was built for %s: %s", target, error)
    for artifact in bundle.manifest.artifacts:
        if artifact.is_half:
            for finding in lint(bundle.path(artifact.file), [target]).findings:
                if finding.is_error:
                    log.warning("%s: %s: %s; %s", artifact.id, finding.where, finding.what, finding.fix)


def localize(
    verifier: Verifier,
    judged: Judged,
    model: ReferenceModel,
    checkpoint: Checkpoint,
    graphs: Mapping[str, ir.Model],
    progress: Progress,
) -> tuple[VerificationReport, dict[str, list[ExplanationCase]]]:
    """Return a verdict with the first node at fault in each graph that failed, and explanations to keep."""

    def give_traced(recipes: Sequence[str]) -> Mapping[str, ir.Model]:
        return graphs

    tracer = None if checkpoint.exporter else give_traced  # an import's graphs were traced elsewhere
    report = explain(verifier, judged.report, progress, model, judged.calibration, tracer)
    return verify_explanations(
        report, verifier.bundle, model, checkpoint.explanations, give_traced, 0, progress
    )
