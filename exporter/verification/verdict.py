"""Compares every graph of a bundle with the model, in every case, within its precision's limits."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ...runtime.apps.check.judge import COUNTED, ENOUGH
from ...runtime.apps.check.outcome import Comparison, Outcome
from ...runtime.bundle.manifest import Artifact
from ...runtime.errors import BackendError
from ..calibration.calibration import Calibration
from ..errors import VerificationError
from ..execution.node_executor import ROUNDING_ENGINE
from ..limits import NOTHING_ACCEPTED, Accepted
from ..memory import give_back_memory
from ..passes.weight_files import load_graph
from ..precisions import PRECISIONS
from ..reference_model import OnnxGraphs, offload_weights, restore_weights
from ..tasks.base import Progress
from ..tasks.verifier import Verifier
from .files import RUNNING
from .foreign_quantization import find_unlike
from .fp32_nodes import list_fp32_nodes
from .precision_errors import (
    PrecisionErrors,
    add_errors_of_searches,
    add_precision_errors,
    adopt_stored_weights,
    judge_by_float64,
)
from .reading import compare_by_reading
from .report import VerificationReport
from .structure import shorten

if TYPE_CHECKING:
    import onnx_ir as ir

    from ..reference_model import ReferenceModel

log = logging.getLogger("planforge")

UNROUNDED = (
    "results are compared without the rounding of activations, whose scales are the folder's to the last bit;"
    " there is no golden data, as an engine may round a value to the next step"
)


class Judged(NamedTuple):
    """A verdict, with the limits and the calibration that it depends on."""

    report: VerificationReport
    limits: dict[str, dict[str, float]]  # of each metric, by precision
    calibration: Calibration  # with the weights that GPTQ chose


def verify_model(
    verifier: Verifier,
    model: ReferenceModel,
    calibration: Calibration,
    progress: Progress,
    accepted: Mapping[str, Accepted] | None = None,
) -> Judged:
    """Compare every graph with the model.

    `accepted` has what a user lets each precision lose. While the graphs run the model may rest: who computes
    with it afterwards calls `restore_weights`.
    """
    restore_weights(model)
    # What rounding does to another exporter's graphs is not known.
    reference = model.reference if isinstance(model, OnnxGraphs) else ""

    read = compare_by_reading(verifier, progress, None if reference else model, calibration)
    if isinstance(model, OnnxGraphs) and model.graph is not None:
        read = {name: add_foreign_faults(one, verifier, model.graph) for name, one in read.items()}
    calibration = adopt_stored_weights(calibration, verifier.bundle, read)
    errors: dict[str, PrecisionErrors] = {}

    def choose_limits(precision: str) -> dict[str, float]:
        progress(f"computing what {precision} may lose")
        rounding = None if reference else calibration.make_rounding(precision)
        gaps = {} if rounding is None else verifier.measure_gaps(model, rounding)
        give_back_memory()
        errors[precision] = verifier.name_precision_errors(gaps)
        return verifier.choose_limits(precision, gaps, (accepted or {}).get(precision, NOTHING_ACCEPTED))

    precisions = sorted({artifact.precision for artifact in verifier.bundle.manifest.artifacts})
    try:
        limits = {precision: choose_limits(precision) for precision in precisions}
    except ValueError as error:
        raise VerificationError(str(error)) from error
    report = compare_all(verifier, limits, progress, None if reference else model, read)
    report = judge_by_float64(verifier, model, report, limits, progress)
    report = dataclasses.replace(
        report,
        reference=reference,
        accepted=accepted or {},
        level=verifier.level.name,
        left_out=verifier.expected.left_out,
        answers_kept=verifier.answers_kept,
    )
    if not reference:
        add_errors_of_searches(verifier, report, errors, calibration)
    if isinstance(model, OnnxGraphs) and model.rounds:
        log.warning("%s", UNROUNDED)
        report = dataclasses.replace(report, notes=(*report.notes, UNROUNDED))
    return Judged(add_precision_errors(report, errors), limits, calibration)


def add_foreign_faults(read: Comparison, verifier: Verifier, folder: ir.Model) -> Comparison:
    """Add what is quantized otherwise than in the folder's graph to the comparison of a graph's file."""
    bundle = verifier.bundle
    graph = load_graph(bundle.path(bundle.manifest.artifact(read.artifact).file))
    faults = shorten(find_unlike(graph, folder))
    return dataclasses.replace(read, failures=(*read.failures, *faults))


def warn_of_unjudged(artifact: Artifact, comparisons: Sequence[Comparison]) -> None:
    """Warn of a quantized graph that read too little real text to judge its counted metrics."""
    for one in comparisons:
        shown = [name for name in COUNTED if name in one.metrics and name not in one.limits]
        if shown and PRECISIONS[artifact.precision].is_quantized:
            log.warning(
                "%s: %s are reported but not checked, as that needs %d tokens of real text, and there are %d",
                artifact.id,
                " and ".join(shown),
                ENOUGH,
                one.metrics["rows"],
            )


def compare_all(
    verifier: Verifier,
    limits: Mapping[str, Mapping[str, float]],
    progress: Progress,
    model: ReferenceModel | None = None,
    read: Mapping[str, Comparison] | None = None,
) -> VerificationReport:
    """Compare every graph in every case; with a model that may be offloaded, `read` is given."""
    bundle = verifier.bundle
    if read is None:
        read = compare_by_reading(verifier, progress, None)
    if model is not None and not verifier.runs_model:
        offload_weights(model)
        give_back_memory()
    comparisons: list[Comparison] = []
    nodes_in_fp32 = {}
    for artifact in bundle.manifest.artifacts:
        comparisons.append(read[artifact.id])
        try:
            compared = verifier.compare(artifact, limits[artifact.precision], progress)
            comparisons += compared
            warn_of_unjudged(artifact, compared)
        except BackendError as error:  # of this graph; the others are still judged
            comparisons.append(Comparison.from_error(artifact.id, "ort-cpu", RUNNING, error))
            continue
        if artifact.is_half:
            graph = load_graph(bundle.path(artifact.file))
            replay = verifier.make_replay(artifact)
            nodes_in_fp32[artifact.id], broken = list_fp32_nodes(graph, artifact, replay)
            steps = " and ".join(dict.fromkeys(step.name for step in replay.steps))
            case = f"every result of {steps}, padded, is finite"
            finite = Outcome({"finite": broken is None}, {}, () if broken is None else (str(broken),))
            comparisons.append(
                Comparison(
                    artifact=artifact.id, backend=ROUNDING_ENGINE, case=case, is_padded=True, **vars(finite)
                )
            )
        give_back_memory()
    return VerificationReport(
        model is not None,
        tuple(comparisons),
        fp32_nodes=nodes_in_fp32,
        plans="not run" if bundle.manifest.plans else "",
        precisions={artifact.id: artifact.precision for artifact in bundle.manifest.artifacts},
    )
