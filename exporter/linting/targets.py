"""What a graph can be checked for: engines, their versions, and the boards that come with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ...runtime.errors import InputError

Engine = Literal["onnxruntime", "tensorrt", "tensorrt-rtx"]

OPERATORS = "https://github.com/onnx/onnx-tensorrt/blob/{}/docs/operators.md"
CHANGELOG = "https://github.com/NVIDIA/TensorRT/blob/main/CHANGELOG.md"
OPSETS = "https://docs.nvidia.com/deeplearning/tensorrt/latest/reference/onnx-opset-guide.html"
JETPACK = "https://docs.pytorch.org/TensorRT/getting_started/jetpack.html"
CONTAINERS = "https://github.com/dusty-nv/jetson-containers/blob/master/packages/cuda/tensorrt/config.py"
DOWNLOADS = "https://developer.nvidia.com/embedded/jetpack/downloads"
RTX_MEASURED = "measured with tensorrt_rtx 1.7.1.116"
ORT_MEASURED = "measured with onnxruntime 1.31.1"


@dataclass(frozen=True)
class LintTarget:
    """An engine in one version.

    Attributes:
        name: as on the command line.
        engine: whose rules hold.
        version: (major, minor) of the engine.
        opsets: the lowest and highest that are documented, or that were measured.
        about: in words.
        source: of the version and its opsets.
    """

    name: str
    engine: Engine
    version: tuple[int, int]
    opsets: tuple[int, int]
    about: str
    source: str

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
        """Whether it is a TensorRT before this version. TensorRT-RTX 1.x is none of them."""
        return self.engine == "tensorrt" and self.version < (major, minor)


def _tensorrt(version: tuple[int, int], opsets: tuple[int, int], source: str) -> LintTarget:
    text = f"{version[0]}.{version[1]}"
    return LintTarget(f"tensorrt{text}", "tensorrt", version, opsets, f"TensorRT {text}", source)


# ONNX 1.17, which TensorRT took up in 10.6, ends at opset 22; what came between is not documented.
_VERSIONS = {
    target.version: target
    for target in (
        _tensorrt((8, 5), (7, 17), OPERATORS.format("8.5-GA")),
        _tensorrt((8, 6), (7, 17), OPERATORS.format("8.6-GA")),
        _tensorrt((10, 0), (9, 20), OPERATORS.format("10.0-GA")),
        _tensorrt((10, 3), (9, 20), OPERATORS.format("10.1-GA")),
        _tensorrt((10, 9), (9, 22), CHANGELOG),
        _tensorrt((10, 13), (9, 22), CHANGELOG),
        _tensorrt((10, 15), (9, 24), OPERATORS.format("main")),
        _tensorrt((10, 16), (9, 24), OPERATORS.format("main")),
        _tensorrt((11, 2), (9, 25), OPSETS),
    )
}


def _jetpack(name: str, version: tuple[int, int], boards: str, source: str) -> LintTarget:
    about = f"JetPack {name} on {boards}: TensorRT {version[0]}.{version[1]}"
    return LintTarget(
        f"jetpack{name.split()[-1]}", "tensorrt", version, _VERSIONS[version].opsets, about, source
    )


TARGETS = {
    target.name: target
    for target in (
        LintTarget("cpu", "onnxruntime", (1, 31), (7, 26), "ONNX Runtime 1.31 on a CPU", ORT_MEASURED),
        LintTarget("rtx", "tensorrt-rtx", (1, 7), (7, 24), "TensorRT-RTX 1.7", RTX_MEASURED),
        *_VERSIONS.values(),
        _jetpack("5.1", (8, 5), "Xavier and Orin", "https://github.com/edgehook/Jetson-AI-task"),
        _jetpack("6.0", (8, 6), "Orin", CONTAINERS),
        _jetpack("6.1 and 6.2", (10, 3), "Orin", JETPACK),
        _jetpack("7.0 and 7.1", (10, 13), "Thor", f"{DOWNLOADS}/archive-7.1.md"),
        _jetpack("7.2", (10, 16), "Orin and Thor", DOWNLOADS),
    )
}


def lint_targets(names: Sequence[str]) -> tuple[LintTarget, ...]:
    """The targets of these names, each once; all of them if there is no name.

    Raises:
        InputError: no such target; lists them.
    """
    for name in names:
        if name not in TARGETS:
            raise InputError(f"target {name!r} is not one of {', '.join(TARGETS)}")
    return tuple(TARGETS[name] for name in dict.fromkeys(names)) or tuple(TARGETS.values())
