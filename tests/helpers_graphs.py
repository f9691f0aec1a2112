"""Changes the graphs of a bundle, to plant faults in them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import onnx_ir as ir

from planforge.runtime.bundle.bundle import Bundle, sha256_of
from planforge.runtime.bundle.manifest import FileEntry


def replace_graph(bundle: Path, artifact_id: str, change: Callable[[ir.Model], None]) -> None:
    """Plants a fault in one graph, and lists the changed file in the manifest as if it were right."""
    manifest = Bundle.open(bundle).manifest
    path = bundle / manifest.artifact(artifact_id).file
    model = ir.load(path)
    change(model)
    ir.save(model, path)
    entry = FileEntry(sha256_of(path), path.stat().st_size)
    changed = dataclasses.replace(
        manifest, files={**manifest.files, manifest.artifact(artifact_id).file: entry}
    )
    (bundle / "manifest.json").write_text(changed.to_json(), encoding="utf-8")


def nodes(model: ir.Model, op_type: str) -> list[ir.Node]:
    return [node for node in model.graph if node.op_type == op_type]
