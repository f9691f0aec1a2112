"""Who may call, how much, and how many; what happens when a model fails, a client leaves, a queue is full."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from planforge.runtime import BackendError, ClosedError, InputError, TextGenerator, load
from planforge.runtime.apps.server import ServerSettings, app, calls
from planforge.runtime.apps.server.auth import read_keys
from planforge.runtime.generate import scheduler
from planforge.runtime.generate.row import Row
from planforge.runtime.scheduling import worker

from ....helpers.openai_client import connect_openai
from ....helpers.patience import turn_clocks, wait_until
from ....helpers.serving import SECONDS, HeldTokens, running_server

COMPLETE = "/v1/completions"
LONG: dict[str, Any] = {
    "prompt": "And it came to pass",
    "max_tokens": 230,
    "ignore_eos": True,
    "temperature": 0,
}
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"

Load = Callable[[], TextGenerator]


@pytest.fixture
def load_gpt(demo_bundle: Path) -> Load:
    """Loads a model that the test may break."""

    def open_it() -> TextGenerator:
        model = load(demo_bundle, backend="ort-cpu")
        assert isinstance(model, TextGenerator)
        return model

    return open_it


@pytest.fixture
def gpt_model(load_gpt: Load) -> Iterator[TextGenerator]:
    with load_gpt() as model:
        yield model


def test_a_key_is_asked_for(gpt_model: TextGenerator, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("# ours\nfirst-key\n\nsecond-key\n")
    keys = read_keys(tmp_path / "keys")
    assert keys == ("first-key", "second-key")
    with running_server({"gpt": gpt_model}, ServerSettings(keys=keys)) as server:
        for path in ("/health", "/ready", "/"):
            assert server.client.get(path).status_code == 200
        for header, message in (
            ({}, "an API key is required"),
            ({"Authorization": "first-key"}, "an API key is required"),
            ({"Authorization": "Bearer first"}, "the API key is invalid"),
        ):
            for path in ("/v1/models", "/metrics", "/openapi.json", "/v1/nothing"):
                response = server.client.get(path, headers=header)
                assert response.status_code == 401
                assert response.json()["error"]["code"] == "invalid_api_key"
                assert response.json()["error"]["message"].startswith(message)
        for key in keys:
            header = {"Authorization": f"Bearer {key}"}
            assert server.client.get("/v1/models", headers=header).status_code == 200
        with connect_openai(server, "wrong") as client, pytest.raises(openai.AuthenticationError):
            client.models.list()


def test_keys_come_from_the_environment_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLANFORGE_API_KEY", "of-the-environment")
    assert read_keys(None) == ("of-the-environment",)
    (tmp_path / "empty").write_text("# nothing\n")
    with pytest.raises(InputError, match="has no API key"):
        read_keys(tmp_path / "empty")
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    for path, message in (
        (tmp_path / "none", "does not exist or is a folder"),
        (tmp_path, "does not exist or is a folder"),
        (tmp_path / "latin", "UTF-8"),
    ):
        with pytest.raises(InputError, match=message):
            read_keys(path)


def test_another_name_than_the_servers_is_refused(gpt_model: TextGenerator) -> None:
    """A page whose name was made to point here (DNS rebinding) sends its own."""
    settings = ServerSettings(hosts=("localhost", "127.0.0.1", "[::1]"))
    with running_server({"gpt": gpt_model}, settings) as server:
        for host, status in (
            ("evil.example", 403),
            ("evil.example:8080", 403),
            ("localhost", 200),
            ("LOCALHOST:80", 200),
            ("[::1]", 200),
            ("[::1]:80", 200),
            ("[::1", 403),
            ("", 403),
        ):
            assert server.client.get("/v1/models", headers={"Host": host}).status_code == status, host
        assert "access-control-allow-origin" not in server.client.get("/health").headers


def test_an_origin_that_is_allowed(gpt_model: TextGenerator) -> None:
    origin = "https://app.example"
    asks = {"Origin": origin, "Access-Control-Request-Method": "POST"}
    with running_server({"gpt": gpt_model}, ServerSettings(keys=("k",), origins=(origin,))) as server:
        allowed = server.client.options(COMPLETE, headers=asks)
        assert allowed.status_code == 200 and allowed.headers["access-control-allow-origin"] == origin
        stainless = "authorization,content-type,x-stainless-lang,x-stainless-retry-count,x-stainless-os"
        browser = server.client.options(
            COMPLETE, headers={**asks, "Access-Control-Request-Headers": stainless}
        )
        assert browser.status_code == 200  # OpenAI's client in a page
        assert set(stainless.split(",")) <= set(
            browser.headers["access-control-allow-headers"].replace(" ", "").split(",")
        )
        other = server.client.options(COMPLETE, headers={**asks, "Origin": "https://evil.example"})
        assert "access-control-allow-origin" not in other.headers


def test_bodies_have_a_limit(gpt_model: TextGenerator) -> None:
    with running_server({"gpt": gpt_model}, ServerSettings(body_bytes=10_000)) as server:
        assert server.post(COMPLETE, prompt="a" * 20_000).status_code == 413
        pieces = (b"a" * 5_000 for _ in range(5))  # without a length
        headers = {"Content-Type": "application/json"}
        assert server.client.post(COMPLETE, content=pieces, headers=headers).status_code == 413
        with server.connect() as cut:
            cut.sendall(HEAD + b'Content-Length: 500\r\n\r\n{"prompt"')
        assert server.client.get("/health").status_code == 200


def test_bodies_have_a_time(gpt_model: TextGenerator) -> None:
    with running_server({"gpt": gpt_model}, ServerSettings(body_seconds=0.1)) as server:
        with server.connect() as slow:
            slow.sendall(HEAD + b'Content-Length: 500\r\n\r\n{"prompt"')
            assert b" 408 " in slow.recv(4096)
        assert server.client.get("/health").status_code == 200


def test_half_a_surrogate_pair_is_named(gpt_model: TextGenerator) -> None:
    with running_server({"gpt": gpt_model}) as server:
        headers = {"Content-Type": "application/json"}
        for half in (r"\ud800", r"\udc00"):
            answer = server.client.post(COMPLETE, content=f'{{"prompt": "{half}"}}', headers=headers)
            assert answer.status_code == 400 and "surrogate" in answer.json()["error"]["message"]


def test_a_body_in_gzip(gpt_model: TextGenerator) -> None:
    body = json.dumps({"prompt": "In the", "max_tokens": 2, "temperature": 0}).encode()
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    with running_server({"gpt": gpt_model}, ServerSettings(body_bytes=10_000)) as server:
        plain = server.client.post(COMPLETE, content=body, headers={"Content-Type": "application/json"})
        packed = server.client.post(COMPLETE, content=gzip.compress(body), headers=headers)
        assert packed.status_code == 200 and packed.json()["choices"] == plain.json()["choices"]
        members = gzip.compress(body[:9]) + gzip.compress(body[9:])  # which RFC 1952 joins
        joined = server.client.post(COMPLETE, content=members, headers=headers)
        assert joined.status_code == 200 and joined.json()["choices"] == plain.json()["choices"]
        bomb = gzip.compress(b" " * 50_000_000 + body)
        assert len(bomb) > 10_000  # so that it comes in parts of which each is small
        small = gzip.compress(b" " * 5_000_000 + body)
        for content, status in (
            (bomb, 413),
            (small, 413),
            (gzip.compress(b" " * 6_000) * 20, 413),
            (gzip.compress(b"") * 600, 413),  # nothing, in more bytes than a body may have
            (gzip.compress(body) + b"no gzip", 400),
            (b"no gzip", 400),
            (gzip.compress(body)[:-20], 400),
        ):
            assert server.client.post(COMPLETE, content=content, headers=headers).status_code == status
        other = server.client.post(COMPLETE, content=body, headers={**headers, "Content-Encoding": "br"})
        assert other.status_code == 415 and "gzip" in other.json()["error"]["message"]


def test_a_stop_does_not_wait_for_a_model_that_loads(load_gpt: Load) -> None:
    go_on = threading.Event()
    loaded: list[TextGenerator] = []

    def load_late() -> TextGenerator:
        assert go_on.wait(SECONDS)
        loaded.append(load_gpt())
        return loaded[0]

    with running_server({"gpt": load_late}, ServerSettings(grace=0)) as server:
        assert server.client.get("/ready").status_code == 503
    go_on.set()  # the server has stopped
    wait_until(lambda: bool(loaded) and loaded[0].decoder.closed)


def test_a_prompt_of_ten_megabytes_is_refused(gpt_model: TextGenerator) -> None:
    """Its tokens would take half a minute and gigabytes."""
    with running_server({"gpt": gpt_model}) as server:
        response = server.post(COMPLETE, prompt="a " * 5_000_000)
        assert response.status_code == 413
        response = server.post(COMPLETE, prompt="a " * 400_000)
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "context_length_exceeded"


def test_headers_and_connections_have_limits(gpt_model: TextGenerator) -> None:
    settings = ServerSettings(header_seconds=3000, header_bytes=4096, connections=50)
    with running_server({"gpt": gpt_model}, settings) as server:
        slow = [server.connect() for _ in range(45)]
        for connection in slow:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: ")
        assert server.client.get("/health").status_code == 200
        with server.connect() as large:
            large.sendall(b"GET /health HTTP/1.1\r\nX: " + b"a" * 8192)
            assert large.recv(4096).startswith(b"HTTP/1.1 400")
        many = [server.connect() for _ in range(30)]
        ready = wait(many, SECONDS)
        assert ready and all(
            connection.recv(1) == b"" for connection in many if connection in ready
        )  # one too many
        assert wait(slow, 0) == []
        for connection in slow + many:
            connection.close()
        wait_until(lambda: answers_health(server.url))


def answers_health(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", trust_env=False, timeout=SECONDS).status_code == 200
    except httpx.TransportError:  # one too many still
        return False


def test_headers_have_a_time(gpt_model: TextGenerator) -> None:
    with (
        running_server({"gpt": gpt_model}, ServerSettings(header_seconds=0.1)) as server,
        server.connect() as slow,
    ):
        slow.sendall(b"GET /health HTTP/1.1\r\nHost: ")
        assert slow.recv(4096) == b""


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_row(
    gpt_model: TextGenerator, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    tokens = HeldTokens(monkeypatch)
    settings = ServerSettings(schedule={"running": 2})
    with running_server({"gpt": gpt_model}, settings) as server:
        body = json.dumps({**LONG, "stream": stream}).encode()
        leaver = server.connect()
        leaver.sendall(HEAD + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
        wait_until(lambda: gpt_model.count_requests() == (0, 1))
        answers: list[Any] = []
        stayer = threading.Thread(
            target=lambda: answers.append(server.ask(COMPLETE, **{**LONG, "max_tokens": 40}))
        )
        stayer.start()
        wait_until(lambda: gpt_model.count_requests() == (1, 1))
        tokens.let(5)
        wait_until(lambda: gpt_model.count_requests() == (0, 2))
        leaver.close()
        stayer.join(SECONDS)
        left, stayed = tokens.rows
        assert left.finish_reason == "cancelled" and len(left.token_ids) <= 6  # of 230
        assert len(stayed.token_ids) == 40
        assert answers[0]["usage"]["completion_tokens"] == 40
    expected = gpt_model.generate(str(LONG["prompt"]), max_new_tokens=40, ignore_eos=True)
    assert answers[0]["choices"][0]["text"] == expected.text


def test_a_full_queue_and_a_deadline(gpt_model: TextGenerator, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = HeldTokens(monkeypatch)
    clock = turn_clocks(monkeypatch, app, calls, worker, scheduler)
    settings = ServerSettings(schedule={"running": 1}, queue_size=1, timeout=3000)
    with running_server({"gpt": gpt_model}, settings) as server:
        running = threading.Thread(target=lambda: server.post(COMPLETE, **{**LONG, "timeout": 2000}))
        running.start()
        wait_until(lambda: gpt_model.count_requests() == (0, 1))
        waiting: list[httpx.Response] = []
        waiter = threading.Thread(
            target=lambda: waiting.append(server.post(COMPLETE, **{**LONG, "timeout": 1000}))
        )
        waiter.start()
        wait_until(lambda: gpt_model.count_requests() == (1, 1))
        refused = server.post(COMPLETE, **LONG)
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "1" and refused.json()["error"]["code"] == "queue_full"
        clock.ahead += 1001
        tokens.let(2)
        waiter.join(SECONDS)
        assert waiting[0].status_code == 504 and waiting[0].json()["error"]["code"] == "timeout"
        assert server.post(COMPLETE, **LONG, n=2).status_code == 429  # neither of the two stays
        clock.ahead += 1000
        tokens.let()
        wait_until(lambda: gpt_model.count_requests() == (0, 0))
        running.join(SECONDS)
        for body in ({"n": 3}, {"prompt": ["a", "b", "c"]}):  # more than ever fit
            refused = server.post(COMPLETE, **{**LONG, **body})
            assert refused.status_code == 400 and refused.json()["error"]["param"] == next(iter(body))
            assert "the 2 that this server may run" in refused.json()["error"]["message"]
        assert len(server.ask(COMPLETE, **{**LONG, "max_tokens": 1}, n=2)["choices"]) == 2


def test_a_model_that_fails_answers_500_to_its_own_requests(
    load_gpt: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    with load_gpt() as broken, load_gpt() as sound:
        monkeypatch.setattr(broken.decoder.program, "run", fail)
        with running_server({"broken": broken, "sound": sound}) as server:
            body = {"prompt": "In the", "max_tokens": 3}
            for stream in (False, True):
                response = server.post(COMPLETE, model="broken", **body, stream=stream)
                assert response.status_code == 500
                assert response.json()["error"]["type"] == "server_error"
            assert server.post(COMPLETE, model="sound", **body).status_code == 200


def fail(*arguments: Any) -> Any:
    raise BackendError("the engine is out of order")


def test_what_fails_in_the_midst_of_a_stream_is_its_last_event(
    gpt_model: TextGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = Row.take
    monkeypatch.setattr(Row, "take", lambda row, *a: fail() if len(row.token_ids) == 4 else take(row, *a))
    with running_server({"gpt": gpt_model}) as server, connect_openai(server) as client:
        stream = client.completions.create(model="gpt", prompt="In the", max_tokens=20, stream=True)
        with pytest.raises(openai.APIError, match="out of order"):
            for _ in stream:
                pass


def test_it_answers_while_a_model_loads(load_gpt: Load) -> None:
    go_on = threading.Event()

    def load_late() -> TextGenerator:
        assert go_on.wait(SECONDS)
        return load_gpt()

    with running_server({"gpt": load_late}) as server:
        assert server.client.get("/health").status_code == 200
        assert server.client.get("/ready").status_code == 503
        refused = server.post(COMPLETE, model="gpt", prompt="In the")
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "loading"
        (entry,) = server.client.get("/v1/models").json()["data"]
        assert (entry["id"], entry["object"], entry["status"]) == ("gpt", "model", "loading")
        assert server.client.get("/v1/models/gpt").json() == entry
        go_on.set()
        wait_until(lambda: server.client.get("/ready").status_code == 200)
        assert server.client.get("/v1/models/gpt").json()["status"] == "ready"
        assert "planforge_generated_tokens_total{" not in server.client.get("/metrics").text  # of the warm-up
        assert server.post(COMPLETE, model="gpt", prompt="In the").status_code == 200


def test_a_model_that_cannot_run_is_never_ready(load_gpt: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step is computed before clients are told that it can be."""
    monkeypatch.setattr("planforge.runtime.apps.server.process.Server.on_tick", stay)
    broken = load_gpt()
    monkeypatch.setattr(broken.decoder.program, "run", fail)
    with running_server({"gpt": lambda: broken}) as server:
        wait_until(lambda: server.client.get("/ready").json()["models"] == {"gpt": "failed"})
        assert server.client.get("/ready").status_code == 503
        assert server.client.get("/v1/models/gpt").json()["status"] == "failed"
    with pytest.raises(ClosedError):
        broken.generate("In the")


async def stay(server: Any, counter: int) -> bool:
    """Stop when told to alone, though a model failed."""
    return bool(server.should_exit)
