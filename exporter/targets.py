"""The one table of targets: what a name on the command line means for export, build and lint."""

from __future__ import annotations

import contextlib
import importlib.metadata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ..runtime.errors import InputError
from ..runtime.suggest import did_you_mean
from .tensorrt_versions import INPLACE_SINCE, TENSORRT_VERSIONS, Version

Engine = Literal["onnxruntime", "tensorrt", "tensorrt-rtx"]

JETPACK = "https://docs.pytorch.org/TensorRT/getting_started/jetpack.html"
CONTAINERS = "https://github.com/dusty-nv/jetson-containers/blob/master/packages/cuda/tensorrt/config.py"
DOWNLOADS = "https://developer.nvidia.com/embedded/jetpack/downloads"
RTX_MEASURED = "measured with tensorrt_rtx 1.7.1.116"
ORT_MEASURED = "measured with onnxruntime 1.31.1"
ANY_ENGINE = "the operators of ONNX alone"


@dataclass(frozen=True)
class Target:
    """An engine in one version: what a graph is exported, built and checked for."""

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

    @property
    def plans(self) -> bool:
        """Whether it builds plans: TensorRT and TensorRT-RTX, which share a parser."""
        return self.engine != "onnxruntime"

    @property
    def typed(self) -> bool:
        """Whether the types in the graph are those that it computes in: no flag chooses them."""
        return self.engine != "tensorrt" or self.version >= (9, 0)

    @property
    def half_by_flag(self) -> bool:
        """Whether a builder's flag can make an fp32 graph compute in fp16. TensorRT 11 has none."""
        return self.engine == "tensorrt" and self.version < (11, 0)

    def older_than(self, major: int, minor: int = 0) -> bool:
        """Tell whether it is a TensorRT before this version. TensorRT-RTX 1.x is none of them."""
        return self.engine == "tensorrt" and self.version < (major, minor)


def _tensorrt(version: Version, opsets: tuple[int, int], source: str) -> Target:
    text = f"{version[0]}.{version[1]}"
    dialect = "inplace" if version >= INPLACE_SINCE else "portable"
    return Target(f"tensorrt{text}", "tensorrt", version, opsets, f"TensorRT {text}", source, dialect)


_VERSIONS = {
    version: _tensorrt(version, opsets, source) for version, (opsets, source) in TENSORRT_VERSIONS.items()
}


def _jetpack(name: str, version: Version, about: str, source: str) -> Target:
    of = _VERSIONS[version]
    text = f"JetPack {about}: TensorRT {version[0]}.{version[1]}"
    return Target(f"jetpack{name}", of.engine, of.version, of.opsets, text, source, of.dialect)


# Every engine and board once: what `planforge lint` checks for unless told otherwise.
TARGETS = {
    target.name: target
    for target in (
        Target(
            "cpu",
            "onnxruntime",
            (1, 31),
            (7, 26),
            "ONNX Runtime 1.31 on a CPU",
            ORT_MEASURED,
            dialect="ort",
            without=("fp16",),  # a CPU computes it in fp32, with casts
        ),
        Target("rtx", "tensorrt-rtx", (1, 7), (7, 24), "TensorRT-RTX 1.7", RTX_MEASURED, dialect="inplace"),
        *_VERSIONS.values(),
        _jetpack("5.1", (8, 5), "5.1 on Xavier and Orin", "https://github.com/edgehook/Jetson-AI-task"),
        _jetpack("6.0", (8, 6), "6.0 on Orin", CONTAINERS),
        _jetpack("6.2", (10, 3), "6.1 and 6.2 on Orin", JETPACK),
        _jetpack("7.1", (10, 13), "7.0 and 7.1 on Thor", f"{DOWNLOADS}/archive-7.1.md"),
        _jetpack("7.2", (10, 16), "7.2 on Orin and Thor", DOWNLOADS),
    )
}
INSTALLED = "tensorrt"  # also a target: the version that is installed
# Other names on the command line.
_PORTABLE = Target(
    "portable", "onnxruntime", (1, 31), (7, 26), "any engine for ONNX", ANY_ENGINE, dialect="portable"
)
_CUDA = Target(
    "cuda",
    "onnxruntime",
    (1, 31),
    (7, 26),
    "ONNX Runtime 1.31 on an NVIDIA GPU",
    ANY_ENGINE,
    dialect="ort",
    without=("int8", "int4", "fp32-kv8", "int8-kv8", "int4-kv8"),  # were never tried there
)
_OTHERS = {"portable": _PORTABLE, "cuda": _CUDA, "tensorrt11": _VERSIONS[(11, 2)]}
NAMES = (*TARGETS, *_OTHERS, INSTALLED)


def find_target(name: str) -> Target:
    """Return the target of a name.

    Raises:
        InputError: no such target; lists them.
    """
    if name == INSTALLED:
        return find_installed_tensorrt()
    if name not in NAMES:
        raise InputError(f"target {name!r} is not one of {', '.join(NAMES)}{did_you_mean(name, NAMES)}")
    return {**TARGETS, **_OTHERS}[name]


def find_installed_tensorrt() -> Target:
    """Return the newest of the table up to the installed TensorRT; the newest of all where none is."""
    for package in ("tensorrt", "tensorrt-cu12", "tensorrt-cu13"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            major, minor = importlib.metadata.version(package).split(".")[:2]
            break
    else:
        return _VERSIONS[max(_VERSIONS)]
    return newest_target((int(major), int(minor)))


def target_of_plan(engine: str, version: str) -> Target:
    """Return the target that a plan was built for.

    Args:
        engine: of the plan, "tensorrt-rtx" or "tensorrt".
        version: of that engine, such as "10.3.0".

    Returns:
        The newest of the table that is not newer; the oldest where all are.
    """
    if engine == "tensorrt-rtx":
        return TARGETS["rtx"]
    major, minor = version.split(".")[:2]
    return newest_target((int(major), int(minor)))


def newest_target(version: Version) -> Target:
    """Return the newest TensorRT of the table that is not newer than this; the oldest where all are."""
    return _VERSIONS[max((v for v in _VERSIONS if v <= version), default=min(_VERSIONS))]


def lint_targets(names: Sequence[str]) -> tuple[Target, ...]:
    """Return the targets of these names, each once; all of `TARGETS` if there is no name.

    Raises:
        InputError: no such target; lists them.
    """
    return tuple(find_target(name) for name in dict.fromkeys(names)) or tuple(TARGETS.values())
