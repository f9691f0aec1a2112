"""Verifies a whole bundle, with PyTorch or with the golden data of its export."""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ...runtime.apps.check.files import find_golden, name_damage, read_golden
from ...runtime.apps.check.texts import compare_texts
from ...runtime.bundle.bundle import Bundle
from ...runtime.bundle.export_again import (
    extrapolates,
    name_checkpoint,
    read_chosen_outputs,
    suggest_export_again,
)
from ...runtime.bundle.manifest import Manifest
from ...runtime.errors import InputError, PlanForgeError
from ..calibration.prompts import read_prompts
from ..calibration.repeat import read_calibration, repeat_calibration
from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.source import Source, add_recorded_adapter, find_recorded, resolve_source
from ..errors import VerificationError
from ..levels import STANDARD, Level, find_level
from ..memory import give_back_memory
from ..passes.weight_files import load_graph
from ..passes.weights import is_described
from ..reference_model import load_our_model
from ..tasks.base import Progress
from ..tasks.verifier import open_golden_verifier, open_verifier
from ..tensorrt.build import check_plan_names
from .derivation import compare_with_checkpoint
from .explain import explain, make_tracer
from .explanations import verify_explanations, verify_kept_explanations
from .files import verify_file
from .golden_answers import compare_golden, note_older_golden
from .older_bundles import find_doubts
from .precision_errors import read_accepted
from .report import VerificationReport
from .user_limits import check_limits, tighten_limits
from .verdict import compare_all, verify_model

if TYPE_CHECKING:
    from ..reference_model import ReferenceModel
    from ..tracing.recipes import Recipe

log = logging.getLogger("planforge")

OLDER = (
    "{} was exported by an older PlanForge, so its weights cannot be compared with the checkpoint's: export"
    " it again, or leave out --source and --prompts to compare it with its golden data"
)

OTHER_TEXTS = (
    "what int8 rounds by was chosen at export with other texts than verification has, so that it is compared"
    " loosely, or not at all: --prompts FILE with the texts of the export compares each value with its own"
)


@dataclass(frozen=True)
class VerifyOptions:
    """A user's choices for a bundle's verification, as `verify` describes them."""

    source: str | Path | None = None
    prompts: str | Path | None = None
    seed: int = 0
    level: Level = STANDARD


def verify(
    bundle: str | Path,
    *,
    source: str | Path | None = None,
    backend: str = "ort-cpu",
    prompts: str | Path | None = None,
    limits: Mapping[str, float] | None = None,
    only: Sequence[str] = (),
    against: str | Path | None = None,
    inputs: str | Path | None = None,
    seed: int = 0,
    level: str = STANDARD.name,
    progress: Progress = lambda _: None,
) -> VerificationReport:
    """Compare every ONNX graph of a bundle with the model it was exported from.

    For a single .onnx file, of any model, compare ONNX Runtime with the same graph node by node.

    Args:
        bundle: the folder, or an .onnx file.
        source: the checkpoint; by default the recorded one, if it is still the same. Without it
            the bundle is compared with its golden data, and the report says so.
        backend: the engine to run the graphs on; "ort-cpu".
        prompts: a file with one prompt per line, instead of the built-in ones; needs the checkpoint.
        limits: limits of metrics, such as {"max_error": 1e-3}, stricter than the usual ones; a larger
            one changes nothing.
        only: ids of the graphs to compare, such as "decoder.ort.int8"; all when empty.
        against: for an .onnx file, another one with the same inputs and outputs to compare it with.
        inputs: for an .onnx file, a .npz with an array for each input; made up unless given.
        seed: decides the batches, lengths and split points of random cases, besides fixed ones; needs the
            checkpoint, as golden data keeps those of the export.
        level: how much is compared with the checkpoint: "quick", a smoke test; "standard", what the model's
            size allows; "full", every case. Golden data has what the export's level kept.
        progress: called with a line when a stage begins, and while it goes on. Some lines are a
            `planforge.runtime.apps.stage_progress.CountedLine`: they know how much is done, and of how much.

    Raises:
        BundleError: a file is missing or has changed.
        VerificationError: nothing to compare with, or prompts that cannot be used.
    """
    limits = limits or {}
    check_limits(limits)
    if seed < 0:
        raise InputError(f"seed={seed} must be 0 or more")
    choices = VerifyOptions(source, prompts, seed, find_level(level))
    check_backend(backend, bundle)
    if Path(bundle).suffix == ".onnx" and not Path(bundle).is_dir():
        if only or choices != VerifyOptions():
            raise InputError("source, prompts, only, seed and level are for a bundle, not for an .onnx file")
        return tighten_limits(verify_file(Path(bundle), against, inputs, progress), limits)
    if against is not None or inputs is not None:
        raise InputError("against and inputs are for an .onnx file, not for a bundle: leave them out")
    return verify_bundle(Bundle.open(bundle), only, choices, limits, progress)


def check_backend(backend: str, bundle: str | Path) -> None:
    """Refuse an engine that cannot verify graphs."""
    if backend not in ("auto", "ort-cpu"):
        raise InputError(
            f"backend={backend!r}: verify runs on 'ort-cpu' only; `planforge selftest {bundle} --backend"
            f" {backend}` compares another engine with golden data, on the machine that has it"
        )


def verify_bundle(
    opened: Bundle,
    only: Sequence[str],
    choices: VerifyOptions,
    limits: Mapping[str, float],
    progress: Progress,
) -> VerificationReport:
    """Verify a bundle: its files, their content, and that each plan belongs to its graph."""
    progress("checking files")
    opened.verify_files()
    report = verify_contents(restrict_to(opened, only), choices, progress)
    report = tighten_limits(report, limits)
    if report.passed:  # a graph that was changed is named by its node, rather than by its plan
        check_plan_names(opened)
    return report


def verify_contents(opened: Bundle, choices: VerifyOptions, progress: Progress) -> VerificationReport:
    """Compare a bundle with its checkpoint, or with golden data where that is absent."""
    found = load_checkpoint(opened, choices)
    progress("comparing tokenizer and settings")
    files = [] if found is None else compare_with_checkpoint(opened, found[0])
    texts, skipped = compare_texts(opened)
    files += texts
    if found is None:
        skipped += find_doubts(opened)
        report = verify_with_golden_data(opened, progress)
    else:
        report = verify_with_pytorch(opened, *found, choices, progress)
    notes = [f"{one.artifact}: {one.what} are not compared: {one.reason}" for one in skipped]
    for note in notes:
        log.warning("%s", note)
    return dataclasses.replace(
        report, comparisons=(*files, *report.comparisons), notes=(*report.notes, *notes)
    )


def verify_with_golden_data(opened: Bundle, progress: Progress) -> VerificationReport:
    file = find_golden(opened)
    if file is None:
        raise VerificationError(
            f"{opened.folder} has no golden data, and its checkpoint was not found; pass --source"
            f" {name_checkpoint(opened)}"
        )
    with name_damage(opened):
        try:
            arrays, usual = read_golden(file)
            verifier = open_golden_verifier(opened, arrays)
        except KeyError as error:
            raise VerificationError(
                f"the golden data of {opened.folder} is of another PlanForge version and lacks {error}: pass"
                f" --source {name_checkpoint(opened)}, or {suggest_export_again(opened)}"
            ) from error
        report = explain(verifier, compare_all(verifier, usual, progress), progress)
    return verify_kept_explanations(report, opened, progress)


def verify_with_pytorch(
    opened: Bundle, checkpoint: Source, model: ReferenceModel, choices: VerifyOptions, progress: Progress
) -> VerificationReport:
    """Verify a bundle with its checkpoint's model, whose hash was compared with the manifest's."""
    texts = read_prompts(choices.prompts, checkpoint.folder)
    recorded = str(opened.manifest.source["sha256"])  # the checkpoint's
    verifier = open_verifier(opened, model, texts, progress, choices.seed, choices.level, recorded)
    give_back_memory()
    calibration = repeat_calibration(verifier, model, read_calibration(opened, model))
    accepted = read_accepted(opened.manifest)
    judged = verify_model(verifier, model, calibration, progress, accepted)
    report = judged.report
    if calibration.follows_texts and not calibration.texts:
        log.warning("%s", OTHER_TEXTS)
        report = dataclasses.replace(report, notes=(*report.notes, OTHER_TEXTS))
    golden = compare_golden(verifier, model, judged.limits, accepted, progress)
    for note in note_older_golden(opened):
        log.warning("%s", note)
        report = dataclasses.replace(report, notes=(*report.notes, note))
    tracer = None
    if not opened.manifest.source.get("exporter"):  # another's graphs cannot be traced again
        tracer = make_tracer(opened.manifest, checkpoint, model)
    report = explain(verifier, report, progress, model, judged.calibration, tracer)
    if opened.manifest.explanations:
        assert tracer is not None  # other exporters' bundles have none
        explanations = read_explanations(opened.manifest, checkpoint)
        report, _ = verify_explanations(report, opened, model, explanations, tracer, choices.seed, progress)
    return dataclasses.replace(report, comparisons=(*golden, *report.comparisons))


def read_explanations(manifest: Manifest, source: Source) -> Mapping[str, Recipe]:
    """Return the recipes of the graphs that explain a bundle's model."""
    return Checkpoint(
        source, None, manifest.max_length, read_chosen_outputs(manifest), extrapolates(manifest)
    ).explanations


def load_model_to_compare(bundle: Bundle, checkpoint: Source) -> ReferenceModel:
    """Load the model in PyTorch: ours, or transformers' for another exporter's graphs."""
    if bundle.manifest.source.get("exporter"):
        from ..reference_model import load_reference

        return load_reference(checkpoint.folder, bundle.manifest.task, bundle.manifest.encoder)
    return load_our_model(checkpoint.folder, bundle.manifest.max_length)


def restrict_to(bundle: Bundle, only: Sequence[str]) -> Bundle:
    """Return a bundle restricted to these graphs, and those that they run with."""
    artifacts = {artifact.id: artifact for artifact in bundle.manifest.artifacts}
    explaining = [artifact for artifact in bundle.manifest.explanations if artifact.id in only]
    if explaining:  # they share the weights of graphs in fp32, which are compared with them
        only = [*only, *(name for name, a in artifacts.items() if a.precision == "fp32")]
        only = [name for name in only if name not in {artifact.id for artifact in explaining}]
    if unknown := [name for name in only if name not in artifacts]:
        raise InputError(f"{bundle.folder} has no graph {unknown[0]!r}; it has {', '.join(artifacts)}")
    if not only:
        return bundle
    graphs = {artifacts[name].graph for name in only}
    precisions = {artifacts[name].precision for name in only}
    chosen = [
        a
        for a in artifacts.values()
        if a.id in only or (a.graph not in graphs and a.precision in precisions)  # an encoder's decoder
    ]
    manifest = dataclasses.replace(bundle.manifest, artifacts=tuple(chosen), explanations=tuple(explaining))
    return Bundle(bundle.folder, manifest)


def is_described_bundle(bundle: Bundle) -> bool:
    """Tell whether the bundle's graphs, which one version wrote, say what their constants store."""
    return is_described(load_graph(bundle.path(bundle.manifest.artifacts[0].file)))


def load_checkpoint(bundle: Bundle, choices: VerifyOptions) -> tuple[Source, ReferenceModel] | None:
    """Return the checkpoint to compare a bundle with, and its model; None where golden data must do.

    One that the manifest names may be refused, as by a later version: that ends nothing, since no user named
    it.
    """
    checkpoint = find_checkpoint(bundle, choices)
    if checkpoint is None:
        return None
    try:
        model = load_model_to_compare(bundle, checkpoint)
    except PlanForgeError as error:
        if choices.source is not None or choices.prompts is not None:
            raise
        log.warning("%s; comparing with golden data instead", error)
        return None
    check_comparable(bundle, model)
    return checkpoint, model


def check_comparable(bundle: Bundle, model: ReferenceModel) -> None:
    """Refuse quantized graphs of another exporter that a comparison cannot prove, as an import does."""
    if not bundle.manifest.source.get("exporter"):
        return
    from ..imported.quantized import check_reference
    from ..reference_model import OnnxGraphs

    if isinstance(model, OnnxGraphs):
        model.found.check_comparable(has_weights=False)
        return
    for artifact in bundle.manifest.artifacts:
        path = bundle.path(artifact.file)
        check_reference(load_graph(path), path, has_weights=True, rounds=False)


def find_checkpoint(bundle: Bundle, choices: VerifyOptions) -> Source | None:
    """Return the checkpoint that a user names; else the recorded one, if it is there."""
    needs_checkpoint = choices.source is not None or choices.prompts is not None
    if needs_checkpoint and not is_described_bundle(bundle):
        raise VerificationError(OLDER.format(bundle.folder))
    if choices.source is not None:
        return find_given_source(bundle, choices.source)
    checkpoint = find_recorded_source(bundle)
    if checkpoint is None and choices.prompts is not None:
        raise VerificationError(f"--prompts needs the checkpoint; pass --source {name_checkpoint(bundle)}")
    return checkpoint


def find_given_source(bundle: Bundle, source: str | Path) -> Source:
    """Return the checkpoint that a user names; refuse one that is not the bundle's."""
    recorded = bundle.manifest.source
    checkpoint = add_recorded_adapter(resolve_source(source), recorded, bundle.folder)
    if checkpoint.compute_sha256() != recorded.get("sha256"):
        raise VerificationError(
            f"{source} is not the checkpoint that the bundle was exported from (its hash differs)"
        )
    return checkpoint


def find_recorded_source(bundle: Bundle) -> Source | None:
    """Return the checkpoint that the manifest names, if it is there, unchanged, and torch can read it."""
    if not is_described_bundle(bundle):
        log.warning("%s; comparing with golden data instead", OLDER.format(bundle.folder))
        return None
    recorded = bundle.manifest.source
    if importlib.util.find_spec("torch") is None:
        return None
    try:
        source = find_recorded(recorded, bundle.folder)
        if source.compute_sha256() == recorded.get("sha256"):
            return source
        why = f"the checkpoint {source.argument} has changed"
    except (PlanForgeError, OSError) as error:
        why = str(error)
    log.warning("%s; comparing with golden data instead", why)
    return None
