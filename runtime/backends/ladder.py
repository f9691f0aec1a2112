"""Which engine runs a bundle here, and why not a better one."""

from __future__ import annotations

import logging

from ..bundle.bundle import Bundle
from ..errors import BackendUnavailableError, InputError
from .backend import Backend

log = logging.getLogger("planforge")

RUNGS = ("tensorrt-rtx", "tensorrt", "ort-cuda", "ort-cpu")  # the best first
BACKENDS = ("auto", *RUNGS)


def choose_backend(
    name: str,
    bundle: Bundle,
    precision: str | None = None,
    threads: int | None = None,
    verify: bool = False,
    device: int = 0,
) -> Backend:
    """The named engine, or with "auto" the best one that works here; one log line says which, and why.

    Raises:
        InputError: no such backend, or no such GPU.
        BackendUnavailableError: says what is missing, and what to install or to run.
    """
    if name not in BACKENDS:
        raise InputError(f"backend={name!r} is not one of {list(BACKENDS)}")
    reasons = []
    for rung in RUNGS if name == "auto" else (name,):
        try:
            backend = open_rung(rung, bundle, precision, threads, verify, device)
        except BackendUnavailableError as error:
            if rung == name:
                raise BackendUnavailableError(
                    f"{bundle.folder.name} cannot run on {rung}: {error}"
                ) from error
            reasons.append(f"{rung} was skipped, as {error}")
        else:
            break
    else:
        raise BackendUnavailableError(f"{bundle.folder.name} can run on nothing here: {'; '.join(reasons)}")
    log.info("%s runs on %s, %s", bundle.folder.name, backend.name, "; ".join([str(backend), *reasons]))
    return backend


def open_rung(
    name: str, bundle: Bundle, precision: str | None, threads: int | None, verify: bool, device: int
) -> Backend:
    """One engine for a bundle. What an engine needs is imported when it is tried."""
    if name == "ort-cpu":
        from .ort_backend import OrtCpuBackend

        return OrtCpuBackend(threads, verify)
    if name == "ort-cuda":
        from .ort_cuda_backend import OrtCudaBackend

        return OrtCudaBackend(bundle, precision, device, verify)
    from .tensorrt_backend import TensorRtBackend

    return TensorRtBackend(name, bundle, precision, device, verify)
