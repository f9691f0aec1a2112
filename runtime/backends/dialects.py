"""Which graph of a bundle ONNX Runtime runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..bundle.artifact import IN_HALF, TOTAL, WINDOW_TOTAL
from ..bundle.bundle import Bundle
from ..bundle.manifest import Artifact
from ..errors import BackendUnavailableError, BundleError, InputError, ManifestError
from ..suggest import did_you_mean
from .architectures import describe_sm
from .cuda_kernels import ATTENTION, QUANTIZED_CACHE_SM, explain_missing_attention

CPU_DIALECTS = ("ort", "portable", "inplace")  # fastest first
CUDA_DIALECTS = ("ort", "portable")
PLANS_ONLY = ("nvfp4a16",)  # precisions with weights in fp4: ONNX Runtime has no kernel for it


def accept_all(artifact: Artifact) -> bool:
    return True


def choose_artifact(
    bundle: Bundle,
    graph: str,
    precision: str | None,
    dialects: Sequence[str] = CPU_DIALECTS,
    accepts: Callable[[Artifact], bool] = accept_all,
) -> Artifact:
    """Return the graph of `precision`, else of the manifest's default, else of the first given at export.

    The dialects are those that can be run, the fastest first. "int8" means w8a16 where only that is there, a
    graph that computes in fp16; "int4" w4a16.
    """
    graphs = [a for a in bundle.manifest.artifacts if a.graph == graph]
    artifacts = [a for a in graphs if a.dialect in dialects and a.precision not in PLANS_ONLY and accepts(a)]
    only = dict.fromkeys(a.precision for a in graphs if a.precision in PLANS_ONLY)
    if only and (precision in only or not artifacts):
        raise InputError(
            f"precision={next(iter(only))!r} runs in a plan alone, as ONNX Runtime has no fp4: build one for"
            f" a GPU of {describe_sm('sm120')} or newer, `planforge build {bundle.folder}`, or give another"
            " precision"
        )
    if not artifacts:
        raise BundleError(f"{bundle.folder} has no {graph} graph that ONNX Runtime can run")
    precisions = list(dict.fromkeys(a.precision for a in artifacts))
    default = bundle.manifest.default_precision
    default = None if default in only else default
    wanted = (default or precisions[0]) if precision is None else precision
    if wanted not in precisions and IN_HALF.get(wanted) in precisions:
        wanted = IN_HALF[wanted]
    if wanted not in precisions:
        hint = did_you_mean(wanted, precisions)
        raise InputError(f"precision={wanted!r} is not in this bundle, which has {precisions}{hint}")
    chosen = min((a for a in artifacts if a.precision == wanted), key=lambda a: dialects.index(a.dialect))
    if precision is None and default is not None and not chosen.passed:
        raise ManifestError(
            f"{bundle.folder}: its default, {chosen.id}, has not passed verification; give one of the"
            f" precisions {precisions}, or let `planforge bench {bundle.folder} --set-default` choose one"
        )
    return chosen


def explain_misfit_on_cuda(artifact: Artifact, cpu_nodes: bool = False) -> str:
    """Return why a graph is not run by ONNX Runtime on a GPU; "" where it is.

    Args:
        artifact: the graph.
        cpu_nodes: whether its attention may be computed on the CPU.
    """
    if artifact.dialect not in CUDA_DIALECTS:
        return f"ONNX Runtime runs no graph of the dialect {artifact.dialect} there"
    if artifact.computes_sizes:
        return (
            f"{artifact.id} splits tokens by their experts, at places that ONNX Runtime reads on the host"
            " before the GPU has computed them, which gives wrong results"
        )
    cache = next((spec.dtype for spec in artifact.inputs if spec.role.startswith("past.")), None)
    if artifact.dialect not in ATTENTION or cache is None:
        return ""
    if missing := explain_missing_attention(artifact.dialect, artifact.computes_in, cache):
        why = f"{artifact.id} would compute its attention on the CPU, unless loaded with cpu_nodes=True"
        return "" if cpu_nodes else f"{why}: {missing}"
    if any(spec.role in (TOTAL, WINDOW_TOTAL) for spec in artifact.inputs):
        return ""
    return (
        f"{artifact.id} was exported by an older version, and its attention reads there on the host what the"
        " GPU has not yet computed, which gives wrong results"
    )


def refuse_older_gpu(artifact: Artifact, sm: str) -> None:
    """Refuse a graph whose cache is in int8 on a GPU, such as "sm75", that has no kernel for it."""
    if "cache_bits" in artifact.quantization and int(sm.removeprefix("sm")) < QUANTIZED_CACHE_SM:
        raise BackendUnavailableError(
            f"{artifact.id} has a cache in int8, for which ONNX Runtime has no kernel on {describe_sm(sm)},"
            f" only on {describe_sm(f'sm{QUANTIZED_CACHE_SM}')} and newer: load a precision without -kv8"
        )
