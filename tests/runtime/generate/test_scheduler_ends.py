"""How submitted requests end early: cancelled, late, failed or closed, and without harm to the others."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import numpy as np
import pytest

from planforge.runtime import Chunk
from planforge.runtime.decoding import slots
from planforge.runtime.decoding.cache_shapes import count_cache_bytes
from planforge.runtime.errors import BackendError, ClosedError, DeadlineError, InputError
from planforge.runtime.generate import scheduler
from planforge.runtime.generate.scheduler import GenerationScheduler
from planforge.runtime.scheduling import worker

from ...helpers.decoder_graph import CONTEXT, artifact
from ...helpers.gate import gated
from ...helpers.generation import DIALECTS, LETTERS, assert_same, generator
from ...helpers.patience import PATIENCE, turn_clocks, wait_until


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


def test_who_leaves_the_loop_over_chunks_cancels() -> None:
    with generator("inplace")[0] as model:
        pending = model.submit("abc", max_new_tokens=60)
        for _ in pending:
            break
        assert pending.result(PATIENCE).finish_reason in ("cancelled", "length", "context")
        assert pending.cancelled


def test_a_deadline_ends_what_runs_and_what_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = turn_clocks(monkeypatch, worker)
    with gated(running=1) as (model, gate):
        running = model.submit("abc", timeout=1000)
        gate.wait()
        waiting = model.submit("bcd", timeout=1000)
        after = model.submit("cde", max_new_tokens=2)
        clock.ahead = 1001
        gate.open()
        for one in (running, waiting):
            with pytest.raises(DeadlineError, match="deadline"):
                one.result(PATIENCE)
        assert len(after.result(PATIENCE).token_ids) == 2


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_request_that_waits_for_memory_keeps_its_deadline_and_can_be_closed(
    dialect: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = turn_clocks(monkeypatch, worker)
    model, _ = generator(dialect, memory_limit=count_cache_bytes(artifact(dialect), 1, CONTEXT))
    stream = model.stream("abcdefgh" * 4, max_new_tokens=30)
    next(stream)  # holds the memory
    late = model.submit("abc", timeout=1000)
    wait_until(lambda: model.count_requests() == (0, 1))  # it has a slot, and no memory
    clock.ahead = 1001
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


def test_a_closed_model_keeps_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[Any]] = []
    real = slots.make_slots

    def make(*args: Any) -> Any:
        own = real(*args)
        made.append(weakref.ref(own))
        return own

    monkeypatch.setattr(scheduler, "make_slots", make)
    model, _ = generator("inplace")
    model.submit("abc", max_new_tokens=2).result(PATIENCE)
    assert made[0]() is not None  # for the next prompt that begins alike
    model.close()
    gc.collect()
    assert made[0]() is None


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


def test_a_model_that_closes_ends_all_and_takes_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = threading.Event()
    stop = GenerationScheduler.stop

    def stop_and_tell(one: GenerationScheduler) -> None:
        stop(one)
        stopped.set()

    monkeypatch.setattr(GenerationScheduler, "stop", stop_and_tell)
    with gated(running=1) as (model, gate):
        pending = [model.submit("abc", max_new_tokens=50) for _ in range(2)]
        gate.wait()
        closing = threading.Thread(target=model.close)
        closing.start()
        assert stopped.wait(PATIENCE)
        with pytest.raises(ClosedError):
            model.submit("abc")
        gate.open()
        closing.join(PATIENCE)
        for one in pending:
            with pytest.raises(ClosedError):
                one.result(PATIENCE)
        with pytest.raises(ClosedError):
            model.submit("abc")


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
