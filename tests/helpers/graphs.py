"""Graphs from text, what ONNX Runtime makes of them, and faults planted in those of a bundle."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx.parser
import onnx.shape_inference
import onnx_ir as ir
import onnxruntime as ort

from planforge.runtime.backends.requirements import EXACT_PRODUCTS, products_saturate
from planforge.runtime.bundle.bundle import Bundle, compute_sha256
from planforge.runtime.bundle.manifest import FileEntry


def replace_graph(bundle: Path, artifact_id: str, change: Callable[[ir.Model], None]) -> None:
    """Plants a fault in one graph, and lists the changed file in the manifest as if it were right."""
    manifest = Bundle.open(bundle).manifest
    path = bundle / manifest.artifact(artifact_id).file
    model = ir.load(path)
    change(model)
    ir.save(model, path)
    entry = FileEntry(compute_sha256(path), path.stat().st_size)
    changed = dataclasses.replace(
        manifest, files={**manifest.files, manifest.artifact(artifact_id).file: entry}
    )
    (bundle / "manifest.json").write_text(changed.to_json(), encoding="utf-8")


@contextmanager
def damaged(bundle: Path, artifact_id: str, change: Callable[[ir.Model], None]) -> Iterator[Bundle]:
    """Give the bundle with a fault in one graph, for a while."""
    files = [bundle / "manifest.json", bundle / Bundle.open(bundle).manifest.artifact(artifact_id).file]
    sound = [path.read_bytes() for path in files]
    try:
        replace_graph(bundle, artifact_id, change)
        yield Bundle.open(bundle)
    finally:
        for path, content in zip(files, sound, strict=True):
            path.write_bytes(content)


def nodes(model: ir.Model, op_type: str) -> list[ir.Node]:
    return [node for node in model.graph if node.op_type == op_type]


def parse_graph(text: str) -> ir.Model:
    """A graph from ONNX text, with types and names, as tracing gives them."""
    model = ir.from_proto(onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text)))
    for number, node in enumerate(model.graph):
        node.name = f"node_{number}"
    return model


def run_graph(model: ir.Model | Path, **inputs: npt.NDArray[Any]) -> list[Any]:
    """The results of a graph, or of a file; what it has no input for is left out."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    if products_saturate():
        for name, value in EXACT_PRODUCTS.items():
            options.add_session_config_entry(name, value)
    source = model if isinstance(model, Path) else ir.to_proto(model).SerializeToString()
    session = ort.InferenceSession(source, options)
    known = {tensor.name for tensor in session.get_inputs()}
    return session.run(None, {name: x for name, x in inputs.items() if name in known})  # type: ignore[no-any-return]


def normal(*shape: int, seed: int = 0) -> npt.NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)
