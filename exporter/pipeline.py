"""Graphs of a checkpoint -> ONNX -> plan -> verified bundle, whoever made the graphs."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import logging
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..runtime.backends.ort_backend import import_onnxruntime
from ..runtime.backends.requirements import check_version
from ..runtime.bundle.bundle import Bundle
from ..runtime.bundle.manifest import Artifact, Manifest, Plan
from .bundle.writer import install, list_file_entries, open_staging_folder, write_manifest
from .calibration.calibration import Calibration, calibrate
from .calibration.convert import write_graphs
from .calibration.prompts import read_prompts
from .checkpoints.checkpoint import Checkpoint
from .comparison.kept_explanations import keep_cases
from .comparison.tasks import AnyExaminer, examine_model
from .errors import BuildError
from .graphs import plan_artifacts, plan_explanations
from .levels import CALIBRATION, STANDARD
from .linting.lint import lint
from .memory import give_back_memory
from .precisions import PRECISIONS
from .processes import ChildGroup, leave_cores
from .reference.model import rest
from .request import Request
from .resources import announce_need
from .targets import find_target
from .tensorrt.plans import Progress, build_plans, tell_left_out
from .verification.explain import explain
from .verification.explanations import verify_explanations
from .verification.golden_texts import add_golden_texts
from .verification.report import keep_checks
from .verification.verdict import verify_model

if TYPE_CHECKING:
    import onnx_ir as ir

    from .providers import GraphProvider
    from .verification.report import VerificationReport


log = logging.getLogger("planforge")


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


@dataclass(frozen=True)
class StagedBundle:
    """A bundle that is complete but for the commit."""

    manifest: Manifest
    report: VerificationReport | None  # None without verification
    fallback: GraphProvider | None = None  # has graphs that do without those that failed


def write_bundle(
    provider: GraphProvider, request: Request, progress: Progress, announce: bool = True
) -> ExportResult:
    """Write a bundle: graphs, weights, plans, verification, manifest; say before what that needs."""
    checkpoint = provider.checkpoint
    artifacts = plan_artifacts(checkpoint, request.targets, request.precisions)
    if request.verify:
        check_engine(artifacts)
    texts = read_prompts(request.prompts, checkpoint.source.folder)
    if announce:
        announce_need(checkpoint, artifacts, request, progress)
    with open_staging_folder(request.output) as staging:
        staged = stage_bundle(provider, request, artifacts, texts, staging, progress)
        if staged.fallback is None:
            if staged.report is not None:
                failed = staged.report.failed_artifacts(staged.manifest)
                staged.report.raise_if_failed(provider.advise(failed))
            progress("committing the bundle")
            install(staging, staged.manifest, request.output, force=request.force)
            return ExportResult(request.output, staged.manifest, staged.report)
    return write_bundle(staged.fallback, request, progress, announce=False)


def stage_bundle(
    provider: GraphProvider,
    request: Request,
    artifacts: Sequence[Artifact],
    texts: Sequence[str],
    staging: Path,
    progress: Progress,
) -> StagedBundle:
    """Write all of a bundle's files to a folder beside it, and verify them."""
    checkpoint = provider.checkpoint
    manifest = begin_manifest(checkpoint, artifacts, staging, request.output)
    if request.verify:
        progress("comparing how texts are read")
        manifest = add_golden_texts(staging, manifest, checkpoint)

    def compute_reference() -> AnyExaminer | None:
        if not request.needs_reference:
            return None
        model = provider.load_reference(progress)
        # Without a verdict it is for calibration alone. That of encoders reads what is drawn, too.
        level = request.level or (CALIBRATION if checkpoint.task == "text-generation" else STANDARD)
        files = manifest.source["sha256"]
        return examine_model(Bundle(staging, manifest), model, texts, progress, level=level, checkpoint=files)

    recipes = list(dict.fromkeys(a.recipe_id for a in (*artifacts, *manifest.explanations)))
    graphs, examiner = provider.make_graphs(recipes, progress, compute_reference)
    calibration = Calibration()
    if examiner is not None:
        model = provider.load_reference(progress)
        calibration = calibrate(examiner, model, graphs, progress, request.quantizer)
        rest(model)  # only its weights are read, while they are written
        give_back_memory()
    manifest = stage_graphs(staging, manifest, graphs, calibration, progress)
    tell_left_out(Bundle(staging, manifest), request.targets, request.sms)
    report = None
    with plans_beside(staging, manifest, checkpoint, request, progress) as plans:
        if examiner is not None and request.verify:
            examiner = dataclasses.replace(examiner, bundle=Bundle(staging, manifest))
            builders = int(any(find_target(name).plans for name in request.targets))
            with leave_cores(builders):
                judged = verify_model(examiner, model, calibration, progress, request.accepted)
            report = judged.report
            failed = report.failed_artifacts(manifest)
            if fallback := provider.leave_out(failed):
                log.debug("did not pass, and is left out: %s", failed)
                return StagedBundle(manifest, report, fallback)
            # Another exporter's graphs cannot be traced again.
            tracer = None if checkpoint.exporter else lambda recipes: graphs
            report = explain(examiner, report, progress, model, judged.calibration, tracer)
            report, explained = verify_explanations(
                report, examiner.bundle, model, checkpoint.explanations, lambda recipes: graphs, 0, progress
            )
            if not report.passed:
                return StagedBundle(manifest, report)
            manifest = keep_checks(staging, manifest, report, examiner.collect_golden(), judged.limits)
            if manifest.explanations:
                keep_cases(staging, manifest.export_id[:8], explained)
        built = plans.result()
    files = list_file_entries(staging, known=manifest.files)
    manifest = dataclasses.replace(manifest, plans=tuple(built), files=files)
    return StagedBundle(manifest, report)


@contextlib.contextmanager
def plans_beside(
    staging: Path, manifest: Manifest, checkpoint: Checkpoint, request: Request, progress: Progress
) -> Iterator[Future[list[Plan]]]:
    """Build plans in child processes, beside what the caller does meanwhile; they end with the block.

    If another exporter made the graphs, TensorRT's refusal is a warning and no error, as long as some target
    needs no plan.
    """
    children = ChildGroup()

    def tell(target: str, error: BuildError) -> None:
        if children.stopped:
            raise error
        tell_refusal(Bundle(staging, manifest), target, error)

    targets = request.targets
    may_do_without = checkpoint.exporter and not all(find_target(name).plans for name in targets)
    refused = tell if may_do_without else None
    with ThreadPoolExecutor(1) as pool:
        try:
            yield pool.submit(
                children.run, build_plans, staging, manifest, targets, request.sms, progress, refused
            )
        finally:
            children.stop()  # the pool waits for its thread


def tell_refusal(bundle: Bundle, target: str, error: BuildError) -> None:
    """Log that a target gets no plan, and what lint says of the graphs that plans are built from."""
    log.warning("no plan was built for %s: %s", target, error)
    for artifact in bundle.manifest.artifacts:
        if artifact.precision == "fp16":
            for finding in lint(bundle.path(artifact.file), [target]).findings:
                if finding.is_error:
                    log.warning("%s: %s: %s; %s", artifact.id, finding.where, finding.what, finding.fix)


def stage_graphs(
    staging: Path,
    manifest: Manifest,
    graphs: Mapping[str, ir.Model],
    calibration: Calibration,
    progress: Progress,
) -> Manifest:
    """Write the graphs that the manifest names, and the manifest, which now lists their files."""
    everything = (*manifest.artifacts, *manifest.explanations)
    opsets = write_graphs(graphs, everything, calibration, staging, progress)
    described = [
        dataclasses.replace(a, opset=opsets[a.file], quantization=calibration.describe(a))
        for a in manifest.artifacts
    ]
    explaining = [dataclasses.replace(a, opset=opsets[a.file]) for a in manifest.explanations]
    files = list_file_entries(staging, known=manifest.files)
    manifest = dataclasses.replace(
        manifest, artifacts=tuple(described), explanations=tuple(explaining), files=files
    )
    write_manifest(staging, manifest)
    return manifest


def check_engine(artifacts: Sequence[Artifact]) -> None:
    """Refuse graphs that the ONNX Runtime here is too old to verify."""
    version = import_onnxruntime().__version__
    for artifact in artifacts:
        kind = PRECISIONS[artifact.precision]
        bits = {"bits": kind.weight_bits, "cache_bits": kind.cache_bits}
        to_be = {name: count for name, count in bits.items() if count}
        check_version(dataclasses.replace(artifact, quantization=to_be), version)


def begin_manifest(
    checkpoint: Checkpoint, artifacts: Sequence[Artifact], staging: Path, output: Path
) -> Manifest:
    """Write the tokenizer's files, and return the manifest, which does not yet list the files to come."""
    (staging / "tokenizer").mkdir()
    written: dict[bytes, str] = {}  # a tokenizer that a source and its target share once
    for stem, data in checkpoint.tokenizer_files.items():
        name = written.setdefault(data, checkpoint.name_file(f"tokenizer/{stem}", "json"))
        (staging / name).write_bytes(data)
    chat = {}
    if (template := checkpoint.chat_template) is not None:
        names = {}
        for key, stem in (("file", "chat_template"), ("tool_use", "chat_template-tool_use")):
            if key in template.contents:
                names[key] = checkpoint.name_file(f"tokenizer/{stem}", "jinja")
                (staging / names[key]).write_bytes(template.contents[key])
        chat = {"chat_template": {**names, "tokens": template.tokens}}
    source = checkpoint.source.describe(output)
    if checkpoint.exporter:
        source["exporter"] = checkpoint.exporter
    return Manifest(
        family=checkpoint.family,
        task=checkpoint.task,
        export_id=checkpoint.export_id,
        config=dataclasses.asdict(checkpoint.config),
        generation=checkpoint.generation,
        encoder=checkpoint.encoder,
        tokenizer={
            "files": [written[data] for data in checkpoint.tokenizer_files.values()],
            "kind": checkpoint.tokenizer_kind,
            "vocab_size": checkpoint.config.vocab_size,
            **chat,
        },
        files=list_file_entries(staging),
        artifacts=tuple(artifacts),
        explanations=plan_explanations(checkpoint, artifacts),
        source=source,
        tools={name: importlib.metadata.version(name) for name in ("planforge", "torch", "onnx")},
    )
