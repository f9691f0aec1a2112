"""OpenAI's own client works against the server, and so does what is written for OpenAI's errors."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import httpx
import numpy as np
import openai
import pydantic
import pytest

from planforge.runtime import TextGenerator
from planforge.runtime.apps.server import ServerSettings
from planforge.runtime.generate.pending import PendingGeneration

from ....helpers.openai_client import connect_openai
from ....helpers.patience import wait_until
from ....helpers.serving import SECONDS, Address, HeldTokens, running_server

SAID: Any = [{"role": "user", "content": "And God said, Let there be light"}]


@pytest.fixture(scope="module")
def client(server: Address) -> Iterator[openai.OpenAI]:
    with connect_openai(server) as client:
        yield client


def test_the_models_are_listed(client: openai.OpenAI) -> None:
    names = [model.id for model in client.models.list()]
    assert {"gpt", "llama", "minilm", "dates"} <= set(names)
    assert client.models.retrieve("gpt").owned_by == "planforge"


def test_chats_and_streams(client: openai.OpenAI, llama: TextGenerator) -> None:
    expected = llama.chat(SAID, temperature=0, max_new_tokens=10)
    whole = client.chat.completions.create(model="llama", messages=SAID, temperature=0, max_tokens=10)
    assert whole.choices[0].message.content == expected.text
    assert whole.usage is not None and whole.usage.completion_tokens == 10
    stream = client.chat.completions.create(
        model="llama",
        messages=SAID,
        temperature=0,
        max_completion_tokens=10,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == expected.text
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 10


def test_embeddings_come_as_base64_unless_asked_otherwise(client: openai.OpenAI) -> None:
    texts = ["Birds can fly.", "The baker sells bread."]
    packed = client.embeddings.create(model="minilm", input=texts)
    plain = client.embeddings.create(model="minilm", input=texts, encoding_format="float")
    vectors = [np.array([one.embedding for one in form.data], np.float32) for form in (packed, plain)]
    np.testing.assert_array_equal(vectors[0], vectors[1])


def test_errors_are_openais(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-4", messages=SAID)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="llama", messages=SAID, presence_penalty=3)
    assert refused.value.param == "presence_penalty"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="gpt", prompt="word " * 1000)
    assert long.value.code == "context_length_exceeded"


class Person(pydantic.BaseModel):
    """What an answer is parsed to."""

    name: Literal["Abraham", "Isaac", "Jacob"]
    is_king: bool


def test_an_answer_is_parsed(client: openai.OpenAI) -> None:
    said: Any = [{"role": "user", "content": "Who was Abraham?"}]
    for seed in range(3):
        answer = client.chat.completions.parse(
            model="llama", messages=said, response_format=Person, temperature=1, seed=seed, max_tokens=200
        )
        assert answer.choices[0].finish_reason == "stop"
        parsed = answer.choices[0].message.parsed
        assert isinstance(parsed, Person)
        with client.chat.completions.stream(
            model="llama", messages=said, response_format=Person, temperature=1, seed=seed, max_tokens=200
        ) as stream:
            assert stream.get_final_completion().choices[0].message.parsed == parsed


def test_the_client_asks_again_while_a_model_loads_and_while_the_queue_is_full(
    demo_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first request is refused each time, and what refused it ends only when it has been."""
    go_on = threading.Event()
    running: list[PendingGeneration] = []
    refusals: list[int] = []

    def load_late() -> TextGenerator:
        assert go_on.wait(SECONDS)
        return model

    def see(response: httpx.Response) -> None:
        if response.status_code in (429, 503):
            assert response.headers["retry-after"] == "0.02"
            refusals.append(response.status_code)
            go_on.set()
            for pending in running:
                pending.cancel()

    monkeypatch.setattr("planforge.runtime.apps.server.errors.RETRY_SECONDS", 0.02)
    HeldTokens(monkeypatch, most=5)
    settings = ServerSettings(schedule={"running": 1}, queue_size=1)
    http = openai.DefaultHttpxClient(trust_env=False, event_hooks={"response": [see]})
    ask: dict[str, Any] = {"model": "gpt", "prompt": "And it came to pass", "temperature": 0, "max_tokens": 5}
    with (
        TextGenerator.load(demo_bundle, backend="ort-cpu") as model,
        running_server({"gpt": load_late}, settings) as server,
        connect_openai(server, http_client=http, max_retries=1000) as client,
    ):
        loaded = client.completions.create(**ask)
        assert set(refusals) == {503}
        refusals.clear()
        for waiting in (0, 1):
            running.append(model.submit("And it came to pass", ignore_eos=True))
            wait_until(lambda: model.count_requests() == (waiting, 1))  # noqa: B023  # called at once
        queued = client.completions.create(**ask)
        assert set(refusals) == {429}
    assert loaded.choices[0].text == queued.choices[0].text


def test_structures_and_what_cannot_be_enforced(client: openai.OpenAI, server: Address) -> None:
    body: dict[str, Any] = {
        "model": "llama",
        "messages": SAID,
        "temperature": 1,
        "seed": 1,
        "max_tokens": 200,
    }
    for extra, pattern in (
        ({"choices": ["light", "darkness"]}, "light|darkness"),
        ({"regex": "[a-c]{3}"}, "[a-c]{3}"),
        ({"grammar": 'start: "yes" | "no"'}, "yes|no"),
    ):
        text = server.ask("/v1/chat/completions", **body, **extra)["choices"][0]["message"]["content"]
        assert re.fullmatch(pattern, text), text
    form = {"type": "json_object"}
    (choice,) = server.ask("/v1/chat/completions", **body, response_format=form)["choices"]
    assert choice["finish_reason"] == "length" or isinstance(json.loads(choice["message"]["content"]), dict)
    schema = {"type": "object", "properties": {"a": {"type": "string", "not": {}}}}
    refused_form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    with pytest.raises(openai.BadRequestError, match="properties/a/not") as refused:
        client.chat.completions.create(model="llama", messages=SAID, response_format=refused_form)
    assert refused.value.param == "response_format"
    with pytest.raises(openai.BadRequestError, match="does not go with"):
        client.chat.completions.create(
            model="llama", messages=SAID, response_format={"type": "json_object"}, extra_body={"regex": "a"}
        )
