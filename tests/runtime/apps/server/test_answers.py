"""What /openapi.json says of answers is what the server answers."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import jsonschema
import msgspec
import pytest

from planforge.runtime.apps.explain import METHODS
from planforge.runtime.apps.server import ServerSettings
from planforge.runtime.apps.server.endpoints import ENDPOINTS
from planforge.runtime.apps.server.forms import ChatForm
from planforge.runtime.apps.server.openapi import describe_api
from planforge.runtime.decoding.chunk import Usage
from planforge.runtime.generate.generation import Generation, Timings
from planforge.runtime.generate.tools import ToolCall
from planforge.runtime.text.tokenizer import Tokenizer

from ....helpers.serving import SECONDS, Address, running_server
from ....helpers.text import byte_level
from .test_refusals import MINIMAL

API = describe_api(ENDPOINTS, has_keys=False)
CHAT = "/v1/chat/completions"
COMPLETE = "/v1/completions"
# Further bodies of a route, beside the minimal one.
FURTHER: dict[str, list[dict[str, Any]]] = {
    CHAT: [
        {"logprobs": True, "top_logprobs": 2, "n": 2, "max_tokens": 3},
        {"regex": "[a-c]{2}", "max_tokens": 9},
    ],
    COMPLETE: [{"logprobs": 2, "max_tokens": 3, "prompt": ["And", "God"]}, {"logprobs": 0}],
    "/v1/embeddings": [{"encoding_format": "base64"}, {"input": ["a", "b"]}],
    "/v1/rerank": [{"return_documents": True}],
    "/v1/classify": [{"input": [["a", "b"], "c"]}],
    "/v1/explanations": [{"methods": list(METHODS), "factors": 2}, {"pair": "b", "answer": "LABEL_1"}],
    "/v1/images/generations": [{"n": 2, "output_format": "jpeg"}],
    "/v1/translations": [{"alignment": True, "num_beams": 2, "n_best": 2}],
}
BODIES = [(path, {**body, **more}) for path, body in MINIMAL.items() for more in [{}, *FURTHER.get(path, [])]]


def check(value: Any, schema: Any) -> None:
    """Refuse what a schema of the description does not describe."""
    jsonschema.Draft202012Validator({**schema, "components": API["components"]}).validate(value)


def find_schema(path: str, method: str, status: int) -> Any:
    response = API["paths"][path][method]["responses"][str(status)]
    return response["content"]["application/json"]["schema"]


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_answers_are_as_described(server: Address, path: str, body: dict[str, Any]) -> None:
    check(server.ask(path, **body), find_schema(path, "post", 200))


STREAMS: dict[str, dict[str, Any]] = {
    CHAT: {"stream_options": {"include_usage": True}},
    COMPLETE: {"stream_options": {"include_usage": True}},
    "/v1/images/generations": {"partial_images": 1},
    "/v1/images/edits": {"partial_images": 1},
}


def test_every_stream_has_its_options() -> None:
    assert set(STREAMS) == {endpoint.path for endpoint in ENDPOINTS if endpoint.event is not None}


@pytest.mark.parametrize(("path", "body"), [one for one in BODIES if one[0] in STREAMS])
def test_events_are_as_described(server: Address, path: str, body: dict[str, Any]) -> None:
    body = {**body, "stream": True, **STREAMS[path]}
    with server.client.stream("POST", path, json=body) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    content = API["paths"][path]["post"]["responses"]["200"]["content"]["text/event-stream"]
    for line in lines:
        check(json.loads(line), content["x-event"])


def test_what_the_server_says_of_itself_is_as_described(server: Address) -> None:
    for path in API["paths"]:
        if "get" in API["paths"][path] and path != "/metrics":
            for name in ("gpt", "minilm", "pretrained", "dates") if "{name}" in path else ("",):
                response = server.client.get(path.format(name=name))
                check(response.json(), find_schema(path, "get", 200))
    assert server.client.get("/openapi.json").json() == json.loads(json.dumps(API))


def test_refusals_are_as_described(server: Address) -> None:
    for path in API["paths"]:
        method = next(iter(API["paths"][path]))
        response = server.client.request(method, path.format(name="gpt"), headers={"Host": "evil.example"})
        assert response.status_code == 403
        check(response.json(), find_schema(path, method, 403))
    check(server.client.get("/v1/models/nobody").json(), find_schema("/v1/models/{name}", "get", 404))
    check(server.post(CHAT).json(), find_schema(CHAT, "post", 400))


def test_a_model_that_loads_is_as_described() -> None:
    go_on = threading.Event()

    def load_late() -> Any:
        assert go_on.wait(SECONDS)
        raise RuntimeError("no model")

    with running_server({"none": load_late}, ServerSettings(keys=("k",))) as server:
        ready = server.client.get("/ready")
        assert ready.status_code == 503
        check(ready.json(), find_schema("/ready", "get", 503))
        headers = {"Authorization": "Bearer k"}
        for path in ("/v1/models", "/v1/models/{name}"):
            check(server.client.get(path).json(), find_schema(path, "get", 401))
            answer = server.client.get(path.format(name="none"), headers=headers)
            check(answer.json(), find_schema(path, "get", 200))
        go_on.set()


def test_calls_of_tools_are_as_described() -> None:
    tokenizer = Tokenizer(byte_level().to_str().encode())
    form = ChatForm(tokenizer, logprobs=False, tools=["look"])
    calls = (ToolCall("look", "{}"), ToolCall("look", '{"at": "sea"}'))
    answer = Generation(
        text="[...]",
        token_ids=(),
        finish_reason="eos",
        logprobs=(),
        timings=Timings(0, 0, 0),
        usage=Usage(1, 1),
        tool_calls=calls,
    )
    check(msgspec.to_builtins(form.write_answer(0, answer)), {"$ref": "#/components/schemas/ChatChoice"})
    for choice in (*form.write_start(0), *form.write_end(0, answer)):
        check(msgspec.to_builtins(choice), {"$ref": "#/components/schemas/StreamedChatChoice"})


def test_paths_that_need_no_key_say_so() -> None:
    paths = describe_api(ENDPOINTS, has_keys=True)["paths"]
    assert [path for path in paths if paths[path].get("get", {}).get("security") == []] == [
        "/health",
        "/ready",
    ]


def list_schemas(value: Any) -> Iterator[dict[str, Any]]:
    """Yield every mapping in a description."""
    if isinstance(value, dict):
        yield value
    for child in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from list_schemas(child)


def test_what_is_referred_to_is_there_and_is_no_empty_schema() -> None:
    named = API["components"]["schemas"]
    referred = {one["$ref"].rpartition("/")[2] for one in list_schemas(API) if "$ref" in one}
    assert referred == set(named)
    assert all(schema["properties"] and schema["additionalProperties"] is False for schema in named.values())
