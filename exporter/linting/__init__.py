"""Says what TensorRT, TensorRT-RTX and ONNX Runtime will refuse or get wrong, before a long build."""

from ..targets import TARGETS, Target
from .lint import lint
from .report import Finding, LintReport

__all__ = ["TARGETS", "Finding", "LintReport", "Target", "lint"]
