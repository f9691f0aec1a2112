"""Checkpoint -> ONNX -> plan -> verified bundle."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..runtime.backends.ort_backend import import_onnxruntime
from ..runtime.backends.requirements import check_version
from ..runtime.backends.tensorrt_library import LIBRARIES, is_installed
from ..runtime.bundle.bundle import Bundle
from ..runtime.bundle.manifest import Artifact, Manifest, Plan
from ..runtime.errors import InputError
from ..runtime.suggest import did_you_mean
from .bundle_writer import check_output, file_entries, install, staging_folder, write_manifest
from .calibration import Calibration, calibrate
from .checkpoint import Checkpoint
from .errors import BuildError, CheckpointError
from .graphs import attach_weights, planned, recipe_of, write_graphs
from .linting import lint
from .plans import Progress, build_plans, default_targets, silent
from .precisions import PRECISIONS, checked_precisions
from .prompts import read_prompts
from .source import resolve_source
from .targets import target_named
from .tensorrt.build import checked_target
from .verification.examiners import examiner_of

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


def export(
    model: str | Path,
    output: str | Path,
    *,
    precision: Sequence[str] | None = None,
    target: Sequence[str] | None = None,
    sms: Sequence[str] | None = None,
    max_batch: int | None = None,
    max_length: int | None = None,
    outputs: Sequence[str] = (),
    exporter: str = "auto",
    optimum_python: str | None = None,
    verify: bool = True,
    force: bool = False,
    prompts: str | Path | None = None,
    progress: Progress = silent,
) -> ExportResult:
    """Exports a checkpoint into a bundle, builds its plans, and verifies it against PyTorch.

    Args:
        model: a demo's name, a folder in Hugging Face's layout, or a hub id.
        output: the bundle's folder; must not exist unless `force`.
        precision: "fp32", "fp16", "int8", "int4", and with keys and values in int8 "fp32-kv8", "int8-kv8",
            "int4-kv8"; the first is what `load` runs unless told otherwise. By default fp32, and fp16 where a
            target's graphs can have it.
        target: "cpu", "rtx", ...; by default cpu and rtx, without a plan where tensorrt-rtx is missing.
        sms: GPU architectures to build plans for, such as "sm86"; by default all that the engine has.
        max_batch: the largest of plans and of a step; by default 8 of a decoder, 32 of an encoder.
        max_length: context in tokens, at most the model's; by default that, or where
            sentence-transformers cuts its texts.
        outputs: of an encoder, beside its last hidden state and heads: "hidden_states" (of all layers),
            "hidden_states.3" (one, 0 being the embeddings), "pooler_output"; of an encoder-decoder
            "cross_attentions".
        exporter: "planforge", "optimum", or "auto": optimum for what has no reference model here.
        optimum_python: of an environment that has optimum-onnx; by default this one.
        verify: compare every graph with PyTorch, and keep nothing if one differs.
        force: replace the bundle that is at `output`; it stays whole until the new one is.
        prompts: a file with a prompt a line to verify with, instead of the built-in ones.
        progress: called with a line when a stage begins.

    Raises:
        PlanForgeError: SourceError, CheckpointError, OutputError, ExportError, BuildError or
            VerificationError; nothing is left at `output` that was not there before.
    """
    output = Path(output)
    targets, precision = chosen(target, precision)
    check_choices(precision, targets, sms, max_batch)
    check_output(output, force)
    source, texts = resolve_source(model), None if prompts is None else Path(prompts)
    if exporter_of(source.folder, exporter) == "optimum":
        from .imported.import_folder import export_and_import

        if outputs:
            raise InputError(f"outputs {list(outputs)}: of a graph that optimum exports none can be chosen")
        return export_and_import(
            *(model, output, optimum_python),
            precision=precision,
            target=target,
            sms=sms,
            max_batch=max_batch,
            max_length=max_length,
            verify=verify,
            force=force,
            prompts=prompts,
            progress=progress,
        )
    checkpoint = Checkpoint(source, max_batch, max_length, tuple(outputs))
    wanted = Wanted(tuple(targets), tuple(precision), sms, texts, verify)
    return write_bundle(checkpoint, output, wanted, trace, progress)


def exporter_of(checkpoint: Path, asked: str) -> str:
    """Who exports a checkpoint: "planforge" or "optimum"."""
    if asked not in ("auto", "planforge", "optimum"):
        known = ("auto", "planforge", "optimum")
        raise InputError(f"exporter {asked!r} is not one of {', '.join(known)}{did_you_mean(asked, known)}")
    if asked != "auto":
        return asked
    from .imported.optimum import has_reference_model

    return "planforge" if has_reference_model(checkpoint) else "optimum"


@dataclass(frozen=True)
class Wanted:
    """What a bundle is to have, checked."""

    targets: tuple[str, ...]
    precisions: tuple[str, ...]
    sms: Sequence[str] | None
    prompts: Path | None
    verify: bool

    @property
    def asks_the_model(self) -> bool:
        """Whether anything needs the results of the model in PyTorch."""
        return self.verify or any(PRECISIONS[name].calibrated for name in self.precisions)


def write_bundle(
    checkpoint: Checkpoint,
    output: Path,
    wanted: Wanted,
    make_graphs: Callable[[Checkpoint, Sequence[Artifact], Path, Progress], tuple[dict[str, ir.Model], Any]],
    progress: Progress,
) -> ExportResult:
    """Graphs, weights, plans, verification, manifest.

    Args:
        make_graphs: the graphs by their recipe's id, and the model in PyTorch, or None if nothing needs it.
    """
    targets, precision, sms, verify = wanted.targets, wanted.precisions, wanted.sms, wanted.verify
    artifacts = planned(checkpoint, targets, precision)
    if verify:
        check_engine(artifacts)
    texts = read_prompts(wanted.prompts, checkpoint.source.folder)
    with staging_folder(output) as staging:
        graphs, reference = make_graphs(checkpoint, artifacts, staging, progress)
        attach_weights(checkpoint, graphs, reference)
        manifest = first_manifest(checkpoint, artifacts, staging, output)
        expected, calibration = None, Calibration()
        if wanted.asks_the_model:
            progress("asking PyTorch")
            bundle = Bundle(staging, manifest)
            expected = examiner_of(manifest).expect(reference, bundle, texts)
            calibration = calibrate(bundle, reference, graphs, expected)
        progress("writing ONNX files")
        manifest = with_graphs(staging, manifest, graphs, calibration)
        with ThreadPoolExecutor(1) as pool:  # plans are built by a child, beside the verification
            plans = pool.submit(build_plans, staging, manifest, targets, sms, None, progress)
            report = None
            if verify:
                manifest, report = verified(
                    *(staging, manifest, reference, graphs), expected, calibration, progress
                )
        built = finished(plans, checkpoint, Bundle(staging, manifest), targets)
        manifest = dataclasses.replace(manifest, plans=built, files=file_entries(staging))
        progress("committing the bundle")
        install(staging, manifest, output)
    return ExportResult(output, manifest, report)


def finished(
    plans: Future[list[Plan]], checkpoint: Checkpoint, bundle: Bundle, targets: Sequence[str]
) -> tuple[Plan, ...]:
    """The plans; of a graph that another exporter made, a refusal is said, and what lint says of it."""
    try:
        return tuple(plans.result())
    except BuildError as error:
        if not checkpoint.exporter or all(target_named(name).plans for name in targets):
            raise
        log.warning("no plan was built: %s", error)
    builders = [name for name in targets if target_named(name).plans]
    for artifact in bundle.manifest.artifacts:
        if artifact.precision == "fp16":
            for finding in lint(bundle.path(artifact.file), builders).findings:
                if finding.is_error:
                    log.warning("%s: %s: %s; %s", artifact.id, finding.where, finding.what, finding.fix)
    return ()


def chosen(target: Sequence[str] | None, precision: Sequence[str] | None) -> tuple[list[str], list[str]]:
    """Targets and precisions, each once, with the usual ones for what is not named; a str is one name."""
    target, precision = ([each] if isinstance(each, str) else each for each in (target, precision))
    targets = default_targets() if target is None else list(dict.fromkeys(target))
    if not targets:
        raise InputError("target=[] names none; leave it out for the usual ones")
    if target is None and precision is not None and "fp16" not in precision:
        targets = ["cpu"]  # plans are built from fp16
    return targets, checked_precisions(default_precisions(targets) if precision is None else precision)


def with_graphs(
    staging: Path, manifest: Manifest, graphs: Mapping[str, ir.Model], calibration: Calibration
) -> Manifest:
    """Writes the graphs that the manifest names, and the manifest, which now lists their files."""
    write_graphs(graphs, manifest.artifacts, calibration, staging)
    artifacts = tuple(
        dataclasses.replace(a, quantization=calibration.described(a)) for a in manifest.artifacts
    )
    manifest = dataclasses.replace(manifest, artifacts=artifacts, files=file_entries(staging))
    write_manifest(staging, manifest)
    return manifest


def default_precisions(targets: Sequence[str]) -> list[str]:
    """fp32, and fp16 where a target's dialect can have it."""
    in_half = any("fp16" not in target_named(name).without for name in targets)
    return ["fp32", "fp16"] if in_half else ["fp32"]


def check_choices(
    precision: Sequence[str], targets: Sequence[str], sms: Sequence[str] | None, max_batch: int | None
) -> None:
    """Refuses what cannot be done before any work is."""
    for name in targets:
        engine = target_named(name).engine
        if engine not in LIBRARIES:
            continue
        if is_installed(engine) or targets != default_targets():
            checked_target(engine, sms or LIBRARIES[engine].sms)
        if "fp16" not in precision:
            raise InputError(f"target {name!r} builds its plan from fp16; add fp16 to the precisions")
    if sms and not any(target_named(name).plans for name in targets):
        raise InputError(f"--sm {','.join(sms)} is for plans, and target {', '.join(targets)} builds none")
    if max_batch is not None and max_batch < 1:
        raise InputError(f"max_batch={max_batch} must be at least 1")


def check_engine(artifacts: Sequence[Artifact]) -> None:
    """Refuses graphs that the ONNX Runtime here is too old to verify."""
    version = import_onnxruntime().__version__
    for artifact in artifacts:
        kind = PRECISIONS[artifact.precision]
        bits = {"bits": kind.weight_bits, "cache_bits": kind.cache_bits}
        to_be = {name: count for name, count in bits.items() if count}
        check_version(dataclasses.replace(artifact, quantization=to_be), version)


def trace(
    checkpoint: Checkpoint, artifacts: Sequence[Artifact], staging: Path, progress: Progress
) -> tuple[dict[str, ir.Model], Model]:
    """Traces every artifact's graph in a child process each, while the weights are read here.

    Returns:
        The graphs by their recipe's id, and the model.
    """
    from ..models import load_model
    from .onnx_export import finish_trace, start_trace

    recipes = list(dict.fromkeys(recipe_of(artifact) for artifact in artifacts))
    progress(f"tracing {', '.join(recipes)}")
    paths = {recipe: staging / f"{recipe}.traced" for recipe in recipes}
    with contextlib.ExitStack() as stack:
        children = {}
        for recipe, path in paths.items():
            child = stack.enter_context(
                start_trace(checkpoint.source.folder, recipe, checkpoint.choices, path)
            )
            stack.callback(child.kill)  # before the context waits for it; nothing if it has ended
            children[recipe] = child
        try:
            model = load_model(checkpoint.source.folder)
        except ValueError as error:
            raise CheckpointError(str(error)) from error
        graphs = {recipe: finish_trace(children[recipe], path) for recipe, path in paths.items()}
    for path in paths.values():
        path.unlink()
    return graphs, model


def first_manifest(
    checkpoint: Checkpoint, artifacts: Sequence[Artifact], staging: Path, output: Path
) -> Manifest:
    """Writes the tokenizer's files, and says what the bundle will hold; what is to come is not yet listed."""
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
        source={
            "argument": checkpoint.source.recorded(output),
            "kind": checkpoint.source.kind,
            "sha256": checkpoint.source.sha256(),
            **({"exporter": checkpoint.exporter} if checkpoint.exporter else {}),
        },
        tools={name: importlib.metadata.version(name) for name in ("planforge", "torch", "onnx")},
    )


def verified(
    staging: Path,
    manifest: Manifest,
    model: Model,
    graphs: Mapping[str, ir.Model],
    expected: Any,
    calibration: Calibration,
    progress: Progress,
) -> tuple[Manifest, VerificationReport]:
    """Compares every staged graph with PyTorch; adds the gates, golden.npz and parity.json.

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
