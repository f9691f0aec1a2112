"""Log-probabilities over HTTP, of tokens that have the spaces before words: joined they are the text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from ....helpers.chat_templates import chat_of
from ....helpers.generation import generator
from ....helpers.serving import Address, running_server
from ....helpers.text import SPACED, SPACED_DECODERS, spaced

CHAT = chat_of("{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}")
ASKED = [{"role": "user", "content": "The"}]
IM_END = SPACED.index("<|im_end|>")
ON = {str(SPACED.index("▁on")): 50}  # the first word of a chat's answer, then "▁The"


@pytest.fixture(scope="module", params=SPACED_DECODERS)
def server(request: pytest.FixtureRequest) -> Iterator[Address]:
    model: Any = generator("ort", counts=True, chat=CHAT, tokenizer=spaced(request.param))[0]
    manifest = SimpleNamespace(explanations=(), task="text-generation")
    model.bundle = SimpleNamespace(manifest=manifest)  # it comes of none
    with model, running_server({"m": model}) as address:
        yield address


def stream(server: Address, path: str, **body: Any) -> list[Any]:
    """Return the choices of a stream's events."""
    lines = server.post(path, stream=True, **body).text.split("\n\n")
    return [json.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")]


@pytest.mark.parametrize(
    ("prompt", "text"), [("The", " cat satcat\n"), ([IM_END, 0], " cat satcat\n"), ([10], " The cat satcat")]
)
def test_a_completions_tokens_joined_are_its_text(server: Address, prompt: Any, text: str) -> None:
    body = {"model": "m", "prompt": prompt, "max_tokens": 5, "logprobs": 3, "temperature": 0}
    (choice,) = server.ask("/v1/completions", **body)["choices"]
    logprobs = choice["logprobs"]
    assert choice["text"] == "".join(logprobs["tokens"]) == text
    ends = [*logprobs["text_offset"][1:], len(text)]
    places = zip(logprobs["text_offset"], ends, strict=True)
    assert [text[start:end] for start, end in places] == logprobs["tokens"]
    parts = stream(server, "/v1/completions", **body)
    assert "".join(part["text"] for part in parts) == text
    assert [token for part in parts for token in part["logprobs"]["tokens"]] == logprobs["tokens"]


def test_a_chats_bytes_joined_are_its_text(server: Address) -> None:
    body: dict[str, Any] = {"model": "m", "messages": ASKED, "max_tokens": 3, "logprobs": True}
    body |= {"top_logprobs": 2, "temperature": 0}
    for bias, text in (({}, "user on"), (ON, "on on on")):
        body["logit_bias"] = bias
        (choice,) = server.ask("/v1/chat/completions", **body)["choices"]
        content = choice["logprobs"]["content"]
        assert choice["message"]["content"] == text
        assert bytes(byte for one in content for byte in one["bytes"]).decode() == text
        if bias:
            assert [one["token"] for one in content] == ["on", " on", " on"]
        else:  # a special token is named and adds nothing
            assert [one["token"] for one in content] == ["<|im_start|>", "user", " on"]
        streamed = [
            part["logprobs"]["content"]
            for part in stream(server, "/v1/chat/completions", **body)
            if part["logprobs"]
        ]
        assert [one for part in streamed for one in part] == content


def test_each_place_has_the_chosen_token_and_those_asked_for(server: Address) -> None:
    """OpenAI: "there may be up to logprobs+1 elements", as the chosen token is always there."""
    body: dict[str, Any] = {"model": "m", "prompt": "The", "max_tokens": 3, "logprobs": 2, "temperature": 0}
    (choice,) = server.ask("/v1/completions", **body, logit_bias=ON)["choices"]
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == [" on"] * 3
    for token, logprob, top in zip(
        *(logprobs[name] for name in ("tokens", "token_logprobs", "top_logprobs")), strict=True
    ):
        assert top[token] == logprob
        assert len(top) == 3 and min(top.values()) == logprob
    (choice,) = server.ask("/v1/completions", **body)["choices"]
    assert [len(top) for top in choice["logprobs"]["top_logprobs"]] == [2, 2, 2]
