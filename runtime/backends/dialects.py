"""Which graph of a bundle ONNX Runtime runs."""

from __future__ import annotations

from collections.abc import Sequence

from ..bundle.bundle import Bundle
from ..bundle.manifest import Artifact
from ..errors import BundleError, InputError, ManifestError
from ..suggest import did_you_mean

CPU_DIALECTS = ("ort", "portable", "inplace")  # fastest first
CUDA_DIALECTS = ("ort", "portable")


def choose_artifact(
    bundle: Bundle, graph: str, precision: str | None, dialects: Sequence[str] = CPU_DIALECTS
) -> Artifact:
    """Return the graph of `precision`, else of the manifest's default, else of the first given at export.

    The dialects are those that can be run, the fastest first.
    """
    artifacts = [a for a in bundle.manifest.artifacts if a.graph == graph and a.dialect in dialects]
    if not artifacts:
        raise BundleError(f"{bundle.folder} has no {graph} graph that ONNX Runtime can run")
    precisions = list(dict.fromkeys(a.precision for a in artifacts))
    default = bundle.manifest.default_precision
    wanted = (default or precisions[0]) if precision is None else precision
    if wanted not in precisions:
        hint = did_you_mean(wanted, precisions)
        raise InputError(f"precision={wanted!r} is not in this bundle, which has {precisions}{hint}")
    chosen = min((a for a in artifacts if a.precision == wanted), key=lambda a: dialects.index(a.dialect))
    if precision is None and default is not None and not chosen.passed:
        raise ManifestError(
            f"{bundle.folder}: the gate of its default, {chosen.id}, has not passed; name a precision of"
            f" {precisions}, or let `planforge bench {bundle.folder} --set-default` choose one"
        )
    return chosen
