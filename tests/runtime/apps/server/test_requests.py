"""What clients of OpenAI's send beside the request itself, and what every answer has."""

from __future__ import annotations

import contextvars
import logging
import threading
from typing import Any

import pytest

from planforge.runtime.apps.server.readers import Job
from planforge.runtime.apps.server.request_log import REQUEST_ID, name_requests_in_log
from planforge.runtime.generate.row import Row
from planforge.runtime.scheduling.steps import Steps

from ....helpers.patience import wait_until
from ....helpers.serving import Address, HeldTokens

CHAT: dict[str, Any] = {
    "model": "llama",
    "messages": [{"role": "user", "content": "The ark"}],
    "max_completion_tokens": 8,
    "temperature": 0,
}
NEUTRAL: dict[str, Any] = {
    "metadata": {"a": "b"},
    "service_tier": "auto",
    "store": True,
    "prompt_cache_key": "key",
    "safety_identifier": "someone",
    "user": "someone",
    "modalities": ["text"],
    "max_tokens": 8,
}


@pytest.mark.parametrize("name", NEUTRAL)
def test_what_changes_no_answer_is_taken(server: Address, name: str) -> None:
    path = "/v1/chat/completions"
    expected = server.ask(path, **CHAT)["choices"]
    assert server.ask(path, **CHAT, **{name: NEUTRAL[name]})["choices"] == expected
    body = {**CHAT, "stream": True, "stream_options": {"include_obfuscation": True}}
    assert server.post(path, **body).status_code == 200


def test_every_answer_and_line_of_the_log_has_an_id(
    server: Address, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> None:
        raise RuntimeError("out of order")

    caplog.set_level(logging.INFO, "planforge")
    ids = []
    for path in ("/health", "/v1/nothing", "/v1/models"):
        ids.append(server.client.get(path).headers["x-request-id"])
    assert len(set(ids)) == 3
    own = server.client.get("/health", headers={"X-Request-Id": "trace-1.a"})
    assert own.headers["x-request-id"] == "trace-1.a"
    forged = server.client.get("/health", headers={"X-Request-Id": "a b\x7fc" * 3})
    assert forged.headers["x-request-id"].startswith("req_")
    with monkeypatch.context() as patch:
        patch.setattr(Row, "take", fail)
        failed = server.post("/v1/chat/completions", **CHAT)
    assert failed.status_code == 500
    ids += ["trace-1.a", failed.headers["x-request-id"]]
    wait_until(lambda: " 500 " in caplog.messages[-1])  # the line comes behind the answer
    said = caplog.messages
    for each in ids:
        assert any("GET" in line or "POST" in line for line in said if f"request_id={each}" in line), each
    assert any("failed" in line for line in said if f"request_id={failed.headers['x-request-id']}" in line)


def test_a_stream_that_waits_sends_comments(server: Address, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first token, and between two."""
    monkeypatch.setattr("planforge.runtime.apps.server.streaming.COMMENT_SECONDS", 0.05)
    tokens = HeldTokens(monkeypatch, most=0)
    lines: list[str] = []
    with server.client.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            if line == ": waiting":
                has_text = any(earlier.startswith("data: ") for earlier in lines)
                tokens.let(CHAT["max_completion_tokens"] if has_text else 3)
            lines.append(line)
    assert lines[0] == ": waiting" and "data: [DONE]" in lines
    first = next(number for number, line in enumerate(lines) if line.startswith("data: "))
    assert ": waiting" in lines[first:]


def test_what_readers_say_names_the_request(caplog: pytest.LogCaptureFixture) -> None:
    """They are threads of their own, which know nothing of who asks but what the job brings."""

    def read() -> Steps[None]:
        logging.getLogger("planforge").warning("a reader's %s", "line")
        yield

    def make_job() -> Job[None]:
        REQUEST_ID.set("trace-2")
        return Job(read(), "a client")

    name_requests_in_log()
    job = contextvars.copy_context().run(make_job)
    thread = threading.Thread(target=job.run_step)
    thread.start()
    thread.join()
    assert caplog.messages == ["a reader's line request_id=trace-2"]
