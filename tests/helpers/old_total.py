"""Bundles as older versions wrote them: graphs of the dialect `ort` that compute total_sequence_length."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import onnx
from onnx.helper import make_node

from planforge.runtime.bundle.artifact import TOTAL


def compute_total_in_the_graph(bundle: Path, target: Path) -> Path:
    """A copy whose `ort` graphs are as older versions wrote them."""
    copy = Path(shutil.copytree(bundle, target))
    value = json.loads((copy / "manifest.json").read_text(encoding="utf-8"))
    for artifact in value["artifacts"]:
        if artifact["dialect"] == "ort":
            path = copy / artifact["file"]
            model = onnx.load(path, load_external_data=False)
            artifact["inputs"] = [i for i in artifact["inputs"] if i["name"] != TOTAL]
            put_total_into(model.graph)
            onnx.save(model, path)
            content = path.read_bytes()
            sha256 = hashlib.sha256(content).hexdigest()
            value["files"][artifact["file"]] = {"sha256": sha256, "bytes": len(content)}
    (copy / "manifest.json").write_text(json.dumps(value), encoding="utf-8")
    return copy


def put_total_into(graph: onnx.GraphProto) -> None:
    """Let a graph compute the longest past and the new tokens itself."""
    graph.input.remove(next(value for value in graph.input if value.name == TOTAL))
    nodes = [
        make_node("ReduceMax", ["past_lengths"], ["longest"], keepdims=0),
        make_node("Shape", ["input_ids"], ["shape"], start=1, end=2),
        make_node("Cast", ["shape"], ["tokens"], to=onnx.TensorProto.INT32),
        make_node("Add", ["longest", "tokens"], ["totals"]),
        make_node("Squeeze", ["totals"], [TOTAL]),
    ]
    for node in reversed(nodes):
        graph.node.insert(0, node)
