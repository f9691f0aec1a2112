"""Tracing in this process, and each graph once, also across runs."""

from __future__ import annotations

import functools
import hashlib
import logging
import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import onnx_ir
import pytest
from filelock import FileLock

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


def describe_graph(config: Any) -> str:
    """Return all of a config that a graph depends on: of a rotation the width of its tables alone."""
    rotations = {
        name: rotation and replace(type(rotation)(), partial_rotary_factor=rotation.partial_rotary_factor)
        for name in ("rotary", "window_rotary")
        if hasattr(config, name)
        for rotation in [getattr(config, name)]
    }
    return repr(replace(config, **rotations))


@contextmanager
def trace_quickly() -> Iterator[None]:
    """Trace the same graphs in a sixth less time: without messages for debugging, and what seldom helps.

    The results that PyTorch keeps of operations on fake tensors cost more here than they save.
    """
    import torch._dynamo.config

    before = logging.root.manager.disable
    logging.disable(logging.INFO)
    try:
        with torch._dynamo.config.patch(fake_tensor_cache_enabled=False):
            yield
    finally:
        logging.disable(before)


@contextmanager
def trace_each_graph_once() -> Iterator[None]:
    """Trace in this process, which has PyTorch loaded, and each graph once, also across runs.

    Tracing reads a checkpoint's description alone, so graphs of equal descriptions are the same. They are
    kept in build/traces until the tracer or its packages change. Where `start_trace` is replaced inside,
    child processes trace.
    """
    from torch.onnx._internal.exporter import _registration

    from planforge.exporter.tracing import onnx_export
    from planforge.models.checkpoint import describe

    registry = _registration.ONNXRegistry  # built anew for each graph: a seventh of its time
    registry.from_torchlib = staticmethod(functools.cache(registry.from_torchlib))  # type: ignore[method-assign]
    start_trace = onnx_export.start_trace
    trace_in_child = onnx_export.trace_in_child
    trace_recipes = onnx_export.trace_recipes
    one_at_a_time = threading.Lock()
    traces = TRACES / hash_tracer()
    for older in TRACES.glob("*"):  # not those that another run is using
        if time.time() - older.stat().st_mtime > DAY:
            shutil.rmtree(older, ignore_errors=True)
    traces.mkdir(parents=True, exist_ok=True)

    def trace_once(checkpoint: Path, recipe: str, choices: Any, out: Path) -> Any:
        if onnx_export.start_trace is not start_trace:
            return trace_in_child(checkpoint, recipe, choices, out)
        description = describe(checkpoint)
        words = (description.family.name, describe_graph(description.config), recipe, repr(choices))
        traced = traces / f"{hashlib.sha256('|'.join(words).encode()).hexdigest()[:16]}.onnx"
        with one_at_a_time, FileLock(traced.with_suffix(".lock")):
            if not traced.exists():
                with trace_quickly():
                    onnx_export.write_trace(
                        str(checkpoint.resolve()),
                        recipe,
                        str(choices.max_batch),
                        str(choices.max_length),
                        ",".join(choices.outputs),
                        str(traced.with_suffix(".partial")),
                    )
                traced.with_suffix(".partial").rename(traced)
        shutil.copy(traced, out)
        return onnx_ir.load(out)

    def trace_before(checkpoint: Path, choices: Any, paths: Mapping[str, Path], *rest: Any) -> Any:
        """Trace before the model runs: meanwhile PyTorch's tracer replaces the calls of every module."""
        if onnx_export.start_trace is start_trace:
            for recipe, path in paths.items():
                trace_once(checkpoint, recipe, choices, path)
        return trace_recipes(checkpoint, choices, paths, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(onnx_export, "trace_in_child", trace_once)
        patch.setattr(onnx_export, "trace_recipes", trace_before)
        yield
