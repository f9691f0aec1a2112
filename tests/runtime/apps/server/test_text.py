"""Chat and completions over HTTP give what the model gives in Python, in OpenAI's form."""

from __future__ import annotations

import json
from typing import Any

import pytest

from planforge.runtime import TextGenerator

from ....helpers.serving import Address

CHAT = "/v1/chat/completions"
COMPLETE = "/v1/completions"
SAID = [{"role": "user", "content": "And God said, Let there be light"}]


def read_events(server: Address, path: str, **body: Any) -> list[dict[str, Any]]:
    """Return the events of a stream, whose last one must be [DONE]."""
    with server.client.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def join_text(events: list[dict[str, Any]], index: int = 0) -> str:
    choices = [choice for event in events for choice in event["choices"] if choice["index"] == index]
    return "".join(choice["delta"].get("content", "") for choice in choices)


def test_a_chat_is_the_models_own(server: Address, llama: TextGenerator) -> None:
    answer = server.ask(CHAT, model="llama", messages=SAID, max_completion_tokens=12, temperature=0)
    expected = llama.chat(SAID, max_new_tokens=12, temperature=0)
    (choice,) = answer["choices"]
    assert choice["message"]["role"] == "assistant" and choice["message"]["content"] == expected.text
    assert choice["finish_reason"] == "length"
    assert answer["object"] == "chat.completion" and answer["id"].startswith("chatcmpl-")
    assert answer["model"] == "llama" and answer["system_fingerprint"].startswith("fp_")
    usage = answer["usage"]
    assert usage["prompt_tokens"] == llama.count_tokens(SAID)
    assert (usage["completion_tokens"], usage["total_tokens"]) == (12, usage["prompt_tokens"] + 12)


def test_a_chat_goes_on_to_its_end_unless_told_otherwise(server: Address, llama: TextGenerator) -> None:
    (choice,) = server.ask(CHAT, model="llama", messages=SAID, temperature=0)["choices"]
    expected = llama.chat(SAID, temperature=0, max_new_tokens=llama.max_length)
    assert choice["message"]["content"] == expected.text
    assert choice["finish_reason"] == {"eos": "stop", "context": "length"}[expected.finish_reason]


def test_contents_may_be_parts(server: Address) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": SAID[0]["content"]}]}]
    one, other = (
        server.ask(CHAT, model="llama", messages=said, max_tokens=8, temperature=0)["choices"]
        for said in (SAID, parts)
    )
    assert one == other


def test_a_stream_has_openais_chunks(server: Address) -> None:
    body = {"model": "llama", "messages": SAID, "max_tokens": 9, "temperature": 0}
    whole = server.ask(CHAT, **body)
    events = read_events(server, CHAT, **body, stream_options={"include_usage": True})
    assert join_text(events) == whole["choices"][0]["message"]["content"]
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": "", "refusal": None}
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == 9
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert len({event["id"] for event in events}) == 1
    assert all(event["usage"] is None for event in events[:-1])
    reasons = [choice["finish_reason"] for event in events for choice in event["choices"]]
    assert reasons == [None] * (len(reasons) - 1) + ["length"]


def test_a_stream_without_usage_has_none(server: Address) -> None:
    events = read_events(server, CHAT, model="llama", messages=SAID, max_tokens=3)
    assert not any("usage" in event for event in events)


def test_several_answers_are_those_of_their_numbers(server: Address, llama: TextGenerator) -> None:
    options: dict[str, Any] = {"temperature": 1.0, "seed": 3, "max_tokens": 8}
    answer = server.ask(CHAT, model="llama", messages=SAID, n=3, **options)
    texts = [choice["message"]["content"] for choice in answer["choices"]]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert len(set(texts)) == 3
    assert texts[0] == llama.chat(SAID, temperature=1.0, seed=3, max_new_tokens=8).text
    assert answer["usage"]["prompt_tokens"] == llama.count_tokens(SAID)  # once
    assert answer["usage"]["completion_tokens"] == 24
    events = read_events(server, CHAT, model="llama", messages=SAID, n=3, **options)
    assert [join_text(events, index) for index in range(3)] == texts


def test_a_chats_logprobs(server: Address, llama: TextGenerator) -> None:
    body = {"model": "llama", "messages": SAID, "max_tokens": 5, "temperature": 0, "logprobs": True}
    (choice,) = server.ask(CHAT, **body, top_logprobs=2)["choices"]
    expected = llama.chat(SAID, max_new_tokens=5, temperature=0, top_logprobs=2)
    content = choice["logprobs"]["content"]
    assert [entry["logprob"] for entry in content] == pytest.approx(expected.logprobs, abs=1e-4)
    for entry, tops in zip(content, expected.top_logprobs, strict=True):
        assert [top["token"] for top in entry["top_logprobs"]] == [top.text for top in tops]
        assert entry["token"] == entry["top_logprobs"][0]["token"]  # the likeliest
        assert bytes(entry["bytes"]).decode() == entry["token"]
    events = read_events(server, CHAT, **body, top_logprobs=2)
    streamed = [
        entry
        for event in events
        for choice in event["choices"]
        for entry in (choice["logprobs"] or {"content": []})["content"]
    ]
    assert [entry["token"] for entry in streamed] == [entry["token"] for entry in content]


def test_prompts_are_texts_or_token_ids(server: Address, gpt: TextGenerator) -> None:
    texts = ["And it came to pass", "In the beginning God"]
    tokens = [gpt.tokenizer.encode(text) for text in texts]
    expected = [gpt.generate(text, max_new_tokens=7).text for text in texts]
    body = {"model": "gpt", "max_tokens": 7, "temperature": 0}
    for prompt, wanted in (
        (texts, expected),
        (tokens, expected),
        (texts[0], expected[:1]),
        (tokens[0], expected[:1]),
    ):
        answer = server.ask(COMPLETE, prompt=prompt, **body)
        assert [choice["text"] for choice in answer["choices"]] == wanted
        assert answer["object"] == "text_completion"


def test_a_completion_draws_at_temperature_1_and_ends_after_16_tokens(
    server: Address, gpt: TextGenerator
) -> None:
    answer = server.ask(COMPLETE, model="gpt", prompt="And it came to pass", seed=5)
    expected = gpt.generate("And it came to pass", temperature=1.0, seed=5, max_new_tokens=16)
    assert answer["choices"][0]["text"] == expected.text
    assert answer["usage"]["completion_tokens"] == 16


def test_stop_bias_and_the_options_of_ours(server: Address, gpt: TextGenerator) -> None:
    prompt = "And it came to pass"
    free = gpt.generate(prompt, max_new_tokens=20)
    stop = free.text[8:12]
    banned = free.token_ids[0]
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"stop": [stop]}, {"stop": [stop]}),
        ({"logit_bias": {str(banned): -100}}, {"logit_bias": {banned: float("-inf")}}),
        ({"repetition_penalty": 1.5}, {"repetition_penalty": 1.5}),
        ({"frequency_penalty": 1.5, "presence_penalty": 0.5},) * 2,
        ({"no_repeat_ngram_size": 2}, {"no_repeat_ngram_size": 2}),
        ({"temperature": 0.9, "top_k": 5, "min_p": 0.1, "top_p": 0.8, "seed": 2},) * 2,
        ({"temperature": 1.5, "top_p": 0, "seed": 2}, {}),
        *(
            ({"temperature": 0.9, "seed": seed}, {"temperature": 0.9, "seed": drawn})
            for seed, drawn in ((-1, 2**64 - 1), (-(2**63), 2**63), (2**63 - 1, 2**63 - 1))
        ),
    ]
    for body, options in cases:
        sent = {"temperature": 0, **body}
        (choice,) = server.ask(COMPLETE, model="gpt", prompt=prompt, max_tokens=20, **sent)["choices"]
        expected = gpt.generate(prompt, max_new_tokens=20, **options)
        assert choice["text"] == expected.text, body
        assert choice["finish_reason"] == ("stop" if expected.finish_reason == "stop" else "length")


def test_a_completions_logprobs(server: Address, gpt: TextGenerator) -> None:
    body = {"model": "gpt", "prompt": "And it came", "max_tokens": 5, "temperature": 0, "logprobs": 2}
    (choice,) = server.ask(COMPLETE, **body)["choices"]
    expected = gpt.generate("And it came", max_new_tokens=5, top_logprobs=2)
    logprobs = choice["logprobs"]
    assert logprobs["token_logprobs"] == pytest.approx(expected.logprobs, abs=1e-4)
    assert "".join(logprobs["tokens"]) == choice["text"]
    assert [len(top) for top in logprobs["top_logprobs"]] == [2] * 5
    ends = [
        start + len(token) for start, token in zip(logprobs["text_offset"], logprobs["tokens"], strict=True)
    ]
    assert logprobs["text_offset"][1:] == ends[:-1]
    parts = [event["choices"][0]["logprobs"] for event in read_events(server, COMPLETE, **body)]
    assert [token for part in parts for token in part["tokens"]] == logprobs["tokens"]
    assert [offset for part in parts for offset in part["text_offset"]] == logprobs["text_offset"]
