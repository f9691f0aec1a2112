"""Tracing in this process, and each graph once, also across runs."""

from __future__ import annotations

import functools
import hashlib
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from safetensors import safe_open

from planforge.exporter.tracing.recipes import Recipe
from planforge.models.adapter_tables import FILE

from .paths import ROOT

TRACES = ROOT / "build" / "traces"
DAY = 86_400.0  # seconds


def hash_tracer() -> str:
    """Return a hash of all that a traced graph depends on beside the checkpoint's description."""
    digest = hashlib.sha256()
    for package in ("torch", "onnx-ir", "onnxscript"):
        digest.update(version(package).encode())
    for folder in ("models", "exporter/tracing"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    digest.update((ROOT / "runtime/decoding/cache_shapes.py").read_bytes())  # the lengths of some axes
    return digest.hexdigest()[:16]


def describe_graph(config: Any, max_length: int) -> str:
    """Return all of a config that a graph depends on: of a rotation the size of its tables alone."""
    rotations = {
        name: rotation and replace(type(rotation)(), partial_rotary_factor=rotation.partial_rotary_factor)
        for name in ("rotary", "window_rotary")
        if hasattr(config, name)
        for rotation in [getattr(config, name)]
    }
    return repr((replace(config, **rotations), max_length if hasattr(config, "rotary") else None))


def describe_tables(checkpoint: Path) -> str:
    """Return the names and shapes of the tables of adapters beside a model."""
    path = checkpoint / FILE
    if not path.is_file():
        return ""
    with safe_open(path, "pt") as file:
        return repr([(name, file.get_slice(name).get_shape()) for name in file.keys()])  # noqa: SIM118


def describe_recipe(recipe: Recipe) -> str:
    """Return all of a recipe that a graph depends on: not its dialect's name, nor how long axes may be."""
    specs = [(spec.name, spec.dtype, spec.axis_names()) for spec in (*recipe.inputs, *recipe.outputs)]
    wrap: Any = recipe.module
    chosen = [cell.cell_contents for cell in wrap.__closure__ or ()]
    return repr((recipe.opset, recipe.example, specs, wrap.__module__, wrap.__qualname__, chosen))


class EndedProcess:
    """Stands for a child process that has traced a graph."""

    returncode = 0

    def communicate(self) -> tuple[str, str]:
        return "", ""


@contextmanager
def trace_each_graph_once() -> Iterator[None]:
    """Trace in this process, which has PyTorch loaded, and each graph once, also across runs.

    Tracing reads a checkpoint's description and a recipe, so graphs of equal ones are the same. They are
    kept in build/traces until the tracer or its packages change. Each is traced before the model runs:
    meanwhile PyTorch's tracer replaces the calls of every module.
    """
    from torch.onnx._internal.exporter import _registration

    from planforge.exporter.tracing import trace
    from planforge.exporter.tracing.recipes import make_all_recipes
    from planforge.models.checkpoint import describe

    registry = _registration.ONNXRegistry  # built anew for each graph: a seventh of its time
    registry.from_torchlib = staticmethod(functools.cache(registry.from_torchlib))  # type: ignore[method-assign]
    one_at_a_time = threading.Lock()
    traces = TRACES / hash_tracer()
    for older in TRACES.glob("*"):  # not those that another run is using
        if time.time() - older.stat().st_mtime > DAY:
            shutil.rmtree(older, ignore_errors=True)
    traces.mkdir(parents=True, exist_ok=True)

    def trace_once(checkpoint: Path, recipe: str, choices: Any, out: Path) -> EndedProcess:
        description = describe(checkpoint)
        family, config = description.family.name, description.config
        recipes, explanations = make_all_recipes(description.task, config, choices)
        graph = describe_graph(config, choices.max_length)
        tables = describe_tables(checkpoint)
        words = (family, graph, tables, describe_recipe({**recipes, **explanations}[recipe]))
        traced = traces / f"{hashlib.sha256('|'.join(words).encode()).hexdigest()[:16]}.onnx"
        with one_at_a_time, FileLock(traced.with_suffix(".lock")):
            if not traced.exists():
                trace.write_trace(
                    str(checkpoint.resolve()),
                    recipe,
                    str(choices.max_batch),
                    str(choices.max_length),
                    ",".join(choices.outputs),
                    str(traced.with_suffix(".partial")),
                )
                traced.with_suffix(".partial").rename(traced)
        shutil.copy(traced, out)
        return EndedProcess()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trace, "start_tracer", trace_once)
        yield
