"""Submitted requests: each one's answer is the one it gets alone, whatever the others ask."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planforge.runtime import Chunk
from planforge.runtime.decoding.cache_shapes import count_cache_bytes

from ...helpers.decoder_graph import CONTEXT, artifact
from ...helpers.gate import Gate, gated
from ...helpers.generation import DIALECTS, LETTERS, assert_same, generator, joined
from ...helpers.patience import PATIENCE

texts = st.text(LETTERS, min_size=1, max_size=30)
ways = st.sampled_from(
    [
        {},
        {"temperature": 0.9, "seed": 3},
        {"top_k": 3, "seed": 4, "top_logprobs": 2},
        {"repetition_penalty": 1.4},
        {"logprobs": False},
        {"stop": "ab"},
    ]
)
requests = st.lists(st.tuples(texts, ways, st.integers(1, 12)), min_size=1, max_size=10)


@settings(deadline=None, max_examples=60)
@given(
    dialect=st.sampled_from(DIALECTS), requests=requests, running=st.integers(1, 4), kept=st.integers(0, 2)
)
def test_answers_are_those_that_requests_get_alone(
    dialect: str, requests: list[tuple[str, dict[str, Any], int]], running: int, kept: int
) -> None:
    row_bytes = count_cache_bytes(artifact(dialect), 1, CONTEXT)
    with generator(dialect)[0] as model, generator(dialect)[0] as alone:
        model.schedule(running=running, prefix_memory=kept * row_bytes)
        pending = [model.submit(text, max_new_tokens=most, **how) for text, how, most in requests]
        for one, (text, how, most) in zip(pending, requests, strict=True):
            want = alone.generate(text, max_new_tokens=most, **how)
            got = one.result(PATIENCE)
            assert_same(got, want)
            assert [[t.token_id for t in place] for place in got.top_logprobs] == [
                [t.token_id for t in place] for place in want.top_logprobs
            ]
            assert got.usage == want.usage


def test_several_answers_to_one_prompt_differ_as_the_prompts_of_a_list_do() -> None:
    how: dict[str, Any] = {"temperature": 1.5, "seed": 7, "max_new_tokens": 12}
    with generator("inplace")[0] as model:
        pending = [model.submit("abc", number=number, **how) for number in range(3)]
        want = model.generate(["abc"] * 3, **how)
        assert [one.result(PATIENCE).token_ids for one in pending] == [one.token_ids for one in want]
        assert len({one.token_ids for one in want}) > 1


@pytest.mark.parametrize("dialect", DIALECTS)
def test_chunks_come_as_they_are_made_and_join_to_the_answer(dialect: str) -> None:
    with generator(dialect)[0] as model:
        pending = model.submit("abcab", max_new_tokens=9)
        chunks = list(pending)
        answer = pending.result()
    assert joined(chunks) == answer.text
    assert [token for chunk in chunks for token in chunk.token_ids] == list(answer.token_ids)
    assert [chunk.finish_reason for chunk in chunks][-1] == "length"
    assert {chunk.finish_reason for chunk in chunks[:-1]} <= {None}


def test_who_subscribes_late_gets_all_in_one_chunk() -> None:
    chunks: list[Chunk] = []
    with generator("inplace")[0] as model:
        pending = model.submit("abc", max_new_tokens=5)
        answer = pending.result(PATIENCE)
        pending.subscribe(chunks.append)
    assert joined(chunks) == answer.text
    assert chunks[-1].finish_reason == "length"


@pytest.mark.parametrize("dialect", ["inplace", "ort"])
def test_a_long_prompt_goes_in_between_the_steps_of_the_others(dialect: str) -> None:
    """No step of a running answer waits for more than a piece of the prompt."""
    model, steps = generator(dialect)
    with model:
        model.schedule(running=2)
        gate = Gate(steps)
        short = model.submit("abc", max_new_tokens=12)
        gate.wait()
        gate.step(2)
        long = model.submit("abcdefghij" * 6, max_new_tokens=1)
        gate.open()
        short.result(PATIENCE)
        long.result(PATIENCE)
    first_piece = next(n for n, fed in enumerate(steps.fed) if len(fed) > 3)
    second_piece = next(n for n, fed in enumerate(steps.fed) if len(fed) > 3 and n > first_piece)
    assert second_piece > first_piece + 1
    assert [len(fed) for fed in steps.fed[first_piece + 1 : second_piece]] == [1]


def test_a_short_prompt_does_not_wait_for_the_whole_of_a_long_one() -> None:
    first_tokens: list[str] = []
    with gated(running=3) as (model, gate):
        running = model.submit("abc", max_new_tokens=60)
        gate.wait()
        long = model.submit("abcdefghij" * 6, max_new_tokens=1)
        short = model.submit("jihg", max_new_tokens=1)
        long.future.add_done_callback(lambda _: first_tokens.append("long"))
        short.future.add_done_callback(lambda _: first_tokens.append("short"))
        gate.open()
        for one in (running, long, short):
            one.result(PATIENCE)
    assert first_tokens == ["short", "long"]


def test_a_memory_limit_leaves_fewer_rows_and_another_call_gets_the_memory_of_idle_ones() -> None:
    row = count_cache_bytes(artifact("inplace"), 1, CONTEXT)
    model, _ = generator("inplace", memory_limit=2 * row)
    with model:
        model.schedule(running=6, prefix_memory=10 * row)
        pending = [model.submit("abc", max_new_tokens=3) for _ in range(5)]
        assert {one.result(PATIENCE).token_ids for one in pending} == {pending[0].result().token_ids}
        assert model.decoder.budget.count_held() == 2 * row
        answers = model.generate(["abc", "bcd"], max_new_tokens=30)
        assert len(answers) == 2


def test_measures_are_taken() -> None:
    taken: dict[str, list[float]] = {}
    with generator("inplace")[0] as model:
        model.schedule(observe=lambda name, value: taken.setdefault(name, []).append(value))
        model.submit("abcde", max_new_tokens=4).result(PATIENCE)
        model.submit("abcde", max_new_tokens=4).result(PATIENCE)
    assert {name: len(values) for name, values in taken.items()} == {
        "prompt": 2, "reused": 2, "first_token": 2, "between_tokens": 6, "batch": 6, "context": 2,
    }  # fmt: skip
    assert taken["prompt"] == [5, 5]
    assert taken["reused"] == [0, 4]
    assert taken["context"] == [9, 9]
