"""A server of models in a thread of the test's own process, and clients that speak to it."""

from __future__ import annotations

import asyncio
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from planforge.runtime.apps.commands.serve import open_socket
from planforge.runtime.apps.server import ServerSettings, make_app
from planforge.runtime.apps.server.process import make_server
from planforge.runtime.apps.server.registry import Loader
from planforge.runtime.generate.pending import PendingGeneration
from planforge.runtime.generate.row import Row
from planforge.runtime.generate.scheduler import GenerationScheduler
from planforge.runtime.model import Model

from .cli import COMMAND
from .patience import PATIENCE, wait_until

SECONDS = PATIENCE  # that a test waits at most


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
def serving(
    *arguments: str | Path, command: Sequence[str] = COMMAND
) -> Generator[tuple[subprocess.Popen[str], str], None, None]:
    """Run `planforge serve` until the block ends; yields its process and its address."""
    started = [*command, "serve", *map(str, arguments), "--port", "0"]
    process = subprocess.Popen(started, stderr=subprocess.PIPE, text=True)
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
    wait_until(lambda: httpx.get(f"{url}/ready", trust_env=False, timeout=SECONDS).status_code == 200)


class HeldTokens:
    """Holds engines until they may go on, or a request with tokens is cancelled, or a model closed.

    Args:
        most: the tokens that a row may have meanwhile.

    Attributes:
        rows: that have a token, in the order of their first ones.
        cancelled: whether one of them was.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, most: int = 1) -> None:
        self.most = most
        self.rows: list[Row] = []
        self.cancelled = threading.Event()
        self._changed = threading.Condition()
        take = Row.take
        cancel = PendingGeneration.cancel
        stop = GenerationScheduler.stop

        def take_when_let(row: Row, *arguments: Any) -> None:
            if not row.token_ids:
                self.rows.append(row)
            with self._changed:
                assert self._changed.wait_for(lambda: self._may_take(row), PATIENCE)
            take(row, *arguments)

        def cancel_and_tell(pending: PendingGeneration) -> None:
            cancel(pending)
            if pending.row in self.rows:
                self.cancelled.set()
                self.let(self.most)

        def stop_and_let(scheduler: GenerationScheduler) -> None:
            stop(scheduler)
            self.let()

        monkeypatch.setattr(GenerationScheduler, "stop", stop_and_let)
        monkeypatch.setattr(Row, "take", take_when_let)
        monkeypatch.setattr(PendingGeneration, "cancel", cancel_and_tell)

    def let(self, most: int = sys.maxsize) -> None:
        """Let the rows have more tokens."""
        with self._changed:
            self.most = most
            self._changed.notify_all()

    def _may_take(self, row: Row) -> bool:
        return self.cancelled.is_set() or len(row.token_ids) < self.most
