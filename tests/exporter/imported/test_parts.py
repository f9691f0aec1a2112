"""Parts of an import on small graphs: files that are mapped, and shapes that become constants."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import numpy_helper

from planforge.exporter.imported.mapped import load_mapped
from planforge.exporter.imported.shapes import fold_shapes

TEXT = """
<ir_version: 8, opset_import: ["" : 18]>
traced (int64[batch, tokens] input_ids, float[batch, tokens, 12] x) => (float[batch, tokens, 12] y)
<int64[1] axis = {0}, int64 zero = {0}, int64[1] rest = {-1}, int64[1] heads = {3}, int64[1] size = {4},
 int64[1] width = {12}>
{
  shape = Shape(x)
  number = Gather <axis = 0> (shape, zero)
  batch = Unsqueeze(number, axis)
  split = Concat <axis = 0> (batch, rest, heads, size)
  apart = Reshape(x, split)
  moved = Transpose <perm = [0, 2, 1, 3]> (apart)
  back = Transpose <perm = [0, 2, 1, 3]> (moved)
  twice = Add(back, back)
  joined = Concat <axis = 0> (batch, rest, width)
  y = Reshape(twice, joined)
}
"""


def traced() -> onnx.ModelProto:
    """Heads that are split and joined, by shapes that are computed in each step."""
    model = onnx.parser.parse_model(TEXT)
    onnx.checker.check_model(model)
    return model


def test_reshapes_whose_axes_follow_get_constants_and_moves_that_cancel_go() -> None:
    proto = traced()
    model = ir.from_proto(proto)
    fold_shapes(model)
    assert [node.op_type for node in model.graph] == ["Reshape", "Add", "Reshape"]
    sessions = [onnxruntime.InferenceSession(p.SerializeToString()) for p in (proto, ir.to_proto(model))]
    for shape in ((1, 1), (2, 5)):
        feeds = {"x": np.random.default_rng(0).normal(size=(*shape, 12)).astype(np.float32)}
        feeds["input_ids"] = np.zeros(shape, np.int64)
        one, other = (s.run(None, {i.name: feeds[i.name] for i in s.get_inputs()})[0] for s in sessions)
        assert np.array_equal(one, other) and one.shape == (*shape, 12)


def test_a_mapped_file_is_the_file(tmp_path: Path) -> None:
    model = traced()
    rng = np.random.default_rng(0)
    arrays: dict[str, Any] = {"large": rng.normal(size=(40, 30)).astype(np.float32), "small": np.arange(5)}
    for name, array in arrays.items():
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    onnx.save(model, tmp_path / "model.onnx")
    found = load_mapped(tmp_path / "model.onnx")
    constants = found.graph.initializers
    assert isinstance(constants["large"].const_value, ir.ExternalTensor)
    for name, array in arrays.items():
        value = constants[name].const_value
        assert value is not None and np.array_equal(value.numpy(), array)
    assert [n.op_type for n in found.graph] == [n.op_type for n in model.graph.node]


@pytest.mark.parametrize("size", [0, 1, 100, -1])
def test_a_file_that_is_cut_off_is_an_error(tmp_path: Path, size: int) -> None:
    model = traced()
    model.graph.initializer.append(numpy_helper.from_array(np.zeros(900, np.float32), "large"))
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString()[:size])
    with pytest.raises(Exception, match=r"byte|empty|index|parsing"):
        load_mapped(tmp_path / "model.onnx")
