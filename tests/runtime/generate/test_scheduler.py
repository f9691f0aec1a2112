"""Submitted requests: each one's answer is the one it gets alone, whatever happens to the others."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planforge.runtime import Chunk, TextGenerator
from planforge.runtime.decoding.cache_shapes import count_cache_bytes
from planforge.runtime.errors import (
    BackendError,
    ClosedError,
    ContextLengthError,
    DeadlineError,
    InputError,
    QueueFullError,
)

from ...helpers.decoder_graph import CONTEXT, artifact
from ...helpers.generation import DIALECTS, LETTERS, Steps, assert_same, generator, joined

PATIENCE = 20.0  # seconds that a test waits for what takes milliseconds

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


class Gate:
    """Stops the engine before each step until it may go on."""

    def __init__(self, steps: Steps) -> None:
        self.graph = steps.graph
        self.entered = threading.Semaphore(0)
        self.passes = threading.Semaphore(0)
        self.is_open = False
        steps.graph = self

    def __call__(self, given: Any) -> Any:
        self.entered.release()
        if not self.is_open:
            assert self.passes.acquire(timeout=PATIENCE)
        return self.graph(given)

    def wait(self) -> None:
        """Wait until the engine is at a step."""
        assert self.entered.acquire(timeout=PATIENCE)

    def step(self, count: int = 1) -> None:
        """Let it go to the next steps."""
        for _ in range(count):
            self.passes.release()
            self.wait()

    def open(self) -> None:
        self.is_open = True
        self.passes.release()


@contextmanager
def gated(**options: Any) -> Iterator[tuple[TextGenerator, Gate]]:
    model, steps = generator("inplace")
    model.schedule(**options)
    gate = Gate(steps)
    try:
        yield model, gate
    finally:
        gate.open()
        model.close()


def test_a_cancelled_request_ends_within_a_step_and_disturbs_nobody() -> None:
    with gated(running=2) as (model, gate):
        leaver = model.submit("abc", max_new_tokens=40)
        gate.wait()
        stayer = model.submit("bcd", max_new_tokens=6)
        waiting = model.submit("cde", max_new_tokens=6)
        gate.step(3)
        leaver.cancel()
        gate.open()
        assert leaver.result(PATIENCE).finish_reason == "cancelled"
        assert len(leaver.result().token_ids) <= 4
        with generator("inplace")[0] as alone:
            for one, text in ((stayer, "bcd"), (waiting, "cde")):
                assert_same(one.result(PATIENCE), alone.generate(text, max_new_tokens=6))


def test_a_request_that_waits_can_be_cancelled_and_has_no_tokens() -> None:
    with gated(running=1) as (model, gate):
        running = model.submit("abc", max_new_tokens=3)
        gate.wait()
        waiting = model.submit("bcd")
        assert model.count_requests() == (1, 1)
        assert repr(waiting) == "PendingGeneration(waiting, 0 tokens)" and not waiting.done()
        waiting.cancel()
        gate.open()
        assert waiting.result(PATIENCE).token_ids == ()
        assert list(waiting)[-1].finish_reason == "cancelled"
        assert len(running.result(PATIENCE).token_ids) == 3
        assert repr(running) == "PendingGeneration(ended, 3 tokens)" and running.done()


def test_a_deadline_ends_what_runs_and_what_waits() -> None:
    with gated(running=1) as (model, gate):
        running = model.submit("abc", timeout=0.05)
        gate.wait()
        waiting = model.submit("bcd", timeout=0.05)
        after = model.submit("cde", max_new_tokens=2)
        time.sleep(0.06)
        gate.open()
        for one in (running, waiting):
            with pytest.raises(DeadlineError, match="deadline"):
                one.result(PATIENCE)
        assert len(after.result(PATIENCE).token_ids) == 2


def test_clients_take_turns() -> None:
    order: list[str] = []

    def note(client: str, future: object) -> None:
        order.append(client)

    with gated(running=1) as (model, gate):
        first = model.submit("abc", max_new_tokens=1, client="many")
        gate.wait()
        pending = [model.submit("abc", max_new_tokens=1, client="many") for _ in range(3)]
        pending.append(model.submit("abc", max_new_tokens=1, client="one"))
        clients = ["many", "many", "many", "one"]
        for number, one in enumerate(pending):
            one.future.add_done_callback(partial(note, clients[number]))
        gate.open()
        for one in (first, *pending):
            one.result(PATIENCE)
    assert order.index("one") <= 1


def test_too_many_requests_are_refused() -> None:
    with gated(running=1, queue_size=2) as (model, gate):
        model.submit("abc", max_new_tokens=1)
        gate.wait()
        model.submit("abc")
        model.submit("abc")
        with pytest.raises(QueueFullError, match="2 requests wait already"):
            model.submit("abc")


@pytest.mark.parametrize(("divided", "places"), [(False, 5), (True, 3)])
def test_a_client_may_submit_as_many_at_once_as_are_counted(divided: bool, places: int) -> None:
    """Those that start at once need no place in the queue; a divided queue keeps places for others."""
    with gated(running=2, queue_size=3, divide_queue=divided) as (model, _):
        assert model.count_places() == places
        for _ in range(places):
            model.submit("abc", max_new_tokens=1, client="one")


def test_prompts_are_shared_by_clients_or_by_each_with_itself() -> None:
    prompt = "abcdefgh" * 5
    for share, expected in ((True, [0, 39, 39]), (False, [0, 0, 39])):
        with generator("inplace")[0] as model:
            model.schedule(share_prompts=share)
            answers = [model.submit(prompt, max_new_tokens=1, client=name).result(PATIENCE) for name in "aba"]
        assert [answer.prompt_tokens_reused for answer in answers] == expected


def test_a_failing_engine_ends_its_requests_and_the_next_ones_go_on() -> None:
    model, steps = generator("inplace")
    with model:
        steps.fails = True
        failing = [model.submit("abc") for _ in range(3)]
        for one in failing:
            with pytest.raises(BackendError, match="planted"):
                one.result(PATIENCE)
            with pytest.raises(BackendError, match="planted"):
                list(one)
        steps.fails = False
        assert len(model.submit("abc", max_new_tokens=4).result(PATIENCE).token_ids) == 4


def test_logits_of_one_row_that_are_nan_fail_that_request_alone() -> None:
    model, steps = generator("inplace")
    graph = steps.graph

    def spoil(given: Any) -> Any:
        results = graph(given)
        spoilt = given["input_ids"].reshape(-1)[given["logit_rows"]] == LETTERS.index("k")
        results["logits"] = np.where(spoilt[:, None], np.nan, results["logits"])
        return results

    steps.graph = spoil
    forbid_k: dict[str, Any] = {"logit_bias": {LETTERS.index("k"): -np.inf}, "max_new_tokens": 8}
    with model, generator("inplace")[0] as alone:
        sound = model.submit("abc", **forbid_k)
        spoilt = model.submit("abk")
        also_sound = model.submit("bca", **forbid_k)
        with pytest.raises(BackendError, match="NaN"):
            spoilt.result(PATIENCE)
        assert_same(sound.result(PATIENCE), alone.generate("abc", **forbid_k))
        assert_same(also_sound.result(PATIENCE), alone.generate("bca", **forbid_k))


def test_a_processor_or_a_listener_that_raises_fails_its_request_alone() -> None:
    def refuse(token_ids: object, logits: object) -> Any:
        raise ArithmeticError("mine")

    def stop_listening(chunk: Chunk) -> None:
        raise ArithmeticError("gone")

    with gated(running=3) as (model, gate):
        sound = model.submit("abc", max_new_tokens=6)
        gate.wait()
        processed = model.submit("abc", logits_processor=refuse)
        heard = model.submit("abc", max_new_tokens=6)
        heard.subscribe(stop_listening)
        gate.open()
        assert len(sound.result(PATIENCE).token_ids) == 6
        for one in (processed, heard):
            with pytest.raises((ArithmeticError, InputError), match=r"mine|gone"):
                one.result(PATIENCE)


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


def test_a_model_that_closes_ends_all_and_takes_no_more() -> None:
    with gated(running=1) as (model, gate):
        pending = [model.submit("abc", max_new_tokens=50) for _ in range(2)]
        gate.wait()
        closing = threading.Thread(target=model.close)
        closing.start()
        with pytest.raises(ClosedError):
            while True:
                pending.append(model.submit("abc"))
                time.sleep(0.001)
        gate.open()
        closing.join(PATIENCE)
        for one in pending:
            with pytest.raises(ClosedError):
                one.result(PATIENCE)
        with pytest.raises(ClosedError):
            model.submit("abc")


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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 2}, "num_beams=2 does not go with submit"),
        ({"speculative": "prompt-lookup"}, "speculative='prompt-lookup' does not go with submit"),
        ({"reuse_prompt": True}, "reuse_prompt=True does not go with submit"),
        ({"on_token": print}, "on_token=.* does not go with submit"),
        ({"timeout": 0}, "timeout is 0"),
        ({"timeout": float("nan")}, "timeout is nan"),
        ({"temprature": 1}, "unknown option 'temprature'"),
    ],
)
def test_what_a_submitted_request_cannot_have_is_refused_at_the_call(
    options: dict[str, Any], message: str
) -> None:
    with generator("inplace")[0] as model, pytest.raises(InputError, match=message):
        model.submit("abc", **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"running": 0}, "running=0 must be an integer from 1 to 8"),
        ({"context": CONTEXT + 1}, f"context={CONTEXT + 1} must be an integer from 2 to {CONTEXT}"),
        ({"prefix_memory": -1}, "prefix_memory=-1"),
        ({"queue_size": 0}, "queue_size=0"),
        ({"share_prompts": "no"}, "share_prompts='no' must be True or False"),
        ({"divide_queue": 1}, "divide_queue=1 must be True or False"),
        ({"runing": 2}, "did you mean 'running'"),
    ],
)
def test_settings_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with generator("inplace")[0] as model, pytest.raises(InputError, match=message):
        model.schedule(**options)


def test_settings_come_before_the_first_request() -> None:
    with generator("inplace")[0] as model:
        model.submit("abc", max_new_tokens=1).result(PATIENCE)
        with pytest.raises(InputError, match="before the first submit"):
            model.schedule(running=2)


def test_a_smaller_context_counts_for_prompts_too() -> None:
    with generator("inplace")[0] as model:
        model.schedule(context=10)
        with pytest.raises(ContextLengthError, match="the context holds 10"):
            model.submit("abcdefghijk")
        answer = model.submit("abcdefgh", max_new_tokens=50).result(PATIENCE)
        assert (len(answer.token_ids), answer.finish_reason) == (2, "context")


def test_many_threads_submit_at_once() -> None:
    with generator("ort")[0] as model, generator("ort")[0] as alone:
        want = {text: alone.generate(text, max_new_tokens=8) for text in ("abc", "cba", "aabb", "k")}
        wrong: list[object] = []

        def ask(text: str) -> None:
            for _ in range(5):
                got = model.submit(text, max_new_tokens=8).result(PATIENCE)
                if got.token_ids != want[text].token_ids:
                    wrong.append((text, got))

        threads = [threading.Thread(target=ask, args=(text,)) for text in want for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        assert not wrong


def test_a_listener_that_raises_at_the_end_of_a_cancelled_request_harms_nobody() -> None:
    def refuse(chunk: Chunk) -> None:
        raise ArithmeticError("gone")

    with gated(running=1) as (model, gate):
        running = model.submit("abc", max_new_tokens=6)
        gate.wait()
        waiting = [model.submit("bcd", max_new_tokens=2) for _ in range(3)]
        waiting[1].subscribe(refuse)
        for one in waiting[:2]:
            one.cancel()
        gate.open()
        assert len(running.result(PATIENCE).token_ids) == 6
        assert waiting[0].result(PATIENCE).finish_reason == "cancelled"
        with pytest.raises(ArithmeticError, match="gone"):
            waiting[1].result(PATIENCE)
        assert len(waiting[2].result(PATIENCE).token_ids) == 2
        assert len(model.submit("abc", max_new_tokens=3).result(PATIENCE).token_ids) == 3


def test_an_observer_that_raises_is_told_no_more(caplog: pytest.LogCaptureFixture) -> None:
    def refuse(measure: str, value: float) -> None:
        raise ArithmeticError(measure)

    with generator("inplace")[0] as model:
        model.schedule(observe=refuse)
        for _ in range(2):
            assert len(model.submit("abc", max_new_tokens=3).result(PATIENCE).token_ids) == 3
    assert [record.message for record in caplog.records].count(
        "the observer of measures raised, and gets no more"
    ) == 1


def test_a_model_closes_while_a_callback_submits_again() -> None:
    refused: list[BaseException] = []

    def submit_again(_: object) -> None:
        try:
            model.submit("abc")
        except ClosedError as error:
            refused.append(error)

    with gated(running=1) as (model, gate):
        pending = [model.submit("abc", max_new_tokens=50) for _ in range(2)]
        for one in pending:
            one.future.add_done_callback(submit_again)
        gate.wait()
        closing = threading.Thread(target=model.close)
        closing.start()
        gate.open()
        closing.join(PATIENCE)
        assert not closing.is_alive()
    assert len(refused) == 2


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_request_that_waits_for_memory_keeps_its_deadline_and_can_be_closed(dialect: str) -> None:
    model, _ = generator(dialect, memory_limit=count_cache_bytes(artifact(dialect), 1, CONTEXT))
    stream = model.stream("abcdefgh" * 4, max_new_tokens=30)
    next(stream)  # holds the memory
    late = model.submit("abc", timeout=0.2)
    with pytest.raises(DeadlineError):
        late.result(PATIENCE)
    stream.close()
    assert len(model.submit("abc", max_new_tokens=2).result(PATIENCE).token_ids) == 2
    stream = model.stream("abcdefgh" * 4, max_new_tokens=30)
    next(stream)
    waiting = model.submit("abc")
    closing = threading.Thread(target=model.close)
    closing.start()
    closing.join(PATIENCE)
    assert not closing.is_alive()
    with pytest.raises(ClosedError):
        waiting.result(PATIENCE)


def test_a_step_that_fails_is_tried_for_each_request_by_itself() -> None:
    model, steps = generator("inplace")
    graph = steps.graph

    def fail_for_k(given: Any) -> Any:
        if given["input_ids"].shape[1] == 1 and LETTERS.index("k") in given["input_ids"]:
            raise BackendError("planted")
        return graph(given)

    steps.graph = fail_for_k
    no_k: dict[str, Any] = {"logit_bias": {LETTERS.index("k"): -np.inf}, "max_new_tokens": 8}
    only_k: dict[str, Any] = {"logit_bias": {i: -np.inf for i, letter in enumerate(LETTERS) if letter != "k"}}
    with model, generator("inplace")[0] as alone:
        pending = [model.submit("abc", **no_k), model.submit("abc", **only_k), model.submit("bca", **no_k)]
        with pytest.raises(BackendError, match="planted"):
            pending[1].result(PATIENCE)
        assert_same(pending[0].result(PATIENCE), alone.generate("abc", **no_k))
        assert_same(pending[2].result(PATIENCE), alone.generate("bca", **no_k))


def test_who_leaves_the_loop_over_chunks_cancels() -> None:
    with generator("inplace")[0] as model:
        pending = model.submit("abc", max_new_tokens=60)
        for _ in pending:
            break
        assert pending.result(PATIENCE).finish_reason in ("cancelled", "length", "context")
        assert pending.cancelled


def test_a_refused_request_leaves_the_settings_open() -> None:
    with generator("inplace")[0] as model:
        with pytest.raises(InputError):
            model.submit("")
        model.schedule(running=2)
        assert len(model.submit("abc", max_new_tokens=2).result(PATIENCE).token_ids) == 2
