"""A server of models in a thread of the test's own process, and clients that speak to it."""

from __future__ import annotations

import asyncio
import re
import socket
import subprocess
import threading
import time
from collections.abc import Generator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from planforge.runtime.commands.serve import open_socket
from planforge.runtime.generate.row import Row
from planforge.runtime.model import Model
from planforge.runtime.server import ServerSettings, make_app
from planforge.runtime.server.process import make_server
from planforge.runtime.server.registry import Loader

from .cli import COMMAND

SECONDS = 60.0  # that a test waits at most


@dataclass(frozen=True)
class Address:
    """Where a server listens, and a client of it."""

    port: int
    client: httpx.Client

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def post(self, path: str, **body: Any) -> httpx.Response:
        """Return the answer to a JSON body."""
        return self.client.post(path, json=body)

    def ask(self, path: str, **body: Any) -> Any:
        """Return the JSON of an answer, which is to be a good one."""
        response = self.post(path, **body)
        assert response.status_code == 200, response.text
        return response.json()

    def connect(self) -> socket.socket:
        """Return a connection on which nothing was said yet."""
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=SECONDS)
        connection.settimeout(SECONDS)
        return connection


@contextmanager
def running_server(
    models: Mapping[str, Model | Loader], settings: ServerSettings | None = None
) -> Generator[Address, None, None]:
    """Run a server of models until the block ends."""
    settings = settings or ServerSettings(hosts=("127.0.0.1", "localhost"))
    app = make_app(models, settings)
    server = make_server(app, settings)
    with closing(open_socket("127.0.0.1", 0)) as listener:  # as the command has it
        port = listener.getsockname()[1]
        thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])))
        thread.start()
        try:
            with httpx.Client(
                base_url=f"http://127.0.0.1:{port}", timeout=SECONDS, trust_env=False
            ) as client:
                yield Address(port, client)
        finally:
            server.should_exit = True
            thread.join(SECONDS)
            assert not thread.is_alive()


@contextmanager
def serving(*arguments: str | Path) -> Generator[tuple[subprocess.Popen[str], str], None, None]:
    """Run `planforge serve` until the block ends; yields its process and its address."""
    command = [*COMMAND, "serve", *map(str, arguments), "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        line = process.stderr.readline()
        match = re.search(r"listening on (http://\S+)", line)
        assert match, line
        yield process, match[1]
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def wait_until_ready(url: str) -> None:
    """Wait until a server has loaded its models."""
    end = time.monotonic() + SECONDS
    while httpx.get(f"{url}/ready", trust_env=False).status_code != 200:
        assert time.monotonic() < end
        time.sleep(0.05)


def slow_down(monkeypatch: pytest.MonkeyPatch, seconds: float = 0.02) -> None:
    """Let each token take so long at least."""
    take = Row.take

    def take_slowly(row: Row, *arguments: Any) -> None:
        time.sleep(seconds)
        take(row, *arguments)

    monkeypatch.setattr(Row, "take", take_slowly)
