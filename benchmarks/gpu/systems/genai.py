"""onnxruntime-genai on CUDA: a bundle of the target `cuda`, packaged for it, run by its own generator."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...systems import onnxruntime_genai
from ...systems.planforge import PlanForge
from ...systems.system import Session, Skip
from .copies import preload_libraries
from .planforge import CLASSES, export_bundle, require

PACKAGE = "pip install onnxruntime-genai-cuda"


class GenaiGpu(PlanForge):
    """onnxruntime-genai with the graph and weights that PlanForge runs; prepares "max_batch".

    For tests: the setting "provider", "cpu" in place of CUDA.
    """

    name = "onnxruntime-genai-cuda"
    classes: Mapping[str, str] = CLASSES

    def prepare(
        self, checkpoint: Path, kind: str, precision: str, out: Path, settings: Mapping[str, Any]
    ) -> None:
        """Write the bundle, and beside it the package."""
        require("ort-cuda")
        import_genai("cuda")
        export_bundle(checkpoint, out / "bundle", precision, "cuda", settings["max_batch"])
        package_bundle(out / "bundle", out / "package", precision)

    def generate(self, model: Path, precision: str, threads: int, settings: Mapping[str, Any]) -> Session:
        provider = settings.get("provider", "cuda")
        genai = import_genai(provider)
        config = genai.Config(str(model / "package"))
        if provider == "cpu":
            config.clear_providers()
        return Generator(genai.Model(config))


def import_genai(provider: str) -> Any:
    """Return onnxruntime-genai; raise Skip where it is not installed, or has no such provider."""
    try:
        import onnxruntime_genai as genai
    except ImportError as error:
        raise Skip(f"onnxruntime_genai cannot be imported ({error}): {PACKAGE}") from error
    if provider == "cuda":
        if not genai.is_cuda_available():
            raise Skip(
                f"the onnxruntime_genai here is without CUDA: pip uninstall onnxruntime-genai, {PACKAGE}"
            )
        preload_libraries()
    return genai


def package_bundle(bundle: Path, out: Path, precision: str) -> None:
    """Write a bundle's graph as a package; raise Skip with the reason where genai does not take it."""
    from planforge.exporter import package
    from planforge.runtime.bundle.artifact import IN_HALF
    from planforge.runtime.errors import InputError

    own = IN_HALF.get(precision, precision)
    try:
        package(bundle, out, runtime="genai", precision=[own], hard_links=True, verify=False)
    except InputError as error:
        raise Skip(f"no package in {precision}: {error}") from error


class Generator(onnxruntime_genai.Generator):
    """A greedy generator, with a cache in fp16."""

    def did(self, work: Mapping[str, Any]) -> dict[str, Any]:
        return {**super().did(work), "cache": "fp16"}


SYSTEM = GenaiGpu()
