"""The one table of targets: engines by the names on the command line, for export, build and lint."""

from __future__ import annotations

import contextlib
import importlib.metadata
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ..runtime.backends.cuda_kernels import explain_missing_attention
from ..runtime.backends.openvino_backend import HINTS
from ..runtime.errors import InputError
from ..runtime.suggest import did_you_mean
from .precisions import PRECISIONS
from .tensorrt_versions import INPLACE_SINCE, TENSORRT_VERSIONS, Version, find_first_version

Engine = Literal["onnxruntime", "openvino", "tensorrt", "tensorrt-rtx"]

JETPACK_5 = "https://github.com/edgehook/Jetson-AI-task"
JETPACK = "https://docs.pytorch.org/TensorRT/getting_started/jetpack.html"
CONTAINERS = "https://github.com/dusty-nv/jetson-containers/blob/master/packages/cuda/tensorrt/config.py"
DOWNLOADS = "https://developer.nvidia.com/embedded/jetpack/downloads"
RTX_MEASURED = "measured with tensorrt_rtx 1.7.1.116"
ORT_MEASURED = "measured with onnxruntime 1.31.1"
ANY_ENGINE = "the operators of ONNX alone"


@dataclass(frozen=True)
class Target:
    """A target: an engine in one version, for which a graph is exported, built and checked."""

    name: str  # as on the command line
    engine: Engine  # the engine that runs the graph, or its plan
    version: Version  # (major, minor) of the engine
    opsets: tuple[int, int]  # the lowest and highest that are documented, or that were measured
    about: str  # the engine or board in words
    source: str  # where the version and its opsets are documented, or what they were measured with
    dialect: str  # the dialect of the decoder's graph that it takes
    # precisions that are not for it, though its dialect can have them; a model that has no such graph gets
    # another dialect's, in any precision
    without: tuple[str, ...] = ()
    on_gpu: bool = False  # whether ONNX Runtime runs it on a GPU
    sms: tuple[str, ...] = ()  # of a board with older GPUs alone

    def find_dialect(self, keeps_cache: bool, precision: str) -> str:
        """Return the dialect of a graph that it takes in a precision, whose attention has kernels there."""
        kind = PRECISIONS[precision]
        types = kind.computes_in, kind.keeps_cache_in
        has_none = self.on_gpu and explain_missing_attention(self.dialect, *types)
        return "portable" if keeps_cache and has_none else self.dialect

    @property
    def multiplies_in_half(self) -> bool:
        """Return whether products by quantized weights are in fp16 there, as on a GPU."""
        return self.plans or self.on_gpu

    @property
    def plans(self) -> bool:
        """Return whether it builds plans, as TensorRT and TensorRT-RTX do, which share a parser."""
        return self.engine in ("tensorrt", "tensorrt-rtx")

    def older_than(self, major: int, minor: int = 0) -> bool:
        """Tell whether it is a TensorRT before this version; always False for TensorRT-RTX."""
        return self.engine == "tensorrt" and self.version < (major, minor)

    def refuse_version(self, precision: str) -> str:
        """Return why its version has no plans in a precision; "" where it has some."""
        format = PRECISIONS[precision].format
        if format is None or not self.older_than(*(first := find_first_version(format.opset))):
            return ""
        needed, own = (f"{major}.{minor}" for major, minor in (first, self.version))
        return f"{precision}, with weights in {format.name}, needs TensorRT {needed}, not {own}"


def _make_target(version: Version, opsets: tuple[int, int], source: str) -> Target:
    text = f"{version[0]}.{version[1]}"
    dialect = "inplace" if version >= INPLACE_SINCE else "portable"
    return Target(f"tensorrt{text}", "tensorrt", version, opsets, f"TensorRT {text}", source, dialect)


_VERSIONS = {
    version: _make_target(version, opsets, source) for version, (opsets, source) in TENSORRT_VERSIONS.items()
}


def _make_jetpack(name: str, version: Version, about: str, source: str, *sms: str) -> Target:
    text = f"JetPack {about}: TensorRT {version[0]}.{version[1]}"
    return replace(_VERSIONS[version], name=f"jetpack{name}", about=text, source=source, sms=sms)


_CPU = Target(
    "cpu",
    "onnxruntime",
    (1, 31),
    (7, 26),
    "ONNX Runtime 1.31 on a CPU",
    ORT_MEASURED,
    "ort",
    # fp16 is computed in fp32 there, with casts
    without=("fp16", "w8a16", "w4a16", "fp16-kv8", "w8a16-kv8", "w4a16-kv8"),
)
# Every engine and board once: what `planforge lint` checks for unless told otherwise.
TARGETS = {
    target.name: target
    for target in (
        _CPU,
        Target("rtx", "tensorrt-rtx", (1, 7), (7, 24), "TensorRT-RTX 1.7", RTX_MEASURED, dialect="inplace"),
        *_VERSIONS.values(),
        _make_jetpack("5.1", (8, 5), "5.1 on Xavier and Orin", JETPACK_5, "sm72", "sm87"),
        _make_jetpack("6.0", (8, 6), "6.0 on Orin", CONTAINERS, "sm87"),
        _make_jetpack("6.2", (10, 3), "6.1 and 6.2 on Orin", JETPACK, "sm87"),
        _make_jetpack("7.1", (10, 13), "7.0 and 7.1 on Thor", f"{DOWNLOADS}/archive-7.1.md"),
        _make_jetpack("7.2", (10, 16), "7.2 on Orin and Thor", DOWNLOADS),
    )
}
INSTALLED = "tensorrt"  # also a target: the version that is installed
# Other names on the command line.
_OTHERS = {
    "portable": Target(
        "portable", "onnxruntime", (1, 31), (7, 26), "any engine for ONNX", ANY_ENGINE, "portable"
    ),
    "openvino": Target(
        "openvino",
        "openvino",
        (2026, 4),
        (7, 26),
        "OpenVINO 2026.4 on a CPU, for encoders",
        "measured with openvino 2026.4.1",
        "portable",
        without=tuple(name for name in PRECISIONS if name not in HINTS),
    ),
    "cuda": replace(
        _CPU,
        name="cuda",
        about="ONNX Runtime 1.31 on an NVIDIA GPU",
        source=ANY_ENGINE,
        without=("int8", "int4", "fp32-kv8", "int8-kv8", "int4-kv8"),  # products in fp16 are faster there
        on_gpu=True,
    ),
    "tensorrt11": _VERSIONS[(11, 2)],
}
NAMES = (*TARGETS, *_OTHERS, INSTALLED)
GPU_HINT = "; did you mean 'cuda' (ONNX Runtime on the GPU), or 'rtx' (TensorRT-RTX plans)?"


def find_target(name: str) -> Target:
    """Return the target of a name; refuse an unknown one."""
    if name == INSTALLED:
        return find_installed_tensorrt()
    if name not in NAMES:
        raise InputError(f"target {name!r} is not one of {', '.join(NAMES)}{suggest_target(name, NAMES)}")
    return {**TARGETS, **_OTHERS}[name]


def suggest_target(name: str, known: Collection[str]) -> str:
    """Return the end of an error that refuses a name, of which a target was perhaps meant."""
    if versions := [repr(other) for other in known if other.startswith(f"{name.lower()}.")]:
        return f"; did you mean {' or '.join(versions)}?"
    return GPU_HINT if name.lower() in ("gpu", "nvidia") else did_you_mean(name, known)


def find_installed_tensorrt() -> Target:
    """Return the newest of the table up to the installed TensorRT; the newest of all where none is."""
    for package in ("tensorrt", "tensorrt-cu12", "tensorrt-cu13"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return find_tensorrt(importlib.metadata.version(package))
    return _VERSIONS[max(_VERSIONS)]


def find_target_of_plan(engine: str, version: str) -> Target:
    """Return the target that a plan was built for, by its engine and the engine's version."""
    return TARGETS["rtx"] if engine == "tensorrt-rtx" else find_tensorrt(version)


def find_tensorrt(version: str) -> Target:
    """Return the newest TensorRT of the table up to a version; the oldest if all are newer."""
    major, minor = version.split(".")[:2]
    asked = (int(major), int(minor))
    return _VERSIONS[max((v for v in _VERSIONS if v <= asked), default=min(_VERSIONS))]


def find_targets(names: Sequence[str]) -> tuple[Target, ...]:
    """Return the targets of these names, each once; all of `TARGETS` if no name is given."""
    return tuple(find_target(name) for name in dict.fromkeys(names)) or tuple(TARGETS.values())
