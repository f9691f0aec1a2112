from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper
from onnxruntime import IOBinding

from planforge.runtime import errors
from planforge.runtime.backends.backend import Array, ArrayBuffer, Buffer
from planforge.runtime.backends.ort_backend import OrtCpuBackend, OrtProgram
from planforge.runtime.decoding.cache import GrowingCache, SlotCache, make_cache
from planforge.runtime.decoding.cache_shapes import count_cache_bytes
from planforge.runtime.decoding.decoder import Decoder, DecoderRun

from ...helpers.decoder_graph import (
    CONTEXT,
    D,
    Given,
    H,
    Numbers,
    Returned,
    artifact,
    assert_close,
    expected,
    inplace,
    portable,
    tokens,
)
from ...helpers.fake_program import FakeProgram

DIALECTS = ("portable", "inplace")


def decoder(dialect: str) -> Decoder:
    return Decoder(FakeProgram({"portable": portable, "inplace": inplace}[dialect]), artifact(dialect))


def start(dialect: str, batch: int, capacity: int = CONTEXT) -> DecoderRun:
    return decoder(dialect).start(batch, capacity)


prompts = st.lists(st.lists(tokens, min_size=1, max_size=12), min_size=1, max_size=4)
dialects = st.sampled_from(DIALECTS)
fast = settings(deadline=None, max_examples=60)


@fast
@given(dialect=dialects, prompts=prompts, chunk=st.integers(1, 13), data=st.data())
def test_prefill_in_chunks_and_decode_equal_each_row_in_one_pass(
    dialect: str, prompts: list[list[int]], chunk: int, data: st.DataObject
) -> None:
    run = start(dialect, len(prompts))
    rows = [list(prompt) for prompt in prompts]
    logits = run.prefill(prompts, chunk)
    for _ in range(data.draw(st.integers(0, 4))):
        assert_close(logits, np.stack([expected(row)[-1] for row in rows]))
        new = [data.draw(tokens) for _ in rows]
        logits = run.decode(new)
        rows = [[*row, token] for row, token in zip(rows, new, strict=True)]
    assert_close(logits, np.stack([expected(row)[-1] for row in rows]))


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_second_prefill_continues_every_row(dialect: str) -> None:
    first = [[1, 2, 3], [4], [5, 6]]
    second = [[7], [8, 9, 10, 1], [2, 3]]
    run = start(dialect, 3)
    run.prefill(first)
    logits = run.prefill(second, chunk=2)
    assert_close(logits, np.stack([expected(a + b)[-1] for a, b in zip(first, second, strict=True)]))


@fast
@given(
    dialect=dialects,
    prompt=st.lists(tokens, min_size=1, max_size=6),
    more=st.lists(tokens, min_size=1, max_size=12),
)
def test_extend_gives_the_logits_after_every_token(dialect: str, prompt: list[int], more: list[int]) -> None:
    for chunk in (1, 5, 64):
        run = start(dialect, 1)
        run.prefill([prompt])
        assert_close(np.concatenate(list(run.extend(more, chunk))), expected(prompt + more)[len(prompt) :])


@pytest.mark.parametrize("dialect", DIALECTS)
def test_runs_of_one_decoder_do_not_disturb_each_other(dialect: str) -> None:
    shared = decoder(dialect)
    a = shared.start(1, 8)
    b = shared.start(2, 8)
    a.prefill([[1, 2]])
    b.prefill([[3], [4, 5]])
    assert_close(a.decode([6]), expected([1, 2, 6])[-1:])
    assert_close(b.decode([7, 8])[1], expected([4, 5, 8])[-1])


@pytest.mark.parametrize("dialect", DIALECTS)
def test_the_cache_holds_exactly_its_capacity(dialect: str) -> None:
    run = start(dialect, 2, capacity=5)
    run.prefill([[1, 2, 3, 4], [1]])
    logits = run.decode([5, 6])
    assert_close(logits[0], expected([1, 2, 3, 4, 5])[-1])
    with pytest.raises(errors.ContextLengthError, match="holds 5 tokens per row, 6 are needed") as caught:
        run.decode([1, 1])
    assert (caught.value.tokens, caught.value.limit) == (6, 5)
    with pytest.raises(errors.ContextLengthError):
        start(dialect, 1, capacity=5).prefill([[1] * 6])


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_closed_decoder_refuses_and_closes_its_program_once(dialect: str) -> None:
    closed = decoder(dialect)
    run = closed.start(1, 8)
    run.prefill([[1]])
    closed.close()
    closed.close()
    assert isinstance(closed.program, FakeProgram) and closed.program.closed
    with pytest.raises(errors.ClosedError, match=r"load\(\) it again"):
        run.decode([1])
    with pytest.raises(errors.ClosedError):
        closed.start(1, 8).prefill([[1]])


def test_steps_of_two_threads_take_turns() -> None:
    inside = threading.Lock()

    def alone(given: Given) -> Returned:
        assert inside.acquire(blocking=False)
        try:
            return inplace(given)
        finally:
            inside.release()

    shared = Decoder(FakeProgram(alone), artifact("inplace"))

    def last_of_many(token: int) -> Array:
        run = shared.start(1, CONTEXT)
        return [run.decode([token]) for _ in range(40)][-1]

    with ThreadPoolExecutor(3) as pool:
        for token, logits in enumerate(pool.map(last_of_many, range(3))):
            assert_close(logits, expected([token] * 40)[-1:])


def test_the_growing_cache_alternates_between_two_sets_of_memory() -> None:
    seen: list[Given] = []

    def watch(given: Given) -> Returned:
        seen.append(dict(given))
        return portable(given)

    cache = GrowingCache(FakeProgram(watch), artifact("portable"), 1, 8)
    for token in range(4):
        cache.step(np.array([[token]]), np.array([[True]]), np.array([0]))
    for name in ("key", "value"):
        past = [step[f"past_key_values.0.{name}"] for step in seen]
        present = [step[f"present.0.{name}"] for step in seen]
        for n in range(1, 4):
            assert np.shares_memory(past[n], present[n - 1])  # handed on, not copied
            assert not np.shares_memory(past[n], present[n])
            assert past[n].shape == (1, H, n, D) and present[n].shape == (1, H, n + 1, D)
        assert np.shares_memory(present[0], present[2])
        assert np.shares_memory(present[1], present[3])
    assert not np.shares_memory(seen[0]["present.0.key"], seen[0]["present.0.value"])


def test_the_slot_cache_hands_out_one_memory_as_past_and_present() -> None:
    cache = SlotCache(FakeProgram(inplace), artifact("inplace"), 1, 8)
    for kind in ("key", "value"):
        assert cache.buffers[f"cache.0.{kind}"] is cache.buffers[f"present.0.{kind}"]
    assert cache.buffers["cache.0.key"] is not cache.buffers["cache.0.value"]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_cache_bytes_is_what_is_allocated(dialect: str, dtype: str) -> None:
    allocated: list[Buffer] = []

    class Counting(FakeProgram):
        def allocate(self, name: str, shape: tuple[int, ...]) -> Buffer:
            allocated.append(super().allocate(name, shape))
            return allocated[-1]

    make_cache(Counting(inplace, dtype), artifact(dialect, dtype), 3, 10)
    size = count_cache_bytes(artifact(dialect, dtype), 3, 10)
    assert size == sum(buffer.numpy().nbytes for buffer in allocated)
    sets = 2 if dialect == "portable" else 1
    assert size == sets * 2 * 3 * H * 10 * D * (4 if dtype == "float32" else 2)


def test_a_fake_refuses_an_output_that_its_buffer_does_not_fit() -> None:
    program = FakeProgram(lambda given: {"present": given["past"][:, :, :1]})
    buffer = program.allocate("past", (1, H, 2, D))
    with pytest.raises(AssertionError, match="present"):
        program.run({}, {"past": buffer, "present": buffer})


def test_an_unknown_dialect_lists_the_known_ones() -> None:
    with pytest.raises(errors.ManifestError, match=r"'other'.*'portable', 'inplace'"):
        make_cache(FakeProgram(inplace), artifact("other"), 1, 8)


def test_a_buffer_copies_the_first_slots_of_a_row_over_another() -> None:
    buffer = ArrayBuffer(np.arange(3 * H * 5 * D, dtype=np.float32).reshape(3, H, 5, D))
    before = buffer.numpy()
    buffer.copy_rows(2, 0, 3)
    after = buffer.numpy()
    np.testing.assert_array_equal(after[0, :, :3], before[2, :, :3])
    np.testing.assert_array_equal(after[0, :, 3:], before[0, :, 3:])
    np.testing.assert_array_equal(after[1:], before[1:])


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
    with pytest.raises(errors.BackendError, match="Got: 4 Expected: 3"):
        step({"y": full(1, 2, 4)})
    np.testing.assert_array_equal(step({"y": full(7, 2, 3)})["sum"], full(12, 2, 3))
    program.close()
    with pytest.raises(errors.ClosedError):
        step({"y": full(7, 2, 3)})


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
