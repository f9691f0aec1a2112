"""Verification of a whole bundle, with PyTorch or with the golden data that an export left."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ...runtime.bundle.bundle import Bundle
from ...runtime.errors import InputError
from ...runtime.text.tokenizer import Tokenizer
from ..errors import CheckpointError, SourceError, VerificationError
from ..prompts import read_prompts
from ..source import Source, resolve_source
from .gate import limits_for
from .parity import Expectation, compare, expect
from .report import VerificationReport, read_golden

if TYPE_CHECKING:
    from ...models import GPT2
    from .reference import Reference

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
        expected, limits = golden_of(opened)
        return compare_all(opened, expected, limits, with_pytorch=False, progress=progress)
    if source is not None and checkpoint.sha256() != opened.manifest.source.get("sha256"):
        raise VerificationError(
            f"{checkpoint.folder} is not the checkpoint that the bundle was exported from (its hash differs)"
        )
    try:
        from ...models import load_model

        model = load_model(checkpoint.folder)
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    texts = read_prompts(None if prompts is None else Path(prompts))
    reference, expected = expectation_from(opened, model, texts, progress)
    precisions = {a.precision for a in opened.manifest.artifacts}
    limits = limits_from(reference, expected, precisions)
    return compare_all(opened, expected, limits, with_pytorch=True, progress=progress)


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
        return source if source.sha256() == recorded.get("sha256") else None
    except (SourceError, OSError):
        return None


def golden_of(bundle: Bundle) -> tuple[Expectation, dict[str, dict[str, float]]]:
    """The samples and limits that the export kept."""
    for name in bundle.manifest.files:
        if name.startswith("checks/golden-"):
            return read_golden(bundle.path(name))
    raise VerificationError(
        f"{bundle.folder} has no golden data and its checkpoint is not at hand; pass --source MODEL"
    )


def expectation_from(
    bundle: Bundle, model: GPT2, prompts: Sequence[str], progress: Progress
) -> tuple[Reference, Expectation]:
    """What PyTorch computes for the prompts."""
    from .reference import Reference

    progress("asking PyTorch")
    reference = Reference(model)
    manifest = bundle.manifest
    tokenizer = Tokenizer.from_file(bundle.path(str(manifest.tokenizer["files"][0])))
    return reference, expect(reference, tokenizer, prompts, manifest.generation.max_length)


def limits_from(
    reference: Reference, expected: Expectation, precisions: Iterable[str]
) -> dict[str, dict[str, float]]:
    """The limits of each precision, from the one table and from what rounding does in PyTorch.

    Raises:
        VerificationError: the model with rounded weights is not finite.
    """
    import torch

    rounded = {"fp16": torch.float16}
    try:
        return {
            precision: limits_for(
                precision,
                reference.gap(expected.samples, rounded[precision]) if precision in rounded else None,
            )
            for precision in sorted(precisions)
        }
    except ValueError as error:
        raise VerificationError(str(error)) from error


def compare_all(
    bundle: Bundle,
    expected: Expectation,
    limits: Mapping[str, Mapping[str, float]],
    *,
    with_pytorch: bool,
    progress: Progress,
) -> VerificationReport:
    """Every artifact, every case."""
    comparisons = [
        comparison
        for artifact in bundle.manifest.artifacts
        for comparison in compare(bundle, artifact, expected, limits[artifact.precision], progress)
    ]
    return VerificationReport(with_pytorch, tuple(comparisons))
