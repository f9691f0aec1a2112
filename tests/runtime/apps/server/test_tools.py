"""OpenAI's client gets calls of tools over HTTP: forced ones, and those that an answer has beside text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import jsonschema
import openai
import pydantic
import pytest

from planforge.runtime import TextGenerator

from ....helpers.chat import HERMES, copy_with_template
from ....helpers.openai_client import connect_openai
from ....helpers.serving import running_server

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 10}, "unit": {"enum": ["C", "F"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
STRICT = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS, "strict": True}}
NOW = {"type": "function", "function": {"name": "now", "description": "What time is it?"}}
SAID = [{"role": "user", "content": "Is it warm in Rome?"}]
BODY: dict[str, Any] = {"model": "hermes", "messages": SAID, "tools": [WEATHER, NOW], "max_tokens": 120}
FORCED: dict[str, Any] = {
    **BODY,
    "tools": [STRICT, NOW],
    "tool_choice": "required",
    "temperature": 1,
    "seed": 1,
}
CALL = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'


@pytest.fixture(scope="module")
def client(llama_demo_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    folder = tmp_path_factory.mktemp("tools") / "hermes"
    bundle = copy_with_template(llama_demo_bundle, folder, HERMES)
    with (
        TextGenerator.load(bundle, backend="ort-cpu", precision="fp32") as model,
        running_server({"hermes": model}) as server,
        connect_openai(server) as client,
    ):
        yield client


def read_stream(client: openai.OpenAI, body: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """Return the text, the calls and the finish reason of each answer of a stream."""
    answers: list[dict[str, Any]] = [{"content": "", "calls": [], "reason": None} for _ in range(count)]
    for chunk in client.chat.completions.create(**body, stream=True):
        for choice in chunk.choices:
            answer = answers[choice.index]
            assert answer["reason"] is None  # nothing comes behind it
            answer["content"] += choice.delta.content or ""
            answer["reason"] = choice.finish_reason
            for call in choice.delta.tool_calls or []:
                assert call.index == len(answer["calls"]) and call.id
                answer["calls"].append((call.function.name, call.function.arguments))
    return answers


def list_answers(client: openai.OpenAI, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the same of answers that come whole."""
    return [
        {
            "content": choice.message.content or "",
            "calls": [(c.function.name, c.function.arguments) for c in choice.message.tool_calls or []],
            "reason": choice.finish_reason,
        }
        for choice in client.chat.completions.create(**body).choices
    ]


def test_a_forced_call_comes_whole_and_streamed(client: openai.OpenAI) -> None:
    whole = list_answers(client, {**FORCED, "n": 2})
    for answer in whole:
        ((name, arguments),) = answer["calls"]
        schema = PARAMETERS if name == "weather" else {"type": "object", "maxProperties": 0}
        jsonschema.validate(json.loads(arguments), schema)
        assert (answer["content"], answer["reason"]) == ("", "tool_calls")
    assert whole[0] != whole[1]  # of two draws
    assert read_stream(client, {**FORCED, "n": 2}, 2) == whole


def test_a_named_tool_is_called_and_its_result_goes_back(client: openai.OpenAI) -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    answer = client.chat.completions.create(**{**FORCED, "tool_choice": named})
    message = answer.choices[0].message
    assert message.tool_calls is not None
    (call,) = message.tool_calls
    assert call.type == "function" and call.function.name == "weather"
    result = {"role": "tool", "tool_call_id": call.id, "content": "21"}
    history = [*SAID, message.model_dump(), result]  # as it came, with all its fields
    further = client.chat.completions.create(**{**BODY, "messages": history, "max_tokens": 4})
    assert answer.usage is not None and further.usage is not None
    assert further.usage.prompt_tokens > answer.usage.prompt_tokens + 10


class Weather(pydantic.BaseModel):
    """Says how warm a city is."""

    city: str = pydantic.Field(max_length=10)
    unit: Literal["C", "F"]


def test_the_clients_own_streams_of_tools(client: openai.OpenAI) -> None:
    """`chat.completions.stream` puts a call's events together, and parses its arguments by pydantic."""
    body = {**FORCED, "tools": [openai.pydantic_function_tool(Weather)]}
    (whole,) = list_answers(client, body)
    ((name, arguments),) = whole["calls"]
    deltas = ""
    done = []
    with client.chat.completions.stream(**body) as stream:
        for event in stream:
            if event.type == "tool_calls.function.arguments.delta":
                deltas += event.arguments_delta
                assert event.arguments == deltas
            if event.type == "tool_calls.function.arguments.done":
                done.append((event.index, event.name, event.arguments, event.parsed_arguments))
        final = stream.get_final_completion().choices[0]
    parsed = Weather.model_validate_json(arguments)
    assert name == "Weather" and deltas == arguments
    assert done == [(0, name, arguments, parsed)]
    assert final.message.tool_calls is not None
    assert [call.function.parsed_arguments for call in final.message.tool_calls] == [parsed]
    assert final.finish_reason == "tool_calls" and not final.message.content


def test_the_clients_own_streams_of_several_calls_beside_text(client: openai.OpenAI) -> None:
    body = {**BODY, "tools": [NOW], "extra_body": {"choices": [f"Well. {CALL}{CALL}"]}}
    text = ""
    with client.chat.completions.stream(**body) as stream:
        for event in stream:
            if event.type == "content.delta":
                text += event.delta
                assert event.snapshot == text
        final = stream.get_final_completion().choices[0]
    calls = final.message.tool_calls
    assert calls is not None and [call.function.name for call in calls] == ["now", "now"]
    assert len({call.id for call in calls}) == 2
    assert text.strip() == (final.message.content or "").strip() == "Well."


@pytest.mark.parametrize("content", ["a < b. See [1] now. ", ""])
def test_what_an_answer_says_beside_a_call_is_not_lost(client: openai.OpenAI, content: str) -> None:
    body = {**BODY, "tools": [NOW], "extra_body": {"choices": [content + CALL]}}
    expected = [{"content": content, "calls": [("now", "{}")], "reason": "tool_calls"}]
    assert list_answers(client, body) == expected
    assert read_stream(client, body, 1) == expected


def test_where_no_tool_may_be_called_a_call_is_text(client: openai.OpenAI) -> None:
    body = {**BODY, "tool_choice": "none", "extra_body": {"choices": [CALL]}}
    expected = [{"content": CALL, "calls": [], "reason": "stop"}]
    assert list_answers(client, body) == expected
    assert read_stream(client, body, 1) == expected


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"tools": [NOW, STRICT]}, "tools[1].function.strict"),
        ({"tools": [NOW, STRICT], "tool_choice": "auto"}, "tools[1].function.strict"),
        ({"tools": [NOW, NOW]}, "tools[1].function.name"),
        ({"tool_choice": {"type": "function", "function": {"name": "then"}}}, "tool_choice"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "now", "a": 1}}},
            "tool_choice.function.a",
        ),
        ({"tool_choice": "required", "extra_body": {"ignore_eos": True}}, "ignore_eos"),
        ({"messages": [{**SAID[0], "tool_calls": []}]}, "messages[0].tool_calls"),
        ({"messages": [{**SAID[0], "tool_call_id": "1"}]}, "messages[0].tool_call_id"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_its_name(
    client: openai.OpenAI, extra: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**{**BODY, **extra})
    assert refused.value.param == param
