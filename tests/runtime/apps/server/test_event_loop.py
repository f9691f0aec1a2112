"""No request, however much it asks for, keeps the event loop or the interpreter from others for a second."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from planforge.runtime import load
from planforge.runtime.apps.server import decode_body
from planforge.runtime.apps.server.bodies import INPUTS, LONGEST_TEXT, MAX_TOKENS, CompletionRequest
from planforge.runtime.apps.server.decode_body import check_sizes, describe_body
from planforge.runtime.apps.server.endpoints import ENDPOINTS
from planforge.runtime.apps.server.errors import ApiError
from planforge.runtime.apps.server.json_text import PIECE, JsonResponse
from planforge.runtime.text.tokenizer import Tokenizer

from ....helpers.loop_probe import probing_loops
from ....helpers.serving import Address, running_server

MOST = 1.0  # seconds of a thread's own processor time
QUARTER = 0.25  # of requests that ask for a quarter of what took seconds: the tests are short
COMPLETE = "/v1/completions"


@pytest.fixture(scope="module")
def server(demo_bundle: Path, minilm_bundle: Path, llama_demo_bundle: Path) -> Iterator[Address]:
    bundles = {"gpt": demo_bundle, "minilm": minilm_bundle, "llama": llama_demo_bundle}
    models = {name: load(bundle, backend="ort-cpu", precision="fp32") for name, bundle in bundles.items()}
    with running_server(models) as address:
        yield address
    for model in models.values():
        model.close()


def ask(
    server: Address, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], most: float = MOST
) -> Any:
    """Return the answer to a request during which nothing took the event loop's time."""
    with probing_loops(monkeypatch) as probe:
        response = server.post(path, **body)
    assert probe.callback[0] < most, probe.callback
    assert probe.thread[0] < most, probe.thread
    return response


@pytest.mark.parametrize("stream", [False, True])
def test_many_log_probabilities(server: Address, monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    messages = [{"role": "user", "content": "The ark"}]
    body: dict[str, Any] = {"n": 32, "max_tokens": 100, "ignore_eos": True, "seed": 1, "stream": stream}
    body |= {"model": "llama", "messages": messages, "logprobs": True, "top_logprobs": 20}
    response = ask(server, monkeypatch, "/v1/chat/completions", body, QUARTER)
    assert response.status_code == 200, response.text[:500]
    if stream:
        assert response.text.count('"finish_reason":"length"') == 32
    else:
        content = [choice["logprobs"]["content"] for choice in response.json()["choices"]]
        assert [len(tokens) for tokens in content] == [100] * 32
        assert all(len(token["top_logprobs"]) == 20 for tokens in content for token in tokens)


def test_many_log_probabilities_of_a_completion(server: Address, monkeypatch: pytest.MonkeyPatch) -> None:
    body = {
        "model": "gpt",
        "prompt": "The ark",
        "logprobs": 5,
        "n": 64,
        "max_tokens": 100,
        "ignore_eos": True,
    }
    response = ask(server, monkeypatch, COMPLETE, body, QUARTER)
    choices = response.json()["choices"]
    assert [len(choice["logprobs"]["tokens"]) for choice in choices] == [100] * 64


def test_more_log_probabilities_than_fit(server: Address, monkeypatch: pytest.MonkeyPatch) -> None:
    body = {"model": "gpt", "prompt": ["a"] * 40, "n": 128, "max_tokens": 200, "logprobs": 5}
    refused = ask(server, monkeypatch, COMPLETE, body)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "logprobs"
    assert "ask for a smaller n, max_tokens or logprobs" in refused.json()["error"]["message"]


def test_many_biases(server: Address, monkeypatch: pytest.MonkeyPatch) -> None:
    body = {"model": "gpt", "prompt": "a", "logit_bias": {str(token): 1 for token in range(500_000)}}
    refused = ask(server, monkeypatch, COMPLETE, body)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "logit_bias"
    assert "at most 1048576 bytes of JSON, together" in refused.json()["error"]["message"]
    body["logit_bias"] = {str(token): 1 for token in range(20_000)}
    refused = ask(server, monkeypatch, COMPLETE, body)
    assert "at most 16384 members, not 20000" in refused.json()["error"]["message"]


@pytest.mark.parametrize("truncation", [None, "tail"])
def test_as_many_tokens_as_may_be(
    server: Address, monkeypatch: pytest.MonkeyPatch, truncation: str | None
) -> None:
    body = {"model": "gpt", "prompt": [1] * MAX_TOKENS, "truncation": truncation, "max_tokens": 1}
    response = ask(server, monkeypatch, COMPLETE, body)
    if truncation is None:
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "context_length_exceeded"
    else:
        assert response.status_code == 200
    response = ask(server, monkeypatch, "/detokenize", {"model": "gpt", "tokens": [1] * MAX_TOKENS})
    assert response.status_code == 200


@pytest.mark.parametrize("prompt", [[1] * 1_000_000, [[1] * 500_000] * 2])
def test_a_million_tokens(server: Address, monkeypatch: pytest.MonkeyPatch, prompt: list[Any]) -> None:
    refused = ask(server, monkeypatch, COMPLETE, {"model": "gpt", "prompt": prompt})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "prompt"
    assert "at most 262144 token ids, not 1000000" in refused.json()["error"]["message"]


def test_a_large_body_with_a_parameter_that_is_unknown(
    server: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"model": "gpt", "prompt": "a", "biases": {str(token): 1 for token in range(500_000)}}
    refused = ask(server, monkeypatch, COMPLETE, body)
    assert refused.status_code == 400 and refused.json()["error"]["code"] == "unsupported_parameter"


def test_what_holds_a_long_text_or_many_tokens_may_be_large() -> None:
    large = set()
    for endpoint in ENDPOINTS:
        for name, schema in describe_body(endpoint.body)["properties"].items():
            text = json.dumps(schema)
            signs = (f'"maxLength": {LONGEST_TEXT}', f'"maxItems": {MAX_TOKENS}', '"contentEncoding"')
            if any(sign in text for sign in signs):
                large.add(name)
                check_sizes(json.dumps({name: "é" * 2**20}, ensure_ascii=False).encode(), endpoint.body)
    assert large == set(INPUTS) - {"candidate_labels"}  # long together: 256 of 1,024 characters


MANY = ", ".join(f'"{token}": 1' for token in range(200_000))
SOME = ", ".join(f'"{token}": 1' for token in range(60_000))


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (f'{{"prompt": "a", "logit_bias": {{{MANY}}}', "not valid JSON"),
        (f'{{"prompt": "a", "logit_bias": {{{MANY}}}, "logit_bias": {{}}}}', "a duplicate name"),
        (f"[{MANY.replace(':', ',')}]", "must be a JSON object"),
        (
            f'{{"metadata": {{{SOME}}}, "logit_bias": {{{SOME}}}}}',
            "together with other options",
        ),
    ],
)
def test_a_large_body_is_not_decoded_to_say_what_is_wrong(
    monkeypatch: pytest.MonkeyPatch, body: str, reason: str
) -> None:
    decoded: list[int] = []
    monkeypatch.setattr(decode_body, "parse_json", lambda data: decoded.append(len(data)))
    body = body.replace(": }", "}").replace(":}", ": 1}")
    with pytest.raises(ApiError, match=reason):
        decode_body.decode_body(body.encode(), CompletionRequest)
    assert not decoded


def test_a_large_answer_is_sent_in_pieces() -> None:
    response = JsonResponse(["é" * 1000] * 300)
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(response({"type": "http"}, None, send))  # type: ignore[arg-type]
    start, *pieces = sent
    content = b"".join(piece["body"] for piece in pieces)
    assert json.loads(content) == ["é" * 1000] * 300 and len(pieces) > 2
    assert max(len(piece["body"]) for piece in pieces) <= PIECE
    assert dict(start["headers"])[b"content-length"] == str(len(content)).encode()
    assert [piece["more_body"] for piece in pieces] == [True] * (len(pieces) - 1) + [False]


def test_many_vectors(server: Address, monkeypatch: pytest.MonkeyPatch) -> None:
    response = ask(server, monkeypatch, "/v1/embeddings", {"model": "minilm", "input": ["a"] * 2048}, QUARTER)
    assert len(response.json()["data"]) == 2048


def test_a_prompt_with_many_answers_is_read_once(server: Address, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    encode = Tokenizer.encode
    encode_batch = Tokenizer.encode_batch

    def count(tokenizer: Tokenizer, text: str, **options: Any) -> list[int]:
        read.append(text)
        return encode(tokenizer, text, **options)

    def count_batch(tokenizer: Tokenizer, texts: Sequence[str], *arguments: Any, **options: Any) -> Any:
        read.extend(texts)
        return encode_batch(tokenizer, texts, *arguments, **options)

    monkeypatch.setattr(Tokenizer, "encode", count)
    monkeypatch.setattr(Tokenizer, "encode_batch", count_batch)
    text = "And it came to pass " * 10
    body = {"max_tokens": 2, "n": 64, "temperature": 1, "seed": 3}
    answer = ask(server, monkeypatch, COMPLETE, {"model": "gpt", "prompt": text, **body}).json()
    assert read == [text] and answer["usage"]["prompt_tokens"] < 256
    assert len({choice["text"] for choice in answer["choices"]}) > 1
    read.clear()
    messages = [{"role": "user", "content": text}]
    ask(server, monkeypatch, "/v1/chat/completions", {"model": "llama", "messages": messages, **body})
    assert len(read) == 1
