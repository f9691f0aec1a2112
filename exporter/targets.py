"""The one table of targets: what a name on the command line means for export and build."""

from __future__ import annotations

from dataclasses import dataclass

from ..runtime.errors import InputError


@dataclass(frozen=True)
class Target:
    """Where a graph will run.

    Attributes:
        dialect: of the graph it takes.
        engine: the library that builds its plan; None where ONNX itself is run.
    """

    dialect: str
    engine: str | None = None


TARGETS = {
    "cpu": Target("ort"),
    "portable": Target("portable"),
    "rtx": Target("inplace", "tensorrt-rtx"),
    "tensorrt": Target("inplace", "tensorrt"),  # TensorRT >= 10.15, for the GPU it is built on
}


def target_named(name: str) -> Target:
    """Looks up a target.

    Raises:
        InputError: no such target; lists them.
    """
    if name not in TARGETS:
        raise InputError(f"target {name!r} is not one of {', '.join(TARGETS)}")
    return TARGETS[name]
