"""Tells whether a failure is a graph's fault, or PyTorch's own error in that precision."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from ...runtime.apps.check.failures import Exceeded, OtherToken
from ...runtime.apps.check.outcome import Comparison, keeps_limit
from ...runtime.bundle.bundle import Bundle
from ...runtime.bundle.manifest import Manifest
from ..calibration.calibration import Calibration
from ..limits import CAPS, GAP_FACTOR, MOST, Accepted, find_factor
from ..passes.quantized_weight import QuantizedWeight, StoredWeight
from ..passes.storage import read_weights
from ..passes.weight_files import load_graph
from ..passes.weights import LazyMapping
from ..precisions import PRECISIONS
from ..reference_model import is_module
from ..tasks.base import Progress
from ..tasks.verifier import Verifier
from .report import VerificationReport

if TYPE_CHECKING:
    from ..reference_model import ReferenceModel

log = logging.getLogger("planforge")

PrecisionErrors = Mapping[str, float]  # PyTorch's own, by the limits' names


def list_exceeded(comparison: Comparison) -> dict[str, float | None]:
    """Return the metrics of a comparison that are over their limits; None where one is not finite."""
    return {
        name: comparison.metrics[name]
        for name, limit in comparison.limits.items()
        if name in comparison.metrics and not keeps_limit(name, comparison.metrics[name], limit)
    }


def add_precision_errors(
    report: VerificationReport, errors: Mapping[str, PrecisionErrors]
) -> VerificationReport:
    """Return the report with PyTorch's own error in each precision, and the failures due to that alone."""

    def tell(comparison: Comparison) -> Comparison:
        precision = report.precisions.get(comparison.artifact, "")
        return annotate_precision_errors(comparison, errors.get(precision, {}), precision)

    limited = find_limited_artifacts(report, errors)
    return replace(report, comparisons=tuple(map(tell, report.comparisons)), limited=limited)


def annotate_precision_errors(comparison: Comparison, errors: PrecisionErrors, precision: str) -> Comparison:
    """Return a comparison whose failures tell PyTorch's own loss, where that is known."""
    has_tokens = are_tokens_close(comparison, errors)

    def add_own(failure: str) -> str:
        if isinstance(failure, Exceeded) and failure.metric in errors:
            return failure.add(f" (PyTorch itself, in {precision}: {errors[failure.metric]:.3g})")
        if isinstance(failure, OtherToken) and has_tokens:
            return failure.add(f" (PyTorch itself, in {precision}: max_error {errors['max_error']:.3g})")
        return failure

    return replace(comparison, failures=tuple(map(add_own, comparison.failures)))


def is_lost_in_pytorch(comparison: Comparison, errors: PrecisionErrors) -> bool:
    """Tell whether PyTorch, rounded in the same way, loses about as much as a graph that failed."""
    exceeded = list_exceeded(comparison)
    tokens = [failure for failure in comparison.failures if isinstance(failure, OtherToken)]
    if not all(isinstance(failure, Exceeded | OtherToken) for failure in comparison.failures):
        return False
    if tokens and not are_tokens_close(comparison, errors):
        return False

    def is_lost(name: str, value: float | None) -> bool:
        metric = name.rpartition(".")[2]
        own = errors.get(name.removesuffix(metric) + MOST.get(metric, metric))
        return value is not None and own is not None and value <= find_factor(metric) * own

    return all(is_lost(name, value) for name, value in exceeded.items())


def are_tokens_close(comparison: Comparison, errors: PrecisionErrors) -> bool:
    """Tell whether logits with an error like PyTorch's own may swap the tokens that a graph swaps."""
    limit = comparison.limits.get("max_error")
    own = errors.get("max_error")
    if comparison.divergence is None or not limit or own is None:
        return False
    explained = comparison.divergence["allowed"] * find_factor("max_error") * own / limit
    return bool(comparison.divergence["margin"] <= explained)


def find_limited_artifacts(
    report: VerificationReport, errors: Mapping[str, PrecisionErrors]
) -> frozenset[str]:
    """Return the graphs that failed only where PyTorch itself loses as much in their precision."""
    failed: dict[str, list[Comparison]] = {}
    for comparison in report.comparisons:
        if not comparison.passed:
            failed.setdefault(comparison.artifact, []).append(comparison)
    return frozenset(
        artifact
        for artifact, comparisons in failed.items()
        if all(is_lost_in_pytorch(one, errors.get(report.precisions[artifact], {})) for one in comparisons)
    )


def add_errors_of_searches(
    verifier: Verifier,
    report: VerificationReport,
    errors: dict[str, PrecisionErrors],
    calibration: Calibration,
) -> None:
    """Add to the errors the effect of rounding along the failed searches of graphs."""
    for artifact in report.failed_artifacts(verifier.bundle.manifest):
        failed = {c.case for c in report.comparisons if c.artifact == artifact.id and not c.passed}
        searches = {case.name for case in verifier.expected.cases if case.runner == "beams"}
        rounding = calibration.make_rounding(artifact.precision)
        if rounding is None or not failed & searches:
            continue
        along = verifier.measure_failed_search(artifact, rounding)
        known = errors[artifact.precision]
        errors[artifact.precision] = {**known, **{n: max(own, known.get(n, 0.0)) for n, own in along.items()}}


def adopt_stored_weights(
    calibration: Calibration, bundle: Bundle, read: Mapping[str, Comparison]
) -> Calibration:
    """Return the calibration with the codes that GPTQ chose, as the graphs store them.

    A checkpoint does not tell what GPTQ makes of it, so export and later verifications alike take the graphs'
    word, where reading finds that GPTQ can have made it. Of a graph with a fault that was `read`, by the
    graphs' ids, nothing is taken: it sets no limits for itself, and fails whatever they are.
    """
    quantized = dict(calibration.weights)
    for artifact in bundle.manifest.artifacts:
        kind = PRECISIONS[artifact.precision].weights
        if kind not in quantized or not read[artifact.id].passed:
            continue
        weights = quantized[kind]
        graph = load_graph(bundle.path(artifact.file)).graph
        products = dict(weights.products)
        by_name = {}
        for stored in read_weights(graph, artifact.quantization.get("rows", {})):
            if stored.rows is not None and stored.names in products:
                product = products[stored.names]
                smoothing = stored.rows.smoothing
                products[stored.names] = replace(product, smoothing=smoothing, weight=read_whole(stored))
            elif (stored.may_be_gptq or stored.is_kept) and stored.names[0] in weights.bits:
                by_name[stored.names[0]] = stored
        compensated = LazyMapping(by_name, read_whole)
        quantized[kind] = replace(weights, compensated=compensated, products=products)
    return replace(calibration, weights=quantized)


def read_whole(weight: StoredWeight) -> QuantizedWeight:
    """Return all rows of a graph's weight."""
    return weight.read(slice(None))


def read_accepted(manifest: Manifest) -> dict[str, Accepted]:
    """Return the losses that a user accepted for each precision, as the graphs' gates keep them."""
    return {artifact.precision: artifact.gate.get("accepted", {}) for artifact in manifest.artifacts}


def judge_by_float64(
    verifier: Verifier,
    model: ReferenceModel,
    report: VerificationReport,
    limits: dict[str, dict[str, float]],
    progress: Progress,
) -> VerificationReport:
    """Return the report with failed fp32 graphs judged by fp32's own rounding, where that is larger.

    PyTorch in float64 is the witness. The limits of fp32 grow in place.
    """
    failed = [
        artifact
        for artifact in report.failed_artifacts(verifier.bundle.manifest)
        if artifact.precision == "fp32"
        and all(c.limits for c in report.comparisons if c.artifact == artifact.id and not c.passed)
    ]
    if not failed or not is_module(model):
        return report
    progress("computing fp32's own loss compared with float64")
    gaps = verifier.measure_fp32_gaps(model)
    own = verifier.choose_limits("fp32", gaps)
    grown = {name: limit for name, limit in own.items() if limit > limits["fp32"].get(name, 0.0)}
    if not grown:
        return report
    limits["fp32"] = own
    comparisons = list(report.comparisons)
    for artifact in failed:
        again = {(c.backend, c.case): c for c in verifier.compare(artifact, own, progress)}
        comparisons = [
            again.get((c.backend, c.case), c) if c.artifact == artifact.id else c for c in comparisons
        ]
    errors = verifier.name_precision_errors(gaps)
    note = describe_rounding(errors)
    log.warning("%s", note)
    return replace(report, comparisons=tuple(comparisons), notes=(*report.notes, note))


def describe_rounding(errors: PrecisionErrors) -> str:
    """Return an explanation of fp32's own uncertainty."""
    caps = CAPS["fp32"]
    usual_by_name = {name: caps[metric] for name in errors if (metric := name.rpartition(".")[2]) in caps}
    name = max(usual_by_name, key=lambda name: errors[name] / usual_by_name[name])
    usual = usual_by_name[name]
    return (
        f"this model amplifies rounding: PyTorch's own fp32 differs from float64 by a {name} of"
        f" {errors[name]:.3g}, and at most {usual:.3g} is usual. On any engine, and in PyTorch, its fp32"
        f" results are no surer than that, and its fp32 graphs are allowed {GAP_FACTOR:g} times as much"
    )
