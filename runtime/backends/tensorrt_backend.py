"""TensorRT plans on a GPU: TensorRT and TensorRT-RTX by one code path."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..bundle.bundle import Bundle
from ..bundle.manifest import Artifact, Plan
from ..errors import BackendError, BackendUnavailableError, BundleError
from .cuda_memory import Device, cuda_of_driver, gpu_at
from .passport import Host, misfit, plans_of, rebuild_command
from .runtime_cache import RuntimeCache
from .tensorrt_library import import_library, make_logger
from .tensorrt_program import TensorRtProgram


class TensorRtBackend:
    """Runs those graphs of a bundle that have a plan for this machine.

    Args:
        name: of the library.
        bundle: whose plans are looked at, none of them loaded.
        precision: the one to run; any that was found to be right when None.
        device: the GPU's number.

    Raises:
        BackendUnavailableError: no plan fits, or something is missing; says what, and what to do.
        InputError: no such GPU.
    """

    def __init__(self, name: str, bundle: Bundle, precision: str | None = None, device: int = 0) -> None:
        self.name = name
        plans, reason = plans_of(bundle, name, precision)
        if not plans:
            raise BackendUnavailableError(reason)
        self.trt = import_library(name)
        gpu = gpu_at(device)
        host = Host(self.trt.__version__, gpu.sm, cuda_of_driver())
        self.plans: dict[str, Plan] = {}
        for graph, candidates in plans.items():
            fits = {plan.file: misfit(plan, host, bundle) for plan in candidates}
            chosen = next((plan for plan in candidates if not fits[plan.file]), None)
            if chosen is None:
                raise BackendUnavailableError(fits[candidates[-1].file])
            self.plans[graph] = chosen
        self.device = Device(device)

    def __str__(self) -> str:
        return (
            f"{self.device.gpu.name}: the plan of {' and '.join(p.built_from for p in self.plans.values())}"
        )

    def artifact(self, bundle: Bundle, graph: str, precision: str | None) -> Artifact:
        """What the graph's plan takes."""
        if graph not in self.plans:
            raise BundleError(f"{bundle.folder} has no {graph}; it has {', '.join(self.plans)}")
        plan = self.plans[graph]
        return plan.narrowed(bundle.manifest.artifact(plan.built_from))

    def open(self, bundle: Bundle, artifact: Artifact) -> TensorRtProgram:
        plan = self.plans[artifact.graph]
        path = bundle.path(plan.file)  # hashed: a plan that has changed is never handed to the library
        with self.device.turn():
            engine = load_engine(self.trt, path, plan, bundle)
            cache = RuntimeCache(path, plan.version, self.device.gpu.sm) if self.is_rtx else None
            return TensorRtProgram(self.trt, engine, self.device, path.name, cache, self.explain(bundle))

    @property
    def is_rtx(self) -> bool:
        return self.name == "tensorrt-rtx"

    def explain(self, bundle: Bundle) -> str:
        """What to do about a shape that no profile takes."""
        return f"for more, {rebuild_command(bundle, self.name)} --max AXIS=N"


def load_engine(trt: Any, path: Path, plan: Plan, bundle: Bundle) -> Any:
    """The plan as an engine; a stripped one with the bundle's weights.

    Raises:
        BackendError: the library refuses it; in its words.
    """
    logger = make_logger(trt)
    runtime = trt.Runtime(logger)
    content = path.read_bytes()
    if hasattr(runtime, "get_engine_validity"):
        validity, diagnostics = runtime.get_engine_validity(content)
        if validity == trt.EngineValidity.INVALID:
            raise BackendError(f"{trt.__name__} says that {path.name} cannot run here: {diagnostics}")
    engine = runtime.deserialize_cuda_engine(content)
    if engine is None:
        raise BackendError(f"{trt.__name__} cannot load {path.name}: {said(logger)}")
    if plan.stripped:
        artifact = bundle.manifest.artifact(plan.built_from)
        for name in artifact.data:
            bundle.path(name)
        graph = bundle.path(artifact.file)
        refitter = trt.Refitter(engine, logger)
        filled = trt.OnnxParserRefitter(refitter, logger).refit_from_file(str(graph))
        if not (filled and refitter.refit_cuda_engine()):
            raise BackendError(f"{trt.__name__} cannot fill {path.name} with the weights: {said(logger)}")
    return engine


def said(logger: Any) -> str:
    """What a library complained of, on one line."""
    return "; ".join(" ".join(text.split()) for text in logger.errors) or "it gives no reason"
