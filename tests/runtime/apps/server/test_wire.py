"""What comes over the wire cut, mangled or too slowly: the server goes on for all others."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from planforge.runtime import TextGenerator

from ....helpers.patience import wait_until
from ....helpers.serving import Address, running_server
from .test_limits import COMPLETE, HEAD

BODY = json.dumps({"prompt": "And it came to pass", "max_tokens": 40, "temperature": 0}).encode()
REQUEST = HEAD + f"Content-Length: {len(BODY)}\r\n\r\n".encode() + BODY
GOOD = {"prompt": "And it came to pass", "max_tokens": 5, "temperature": 0}
RESET = struct.pack("ii", 1, 0)  # for SO_LINGER: closing does not wait, and tells the server so
MANGLED = [
    b"\x00\xff\xfe\r\n\r\n",
    b"\r\n" * 1000,
    b"GET\r\n\r\n",
    b"GET / HTTP/9.9\r\nHost: 127.0.0.1\r\n\r\n",
    b"GET / HTTP/1.1\r\n\r\n",  # no host
    b"GET /\xff\xfe HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    b"GET /%ff%00 HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    b"GET /../../etc/passwd HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: \xff\xfe\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nName without a colon\r\n\r\n",
    HEAD + b"Content-Length: -1\r\n\r\n",
    HEAD + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n{}",
    HEAD + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n",
    HEAD + b"Content-Length: one\r\n\r\n",
    HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
    HEAD + b"Transfer-Encoding: gzip\r\n\r\n",
    HEAD + b"Upgrade: websocket\r\nConnection: Upgrade\r\nContent-Length: 2\r\n\r\n{}",
]


@pytest.fixture(scope="module")
def model(demo_bundle: Path) -> Iterator[TextGenerator]:
    with TextGenerator.load(demo_bundle, backend="ort-cpu", precision="fp32") as model:
        yield model


@pytest.fixture(scope="module")
def server(model: TextGenerator) -> Iterator[Address]:
    with running_server({"gpt": model}) as address:
        yield address


def test_a_request_may_be_cut_at_any_place(
    server: Address, model: TextGenerator, caplog: pytest.LogCaptureFixture
) -> None:
    """By a client that closes its connection, or one that resets it; a whole one may be left too."""
    expected = server.ask(COMPLETE, **GOOD)["choices"]
    for cut in range(len(REQUEST) + 1):
        with server.connect() as connection:
            connection.sendall(REQUEST[:cut])
            if cut % 2:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    assert server.ask(COMPLETE, **GOOD)["choices"] == expected
    wait_until(lambda: model.count_requests() == (0, 0))
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.parametrize("content", MANGLED, ids=range(len(MANGLED)))
def test_what_is_no_http_is_refused(
    server: Address, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with server.connect() as connection:
        connection.sendall(content)
        answer = connection.recv(65_536)  # empty where the connection is closed
    assert not answer or answer.startswith((b"HTTP/1.1 4", b"HTTP/1.1 2"))
    assert b"root:" not in answer
    assert server.client.get("/health").status_code == 200
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
