"""Verification of a whole bundle, with PyTorch or with the golden data that an export left."""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ...runtime.bundle.bundle import Bundle
from ...runtime.diagnostics.golden.files import find_golden, name_damage, read_golden
from ...runtime.diagnostics.golden.texts import compare_texts
from ...runtime.diagnostics.metrics import Comparison, Metrics, Outcome, ScoreMetrics, VectorMetrics
from ...runtime.errors import BackendError, InputError
from ..calibration.calibration import Calibration, read_calibration
from ..calibration.prompts import read_prompts
from ..calibration.repeat import repeat_calibration
from ..checkpoints.source import Source, resolve_source, restore_argument
from ..comparison.examiner import Progress
from ..comparison.tasks import AnyExaminer, examine_golden, examine_model
from ..errors import SourceError, VerificationError
from ..execution.node_executor import ROUNDING_ENGINE
from ..levels import STANDARD, Level, find_level
from ..limits import NOTHING_ACCEPTED, Accepted
from ..memory import give_back_memory
from ..passes.weight_files import load_graph
from ..passes.weights import is_described
from ..reference.model import load_our_model, rest, wake
from ..reference.passages import TextMetrics
from ..tensorrt.build import check_plan_names
from .deep import compare_deeply, refuse_deep
from .derivation import compare_with_checkpoint
from .explain import explain, make_tracer
from .files import RUNNING, verify_file
from .fp32_nodes import list_fp32_nodes
from .golden_answers import compare_golden
from .losses import (
    Losses,
    add_losses,
    add_losses_of_searches,
    adopt_stored_weights,
    judge_by_float64,
    read_accepted,
)
from .reading import compare_by_reading
from .report import VerificationReport

if TYPE_CHECKING:
    from ..reference.model import ReferenceModel

log = logging.getLogger("planforge")

OLDER = (
    "{} was exported by an older PlanForge, so its weights cannot be compared with the checkpoint's: export"
    " it again, or leave out --source and --prompts to compare it with its golden data"
)

OTHER_TEXTS = (
    "what int8 rounds by was chosen at export with other texts than verification has, so that it is held to"
    " them loosely, or not at all: --prompts FILE with the texts of the export holds each number to its own"
)

# Metrics that a user can limit: of the others more is better, or they count.
ERRORS = {
    field.name
    for kind in (Metrics, VectorMetrics, ScoreMetrics, TextMetrics)
    for field in dataclasses.fields(kind)
} - {"top1_agreement", "top5_agreement", "finite", "rows"}


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
    deep: bool = False,
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
        seed: decides which batches, lengths and split points are drawn, beside the fixed ones; needs the
            checkpoint, as golden data keeps those of the export.
        deep: also make every graph from the checkpoint again, with the same choices, and compare them node
            for node; needs the checkpoint, and takes as long as an export.
        level: how much is compared with the checkpoint: "quick", a smoke test; "standard", what the model's
            size allows; "full", every case. Golden data has what the export's level kept.
        progress: called with a line when a stage begins, and while it goes on. Some lines are a
            `planforge.runtime.progress.CountedLine`: they know how much is done, and of how much.

    Raises:
        BundleError: a file is missing or has changed.
        VerificationError: nothing to compare with, or prompts that cannot be used.
    """
    limits = limits or {}
    if bad := [name for name, limit in limits.items() if not limit >= 0]:  # NaN is not
        raise InputError(f"limit of {bad[0]!r} must be 0 or more")
    if unknown := set(limits) - ERRORS:
        raise InputError(f"limit of {min(unknown)!r}: what can be limited is {', '.join(sorted(ERRORS))}")
    if seed < 0:
        raise InputError(f"seed={seed} must be 0 or more")
    budget = find_level(level)
    if backend not in ("auto", "ort-cpu"):
        raise InputError(
            f"backend={backend!r}: verify runs on 'ort-cpu' only; `planforge selftest {bundle} --backend"
            f" {backend}` holds another engine against golden data, on the machine that has it"
        )
    if Path(bundle).suffix == ".onnx" and not Path(bundle).is_dir():
        if source is not None or prompts is not None or only or deep or budget is not STANDARD:
            raise InputError("source, prompts, only, deep and level are for a bundle, not for an .onnx file")
        return tighten_limits(verify_file(Path(bundle), against, inputs, progress), limits)
    if against is not None or inputs is not None:
        raise InputError("against and inputs are for an .onnx file; a bundle has its own")
    opened = Bundle.open(bundle)
    progress("checking files")
    opened.verify_files()
    wanted = restrict_to(opened, only)
    report = tighten_limits(verify_bundle(wanted, source, prompts, progress, seed, deep, budget), limits)
    if report.passed:  # a graph that was changed is named by its node, rather than by its plan
        check_plan_names(opened)
    return report


def verify_bundle(
    opened: Bundle,
    source: str | Path | None,
    prompts: str | Path | None,
    progress: Progress,
    seed: int,
    deep: bool,
    level: Level,
) -> VerificationReport:
    """Verify a bundle with its checkpoint, or with golden data where that is absent."""
    if (source is not None or prompts is not None) and not is_described_bundle(opened):
        raise VerificationError(OLDER.format(opened.folder))
    checkpoint = find_recorded_source(opened) if source is None else find_given_source(opened, source)
    if checkpoint is None and prompts is not None:
        raise VerificationError("--prompts needs the checkpoint; pass --source MODEL")
    if deep:
        refuse_deep(opened, checkpoint is not None)
    progress("comparing tokenizer and settings")
    files = [] if checkpoint is None else compare_with_checkpoint(opened, checkpoint)
    texts, skipped = compare_texts(opened)
    files += texts
    if checkpoint is None:
        report = verify_with_golden_data(opened, progress)
    else:
        report = verify_with_pytorch(opened, checkpoint, prompts, progress, seed, level, deep)
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
            f"{opened.folder} has no golden data and its checkpoint is not at hand; pass --source MODEL"
        )
    with name_damage(opened):
        try:
            arrays, usual = read_golden(file)
            examiner = examine_golden(opened, arrays)
        except KeyError as error:
            raise VerificationError(
                f"the golden data of {opened.folder} is that of another PlanForge, without {error}: pass"
                " --source MODEL, or export again"
            ) from error
        return explain(examiner, compare_all(examiner, usual, progress), progress)


def verify_with_pytorch(
    opened: Bundle,
    checkpoint: Source,
    prompts: str | Path | None,
    progress: Progress,
    seed: int,
    level: Level = STANDARD,
    deep: bool = False,
) -> VerificationReport:
    """Verify a bundle with its checkpoint, whose hash was compared with the manifest's."""
    model = load_model_to_compare(opened, checkpoint)
    texts = read_prompts(prompts, checkpoint.folder)
    recorded = str(opened.manifest.source["sha256"])  # the checkpoint's
    examiner = examine_model(opened, model, texts, progress, seed, level, recorded)
    give_back_memory()
    as_read = read_calibration(opened, model)
    calibration = repeat_calibration(examiner, model, as_read)
    accepted = read_accepted(opened.manifest)
    judged = verify_model(examiner, model, calibration, progress, accepted)
    report = judged.report
    if (calibration.cache_scales or calibration.products) and not calibration.texts:
        log.warning("%s", OTHER_TEXTS)
        report = dataclasses.replace(report, notes=(*report.notes, OTHER_TEXTS))
    golden = compare_golden(examiner, model, judged.limits, accepted, progress)
    tracer = None
    if not opened.manifest.source.get("exporter"):  # another's graphs cannot be traced again
        tracer = make_tracer(opened.manifest, checkpoint, model)
    report = explain(examiner, report, progress, model, judged.calibration, tracer)
    again = compare_deeply(opened, as_read, tracer, progress) if deep and tracer is not None else []
    return dataclasses.replace(report, comparisons=(*golden, *report.comparisons, *again))


def load_model_to_compare(bundle: Bundle, checkpoint: Source) -> ReferenceModel:
    """Load the model in PyTorch: ours, or transformers' for what another exporter made."""
    if bundle.manifest.source.get("exporter"):
        from ..reference.transformers_reference import load_reference

        return load_reference(checkpoint.folder, bundle.manifest.task, bundle.manifest.encoder)
    return load_our_model(checkpoint.folder, bundle.manifest.max_length)


def restrict_to(bundle: Bundle, only: Sequence[str]) -> Bundle:
    """Return a bundle as if it had these graphs alone, with those that they run with."""
    artifacts = {artifact.id: artifact for artifact in bundle.manifest.artifacts}
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
    return Bundle(bundle.folder, dataclasses.replace(bundle.manifest, artifacts=tuple(chosen)))


def tighten_limits(report: VerificationReport, limits: Mapping[str, float]) -> VerificationReport:
    """Return a report that holds metrics to a user's limits too; refuse those that nothing has."""
    measured = {name.rpartition(".")[2] for comparison in report.comparisons for name in comparison.metrics}
    if unknown := set(limits) - measured:
        raise InputError(
            f"limit of {min(unknown)!r}: nothing here is measured by it, only by"
            f" {', '.join(sorted(measured & ERRORS))}"
        )
    for name, limit in limits.items():
        usual = [c.limits[n] for c in report.comparisons for n in c.limits if n.rpartition(".")[2] == name]
        if usual and limit >= max(usual):
            log.warning("--limit %s=%g changes nothing: the usual one is %.3g", name, limit, max(usual))
    return dataclasses.replace(
        report, comparisons=tuple(apply_limits(comparison, limits) for comparison in report.comparisons)
    )


def apply_limits(comparison: Comparison, limits: Mapping[str, float]) -> Comparison:
    own = {
        name: min(limits[metric], comparison.limits.get(name, math.inf))
        for name in comparison.metrics
        if (metric := name.rpartition(".")[2]) in limits
    }
    found = list(comparison.failures)
    for name, limit in own.items():
        value = comparison.metrics[name]
        if limit < comparison.limits.get(name, math.inf) and value is not None and not value <= limit:
            found.append(f"{name} is {value:.3g}, at most {limit:.3g} is wanted")
    return dataclasses.replace(
        comparison, limits={**comparison.limits, **own}, failures=tuple(dict.fromkeys(found))
    )


def is_described_bundle(bundle: Bundle) -> bool:
    """Tell whether the bundle's graphs, which one version wrote, say what their constants store."""
    return is_described(load_graph(bundle.path(bundle.manifest.artifacts[0].file)))


def find_given_source(bundle: Bundle, source: str | Path) -> Source:
    """Return the checkpoint that a user names; refuse one that the bundle was not exported from."""
    checkpoint = resolve_source(source)
    if checkpoint.compute_sha256() != bundle.manifest.source.get("sha256"):
        raise VerificationError(
            f"{checkpoint.folder} is not the checkpoint that the bundle was exported from (its hash differs)"
        )
    return checkpoint


def find_recorded_source(bundle: Bundle) -> Source | None:
    """Return the checkpoint that the manifest names, if it is there and unchanged and torch can read it."""
    if not is_described_bundle(bundle):
        log.warning("%s; comparing with golden data instead", OLDER.format(bundle.folder))
        return None
    recorded = bundle.manifest.source
    argument = restore_argument(recorded, bundle.folder)
    if importlib.util.find_spec("torch") is None:
        return None
    try:
        source = resolve_source(argument)
        if source.compute_sha256() == recorded.get("sha256"):
            return source
        why = "has changed"
    except (SourceError, OSError):
        why = "is not there"
    log.warning("the checkpoint %s %s; comparing with golden data instead", argument, why)
    return None


class Judged(NamedTuple):
    """A verdict, and what it rests on."""

    report: VerificationReport
    limits: dict[str, dict[str, float]]  # what each metric was held to, by precision
    calibration: Calibration  # with the weights that GPTQ chose


def verify_model(
    examiner: AnyExaminer,
    model: ReferenceModel,
    calibration: Calibration,
    progress: Progress,
    accepted: Mapping[str, Accepted] | None = None,
) -> Judged:
    """Compare every graph with the model.

    `accepted` has what a user lets each precision lose. While the graphs run the model may rest: who computes
    with it afterwards calls `wake`.
    """
    from ..reference.onnx_reference import OnnxGraphs

    wake(model)
    # What rounding does to another exporter's graphs is not known.
    reference = model.reference if isinstance(model, OnnxGraphs) else ""

    read = compare_by_reading(examiner, progress, None if reference else model, calibration)
    calibration = adopt_stored_weights(calibration, examiner.bundle, read)
    losses: dict[str, Losses] = {}

    def choose_limits(precision: str) -> dict[str, float]:
        progress(f"computing what {precision} may lose")
        rounding = None if reference else calibration.make_rounding(precision)
        gaps = {} if rounding is None else examiner.measure_gaps(model, rounding)
        losses[precision] = examiner.name_losses(gaps)
        return examiner.choose_limits(precision, gaps, (accepted or {}).get(precision, NOTHING_ACCEPTED))

    precisions = sorted({artifact.precision for artifact in examiner.bundle.manifest.artifacts})
    try:
        limits = {precision: choose_limits(precision) for precision in precisions}
    except ValueError as error:
        raise VerificationError(str(error)) from error
    give_back_memory()
    report = compare_all(examiner, limits, progress, None if reference else model, read)
    report = judge_by_float64(examiner, model, report, limits, progress)
    report = dataclasses.replace(
        report,
        reference=reference,
        accepted=accepted or {},
        level=examiner.level.name,
        left_out=examiner.expected.left_out,
        answers_kept=examiner.answers_kept,
    )
    if not reference:
        add_losses_of_searches(examiner, report, losses, calibration)
    return Judged(add_losses(report, losses), limits, calibration)


def compare_all(
    examiner: AnyExaminer,
    limits: Mapping[str, Mapping[str, float]],
    progress: Progress,
    model: ReferenceModel | None = None,
    read: Mapping[str, Comparison] | None = None,
) -> VerificationReport:
    """Compare every graph in every case. With PyTorch's model it was `read` before; the model may `rest`."""
    bundle = examiner.bundle
    if read is None:
        read = compare_by_reading(examiner, progress, None)
    if model is not None and not examiner.runs_model:
        rest(model)
        give_back_memory()
    comparisons: list[Comparison] = []
    nodes_in_fp32 = {}
    for artifact in bundle.manifest.artifacts:
        comparisons.append(read[artifact.id])
        try:
            comparisons += examiner.compare(artifact, limits[artifact.precision], progress)
        except BackendError as error:  # of this graph; the others are still judged
            comparisons.append(Comparison.from_error(artifact.id, "ort-cpu", RUNNING, error))
            continue
        if artifact.precision == "fp16":
            graph = load_graph(bundle.path(artifact.file))
            trial = examiner.make_trial(artifact)
            nodes_in_fp32[artifact.id], broken = list_fp32_nodes(graph, artifact, trial)
            steps = " and ".join(step.name for step in trial.steps)
            case = f"every result of {steps}, padded, is finite"
            finite = Outcome({"finite": broken is None}, {}, () if broken is None else (str(broken),))
            comparisons.append(
                Comparison(artifact=artifact.id, backend=ROUNDING_ENGINE, case=case, **vars(finite))
            )
        give_back_memory()
    return VerificationReport(
        model is not None,
        tuple(comparisons),
        fp32_nodes=nodes_in_fp32,
        plans="not run" if bundle.manifest.plans else "",
        precisions={artifact.id: artifact.precision for artifact in bundle.manifest.artifacts},
    )
