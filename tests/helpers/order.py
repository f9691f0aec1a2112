"""The order in which tests are collected and run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from .paths import ROOT

# The files that take longest, in this order: begun first, no worker is left alone with one in the end.
LONGEST = (
    "runtime/apps/batch/test_ray.py",
    "exporter/verification/test_explanations.py",
    "controls/test_controls.py",
    "exporter/verification/test_mutations.py",
    "runtime/apps/explain/test_explain.py",
    "benchmarks/test_cases.py",
    "exporter/imported/test_native.py",
    "exporter/test_llama.py",
    "commands/test_commands.py",
    "exporter/packaging/test_runtimes.py",
    "exporter/test_matrix.py",
    "commands/test_explain.py",
    "exporter/test_classes.py",
    "runtime/generate/test_scheduler.py",
    "benchmarks/test_gpu.py",
    "exporter/fitting/test_fitting.py",
    "exporter/verification/test_bisect.py",
    "exporter/test_export.py",
    "exporter/test_adapters.py",
    "exporter/imported/test_transformers.py",
    "exporter/verification/test_encoders.py",
    "commands/test_encoders.py",
    "exporter/imported/test_optimum.py",
)
PLACES = {ROOT / "tests" / name: place for place, name in enumerate(LONGEST)}


def find_place(item: pytest.Item) -> tuple[int, Path]:
    """Return what to sort tests by; those of a file keep their order."""
    return PLACES.get(item.path, len(PLACES)), item.path


def rotate(nodes: list[Any]) -> list[Any]:
    """Return what a folder holds, from another place on for each worker: they compile different files first.

    Pytest rewrites a file's assertions, and keeps what it compiled for workers that come to it later.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    begin = worker * len(nodes) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    return [*nodes[begin:], *nodes[:begin]]
