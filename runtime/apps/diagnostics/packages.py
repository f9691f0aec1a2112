"""Finds installed Python packages without importing them, except ONNX Runtime for its providers."""

from __future__ import annotations

import contextlib
import ctypes.util
import importlib.metadata
import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass

from ...backends.ort_program import import_onnxruntime

# A module, and the packages that install it. Of ONNX Runtime's only one may be installed.
DISTRIBUTIONS = {
    "numpy": ("numpy",),
    "tokenizers": ("tokenizers",),
    "onnxruntime": ("onnxruntime-gpu", "onnxruntime", "onnxruntime-directml", "onnxruntime-openvino"),
    "openvino": ("openvino",),
    "nvidia.cudnn": ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12"),
    "cuda.bindings": ("cuda-bindings",),
    "tensorrt": ("tensorrt", "tensorrt-cu13", "tensorrt-cu12"),
    "tensorrt_rtx": ("tensorrt-rtx-cu13", "tensorrt-rtx-cu12", "tensorrt-rtx"),
    "onnx": ("onnx",),
    "torch": ("torch",),
}
NOT_NEEDED = ("onnx", "torch")  # to run bundles
UNKNOWN = "unknown version"  # of a module that no package claims


@dataclass(frozen=True)
class Package:
    """A Python module and the versions of the packages that install it: none if it is not there."""

    module: str
    versions: Mapping[str, str]

    def __str__(self) -> str:
        return ", ".join(f"{name} {version}" for name, version in self.versions.items()) or "not installed"

    @property
    def major(self) -> int | None:
        """The first of its version's numbers."""
        return next((number for version in self.versions.values() if (number := parse_major(version))), None)

    @property
    def cuda(self) -> int | None:
        """The major version of CUDA that it is made for, where its name or version says."""
        if self.module == "cuda.bindings":
            return self.major
        match = re.search(r"-cu([0-9]+)\b", str(self))
        return int(match[1]) if match else None


@dataclass(frozen=True)
class OnnxRuntime:
    """What ONNX Runtime says about itself."""

    providers: tuple[str, ...] = ()
    cuda: str | None = None  # that it was made for
    error: str | None = None  # why it could not be imported


def parse_major(version: str | None) -> int | None:
    """Return 13 for "13.0"; None for what is no version."""
    match = re.match("[0-9]{1,4}", version or "")
    return int(match[0]) if match else None


def find_package(module: str) -> Package:
    """Return a module's packages, without importing it."""
    versions = {}
    for name in DISTRIBUTIONS[module]:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name) or UNKNOWN
    if not versions and is_there(module):
        versions[module] = UNKNOWN
    return Package(module, versions)


def is_there(module: str) -> bool:
    """Tell whether there is a module that no package claims; for cuDNN, a library of the system."""
    if module == "nvidia.cudnn":
        return any(ctypes.util.find_library(name) for name in ("cudnn", "cudnn64_9"))
    try:
        return "." not in module and importlib.util.find_spec(module) is not None
    except ValueError:  # it was made in this process
        return True


def ask_onnxruntime() -> OnnxRuntime:
    """Return what ONNX Runtime says about itself."""
    try:
        ort = import_onnxruntime()
        return OnnxRuntime(tuple(ort.get_available_providers()), getattr(ort, "cuda_version", "") or None)
    except Exception as error:  # half an installation fails in many ways
        lines = str(error).splitlines() or [type(error).__name__]
        return OnnxRuntime(error=lines[0])
