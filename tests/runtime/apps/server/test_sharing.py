"""What clients of one server have to do with each other, and what those do that only take."""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, ClassVar

import httpx
import pytest

from planforge.runtime import TextGenerator, load
from planforge.runtime.apps.server import ServerSettings
from planforge.runtime.apps.server.limits import BoundedProtocol

from ....helpers.patience import wait_until
from ....helpers.serving import SECONDS, Address, HeldTokens, running_server
from .test_limits import COMPLETE, HEAD, LONG

PROMPT = "And it came to pass in those days, that the children of Israel went up against the city, " * 2


@pytest.fixture
def gpt(demo_bundle: Path) -> Iterator[TextGenerator]:
    with load(demo_bundle, backend="ort-cpu") as model:
        assert isinstance(model, TextGenerator)
        yield model


def ask(server: Address, key: str, **body: Any) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"}
    return server.client.post(COMPLETE, json={**LONG, **body}, headers=headers)


def make_request(body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    return HEAD + f"Content-Length: {len(content)}\r\n\r\n".encode() + content


@pytest.mark.parametrize(
    ("keys", "shares", "is_shared"),
    [("ab", None, False), ("ab", True, True), ("ab", False, False), ("a", None, True), ("a", False, True)],
)
def test_a_key_learns_nothing_of_anothers_prompts(
    gpt: TextGenerator, keys: str, shares: bool | None, is_shared: bool
) -> None:
    settings = ServerSettings(keys=tuple(keys), share_prompts=shares)
    with running_server({"gpt": gpt}, settings) as server:
        asked = ("a", keys[-1], "a")
        usages = [ask(server, key, prompt=PROMPT, max_tokens=1).json()["usage"] for key in asked]
        reused = [usage["prompt_tokens_details"]["cached_tokens"] > 0 for usage in usages]
    assert reused == [False, is_shared, True]


def test_no_key_fills_the_queue_and_a_key_has_one_turn_at_a_time(
    gpt: TextGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also not by inventing users."""
    tokens = HeldTokens(monkeypatch)
    settings = ServerSettings(keys=("a", "b"), schedule={"running": 1}, queue_size=4)
    limits = {"a1": 2, "a2": 3, "a3": 4, "b1": 5}  # by which their rows are known

    def run(name: str) -> None:
        assert ask(server, name[0], max_tokens=limits[name], user=name).status_code == 200

    with running_server({"gpt": gpt}, settings) as server:
        threads: list[threading.Thread] = []
        for number, name in enumerate(limits):
            threads.append(threading.Thread(target=run, args=(name,)))
            threads[-1].start()
            wait_until(lambda: gpt.count_requests() == (number, 1))  # noqa: B023  # called at once
            if name == "a3":
                refused = ask(server, "a", user="a4")
                assert refused.status_code == 429
                assert "2 requests of this client wait already" in refused.json()["error"]["message"]
        tokens.let()
        for thread in threads:
            thread.join()
    order = [row.max_new_tokens for row in tokens.rows]
    assert order.index(limits["b1"]) < order.index(limits["a3"])


def test_a_client_that_never_reads_is_cut_off(gpt: TextGenerator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("planforge.runtime.apps.server.process.bound_connections", Narrow.bound)
    tokens = HeldTokens(monkeypatch, most=100)  # more than the buffers on the way hold
    body = {**LONG, "n": 8, "logprobs": 5, "stream": True}
    with running_server({"gpt": gpt}, ServerSettings(write_seconds=0.3)) as server:
        with connect_narrowly(server) as idle:
            idle.sendall(make_request(body))
            assert tokens.cancelled.wait(SECONDS)
            wait_until(lambda: gpt.count_requests() == (0, 0))
            received = b""
            while part := idle.recv(1 << 16):
                received += part
            assert b"[DONE]" not in received
        (line,) = re.findall(r"generated_tokens_total{.*} (.*)", server.client.get("/metrics").text)
        assert float(line) <= 8 * 101


def test_a_client_that_reads_slowly_is_not_cut_off(
    gpt: TextGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its time is over again and again, and it has taken something each time."""
    monkeypatch.setattr(Narrow, "made", [])
    monkeypatch.setattr("planforge.runtime.apps.server.process.bound_connections", Narrow.bound)
    body = {**LONG, "n": 8, "logprobs": 5, "stream": True, "max_tokens": 60}
    with (
        running_server({"gpt": gpt}, ServerSettings(write_seconds=3000)) as server,
        connect_narrowly(server) as slow,
    ):
        slow.sendall(make_request(body))
        wait_until(lambda: any(connection.write_timer for connection in Narrow.made))
        (connection,) = Narrow.made
        received = b""
        times_over = 0
        while b"[DONE]" not in received:
            part = slow.recv(4096)
            assert part
            received = received[-10:] + part
            times_over += connection.let_time_be_over()
    assert times_over > 3


def connect_narrowly(server: Address) -> socket.socket:
    """Return a connection of a client that keeps little that it did not read."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.settimeout(SECONDS)
    client.connect(("127.0.0.1", server.port))
    return client


class Narrow(BoundedProtocol):
    """A connection for which the system keeps little that was not read; all that were made are listed."""

    made: ClassVar[list[Narrow]] = []

    @classmethod
    def bound(cls, settings: ServerSettings) -> Any:
        """Return the protocol with a server's limits."""
        return type("Bound", (cls,), {"limits": settings})

    def connection_made(self, transport: Any) -> None:
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        Narrow.made.append(self)
        super().connection_made(transport)

    def let_time_be_over(self) -> bool:
        """Do what the timer does, from another thread, if one runs and the client took something since."""
        done: Future[bool] = Future()

        def look() -> None:
            is_time = self.write_timer is not None and self.transport.get_write_buffer_size() < self.unsent
            if is_time:
                self.stop_write_timer()
                self.check_write_progress()
            done.set_result(is_time)

        self.loop.call_soon_threadsafe(look)
        return done.result(SECONDS)


@pytest.mark.parametrize("stream", [True, False])
def test_no_grace_ends_answers_at_once(
    gpt: TextGenerator, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    HeldTokens(monkeypatch, most=5)  # so that the answer is not whole, however long the stop takes
    with running_server({"gpt": gpt}, ServerSettings(grace=0)) as server:
        reader = server.connect()
        reader.sendall(make_request({**LONG, "stream": stream}))
        wait_until(lambda: gpt.count_requests() == (0, 1))
    with reader:
        received = b""
        while part := reader.recv(1 << 16):
            received += part
    assert b"[DONE]" not in received and b"usage" not in received
    wait_until(lambda: gpt.count_requests() == (0, 0))
    assert caplog.messages == ["requests cut off 0 s (--grace) after the stop: 1"]
