"""Verification of a whole bundle, with PyTorch or with the golden data that an export left."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...runtime.bundle.bundle import Bundle
from ...runtime.errors import InputError
from ..calibration import Calibration, recorded
from ..errors import CheckpointError, SourceError, VerificationError
from ..prompts import read_prompts
from ..source import Source, resolve_source
from .examiners import examiner_of
from .explain import explain, tracer_of
from .report import VerificationReport, read_golden

if TYPE_CHECKING:
    from ...models.checkpoint import Model

log = logging.getLogger("planforge")

Progress = Callable[[str], None]


def verify(
    bundle: str | Path,
    *,
    source: str | Path | None = None,
    backend: str = "ort-cpu",
    prompts: str | Path | None = None,
    progress: Progress = lambda _: None,
) -> VerificationReport:
    """Compares every ONNX graph of a bundle with the model it was exported from.

    Args:
        bundle: the folder.
        source: the checkpoint; by default the recorded one, if it is still the same. Without it
            the bundle is compared with its golden data, and the report says so.
        backend: the engine to run the graphs on; "ort-cpu".
        prompts: a file with a prompt a line, instead of the built-in ones; needs the checkpoint.
        progress: called with a line when a stage begins.

    Raises:
        BundleError: a file is missing or has changed.
        VerificationError: nothing to compare with, or prompts that cannot be used.
    """
    if backend not in ("auto", "ort-cpu"):
        raise InputError(f"backend={backend!r}: this version verifies on 'ort-cpu' only")
    opened = Bundle.open(bundle)
    progress("checking files")
    opened.verify_files()
    checkpoint = resolve_source(source) if source is not None else recorded_source(opened)
    if checkpoint is None:
        if prompts is not None:
            raise VerificationError("--prompts needs the checkpoint; pass --source MODEL")
        arrays, limits = read_golden(golden_file(opened))
        expected = examiner_of(opened.manifest).from_arrays(arrays)
        report = compare_all(opened, expected, limits, with_pytorch=False, progress=progress)
        return explain(opened, report, expected, progress)
    if source is not None and checkpoint.sha256() != opened.manifest.source.get("sha256"):
        raise VerificationError(
            f"{checkpoint.folder} is not the checkpoint that the bundle was exported from (its hash differs)"
        )
    try:
        from ...models import load_model

        model = load_model(checkpoint.folder)
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    texts = read_prompts(None if prompts is None else Path(prompts), checkpoint.folder)
    progress("asking PyTorch")
    expected = examiner_of(opened.manifest).expect(model, opened, texts)
    calibration = recorded(opened, model)
    report, _, _ = examine(opened, model, expected, calibration, progress)
    tracer = tracer_of(opened.manifest, checkpoint, model)
    return explain(opened, report, expected, progress, model, calibration, tracer)


def recorded_source(bundle: Bundle) -> Source | None:
    """The checkpoint that the manifest names, if it is there and unchanged and torch can read it."""
    import importlib.util

    recorded = bundle.manifest.source
    argument = str(recorded.get("argument", ""))
    if recorded.get("kind") == "folder":
        argument = str(bundle.folder / argument)
    if importlib.util.find_spec("torch") is None:
        return None
    try:
        source = resolve_source(argument)
        if source.sha256() == recorded.get("sha256"):
            return source
        why = "has changed"
    except (SourceError, OSError):
        why = "is not there"
    log.warning("the checkpoint %s %s; comparing with golden data instead", recorded.get("argument"), why)
    return None


def golden_file(bundle: Bundle) -> Path:
    """The samples and limits that the export kept."""
    for name in bundle.manifest.files:
        if name.startswith("checks/golden-"):
            return bundle.path(name)
    raise VerificationError(
        f"{bundle.folder} has no golden data and its checkpoint is not at hand; pass --source MODEL"
    )


def examine(
    bundle: Bundle, model: Model, expected: Any, calibration: Calibration, progress: Progress
) -> tuple[VerificationReport, dict[str, Any], dict[str, dict[str, float]]]:
    """Compares every artifact with PyTorch.

    Args:
        expected: what the bundle's examiner asked PyTorch.
        calibration: how the bundle's whole numbers were chosen.

    Returns:
        The report, and what golden data keeps: PyTorch's answers and the limits.

    Raises:
        VerificationError: rounded to a precision, the model itself is not finite.
    """
    examiner = examiner_of(bundle.manifest)
    limits: dict[str, dict[str, float]] = {}
    try:
        for precision in sorted({a.precision for a in bundle.manifest.artifacts}):
            progress(f"asking PyTorch what {precision} may lose")
            rounding = calibration.rounding(precision)
            gaps = {} if rounding is None else examiner.gaps(model, bundle, expected, rounding)
            limits[precision] = examiner.limits(bundle, expected, precision, gaps)
    except ValueError as error:
        raise VerificationError(str(error)) from error
    report = compare_all(bundle, expected, limits, with_pytorch=True, progress=progress)
    return report, examiner.to_arrays(expected), limits


def compare_all(
    bundle: Bundle,
    expected: Any,
    limits: Mapping[str, Mapping[str, float]],
    *,
    with_pytorch: bool,
    progress: Progress,
) -> VerificationReport:
    """Every artifact, every case."""
    examiner = examiner_of(bundle.manifest)
    comparisons = [
        comparison
        for artifact in bundle.manifest.artifacts
        for comparison in examiner.compare(bundle, artifact, expected, limits[artifact.precision], progress)
    ]
    return VerificationReport(with_pytorch, tuple(comparisons))
