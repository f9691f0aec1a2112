"""Checkpoint -> ONNX -> plan -> verified bundle; and the `planforge` command.

The functions load on first use, so that `planforge run` and `planforge build` never load torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .errors import (
        BuildError,
        CheckpointError,
        ExportError,
        OutputError,
        SourceError,
        VerificationError,
    )
    from .exporting import ExportResult, export
    from .fitting.fitting import FitResult, fit_head
    from .linting.lint import lint
    from .linting.report import LintReport
    from .options import ExportOptions
    from .packaging.package import PackageResult, package
    from .pruning import PruneResult, prune
    from .tensorrt.plans import BuildResult, build
    from .verification.report import VerificationReport
    from .verification.verify import verify

__all__ = [
    "BuildError",
    "BuildResult",
    "CheckpointError",
    "ExportError",
    "ExportOptions",
    "ExportResult",
    "FitResult",
    "LintReport",
    "OutputError",
    "PackageResult",
    "PruneResult",
    "SourceError",
    "VerificationError",
    "VerificationReport",
    "build",
    "export",
    "fit_head",
    "lint",
    "package",
    "prune",
    "verify",
]

_HOME = {
    **dict.fromkeys(
        ("BuildError", "CheckpointError", "ExportError", "OutputError", "SourceError", "VerificationError"),
        ".errors",
    ),
    **dict.fromkeys(("ExportResult", "export"), ".exporting"),
    "ExportOptions": ".options",
    **dict.fromkeys(("FitResult", "fit_head"), ".fitting.fitting"),
    "LintReport": ".linting.report",
    "lint": ".linting.lint",
    **dict.fromkeys(("PackageResult", "package"), ".packaging.package"),
    **dict.fromkeys(("PruneResult", "prune"), ".pruning"),
    **dict.fromkeys(("BuildResult", "build"), ".tensorrt.plans"),
    "verify": ".verification.verify",
    "VerificationReport": ".verification.report",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name], __name__), name)
