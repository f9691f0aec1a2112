"""The machine and the versions that a result belongs to."""

from __future__ import annotations

import contextlib
import importlib.metadata
from typing import Any

from planforge.runtime.apps.diagnostics import doctor
from planforge.runtime.backends.gpus import Gpu

from .nvidia import FACTS, query


def environment(gpu: Gpu) -> dict[str, Any]:
    """Return as plain JSON the GPU, its driver, clocks and limits, the available backends, and versions."""
    facts = doctor.examine()
    versions = {"planforge": facts.planforge}
    for package in ("transformers", "onnxruntime-genai-cuda"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    versions |= {name: version for package in facts.packages for name, version in package.versions.items()}
    return {
        "gpu": {
            "name": gpu.name,
            "sm": gpu.sm,
            "memory_gb": round(gpu.memory / 1e9, 1),
            "nvidia_smi": query(FACTS),
        },
        "driver": facts.graphics.driver,
        "cuda": facts.graphics.cuda,
        "cpu": facts.processor.name,
        "system": facts.system,
        "python": facts.python,
        "versions": versions,
        "backends": {
            backend.backend: backend.reason if backend.available else f"not here: {backend.reason}"
            for backend in doctor.find_backends(facts)
        },
    }


def same_machine(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Tell whether results of both may stand in one table."""
    return all(one.get(key) == other.get(key) for key in ("driver", "cuda", "versions")) and (
        one["gpu"]["name"] == other["gpu"]["name"]
    )
