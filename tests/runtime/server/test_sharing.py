"""What clients of one server have to do with each other, and what those do that only take."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from planforge.runtime import TextGenerator, load
from planforge.runtime.server import ServerSettings
from planforge.runtime.server.limits import bound_connections

from ...helpers.serving import SECONDS, Address, running_server, slow_down
from .test_limits import COMPLETE, HEAD, LONG, wait_until

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
    slow_down(monkeypatch)
    settings = ServerSettings(keys=("a", "b"), schedule={"running": 1}, queue_size=4)
    ended: list[str] = []

    def run(name: str) -> None:
        assert ask(server, name[0], max_tokens=8, user=name).status_code == 200
        ended.append(name)

    with running_server({"gpt": gpt}, settings) as server:
        threads: list[threading.Thread] = []
        for number, name in enumerate(("a1", "a2", "a3", "b1")):
            threads.append(threading.Thread(target=run, args=(name,)))
            threads[-1].start()
            wait_until(lambda: gpt.count_requests() == (number, 1))  # noqa: B023  # called at once
            if name == "a3":
                refused = ask(server, "a", user="a4")
                assert refused.status_code == 429
                assert "2 requests of this client wait already" in refused.json()["error"]["message"]
        for thread in threads:
            thread.join()
    assert ended.index("b1") < ended.index("a3")


def test_a_client_that_never_reads_is_cut_off(gpt: TextGenerator, monkeypatch: pytest.MonkeyPatch) -> None:
    """And one that does read is not, however slow it is."""
    monkeypatch.setattr("planforge.runtime.server.process.bound_connections", buffer_little)
    body = {**LONG, "n": 8, "logprobs": 5, "stream": True}
    with running_server({"gpt": gpt}, ServerSettings(write_seconds=0.3)) as server:
        with monkeypatch.context() as patch, connect_narrowly(server) as idle:
            slow_down(patch, 0.01)
            idle.sendall(make_request(body))
            wait_until(lambda: gpt.count_requests()[1] == 8)
            wait_until(lambda: gpt.count_requests()[1] == 0)
            received = b""
            while part := idle.recv(1 << 16):
                received += part
            assert b"[DONE]" not in received
            (line,) = re.findall(r"generated_tokens_total{.*} (.*)", server.client.get("/metrics").text)
            assert float(line) < 8 * body["max_tokens"]
        with connect_narrowly(server) as slow:
            slow.sendall(make_request({**body, "max_tokens": 60}))
            received = b""
            while b"[DONE]" not in received:
                time.sleep(0.01)
                received = received[-10:] + slow.recv(4096)


def connect_narrowly(server: Address) -> socket.socket:
    """Return a connection of a client that keeps little that it did not read."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.settimeout(SECONDS)
    client.connect(("127.0.0.1", server.port))
    return client


def buffer_little(settings: ServerSettings) -> Any:
    """Return the protocol of connections for which the system keeps little that was not read."""

    class Protocol(bound_connections(settings)):  # type: ignore[misc]
        def connection_made(self, transport: Any) -> None:
            transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            super().connection_made(transport)

    return Protocol


@pytest.mark.parametrize("stream", [True, False])
def test_no_grace_ends_answers_at_once(
    gpt: TextGenerator, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    slow_down(monkeypatch)
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
    assert caplog.messages == ["answers cut off after a grace of 0 s: 1"]
