from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planforge.runtime import errors
from planforge.runtime.backends.backend import Array, ArrayBuffer, Buffer
from planforge.runtime.decoding.cache_shapes import count_cache_bytes
from planforge.runtime.decoding.caches import make_cache
from planforge.runtime.decoding.decoder import Decoder, DecoderRun
from planforge.runtime.decoding.dynamic_cache import DynamicCache
from planforge.runtime.decoding.static_cache import StaticCache

from ...helpers.decoder_graph import (
    CONTEXT,
    D,
    Given,
    H,
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

    cache = DynamicCache(FakeProgram(watch), artifact("portable"), 1, 8)
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
    cache = StaticCache(FakeProgram(inplace), artifact("inplace"), 1, 8)
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
