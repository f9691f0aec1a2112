"""The text of an `IEngineInspector` on an emulated GPU, in the form that NVIDIA documents.

Two nodes are one layer, whose name tells them only where it is not Myelin's; a copy comes before the first.
As TensorRT-RTX 1.7.1 lists a plan at its build, metadata has "[ONNX Layer: NAME]" with ASCII's separators
between them, unescaped. Names of nodes and of the graph's tensors have " [profile N]" in all profiles but the
first. Myelin's names of layers end in "_mylN_" and their place, with the number of their subgraph: here the
profile's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import onnx

from planforge.runtime.bundle.manifest import Axis

if TYPE_CHECKING:
    from .emulated_gpu import EmulatedContext, EmulatedEngine

FORMATS = {1: "Row major linear FP32", 7: "Row major Int64", 10: "Row major linear FP16 format"}
UNKNOWN = "N/A due to dynamic shapes"


class EmulatedInspector:
    """An `IEngineInspector`; without a context it does not know the lengths of dynamic axes."""

    execution_context: EmulatedContext | None = None

    def __init__(self, engine: EmulatedEngine) -> None:
        self.engine = engine

    def get_engine_information(self, kind: str) -> str:
        assert kind == "JSON"
        profiling = self.engine.plan.profiling
        layers: list[Any] = []
        for profile in range(self.engine.num_optimization_profiles):
            layers += list_layers(self.engine, self.execution_context, profile)
        if profiling != "detailed":
            layers = [layer["Name"] for layer in layers if profiling != "none"]
        text = json.dumps({"Layers": layers, "Bindings": list(self.engine.specs)})
        return text.replace("\\u001f", "\x1f").replace("\\u001e", "\x1e")


def list_layers(
    engine: EmulatedEngine, context: EmulatedContext | None, profile: int
) -> Iterator[dict[str, Any]]:
    """Yield the layers of a profile."""
    graph = onnx.load(engine.plan.graph, load_external_data=False).graph
    types = {value.name: value.type.tensor_type for value in (*graph.input, *graph.value_info, *graph.output)}
    suffix = f" [profile {profile}]" if profile else ""
    lengths = {} if context is None else list_lengths(context)

    def describe(names: Any) -> list[dict[str, Any]]:
        return [
            {
                "Name": f"{name}{suffix}",
                "Location": "Device",
                "Dimensions": [d.dim_value or lengths.get(d.dim_param, -1) for d in types[name].shape.dim],
                "Format/Datatype": FORMATS.get(types[name].elem_type, "Row major") if lengths else UNKNOWN,
            }
            for name in names
            if name in types
        ]

    nodes = list(graph.node)
    copied = f"Reformatting CopyNode for Input Tensor 0 to {nodes[0].name}{suffix}"
    yield {"Name": copied, "LayerType": "Reformat", "Inputs": [], "Outputs": [], "Metadata": ""}
    for first in range(0, len(nodes), 2):
        fused = nodes[first : first + 2]
        is_named = first % 4 == 0
        yield {
            "Name": (" + ".join(node.name for node in fused) + suffix if is_named else "__myl_Fused")
            + f"_myl{profile}_{first}",
            "LayerType": "gemm" if is_named else "kgen",
            "Inputs": describe(fused[0].input),
            "Outputs": describe(fused[-1].output),
            "TacticName": "0x0000000000000000",
            "StreamId": 0,
            "Metadata": "\x1f".join(f"[ONNX Layer: {node.name}]" for node in fused),
        }


def list_lengths(context: EmulatedContext) -> dict[str, int]:
    """Return the lengths of a context's axes, by their names."""
    return {
        axis.name: length
        for spec in context.engine.plan.artifact.inputs
        for axis, length in zip(spec.axes, context.shapes.get(spec.name, ()), strict=False)
        if isinstance(axis, Axis)
    }
