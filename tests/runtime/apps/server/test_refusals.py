"""What cannot be used is refused by the parameter's name, in OpenAI's form, and never breaks the server."""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np
import pytest

from planforge.runtime import TextGenerator
from planforge.runtime.apps.server.endpoints import ENDPOINTS
from planforge.runtime.images.pictures import Picture

from ....helpers.serving import Address

PICTURE = base64.b64encode(Picture(np.zeros((8, 8, 3), np.uint8)).encode()).decode()
SAID = [{"role": "user", "content": "And God said"}]
MINIMAL: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "llama", "messages": SAID, "max_tokens": 1},
    "/v1/completions": {"model": "gpt", "prompt": "And God", "max_tokens": 1},
    "/v1/embeddings": {"model": "minilm", "input": "a"},
    "/v1/rerank": {"model": "ranker", "query": "a", "documents": ["b"]},
    "/rerank": {"model": "ranker", "query": "a", "texts": ["b"]},
    "/v1/score": {"model": "ranker", "text_1": "a", "text_2": ["b"]},
    "/embed_sparse": {"model": "splade", "inputs": "a"},
    "/v1/matches": {"model": "splade", "query": "a", "documents": ["b"]},
    "/v1/classify": {"model": "classifier", "input": "a"},
    "/v1/tags": {"model": "tagger", "input": "a"},
    "/v1/answers": {"model": "reader", "question": "who", "context": "a"},
    "/v1/fill-mask": {"model": "pretrained", "input": "a [MASK]"},
    "/v1/translations": {"model": "dates", "input": "the 3rd of May, 1998"},
    "/v1/explanations": {"model": "explained", "input": "a"},
    "/v1/images/generations": {"model": "sd", "prompt": "one", "steps": 1},
    "/v1/images/edits": {"model": "sd", "prompt": "one", "steps": 2, "image": PICTURE},
    "/tokenize": {"model": "gpt", "content": "a"},
    "/detokenize": {"model": "gpt", "tokens": [1]},
}


def read_error(response: Any, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    return error


def test_every_route_has_a_minimal_body() -> None:
    assert list(MINIMAL) == [one.path for one in ENDPOINTS]


@pytest.mark.parametrize("path", MINIMAL)
def test_an_unknown_parameter_is_refused_by_its_name(server: Address, path: str) -> None:
    error = read_error(server.post(path, **MINIMAL[path], modle="x"), 400)
    assert error["param"] == "modle" and "did you mean 'model'" in error["message"]


@pytest.mark.parametrize(
    ("name", "hint"),
    [("json_schema", "response_format"), ("functions", "tools"), ("function_call", "tool_choice")],
)
def test_what_is_at_the_wrong_place_is_told_the_right_one(server: Address, name: str, hint: str) -> None:
    error = read_error(server.post("/v1/completions", **MINIMAL["/v1/completions"], **{name: {}}), 400)
    assert error["param"] == name and hint in error["message"].partition("There are")[0]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("presence_penalty", 2.5),
        ("frequency_penalty", -3),
        ("modalities", ["audio"]),
        ("functions", []),
        ("audio", {}),
        ("tools", [{"type": "function", "function": {"name": "look"}}]),
        ("tool_choice", "required"),
        ("messages", [{"role": "user", "content": "a", "nonsense": 1}]),
        ("messages", [{"role": "user", "content": "a", "audio": {"id": "x"}}]),
        ("messages", [{"role": "user", "content": "a", "tool_calls": 5}]),
        ("messages", [{"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "{}"}}]}]),
        ("messages", [{"role": "user", "content": "a", "name": 1}]),
        ("messages", [{"role": "user", "content": "word " * 1000}]),
        ("messages", [{"role": "user", "content": "word " * 20_000}]),
        ("regex", "("),
        ("regex", "[^\\s\\S]"),
        ("grammar", "start: nothing"),
        ("response_format", {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}),
        ("choices", [""]),
        ("truncation", "head"),
        ("temperature", -0.1),
        ("temperature", "hot"),
        ("top_p", -0.1),
        ("top_p", 1.1),
        ("max_tokens", 0),
        ("n", 0),
        ("stop", ["a"] * 17),
        ("top_logprobs", 21),
        ("seed", 2**63),
        ("seed", -(2**63) - 1),
        ("messages", []),
        ("messages", [{"role": "king", "content": "a"}]),
        ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
        ("logit_bias", {"a": 1}),
        ("logit_bias", {"999999": 1}),
        ("logit_bias", {"1": 1000}),
    ],
)
def test_what_is_out_of_range_or_not_supported_is_refused(server: Address, name: str, value: Any) -> None:
    error = read_error(
        server.post("/v1/chat/completions", **{**MINIMAL["/v1/chat/completions"], name: value}), 400
    )
    assert error["type"] == "invalid_request_error"
    assert error["param"].startswith(name)


@pytest.mark.parametrize(
    ("path", "extra", "param"),
    [
        ("/v1/completions", {"prompt": ""}, "prompt"),
        ("/v1/completions", {"prompt": [2**20]}, "prompt"),
        ("/v1/completions", {"prompt": "word " * 1000}, "prompt"),
        ("/v1/completions", {"prompt": "word " * 20_000}, "prompt"),
        ("/v1/embeddings", {"dimensions": 2**20}, "dimensions"),
        ("/v1/embeddings", {"prompt_name": "nobody"}, "prompt_name"),
        ("/v1/rerank", {"query": "word " * 1000, "truncation": "windows"}, "query"),
        ("/v1/answers", {"question": "word " * 1000, "truncation": "windows"}, "question"),
        ("/v1/tags", {"input": "a " * 1000, "truncation": "windows", "stride": 2**20}, "stride"),
        ("/v1/fill-mask", {"input": "no mask"}, "input"),
        ("/v1/fill-mask", {"top_k": 1000}, "top_k"),
        ("/v1/translations", {"max_new_tokens": 2**20}, "max_new_tokens"),
        ("/v1/translations", {"min_new_tokens": 2**20}, "min_new_tokens"),
        ("/v1/translations", {"n_best": 3, "num_beams": 2}, "n_best"),
        ("/v1/translations", {"input": ["a", "b" * 1000]}, "input"),
        ("/v1/translations", {"input": ["a", ""]}, "input"),
        ("/v1/explanations", {"answer": "nobody"}, "answer"),
        ("/v1/explanations", {"input": "a " * 100}, "input"),
        ("/detokenize", {"tokens": [2**30]}, "tokens"),
    ],
)
def test_what_a_model_cannot_use_is_refused_by_its_name(
    server: Address, path: str, extra: dict[str, Any], param: str
) -> None:
    error = read_error(server.post(path, **{**MINIMAL[path], **extra}), 400)
    assert error["param"] == param, error


def test_a_bias_that_forbids_all_is_refused_by_its_name(server: Address, gpt: TextGenerator) -> None:
    bias = {str(token): -100 for token in range(gpt.tokenizer.vocab_size)}
    body = {**MINIMAL["/v1/completions"], "temperature": 0.5, "logit_bias": bias}
    error = read_error(server.post("/v1/completions", **body), 400)
    assert error["param"] == "logit_bias"


def test_parameters_that_go_together(server: Address) -> None:
    chat = MINIMAL["/v1/chat/completions"]
    for extra, param in (
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"max_completion_tokens": 3}, "max_tokens"),
    ):
        assert read_error(server.post("/v1/chat/completions", **chat, **extra), 400)["param"] == param


def test_null_is_as_good_as_leaving_out(server: Address) -> None:
    for endpoint in ENDPOINTS:
        body = MINIMAL[endpoint.path]
        server.ask(endpoint.path, **{**dict.fromkeys(endpoint.body.__struct_fields__), **body})


def test_token_ids_for_an_encoder_are_refused_with_a_way_out(server: Address) -> None:
    error = read_error(server.post("/v1/embeddings", model="minilm", input=[1, 2]), 400)
    assert error["param"] == "input[0]" and "check_embedding_ctx_length=False" in error["message"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"a": ' + b"1" * 5_000 + b"}",
        b'"\xed\xa0\x80"',
        b"nul",
    ],
)
def test_what_is_no_json_is_refused(server: Address, content: bytes) -> None:
    for path in MINIMAL:
        read_error(
            server.client.post(path, content=content, headers={"Content-Type": "application/json"}), 400
        )


def test_another_type_than_json_is_refused(server: Address) -> None:
    """A page of another origin may send such a body without asking first."""
    content = json.dumps(MINIMAL["/v1/embeddings"])
    for media_type in ("text/plain", "application/x-www-form-urlencoded", ""):
        headers = {"Content-Type": media_type}
        error = read_error(server.client.post("/v1/embeddings", content=content, headers=headers), 415)
        assert error["code"] == "not_json"


def test_a_model_must_be_named_where_several_can_do_it(server: Address) -> None:
    error = read_error(server.post("/v1/embeddings", input="a"), 400)
    assert (error["param"], error["code"]) == ("model", "invalid_value")
    assert "'minilm', 'classifier'" in error["message"]


def test_an_unknown_model_path_and_method(server: Address) -> None:
    for path, body in MINIMAL.items():
        error = read_error(server.post(path, **{**body, "model": "nobody"}), 404)
        assert (error["param"], error["code"]) == ("model", "model_not_found")
        assert "'minilm'" in error["message"]
        read_error(server.client.get(path), 405)
    assert "did you mean" not in read_error(server.post("/v1/audio/speech"), 404)["message"]
    mistyped = read_error(server.post("/v1/chat/completion"), 404)
    assert "did you mean '/v1/chat/completions'?" in mistyped["message"]
    read_error(server.client.get("/v1/models/nobody"), 404)


def test_a_model_that_cannot_do_it(server: Address) -> None:
    error = read_error(server.post("/v1/embeddings", model="gpt", input="a"), 400)
    assert error["param"] == "model" and "completions" in error["message"]
    error = read_error(server.post("/v1/chat/completions", model="gpt", messages=SAID), 400)
    assert error["param"] == "model"


def test_where_one_model_fits_its_name_may_be_left_out(server: Address) -> None:
    assert server.ask("/v1/chat/completions", messages=SAID, max_tokens=1)["model"] == "llama"
    error = read_error(server.post("/v1/completions", prompt="a"), 400)
    assert error["param"] == "model" and "'gpt'" in error["message"] and "'llama'" in error["message"]


@pytest.mark.parametrize(
    ("path", "extra", "says", "not_says"),
    [
        ("/v1/embeddings", {"dimensions": 2**20}, "dimensions=1048576", "truncate_dim"),
        ("/v1/embeddings", {"input": ["a"] * 2049}, "at most 2048 items, not 2049", "token ids"),
        ("/v1/embeddings", {"input": []}, "at least 1 items, not 0", "token ids"),
        ("/v1/embeddings", {"input": [1, 2]}, "check_embedding_ctx_length", "items"),
        ("/v1/embeddings", {"input": [[1, 2]]}, "check_embedding_ctx_length", "items"),
        ("/v1/embeddings", {"truncate_prompt_tokens": 1}, "truncate_prompt_tokens=1 must", "max_tokens"),
        ("/v1/rerank", {"documents": ["a"] * 2049}, "at most 2048 items, not 2049", "must be of"),
        ("/v1/classify", {"input": ["a"] * 2049}, "at most 2048 items, not 2049", "must be of"),
        ("/v1/completions", {"prompt": ["a"] * 129}, "at most 128 items, not 129", "must be string"),
        ("/v1/completions", {"prompt": []}, "at least 1 items, not 0", "must be string"),
        ("/v1/completions", {"prompt": [1, "a"]}, "not some of each", "items"),
        ("/v1/completions", {"prompt": [True]}, "an array of (an integer), not true", "True"),
        ("/v1/completions", {"prompt": None}, "prompt is missing", "null"),
        ("/v1/completions", {"echo": True}, "echo must be false, not true", "True"),
        (
            "/v1/completions",
            {"logit_bias": {"1": 1, "2": "x"}},
            'logit_bias.2 must be a number, not "x"',
            "1",
        ),
        ("/v1/completions", {"logit_bias": {"a": 1}}, 'a name that must be an integer, not "a"', "key"),
        ("/v1/completions", {"truncation": 5}, 'truncation must be "tail", not 5', "string"),
        ("/v1/completions", {"temperature": "hot"}, 'must be a number, not "hot"', "float"),
        ("/v1/completions", {"prompt": "word " * 1000}, "truncation='tail'", "--"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            'not "image_url" (this server only reads text, not images',
            "is missing",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"file": {}, "type": "file"}]}]},
            'content[0].type must be "text", not "file" (this server only reads text, not images',
            "not supported",
        ),
    ],
)
def test_errors_speak_the_words_of_the_route(
    server: Address, path: str, extra: dict[str, Any], says: str, not_says: str
) -> None:
    error = read_error(server.post(path, **{**MINIMAL[path], **extra}), 400)
    assert says in error["message"] and not_says not in error["message"], error["message"]


@pytest.mark.parametrize(
    "content",
    [
        '{"logit_bias": {"1": "x"}, "logit_bias": 5}',  # the last one counts
        '{"stop": ["", "a"], "stop": 5}',
        '{"x` - at `$.user[...]": 1}',  # looks like a path of msgspec's
        '{"user": "a", "x` - at `$.user[...]": 1}',
        '{"user": {"x` - at `key` in `$.user": 1}}',
        '{"truncation": "` - at `$.prompt[...]`"}',
        '{"` - at `$[0]": 1}',
    ],
)
def test_what_misleads_who_explains_is_refused(server: Address, content: str) -> None:
    headers = {"Content-Type": "application/json"}
    for path in MINIMAL:
        error = read_error(server.client.post(path, content=content, headers=headers), 400)
        assert error["param"]


def test_the_ways_out_that_errors_name_are_open(server: Address, gpt: TextGenerator) -> None:
    long = "word " * 1000
    text = {"model": "gpt", "max_tokens": 2, "temperature": 0}
    error = read_error(server.post("/v1/completions", prompt=long, **text), 400)
    assert error["code"] == "context_length_exceeded"
    assert "truncation='tail'" in error["message"] and str(gpt.max_length) in error["message"]
    answer = server.ask("/v1/completions", prompt=long, truncation="tail", **text)
    expected = gpt.generate(long, max_new_tokens=2, truncation="tail")
    assert answer["choices"][0]["text"] == expected.text
    assert answer["usage"]["prompt_tokens"] == gpt.max_length - 2
    error = read_error(server.post("/v1/completions", prompt="", **text), 400)
    assert "parse_special=true" in error["message"]
    answer = server.ask("/v1/completions", prompt="<|endoftext|>", parse_special=True, **text)
    assert answer["usage"]["prompt_tokens"] == 1
    said = [{"role": "user", "content": long}, {"role": "assistant", "content": "a"}, *SAID]
    error = read_error(server.post("/v1/chat/completions", model="llama", messages=said), 400)
    assert error["code"] == "context_length_exceeded" and "truncation='tail'" in error["message"]
    chat = {"model": "llama", "max_tokens": 1}
    kept = server.ask("/v1/chat/completions", messages=SAID, **chat)["usage"]
    cut = server.ask("/v1/chat/completions", messages=said, truncation="tail", **chat)["usage"]
    assert cut["prompt_tokens"] == kept["prompt_tokens"]
