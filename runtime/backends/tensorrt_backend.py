"""TensorRT plans on a GPU: TensorRT and TensorRT-RTX by one code path."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..bundle.bundle import Bundle
from ..bundle.manifest import Artifact, Axis, Plan, PlanWeight
from ..errors import BackendError, BackendUnavailableError, BundleError, ManifestError
from .backend import LoadRequest
from .cuda_memory import Device
from .device_buffer import DeviceBuffer, upload_array
from .gpus import find_driver_cuda, find_gpu
from .plan_check import check_engine
from .plan_compatibility import (
    Host,
    choose_plan,
    explain_misfit,
    find_plans,
    find_sides,
    keep_first_precision,
    make_rebuild_command,
)
from .runtime_cache import RuntimeCache
from .tensorrt_library import import_library, make_logger
from .tensorrt_program import TensorRtProgram


class TensorRtBackend:
    """Runs those graphs of a bundle that have a plan for this machine, by the library of that name."""

    widens_half = False
    openings = 1

    def __init__(self, name: str, bundle: Bundle, request: LoadRequest) -> None:
        self.name = name
        self.verify = request.verify
        self.weights: dict[tuple[str, int], DeviceBuffer] = {}
        plans = find_plans(bundle, name, request.precision)
        self.trt = import_library(name)
        gpu = find_gpu(request.device)
        host = Host(self.trt.__version__, gpu.sm, find_driver_cuda())
        fitting: dict[str, list[Plan]] = {}
        for graph, candidates in plans.items():
            misfits = {plan.file: explain_misfit(plan, host, bundle) for plan in candidates}
            fitting[graph] = [plan for plan in candidates if not misfits[plan.file]]
            if not fitting[graph]:
                raise BackendUnavailableError(misfits[candidates[-1].file])
        self.plans = {
            graph: choose_plan(some, request.max_length, gpu.memory)
            for graph, some in keep_first_precision(bundle, fitting).items()
        }
        self.device = Device(request.device)

    def __str__(self) -> str:
        plans = [
            f"{plan.built_from} for {plan.find_longest('batch')} x {plan.find_longest('tokens')} tokens"
            for plan in self.plans.values()
        ]
        return f"{self.device.gpu.name}: the plan of {' and '.join(plans)}"

    def artifact(self, bundle: Bundle, graph: str, precision: str | None) -> Artifact:
        """Return the artifact, narrowed to what the graph's plan takes."""
        if graph not in self.plans:
            raise BundleError(f"{bundle.folder} has no {graph}; it has {', '.join(self.plans)}")
        plan = self.plans[graph]
        return plan.narrow_artifact(bundle.manifest.artifact(plan.built_from))

    def open(self, bundle: Bundle, artifact: Artifact) -> TensorRtProgram:
        plan = self.plans[artifact.graph]
        path = bundle.path(plan.file)  # hashed: a plan that has changed is never handed to the library
        with self.device.turn():
            engine = load_engine(self.trt, path, plan)
            check_engine(self.trt, engine, bundle, plan, artifact)
            is_rtx = self.name == "tensorrt-rtx"
            cache = RuntimeCache(path, plan.version, self.device.gpu.sm) if is_rtx else None
            weights = {w.name: self.load_weight(bundle, w) for w in plan.weights}
            hint = partial(explain, bundle, plan)
            return TensorRtProgram(self.trt, engine, self.device, path.name, cache, hint, weights)

    def load_weight(self, bundle: Bundle, weight: PlanWeight) -> DeviceBuffer:
        """Return a weight that a plan leaves out; one that several plans read is on the device once."""
        place = weight.file, weight.offset
        if place not in self.weights:
            path = bundle.path(weight.file, verify=self.verify)
            dtype = np.dtype(weight.dtype)
            if weight.offset + math.prod(weight.shape) * dtype.itemsize > path.stat().st_size:
                raise ManifestError(f"{bundle.folder}: {weight.name} lies beyond the end of {weight.file}")
            values = np.memmap(path, dtype, "r", weight.offset, weight.shape)
            self.weights[place] = upload_array(self.device, weight.name, values)
        return self.weights[place].view(weight.shape)


def explain(bundle: Bundle, plan: Plan, name: str, axis: int, length: int) -> str:
    """Return what to do about a length of an input's axis that no profile takes."""
    artifact = bundle.manifest.artifact(plan.built_from)
    (spec,) = (spec for spec in artifact.inputs if spec.name == name)
    graphs = spec.axes[axis]
    if not isinstance(graphs, Axis) or length < graphs.min:
        return "no plan of this graph takes it"
    option = "batch" if graphs.name == "batch" else "length"
    for side, (own, pixels) in find_sides(artifact).items():
        if graphs.name == own:
            return make_rebuild_command(bundle, plan.engine, plan=plan, limits={side: pixels * length})
    if length > graphs.max:
        return f"the graph takes {graphs.max} at most; export it again with a larger --max-{option}"
    return make_rebuild_command(bundle, plan.engine, plan=plan, limits={option: length})


def load_engine(trt: Any, path: Path, plan: Plan) -> Any:
    """Load a plan as an engine; where the library refuses it, the error has the library's own message."""
    logger = make_logger(trt)
    runtime = trt.Runtime(logger)
    if plan.compatible:  # such a plan carries the part of the library that reads it
        runtime.engine_host_code_allowed = True
    content = path.read_bytes()
    if hasattr(runtime, "get_engine_validity"):
        validity, bits = runtime.get_engine_validity(content)
        if validity == trt.EngineValidity.INVALID:
            kinds = trt.EngineInvalidityDiagnostics.__members__.items()
            names = [name for name, kind in kinds if int(bits) & int(kind)]
            why = ", ".join(names) or join_errors(logger)
            raise BackendError(f"{trt.__name__} says that {path.name} cannot run here: {why}")
    engine = runtime.deserialize_cuda_engine(content)
    if engine is None:
        raise BackendError(f"{trt.__name__} cannot load {path.name}: {join_errors(logger)}")
    return engine


def join_errors(logger: Any) -> str:
    """Return the errors that a library logged, on one line."""
    return "; ".join(" ".join(text.split()) for text in logger.errors) or "it gives no reason"
