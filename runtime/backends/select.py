"""Chooses the engine that runs a bundle here, and says why no better one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from ..bundle.bundle import Bundle
from ..errors import BackendError, BackendUnavailableError, InputError
from ..suggest import did_you_mean
from .backend import Backend, LoadRequest
from .gpus import NO_DRIVER, driver_is_missing, gpu_is_present

Model = TypeVar("Model")
log = logging.getLogger("planforge")

BACKEND_PRIORITY = ("tensorrt-rtx", "tensorrt", "ort-cuda", "openvino", "ort-cpu")  # the best first
BACKENDS = ("auto", *BACKEND_PRIORITY)
OPTIONAL = "openvino"  # "auto" takes it where the bundle's default asks for it, and in these precisions
OPTIONAL_FOR = ("bf16", "w8a8")


def open_on(
    bundle: Bundle, request: LoadRequest, open_model: Callable[[Backend], Model]
) -> tuple[Backend, Model]:
    """Open a model on the named engine, or with "auto" on the best that works; one log line says why.

    With "auto" only an engine that cannot be used here, or that refuses its plan or graph, is passed over.
    What the caller asked for and cannot have (`InputError`, `MemoryLimitError`) is raised, as the next engine
    would answer another question. The line is a warning where a GPU is here and is not used, or where an
    engine failed.
    """
    name = request.backend
    if name not in BACKENDS:
        raise InputError(f"backend={name!r} is not one of {list(BACKENDS)}{did_you_mean(name, BACKENDS)}")
    reasons: dict[str, list[str]] = {}
    failed = False
    names = list_candidates(bundle, request) if name == "auto" else (name,)
    for candidate in names:
        try:
            backend = make_backend(candidate, bundle, request)
            model = open_model(backend)
            break
        except BackendUnavailableError as error:
            if candidate == name:
                raise BackendUnavailableError(
                    f"{bundle.folder.name} cannot run on {candidate}: {error}"
                ) from error
            reasons.setdefault(str(error), []).append(candidate)
        except BackendError as error:
            if candidate == names[-1]:
                raise
            failed = True
            reasons.setdefault(str(error), []).append(candidate)
    else:
        skipped = "; ".join(describe_skipped(reasons))
        raise BackendUnavailableError(f"no backend on this machine can run {bundle.folder.name}: {skipped}")
    missed = name == "auto" and backend.name == "ort-cpu" and gpu_is_present()
    log.log(
        logging.WARNING if failed or missed else logging.INFO,
        "%s runs on %s, %s",
        bundle.folder.name,
        f"{backend.name} though an NVIDIA GPU is here" if missed else backend.name,
        "; ".join([str(backend), *describe_skipped(reasons)]),
    )
    if request.device and backend.name == "ort-cpu":
        log.warning("device=%d is not used: %s runs on ort-cpu", request.device, bundle.folder.name)
    return backend, model


def list_candidates(bundle: Bundle, request: LoadRequest) -> tuple[str, ...]:
    """Return the engines that "auto" tries, the best first."""
    manifest = bundle.manifest
    first = next((artifact.precision for artifact in manifest.artifacts), None)
    precision = request.precision or manifest.default_precision or first
    is_default = request.precision is None and manifest.default_backend == OPTIONAL
    wanted = is_default or precision in OPTIONAL_FOR
    return tuple(name for name in BACKEND_PRIORITY if wanted or name != OPTIONAL)


def describe_skipped(reasons: Mapping[str, Sequence[str]]) -> list[str]:
    """Return which engines were skipped, grouped by the reason."""
    lines = []
    for reason, (first, *others) in reasons.items():
        names = f"{', '.join((first, *others[:-1]))} and {others[-1]} were" if others else f"{first} was"
        lines.append(f"{names} skipped, as {reason}")
    return lines


def make_backend(name: str, bundle: Bundle, request: LoadRequest) -> Backend:
    """Return one engine for a bundle. What an engine needs is imported when it is tried."""
    if name == "ort-cpu":
        from .ort_backend import OrtCpuBackend

        return OrtCpuBackend(request.threads, request.verify, request.prepared)
    if name == "openvino":
        from .openvino_backend import OpenVinoBackend

        return OpenVinoBackend(request.threads, request.verify)
    if driver_is_missing():  # the first thing to know, whatever else is missing
        raise BackendUnavailableError(NO_DRIVER)
    if name == "ort-cuda":
        from .ort_cuda_backend import OrtCudaBackend

        return OrtCudaBackend(bundle, request)
    from .tensorrt_backend import TensorRtBackend

    return TensorRtBackend(name, bundle, request)
