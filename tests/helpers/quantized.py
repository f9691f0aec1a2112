"""Folders with quantized graphs as NVIDIA ModelOpt writes them.

They are written here by onnx.helper, in the form that `python -m modelopt.onnx.quantization` of ModelOpt
0.47 gave of bert-demo with --high_precision_dtype fp32: in int4 a DequantizeLinear of codes in blocks along
axis 0; in int8 and fp8 a pair of nodes at each weight, with a scale for each column, and one at each
activation. ModelOpt itself is no dependency.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from .models import write_wordpiece

WORDS = 128
WIDTH = 64
BLOCK = 32
LENGTH = 16
NODE = "/encoder/layer.0/output/dense/DequantizeLinear"
TYPES = {"int8": TensorProto.INT8, "fp8": TensorProto.FLOAT8E4M3FN}
TENSORS: dict[str, Any] = {"int8": np.int8, "fp8": ml_dtypes.float8_e4m3fn}


def draw_weights() -> tuple[Any, Any, Any]:
    """Return a table of words, int4 codes (K, N), and fp32 scales that fp16 does not have (K / b, N)."""
    random = np.random.default_rng(0)
    table = random.standard_normal((WORDS, WIDTH)).astype(np.float32)
    codes = random.integers(-8, 8, (WIDTH, WIDTH)).astype(np.int8)
    scales = random.uniform(0.01, 0.02, (WIDTH // BLOCK, WIDTH)).astype(np.float32)
    assert (scales != scales.astype(np.float16)).all()
    return table, codes, scales


def make_folder(folder: Path, kind: str) -> Path:
    """Write an encoder of one product, whose weight is quantized, as optimum names its files."""
    folder.mkdir()
    write_wordpiece(folder)
    settings = {"model_type": "bert", "vocab_size": WORDS, "hidden_size": WIDTH, "pad_token_id": 0}
    settings |= {"num_attention_heads": 4, "num_hidden_layers": 1, "max_position_embeddings": LENGTH}
    (folder / "config.json").write_text(json.dumps({**settings, "architectures": ["BertModel"]}))
    table, codes, scales = draw_weights()
    weights = [numpy_helper.from_array(table, "table")]
    nodes = [
        helper.make_node("Gather", ["table", "input_ids"], ["words"], "/embeddings/Gather"),
        helper.make_node("Cast", ["attention_mask"], ["mask"], "/Cast", to=TensorProto.FLOAT),
        helper.make_node("Unsqueeze", ["mask", "last"], ["seen"], "/Unsqueeze"),
        helper.make_node("Mul", ["words", "seen"], ["x"], "/Mul"),
    ]
    weights.append(numpy_helper.from_array(np.array([-1]), "last"))
    read = "x"
    if kind == "int4":
        packed = helper.make_tensor("codes", TensorProto.INT4, codes.shape, codes.ravel().tolist())
        weights += [packed, numpy_helper.from_array(scales, "scales")]
        nodes.append(helper.make_node("DequantizeLinear", ["codes", "scales"], ["w"], NODE))
        nodes[-1].attribute.extend([helper.make_attribute("axis", 0)])
        nodes[-1].attribute.extend([helper.make_attribute("block_size", BLOCK)])
    else:
        zeros = np.zeros(WIDTH, TENSORS[kind])
        values = codes * scales[:1]
        weights += [numpy_helper.from_array(values, "values"), numpy_helper.from_array(scales[0], "scales")]
        weights += [numpy_helper.from_array(zeros, "zeros"), numpy_helper.from_array(zeros[0], "zero")]
        weights.append(numpy_helper.from_array(np.float32(0.03), "step"))
        pairs: list[tuple[list[str], str, str, dict[str, Any]]] = [
            (["x", "step"], "zero", "activation", {}),
            (["values", "scales"], "zeros", "w", {"axis": 1}),
        ]
        for given, shift, made, axis in pairs:
            name = f"/encoder/{made}"
            q = helper.make_node("QuantizeLinear", [*given, shift], [f"{made}.q"], f"{name}/Quantize", **axis)
            back = [f"{made}.q", given[1], shift]
            nodes += [q, helper.make_node("DequantizeLinear", back, [made], f"{name}/Dequantize", **axis)]
        read = "activation"
    nodes.append(helper.make_node("MatMul", [read, "w"], ["last_hidden_state"], "/encoder/layer.0/MatMul"))
    axes = ["batch", "tokens"]
    inputs = [
        helper.make_tensor_value_info(n, TensorProto.INT64, axes) for n in ("input_ids", "attention_mask")
    ]
    output = helper.make_tensor_value_info("last_hidden_state", TensorProto.FLOAT, [*axes, WIDTH])
    graph = helper.make_graph(nodes, "main", inputs, [output], weights)
    opset = helper.make_opsetid("", 21 if kind == "int4" else 19)
    model = helper.make_model(graph, opset_imports=[opset], ir_version=10)
    onnx.checker.check_model(model)
    onnx.save(model, folder / "model.onnx")
    return folder


def read_scales(path: Path) -> dict[str, list[bytes]]:
    """Return the bytes of each quantizing node's scales, by operator."""
    graph = onnx.load(path).graph
    tensors = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    found: dict[str, list[bytes]] = {}
    for node in graph.node:
        if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            assert tensors[node.input[1]].dtype == np.float32
            found.setdefault(node.op_type, []).append(tensors[node.input[1]].tobytes())
    return {name: sorted(scales) for name, scales in found.items()}


def change(folder: Path, edit: Callable[[onnx.GraphProto], None]) -> None:
    model = onnx.load(folder / "model.onnx")
    edit(model.graph)
    onnx.save(model, folder / "model.onnx")


def set_tensor(graph: onnx.GraphProto, name: str, array: Any) -> None:
    next(t for t in graph.initializer if t.name == name).CopyFrom(numpy_helper.from_array(array, name))
