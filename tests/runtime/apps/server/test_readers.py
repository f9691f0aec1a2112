"""Who waits for whom where requests are read: clients take turns, and nobody is read who left or is late."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import httpx
import pytest

from planforge.runtime import ClosedError, QueueFullError, TextEncoder, TextGenerator, load
from planforge.runtime.apps.server import ServerSettings
from planforge.runtime.apps.server.readers import Job, WorkerPool
from planforge.runtime.generate.grammar import Grammars
from planforge.runtime.scheduling.steps import Steps

from ....helpers.serving import SECONDS, running_server

EMBED = "/v1/embeddings"
COMPLETE = "/v1/completions"
HEAD = b"POST /v1/embeddings HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
OBJECT = {"type": "json_object"}


class Held:
    """What others wait for: each pass says that it began, and waits until it may go on."""

    def __init__(self) -> None:
        self.began = threading.Semaphore(0)
        self.may_end = threading.Event()
        self.count = 0

    def wait(self) -> None:
        self.count += 1
        self.began.release()
        assert self.may_end.wait(SECONDS)

    def wait_for_beginning(self) -> None:
        assert self.began.acquire(timeout=SECONDS)


class Reading:
    """A pool whose only thread is held by a first job, and what its jobs did."""

    def __init__(self, **settings: Any) -> None:
        self.held = Held()
        self.pool = WorkerPool("test", 1, ServerSettings(**settings))
        self.done: list[str] = []
        self.first = self.put("first", wait=self.held.wait)
        self.held.wait_for_beginning()

    def put(
        self, name: str, client: str = "", steps: int = 1, wait: Callable[[], None] = lambda: None
    ) -> Job[str]:
        job = Job(self.run(name, steps, wait), client)
        self.pool.put(job)
        return job

    def run(self, name: str, steps: int, wait: Callable[[], None]) -> Steps[str]:
        try:
            for number in range(steps):
                if number:
                    yield
                self.done.append(f"{name}{number}")
                wait()
        finally:
            self.done.append(f"{name} ends")
        return name


def wait_for(future: Future[Any]) -> Any:
    return future.result(SECONDS)


def test_clients_take_turns_between_steps() -> None:
    reading = Reading()
    jobs = [reading.put("a", "a", 3), reading.put("b", "a"), reading.put("c", "c"), reading.put("d", "c")]
    reading.held.may_end.set()
    assert [wait_for(job.future) for job in jobs] == ["a", "b", "c", "d"]
    steps = [done for done in reading.done if not done.endswith("ends")]
    assert steps == ["first0", "a0", "c0", "b0", "d0", "a1", "a2"]
    reading.pool.close()


def test_a_job_that_is_stopped() -> None:
    """One that waits fails at once and never begins; one that runs ends behind its step."""
    reading = Reading()
    waiting, held = reading.put("waiting"), Held()
    running = reading.put("running", steps=3, wait=held.wait)
    reading.pool.stop(waiting, TimeoutError())
    with pytest.raises(TimeoutError):
        wait_for(waiting.future)
    reading.held.may_end.set()
    held.wait_for_beginning()
    reading.pool.stop(running, TimeoutError())
    assert not running.future.done()
    held.may_end.set()
    with pytest.raises(TimeoutError):
        wait_for(running.future)
    assert reading.done == ["first0", "first ends", "running0", "running ends"]
    reading.pool.close()


def test_the_last_step_of_a_job_that_is_stopped_counts() -> None:
    """What it submitted is cancelled by who gets it."""
    reading = Reading()
    reading.pool.stop(reading.first, TimeoutError())
    reading.held.may_end.set()
    assert wait_for(reading.first.future) == "first"
    reading.pool.close()


def test_so_many_wait() -> None:
    reading = Reading(queue_size=2, keys=("a", "b"))
    job = reading.put("a", "a", 2)
    with pytest.raises(QueueFullError, match="1 requests of this client wait already"):
        reading.put("a", "a")
    reading.put("b", "b")
    with pytest.raises(QueueFullError, match="2 requests wait already"):
        reading.put("c", "c")
    reading.pool.put(Job(reading.run("a", 1, lambda: None), "a"), begun=True)
    reading.held.may_end.set()
    assert wait_for(job.future) == "a"
    reading.pool.close()


def test_a_lane_that_is_closed() -> None:
    reading = Reading()
    held, waiting = Held(), reading.put("waiting")
    reading.held.may_end.set()
    wait_for(waiting.future)
    running, late = reading.put("running", steps=2, wait=held.wait), reading.put("late")
    held.wait_for_beginning()
    reading.pool.close()
    with pytest.raises(ClosedError):
        wait_for(late.future)
    held.may_end.set()
    with pytest.raises(ClosedError):
        wait_for(running.future)
    with pytest.raises(ClosedError):
        reading.put("more")


@pytest.fixture
def encoder(minilm_bundle: Path) -> Iterator[TextEncoder]:
    with load(minilm_bundle, backend="ort-cpu") as model:
        assert isinstance(model, TextEncoder)
        yield model


@pytest.fixture
def held_texts(encoder: TextEncoder, monkeypatch: pytest.MonkeyPatch) -> Held:
    """Holds the thread that tokenizes."""
    held = Held()
    encode = encoder.tokenizer.encode_batch

    def encode_held(texts: list[str], *arguments: Any) -> Any:
        held.wait()
        return encode(texts, *arguments)

    monkeypatch.setattr(encoder.tokenizer, "encode_batch", encode_held)
    return held


def test_a_deadline_ends_what_waits_to_be_read(encoder: TextEncoder, held_texts: Held) -> None:
    with running_server({"minilm": encoder}, ServerSettings(readers=1)) as server:
        answers: list[httpx.Response] = []
        text = "the baker sells bread " * 200
        first = threading.Thread(
            target=lambda: answers.append(server.post(EMBED, input=text, truncation="head"))
        )
        first.start()
        held_texts.wait_for_beginning()
        late = server.post(EMBED, input=text, truncation="head", timeout=0.2)
        assert late.status_code == 504 and late.json()["error"]["code"] == "timeout"
        held_texts.may_end.set()
        first.join(SECONDS)
        assert answers[0].status_code == 200
        assert held_texts.count == 1


def test_a_client_that_leaves_is_not_read_on(
    encoder: TextEncoder, held_texts: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = threading.Event()
    stop = WorkerPool.stop

    def stop_and_tell(*arguments: Any) -> None:
        stop(*arguments)
        stopped.set()

    monkeypatch.setattr(WorkerPool, "stop", stop_and_tell)
    with running_server({"minilm": encoder}, ServerSettings(readers=1)) as server:
        leaver = server.connect()
        body = json.dumps({"input": ["the baker sells bread " * 2500] * 3}).encode()
        leaver.sendall(HEAD + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
        held_texts.wait_for_beginning()
        leaver.close()
        assert stopped.wait(SECONDS)
        held_texts.may_end.set()
        assert server.post(EMBED, input="the baker sells bread " * 200, truncation="head").status_code == 200
        assert held_texts.count == 2  # the first of the three texts, and this one


def test_a_grammar_that_is_compiled_waits_for_none_that_is_not(
    demo_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held()
    compile_grammar = Grammars._compile

    def compile_held(*arguments: Any) -> Any:
        held.wait()
        return compile_grammar(*arguments)

    body: dict[str, Any] = {"prompt": "The ark", "max_tokens": 3}
    with load(demo_bundle, backend="ort-cpu") as model, running_server({"gpt": model}) as server:
        assert isinstance(model, TextGenerator)
        assert model.has_compiled() and not model.has_compiled(json_schema={"type": "object"})
        server.ask(COMPLETE, **body, response_format=OBJECT)
        assert model.has_compiled(json_schema={"type": "object"})
        monkeypatch.setattr(Grammars, "_compile", compile_held)
        answers: list[httpx.Response] = []
        other = threading.Thread(target=lambda: answers.append(server.post(COMPLETE, **body, regex="[a-z]+")))
        other.start()
        held.wait_for_beginning()
        server.ask(COMPLETE, **body, response_format=OBJECT)
        assert not answers
        held.may_end.set()
        other.join(SECONDS)
        assert answers[0].status_code == 200
