"""A bundle of PlanForge's, packaged for onnxruntime-genai and run by it: what the runtime alone costs."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import onnxruntime_genai, planforge
from .system import System


class GenaiPackage(onnxruntime_genai.OnnxruntimeGenai):
    """A packaged bundle, with the same graph and weights that PlanForge runs."""

    name = "genai, same graph"
    packages = ("planforge", "onnxruntime-genai", "onnxruntime")

    def gathered_tables(self, precision: str) -> int:
        return planforge.SYSTEM.gathered_tables(precision)

    def code_stamp(self) -> str:
        return planforge.SYSTEM.code_stamp()

    def prepare(
        self, checkpoint: Path, kind: str, precision: str, out: Path, settings: Mapping[str, Any]
    ) -> None:
        from planforge.exporter import package

        with tempfile.TemporaryDirectory(dir=out.parent) as folder:
            bundle = Path(folder) / "bundle"
            planforge.SYSTEM.prepare(checkpoint, kind, precision, bundle, settings)
            package(bundle, out, runtime="genai", precision=[precision], hard_links=True, verify=False)


SYSTEM: System = GenaiPackage()
