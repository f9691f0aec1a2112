"""Graphs of a checkpoint -> ONNX -> plan -> verified bundle, whoever made the graphs."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..runtime.backends.ort_backend import import_onnxruntime
from ..runtime.backends.requirements import check_version
from ..runtime.bundle.bundle import Bundle
from ..runtime.bundle.manifest import Artifact, Manifest, Plan
from .bundle.writer import file_entries, install, staging_folder, write_manifest
from .calibration.calibration import Calibration, calibrate
from .calibration.convert import write_graphs
from .calibration.prompts import read_prompts
from .checkpoints.checkpoint import Checkpoint
from .comparison.examiners import examiner_of
from .errors import BuildError
from .graphs import attach_weights, planned
from .linting import lint
from .precisions import PRECISIONS
from .processes import ChildGroup
from .request import Request
from .targets import find_target
from .tensorrt.plans import Progress, build_plans

if TYPE_CHECKING:
    import onnx_ir as ir

    from ..models.checkpoint import Model
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


def write_bundle(
    checkpoint: Checkpoint,
    output: Path,
    request: Request,
    make_graphs: Callable[[Checkpoint, Sequence[Artifact], Path, Progress], tuple[dict[str, ir.Model], Any]],
    progress: Progress,
) -> ExportResult:
    """Write a bundle: graphs, weights, plans, verification, manifest.

    Args:
        make_graphs: returns the graphs by recipe id, and the model in PyTorch, or None if not needed.
    """
    targets = request.targets
    precision = request.precisions
    verify = request.verify
    artifacts = planned(checkpoint, targets, precision)
    if verify:
        check_engine(artifacts)
    texts = read_prompts(request.prompts, checkpoint.source.folder)
    with staging_folder(output) as staging:
        graphs, reference = make_graphs(checkpoint, artifacts, staging, progress)
        attach_weights(checkpoint, graphs, reference)
        manifest = begin_manifest(checkpoint, artifacts, staging, output)
        expected = None
        calibration = Calibration()
        if request.asks_the_model:
            progress("computing the reference in PyTorch")
            bundle = Bundle(staging, manifest)
            expected = examiner_of(manifest).expect(reference, bundle, texts)
            calibration = calibrate(bundle, reference, graphs, expected)
        progress("writing ONNX files")
        manifest = stage_graphs(staging, manifest, graphs, calibration)
        with plans_beside(staging, manifest, checkpoint, request, progress) as plans:
            report = None
            if verify:
                manifest, report = verify_graphs(
                    staging=staging,
                    manifest=manifest,
                    model=reference,
                    graphs=graphs,
                    expected=expected,
                    calibration=calibration,
                    progress=progress,
                )
            built = plans.result()
        manifest = dataclasses.replace(manifest, plans=tuple(built), files=file_entries(staging))
        progress("committing the bundle")
        install(staging, manifest, output, force=request.force)
    return ExportResult(output, manifest, report)


@contextlib.contextmanager
def plans_beside(
    staging: Path, manifest: Manifest, checkpoint: Checkpoint, request: Request, progress: Progress
) -> Iterator[Future[list[Plan]]]:
    """Build plans in child processes, beside what the caller does meanwhile; its error stops them.

    If another exporter made the graphs, TensorRT's refusal is a warning and no error, as long as some target
    needs no plan.
    """
    children = ChildGroup()

    def tell(target: str, error: BuildError) -> None:
        if children.stopped:
            raise error
        tell_refusal(Bundle(staging, manifest), target, error)

    may_do_without = checkpoint.exporter and not all(find_target(name).plans for name in request.targets)
    refused = tell if may_do_without else None

    def build() -> list[Plan]:
        return build_plans(staging, manifest, request.targets, request.sms, None, progress, refused)

    with ThreadPoolExecutor(1) as pool:
        try:
            yield pool.submit(children.run, build)
        except BaseException:
            children.stop()  # the pool waits for its thread
            raise


def tell_refusal(bundle: Bundle, target: str, error: BuildError) -> None:
    """Log that a target gets no plan, and what lint says of the graphs that plans are built from."""
    log.warning("no plan was built for %s: %s", target, error)
    for artifact in bundle.manifest.artifacts:
        if artifact.precision == "fp16":
            for finding in lint(bundle.path(artifact.file), [target]).findings:
                if finding.is_error:
                    log.warning("%s: %s: %s; %s", artifact.id, finding.where, finding.what, finding.fix)


def stage_graphs(
    staging: Path, manifest: Manifest, graphs: Mapping[str, ir.Model], calibration: Calibration
) -> Manifest:
    """Write the graphs that the manifest names, and the manifest, which now lists their files."""
    write_graphs(graphs, manifest.artifacts, calibration, staging)
    artifacts = tuple(
        dataclasses.replace(a, quantization=calibration.described(a)) for a in manifest.artifacts
    )
    manifest = dataclasses.replace(manifest, artifacts=artifacts, files=file_entries(staging))
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
        name = written.setdefault(data, checkpoint.file(f"tokenizer/{stem}", "json"))
        (staging / name).write_bytes(data)
    chat = {}
    if (template := checkpoint.chat_template) is not None:
        name = checkpoint.file("tokenizer/chat_template", "jinja")
        (staging / name).write_bytes(template.content)
        chat = {"chat_template": {"file": name, "tokens": template.tokens}}
    source = checkpoint.source.entry(output)
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
        files=file_entries(staging),
        artifacts=tuple(artifacts),
        source=source,
        tools={name: importlib.metadata.version(name) for name in ("planforge", "torch", "onnx")},
    )


def verify_graphs(
    *,
    staging: Path,
    manifest: Manifest,
    model: Model,
    graphs: Mapping[str, ir.Model],
    expected: Any,
    calibration: Calibration,
    progress: Progress,
) -> tuple[Manifest, VerificationReport]:
    """Compare every staged graph with PyTorch; add the gates, golden.npz and parity.json.

    Raises:
        VerificationError: a graph does not compute the model.
    """
    from .verification.explain import explain
    from .verification.report import keep_checks
    from .verification.verify import examine

    bundle = Bundle(staging, manifest)
    report, golden, limits = examine(bundle, model, expected, calibration, progress)
    if manifest.source.get("exporter"):  # and so no trace of ours
        report = explain(bundle, report, expected, progress, model, calibration)
    else:
        report = explain(bundle, report, expected, progress, model, calibration, lambda _: graphs)
    report.raise_if_failed()
    return keep_checks(staging, manifest, report, golden, limits), report
