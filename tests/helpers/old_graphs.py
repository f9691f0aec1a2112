"""Bundles as older versions wrote them: graphs of the dialect `ort` that compute more than they do now."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
from onnx.helper import make_node

from planforge.runtime.bundle.artifact import TOTAL


def compute_total_in_the_graph(bundle: Path, target: Path) -> Path:
    """A copy whose `ort` graphs compute how many slots are filled, as those of older versions do."""

    def change(artifact: dict[str, Any], graph: onnx.GraphProto) -> None:
        artifact["inputs"] = [i for i in artifact["inputs"] if i["name"] != TOTAL]
        put_total_into(graph)

    return rewrite_ort_graphs(bundle, target, change)


def compute_last_slots_on_the_cpu(bundle: Path, target: Path) -> Path:
    """A copy whose `ort` graphs compute a step's last slots from its number of tokens, as was done."""
    return rewrite_ort_graphs(bundle, target, lambda _, graph: put_last_slots_into(graph))


def rewrite_ort_graphs(
    bundle: Path, target: Path, change: Callable[[dict[str, Any], onnx.GraphProto], None]
) -> Path:
    """A copy with other `ort` graphs, and their entries in its manifest."""
    copy = Path(shutil.copytree(bundle, target))
    value = json.loads((copy / "manifest.json").read_text(encoding="utf-8"))
    for artifact in value["artifacts"]:
        if artifact["dialect"] == "ort":
            path = copy / artifact["file"]
            model = onnx.load(path, load_external_data=False)
            change(artifact, model.graph)
            onnx.save(model, path)
            content = path.read_bytes()
            sha256 = hashlib.sha256(content).hexdigest()
            value["files"][artifact["file"]] = {"sha256": sha256, "bytes": len(content)}
    (copy / "manifest.json").write_text(json.dumps(value), encoding="utf-8")
    return copy


def put_last_slots_into(graph: onnx.GraphProto) -> None:
    """Let attention read `past_lengths` and the new tokens less one, of which the CPU computes the latter."""
    graph.initializer.append(onnx.helper.make_tensor("old.one", onnx.TensorProto.INT32, [1], [1]))
    nodes = [
        make_node("Shape", ["input_ids"], ["old.shape"], start=1, end=2),
        make_node("Cast", ["old.shape"], ["old.tokens"], to=onnx.TensorProto.INT32),
        make_node("Sub", ["old.tokens", "old.one"], ["old.less"]),
        make_node("Add", ["past_lengths", "old.less"], ["old.last"], name="old_add"),
    ]
    for node in reversed(nodes):
        graph.node.insert(0, node)
    for node in graph.node:
        if node.op_type == "GroupQueryAttention":
            node.input[5] = "old.last"


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
