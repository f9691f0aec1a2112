"""Which engine runs a bundle here, and why not a better one."""

from __future__ import annotations

import logging

from ..bundle.bundle import Bundle
from ..bundle.manifest import Artifact
from ..errors import BackendUnavailableError, BundleError, InputError, ManifestError
from .backend import Backend
from .ort_backend import OrtCpuBackend

log = logging.getLogger("planforge")

BACKENDS = ("auto", "ort-cpu")
CPU_DIALECTS = ("ort", "portable", "inplace")  # fastest first


def choose_backend(name: str, bundle: Bundle, threads: int | None, verify: bool) -> Backend:
    """The named engine, or with "auto" the best one that works here; one log line says why, and its threads.

    Raises:
        InputError: no such backend.
        BackendUnavailableError: names what to install.
    """
    if name not in BACKENDS:
        if name in ("tensorrt", "tensorrt-rtx", "ort-cuda"):
            raise BackendUnavailableError(
                f"backend={name!r}: this version builds and checks plans but runs bundles on the CPU only;"
                " use backend='ort-cpu'"
            )
        raise InputError(f"backend={name!r} is not one of {list(BACKENDS)}")
    backend = OrtCpuBackend(threads, verify)
    skipped = "".join(
        f"; its {plan.engine} plan is skipped, as this version does not run plans"
        for plan in bundle.manifest.plans[:1]
        if name == "auto"
    )
    log.info("%s runs on ort-cpu, %s%s", bundle.folder.name, backend.threads, skipped)
    return backend


def choose_artifact(bundle: Bundle, graph: str, precision: str | None) -> Artifact:
    """The graph to run on a CPU: of `precision`, or the manifest's default, or the first given at export.

    Raises:
        InputError: the bundle has no such precision.
        ManifestError: the default's gate has not passed.
    """
    found = [a for a in bundle.manifest.artifacts if a.graph == graph and a.dialect in CPU_DIALECTS]
    if not found:
        raise BundleError(f"{bundle.folder} has no {graph} graph that ONNX Runtime can run")
    precisions = list(dict.fromkeys(a.precision for a in found))
    default = bundle.manifest.default_precision
    wanted = (default or precisions[0]) if precision is None else precision
    if wanted not in precisions:
        raise InputError(f"precision={wanted!r} is not in this bundle, which has {precisions}")
    chosen = min((a for a in found if a.precision == wanted), key=lambda a: CPU_DIALECTS.index(a.dialect))
    if precision is None and default is not None and not chosen.passed:
        raise ManifestError(
            f"{bundle.folder}: the gate of its default, {chosen.id}, has not passed; name a precision of"
            f" {precisions}, or let `planforge bench {bundle.folder} --set-default` choose one"
        )
    return chosen
