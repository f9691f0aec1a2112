"""Says what TensorRT, TensorRT-RTX and ONNX Runtime will refuse or get wrong, before a long build."""

from .lint import lint
from .report import Finding, LintReport
from .targets import TARGETS, LintTarget

__all__ = ["TARGETS", "Finding", "LintReport", "LintTarget", "lint"]
