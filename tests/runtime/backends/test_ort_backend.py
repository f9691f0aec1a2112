from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnxruntime import IOBinding

from planforge.runtime import errors
from planforge.runtime.backends.backend import Array
from planforge.runtime.backends.ort_backend import OrtCpuBackend
from planforge.runtime.backends.ort_program import OrtProgram

from ...helpers.decoder_graph import Numbers


def onnx_file(
    folder: Path, op: str, shapes: Mapping[str, list[Any]], outputs: int = 1, **attributes: Any
) -> Path:
    """A graph of one node; the last of `shapes` are its outputs."""
    infos = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in shapes.items()]
    node = helper.make_node(op, [*shapes][:-outputs], [*shapes][-outputs:], **attributes)
    graph = helper.make_graph([node], "g", infos[:-outputs], infos[-outputs:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    onnx.save(model, folder / "model.onnx")
    return folder / "model.onnx"


ROW = ["batch", 3]
ADD: dict[str, list[Any]] = {"x": ROW, "y": ROW, "sum": ROW}


def full(value: float, *shape: int) -> Numbers:
    return np.full(shape, value, np.float32)


def test_ort_outputs_are_arrays_of_their_own(tmp_path: Path) -> None:
    program = OrtProgram(onnx_file(tmp_path, "Add", ADD), threads=1)
    x = full(1, 2, 3)
    y = full(2, 2, 3)
    first = program.run({"x": x, "y": y}, {})["sum"]
    second = program.run({"x": full(10, 2, 3), "y": y}, {})["sum"]
    np.testing.assert_array_equal(first, full(3, 2, 3))  # the second run left it alone
    np.testing.assert_array_equal(second, full(12, 2, 3))
    assert not np.shares_memory(first, x) and first.flags.writeable
    program.close()
    np.testing.assert_array_equal(second, full(12, 2, 3))


def test_ort_writes_an_output_into_the_buffer_of_its_input(tmp_path: Path) -> None:
    program = OrtProgram(onnx_file(tmp_path, "Add", ADD), threads=1)
    buffer = program.allocate("x", (2, 3))
    np.testing.assert_array_equal(buffer.numpy(), full(0, 2, 3))
    address = buffer.array.ctypes.data
    for step in (1, 2, 3):
        assert program.run({"y": full(5, 2, 3)}, {"x": buffer, "sum": buffer}) == {}
        np.testing.assert_array_equal(buffer.numpy(), full(5 * step, 2, 3))
    assert buffer.array.ctypes.data == address == buffer.value.data_ptr()


def test_a_bound_graph_computes_what_a_run_computes(tmp_path: Path) -> None:
    program = OrtProgram(onnx_file(tmp_path, "Add", ADD), threads=1)
    buffer = program.allocate("x", (2, 3))
    buffer.array[:] = 5
    step = program.bind({"x": buffer}, ["sum"])
    for value in (1, 2, 3):
        np.testing.assert_array_equal(step({"y": full(value, 2, 3)})["sum"], full(5 + value, 2, 3))
    np.testing.assert_array_equal(step({"y": full(4, 1, 3)})["sum"], full(9, 2, 3))  # another shape
    np.testing.assert_array_equal(step({"y": np.full((2, 3), 6, np.int64)})["sum"], full(11, 2, 3))
    for value in (1, 2, 3):  # in columns, which ONNX Runtime copies
        np.testing.assert_array_equal(step({"y": full(value, 3, 2).T})["sum"], full(5 + value, 2, 3))
    with pytest.raises(errors.BackendError, match="Got: 4 Expected: 3"):
        step({"y": full(1, 2, 4)})
    np.testing.assert_array_equal(step({"y": full(7, 2, 3)})["sum"], full(12, 2, 3))
    program.close()
    with pytest.raises(errors.ClosedError):
        step({"y": full(7, 2, 3)})


def test_a_graph_whose_only_input_is_a_buffer_computes_it_at_each_step(tmp_path: Path) -> None:
    program = OrtProgram(onnx_file(tmp_path, "Abs", {"x": ROW, "y": ROW}), threads=1)
    x = program.allocate("x", (2, 3))
    step = program.bind({"x": x})
    kept = []
    for value in range(3):
        x.array[...] = -value
        kept.append(step({})["y"])
    for value, result in enumerate(kept):
        np.testing.assert_array_equal(result, full(value, 2, 3))
    program.close()


def test_a_bound_graph_leaves_alone_what_somebody_still_has(tmp_path: Path) -> None:
    program = OrtProgram(onnx_file(tmp_path, "Add", ADD), threads=1)
    step = program.bind({})

    def add(value: float) -> Array:
        return step({"x": full(value, 2, 3), "y": full(1, 2, 3)})["sum"]

    kept = [add(value) for value in range(4)]
    rows = [add(value)[1] for value in range(4, 8)]  # a view keeps the whole
    for value, array in enumerate(kept):
        np.testing.assert_array_equal(array, full(value + 1, 2, 3))
    for value, row in enumerate(rows, 4):
        np.testing.assert_array_equal(row, full(value + 1, 3))
    addresses = {add(value).ctypes.data for value in range(3)}
    assert len(addresses) == 1  # nobody has them: the memory is taken again
    assert not addresses & {array.ctypes.data for array in kept}


def test_a_step_binds_nothing_however_many_buffers_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model of 32 layers has 64 buffers for keys and values, each an input and an output."""
    names = [f"cache.{layer}" for layer in range(64)]
    shapes: dict[str, list[Any]] = {name: [1, 3] for name in names}
    outputs: dict[str, list[Any]] = {f"present.{layer}": [1, 3] for layer in range(64)} | {
        "sum": ["batch", 3]
    }
    infos = {
        name: helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
        for name, shape in {"x": ["batch", 3], **shapes, **outputs}.items()
    }
    nodes = [helper.make_node("Add", ["x", "x"], ["sum"])]
    nodes += [helper.make_node("Identity", [name], [f"present.{i}"]) for i, name in enumerate(names)]
    given_values = [infos[name] for name in ("x", *names)]
    graph = helper.make_graph(nodes, "g", given_values, [infos[name] for name in outputs])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    onnx.save(model, tmp_path / "model.onnx")
    program = OrtProgram(tmp_path / "model.onnx", threads=1)
    slots = [program.allocate(name, (1, 3)) for name in names]
    buffers = {name: slot for name, slot in zip(names, slots, strict=True)}
    buffers |= {f"present.{i}": slot for i, slot in enumerate(slots)}
    bound: list[str] = []
    for method in ("bind_cpu_input", "bind_output", "bind_ortvalue_input", "bind_ortvalue_output"):
        original = getattr(IOBinding, method)

        def noted(self: Any, name: str, *rest: Any, original: Any = original) -> Any:
            bound.append(name)
            return original(self, name, *rest)

        monkeypatch.setattr(IOBinding, method, noted)
    step = program.bind(buffers)
    assert sorted(bound) == sorted(buffers)
    del bound[:]
    for value in range(2):
        step({"x": full(value, 1, 3)})
    assert bound == ["x", "sum", "sum"]  # allocated by ONNX Runtime, and then here
    del bound[:]
    for value in range(5):
        np.testing.assert_array_equal(step({"x": full(value, 1, 3)})["sum"], full(2 * value, 1, 3))
    assert bound == []


def test_a_closed_program_frees_its_session_though_a_cache_is_bound_to_it(tmp_path: Path) -> None:
    program = OrtProgram(onnx_file(tmp_path, "Add", ADD), threads=1)
    step = program.bind({})
    session = weakref.ref(program.session)
    program.close()
    gc.collect()
    assert session() is None and step is not None


@pytest.mark.parametrize("bound", [["a"], ["b"], ["a", "b"], []])
def test_ort_returns_the_outputs_that_have_no_buffer(tmp_path: Path, bound: list[str]) -> None:
    shapes = {"x": [4], "a": [2], "b": [2]}
    program = OrtProgram(onnx_file(tmp_path, "Split", shapes, outputs=2, num_outputs=2), threads=1)
    buffers = {name: program.allocate(name, (2,)) for name in bound}
    returned = program.run({"x": np.array([1, 1, 2, 2], np.float32)}, buffers)
    assert set(returned) == {"a", "b"} - set(bound)
    for name, value in (("a", 1), ("b", 2)):
        got = buffers[name].numpy() if name in bound else returned[name]
        np.testing.assert_array_equal(got, full(value, 2))


def test_ort_grows_a_past_of_no_tokens_without_a_copy(tmp_path: Path) -> None:
    shapes = {"past": [1, 1, "P", 2], "new": [1, 1, "T", 2], "present": [1, 1, "S", 2]}
    program = OrtProgram(onnx_file(tmp_path, "Concat", shapes, axis=2), threads=1)
    past, present = (program.allocate("past", (1, 1, 8, 2)) for _ in range(2))
    for length in range(5):
        buffers = {
            "past": past.view((1, 1, length, 2)),
            "present": present.view((1, 1, length + 1, 2)),
        }
        assert program.run({"new": full(length, 1, 1, 1, 2)}, buffers) == {}
        past, present = present, past
    np.testing.assert_array_equal(past.numpy()[0, 0, :, 0], [0, 1, 2, 3, 4, 0, 0, 0])


@pytest.mark.parametrize(
    ("inputs", "shape", "message"),
    [
        ({"x": full(1, 2, 3)}, None, "y"),
        ({"x": full(1, 2, 3), "y": full(1, 2, 4)}, None, "y.*Got: 4 Expected: 3"),
        ({"x": full(1, 2, 3), "y": full(1, 6)}, None, "y"),
        ({"x": full(1, 2, 3), "y": full(1, 2, 3)}, (2, 4), "sum.*Got: 4 Expected: 3"),
    ],
    ids=["missing", "axis", "rank", "output"],
)
def test_ort_names_what_does_not_fit_in_one_line_and_runs_on(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    inputs: dict[str, Array],
    shape: tuple[int, ...] | None,
    message: str,
) -> None:
    program = OrtProgram(onnx_file(tmp_path, "Add", ADD), threads=1)
    buffers = {} if shape is None else {"sum": program.allocate("sum", shape)}
    with pytest.raises(errors.BackendError, match=message) as caught:
        program.run(inputs, buffers)
    assert "\n" not in str(caught.value) and caught.value.__cause__ is not None
    assert capfd.readouterr().err == ""  # said once, in the exception
    good = program.run({"x": full(1, 1, 3), "y": full(1, 1, 3)}, {})
    np.testing.assert_array_equal(good["sum"], full(2, 1, 3))


@pytest.mark.parametrize("content", [b"", b"garbage" * 20, None])
def test_ort_names_a_file_that_it_cannot_load(tmp_path: Path, content: bytes | None) -> None:
    path = onnx_file(tmp_path, "Add", ADD)
    path.write_bytes(path.read_bytes()[:-9] if content is None else content)
    with pytest.raises(errors.BackendError, match=r"cannot load model\.onnx") as caught:
        OrtProgram(path)
    assert "\n" not in str(caught.value)


def test_without_onnxruntime_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(errors.BackendUnavailableError, match=r"planforge\[cpu\]"):
        OrtCpuBackend()
