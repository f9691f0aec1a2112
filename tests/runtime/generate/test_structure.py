"""Answers that follow a JSON schema, a regular expression, a grammar or a list of choices."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from planforge.runtime import BackendUnavailableError, Generation, InputError, SchemaError, TextGenerator

from ...helpers.generation import margin_where_they_part
from ...helpers.modules import modules_after

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
NODE: dict[str, Any] = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "v": {"type": "boolean"},
                "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
            },
            "required": ["v", "next"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}
SCHEMAS: list[dict[str, Any]] = [
    PERSON,
    NODE,
    {"type": "array", "items": {"enum": ["a", 1, None, [2], {"b": 3}]}, "minItems": 1, "maxItems": 3},
    {"type": "array", "prefixItems": [{"type": "boolean"}, {"const": "é\n"}], "items": False, "minItems": 2},
    {"type": "number", "minimum": -0.5, "exclusiveMaximum": 12.25},
    {"type": "integer", "multipleOf": 7, "minimum": 0, "exclusiveMaximum": 700},
    {"type": "string", "pattern": r"^\d{2}-[a-z]+$", "maxLength": 8},
    {"type": "string", "minLength": 2, "maxLength": 5},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "ipv4"},
    {"anyOf": [{"type": "integer", "maximum": 70, "minimum": 0}, {"type": "null"}]},
    {
        "oneOf": [
            {
                "type": "object",
                "properties": {"kind": {"const": "a"}},
                "required": ["kind"],
                "maxProperties": 1,
            },
            {
                "type": "object",
                "properties": {"kind": {"const": "b"}},
                "required": ["kind"],
                "maxProperties": 1,
            },
        ]
    },
    {
        "type": "object",
        "patternProperties": {"^[ab]$": {"type": "integer", "minimum": 0, "maximum": 9}},
        "additionalProperties": False,
        "maxProperties": 3,
    },
    {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 9}], "title": "a note", "x-note": 1},
    {"type": ["boolean", "null"]},
    {
        "type": "object",
        "properties": {
            "a": {"type": "object", "properties": {"b": {"enum": [1]}}, "additionalProperties": False}
        },
        "required": ["a"],
        "maxProperties": 1,
    },
]
REGEXES = [
    r"[0-9]\d{3}-[a-z]{1,9}",
    "(yes|no), (sir|madam)!?",
    r"[^\x00-\x7f]{1,3}",
    r"(?i)the (lord|king)",
    r"a/b\n?",
    r"^\w{1,8}$",
]
CHOICES = ["yes", "yes, sir", "no", 'né\n"\\']
SCHEMA: dict[str, Any] = {"json_schema": PERSON, "max_new_tokens": 60}
STRUCTURES: list[dict[str, Any]] = [
    SCHEMA,
    {"regex": r"\d{3}-[a-z]{2,5}(, [A-Z]+)?"},
    {"choices": CHOICES},
    {"grammar": 'start: "(" start ")" | /[0-9]+/', "max_new_tokens": 8},
]


@pytest.fixture(scope="module")
def models(demo_bundle: Path, llama_demo_bundle: Path) -> Iterator[dict[str, TextGenerator]]:
    with TextGenerator.load(demo_bundle) as gpt2, TextGenerator.load(llama_demo_bundle) as llama:
        models = {"gpt2": gpt2, "llama": llama}
        for model in models.values():
            model.schedule(queue_size=1000)
        yield models


@pytest.fixture(scope="module")
def model(models: dict[str, TextGenerator]) -> TextGenerator:
    return models["gpt2"]


def is_whole(answer: Generation) -> bool:
    return answer.finish_reason in ("stop", "eos")


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_of_a_thousand_submitted_answers_at_temperature_1_each_whole_one_is_valid(
    models: dict[str, TextGenerator], name: str
) -> None:
    """Answers of every structure share the engine."""
    structures: list[dict[str, Any]] = [{"json_schema": schema} for schema in SCHEMAS]
    structures += [{"regex": regex} for regex in REGEXES]
    structures += [{"choices": CHOICES}]
    asked = [(number, structure) for number in range(24) for structure in structures]
    pending = [
        models[name].submit(
            "And the LORD said",
            number=number,
            temperature=1.0,
            seed=1,
            max_new_tokens=48,
            logprobs=False,
            **structure,
        )
        for number, structure in asked
    ]
    texts = set()
    whole = 0
    for one, (_, structure) in zip(pending, asked, strict=True):
        answer = one.result(60)
        if is_whole(answer):
            whole += 1
            texts.add(answer.text)
            check_structure(answer.text, **structure)
    assert whole > 0.95 * len(asked) > 500
    assert len(texts) > whole / 4


def check_structure(text: str, json_schema: Any = None, regex: str = "", choices: Sequence[str] = ()) -> None:
    """Fail where a text has not the structure that was asked for."""
    if json_schema is not None:
        jsonschema.validate(json.loads(text), json_schema, format_checker=jsonschema.FormatChecker())
    elif regex:
        assert re.fullmatch(regex, text, re.ASCII if "d" in regex else 0)
    else:
        assert text in choices


def test_answers_are_one_of_the_choices(model: TextGenerator) -> None:
    choices = [*CHOICES, "<|endoftext|>"]
    answers = model.generate(["And"] * 24, choices=choices, temperature=3.0, seed=1)
    assert {answer.text for answer in answers} <= set(choices)
    assert len({answer.text for answer in answers}) > 1
    ends = {answer.text: answer.finish_reason for answer in answers}
    assert ends.get("no", "stop") == "stop"
    assert model.generate("And", choices=["<|endoftext|>"]).text == "<|endoftext|>"


def test_a_grammar_of_lark(model: TextGenerator) -> None:
    grammar = 'start: "(" start ")" | NAME\nNAME: /[a-z]{1,6}/'
    for answer in model.generate(["And"] * 8, grammar=grammar, temperature=1.0, seed=1):
        text = answer.text
        depth = text.count("(")
        if is_whole(answer):
            assert re.fullmatch("[a-z]{1,6}", text[depth : len(text) - depth])
            assert text[:depth] == "(" * depth and text[len(text) - depth :] == ")" * depth


@pytest.mark.parametrize("options", STRUCTURES, ids=lambda options: next(iter(options)))
@pytest.mark.parametrize("temperature", [None, 1.0])
def test_every_way_to_ask_gives_the_same_answer(
    models: dict[str, TextGenerator], options: dict[str, Any], temperature: float | None
) -> None:
    model = models["llama"]
    prompts = ["And the LORD", "Of the king", "In"]
    options = {**options, "temperature": temperature, "seed": 5}
    answers = model.generate(prompts, **options)
    assert [answer.text for answer in model.iterate(prompts, **options)] == [a.text for a in answers]
    first = model.generate(prompts[0], **options)
    assert first.token_ids == answers[0].token_ids
    assert "".join(map(str, model.stream(prompts[0], **options))) == first.text
    pending = [model.submit(prompt, number=number, **options) for number, prompt in enumerate(prompts)]
    for one, answer, prompt in zip(pending, answers, prompts, strict=True):
        got = one.result(60)
        assert (got.text, got.finish_reason) == (answer.text, answer.finish_reason), prompt
    guessed = model.generate(prompts[0], speculative="prompt-lookup", **options)
    if guessed.token_ids != first.token_ids:
        assert margin_where_they_part(model, prompts[0], guessed, first) < 1e-4


def test_requests_with_structures_of_their_own_share_an_engine(model: TextGenerator) -> None:
    asked = [{}, *STRUCTURES, {"temperature": 1.0, "seed": 3}, {"regex": "[0-9]{4}"}]
    pending = [model.submit("And the LORD", **options) for options in asked]
    for one, options in zip(pending, asked, strict=True):
        assert one.result(60).text == model.generate("And the LORD", **options).text


def test_a_structure_that_the_answer_has_anyway_changes_nothing(model: TextGenerator) -> None:
    free = model.generate("And it came to pass", max_new_tokens=30)
    for options in ({"regex": r"(?s).*"}, {"regex": re.escape(free.text)}, {"choices": [free.text, "x"]}):
        held = model.generate("And it came to pass", max_new_tokens=30, **options)
        assert held.token_ids == free.token_ids
        np.testing.assert_allclose(held.logprobs, free.logprobs, atol=1e-4)


def test_log_probabilities_are_the_models_own(model: TextGenerator) -> None:
    prompt = model.tokenizer.encode("And the LORD")
    answer = model.generate(prompt, top_logprobs=3, temperature=1.0, seed=1, **SCHEMA)
    scores = model.score([*prompt, *answer.token_ids]).logprobs
    np.testing.assert_allclose(answer.logprobs, scores[-len(answer.token_ids) :], atol=1e-4)
    assert answer.top_logprobs[0][0].logprob > answer.logprobs[0]  # what the model would have said


def test_what_must_come_is_guessed(model: TextGenerator) -> None:
    schema = {**PERSON, "properties": {"name": {"const": "The children of Israel"}, "age": {"const": 3}}}
    answer = model.generate("And", json_schema=schema, speculative="prompt-lookup", max_new_tokens=80)
    assert json.loads(answer.text) == {"name": "The children of Israel", "age": 3}
    assert answer.accepted_tokens > len(answer.token_ids) / 2


def test_guesses_end_where_the_grammar_forbids_them(model: TextGenerator) -> None:
    text = "the LORD spake unto Moses, saying, " * 4
    regex = "the LORD spake [a-z ]{1,30}!"
    answer = model.generate(text, regex=regex, speculative="prompt-lookup")
    assert not is_whole(answer) or re.fullmatch(regex, answer.text)
    assert answer.token_ids == model.generate(text, regex=regex).token_ids


def test_an_answer_may_be_cut(model: TextGenerator) -> None:
    answer = model.generate("And", json_schema=PERSON, max_new_tokens=3)
    assert answer.finish_reason == "length" and len(answer.token_ids) == 3
    answer = model.generate("And", json_schema={"type": "object"}, stop='"')
    assert answer.finish_reason == "stop" and '"' not in answer.text


@pytest.mark.parametrize(
    ("schema", "path", "words"),
    [
        ({"properties": {"a": {"pattern": "(?=x)y"}}}, "properties/a/pattern", "look-ahead"),
        ({"properties": {"a": {"pattern": "(["}}}, "properties/a/pattern", "unclosed character class"),
        ({"properties": {"a": {"pattern": r"\bx"}}}, "properties/a/pattern", "lookarounds"),
        ({"items": {"type": "string", "format": "color"}}, "items/format", "Unknown format: color"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"type": "strin"}}}, "$defs/a/type", "Invalid type: strin"),
        ({"properties": {"a": {"$ref": "#/$defs/b"}}}, "properties/a/$ref", "'/$defs/b' does not exist"),
        ({"anyOf": [{"type": "null"}, {"minimum": "a"}]}, "anyOf/1/minimum", "minimum"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "minimum", "Unsatisfiable"),
        ({"enum": []}, "enum", "Unsatisfiable"),
        ({"$ref": "http://example.com/x.json"}, "$ref", "example.com"),
        ({"properties": {"a": {"not": {}}}}, "properties/a/not", "not supported"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems", "not supported"),
        ({"allOf": [{"maxLenght": 3}]}, "allOf/0/maxLenght", "did you mean 'maxLength'"),
        (
            {"$schema": "http://json-schema.org/draft-07/schema#", "dependentRequired": {}},
            "dependentRequired",
            "",
        ),
        ({"x-guidance": {"lenient": True}, "uniqueItems": True}, "x-guidance", "not supported"),
        ({"type": "object", "minProperties": 2}, "minProperties", "list the keys in required"),
        ({"$ref": "#"}, "", "allows no text"),
        ("[", "", "not valid JSON"),
        ("3", "", "must be an object"),
        ('{"const": NaN}', "", "NaN"),
        ('{"items":' * 5000 + "{}" + "}" * 5000, "", "deep"),
        ({"const": {1, 2}}, "", "not valid JSON"),
    ],
)
def test_a_schema_that_cannot_be_enforced_is_refused_by_its_place(
    model: TextGenerator, schema: Any, path: str, words: str
) -> None:
    with pytest.raises(SchemaError) as caught:
        model.stream("And", json_schema=schema)
    assert caught.value.path == path
    assert words in str(caught.value)
    assert path in str(caught.value) and "\n" not in str(caught.value) and len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"regex": "ab(c"}, "regex cannot be used: unclosed group, at character 3 of ab"),
        ({"regex": "(?=a)b"}, "look-ahead"),
        ({"regex": ""}, "regex='' must be a non-empty text"),
        ({"regex": 3}, "regex=3 must be a non-empty text"),
        ({"grammar": 'start: "a" b'}, 'grammar cannot be used: line 1, character 8: unknown name: "b"'),
        ({"grammar": "a"}, "grammar cannot be used"),
        ({"choices": []}, "choices="),
        ({"choices": "yes"}, "choices='yes' must be a list"),
        ({"choices": ["a", ""]}, r"choices\[1\]="),
        ({"choices": ["a", "\ud800"]}, "surrogate"),
        ({"regex": "a", "choices": ["a"]}, "regex and choices each set the form of the answer"),
        ({"regex": "a" * 200_000}, "at most 131072"),
        ({"json_schema": {"enum": ["a" * 200_000]}}, "at most 131072"),
        ({"regex": "a", "ignore_eos": True}, "ignore_eos=True cannot be used with regex"),
        ({"regex": "a", "num_beams": 2}, "regex='a' does not go with num_beams=2"),
        ({"json_schema": {}, "num_beams": 2}, "json_schema='{}' does not go with num_beams=2"),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_line(
    model: TextGenerator, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(InputError, match=words) as caught:
        model.iterate(["And"], **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        {"regex": "(a{1000}){1000}"},
        {"json_schema": {"type": "object", "properties": {f"key {number}": {} for number in range(1000)}}},
        {"json_schema": {"allOf": [{"pattern": f"^.*{letter}.{{8}}$"} for letter in "abcdefgh"]}},
        {"json_schema": {"type": "number", "minimum": -1e300, "maximum": 1e300}},
    ],
)
def test_what_is_too_complex_is_refused_soon(model: TextGenerator, options: dict[str, Any]) -> None:
    with pytest.raises(InputError) as caught:
        model.generate("And", **options)
    assert "\n" not in str(caught.value)
    assert model.generate("And", regex="ab").text == "ab"


def test_a_processor_that_insists_on_what_is_forbidden(model: TextGenerator) -> None:
    def insist(token_ids: Any, logits: Any) -> Any:
        return np.where(np.arange(len(logits)) == 5, 100.0, logits)

    with pytest.raises(InputError, match="regex"):
        model.generate("And", regex="[0-9]+", logits_processor=insist)


def test_a_bias_against_all_that_is_allowed(model: TextGenerator) -> None:
    digits = {model.tokenizer.encode(digit)[0]: float("-inf") for digit in "3"}
    with pytest.raises(InputError, match=r"logit_bias.* with the structure of the answer leaves no token"):
        model.generate("And", regex="3", logit_bias=digits)


def test_llguidance_is_asked_for_by_its_extra(model: TextGenerator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(BackendUnavailableError, match=r"pip install 'planforge\[grammar\]'"):
        model.generate("And", regex="another expression")


def test_answers_without_structure_load_no_llguidance(demo_bundle: Path) -> None:
    code = (
        f"from planforge.runtime import load\nload({str(demo_bundle)!r}).generate('In the', max_new_tokens=2"
    )
    assert "llguidance" not in modules_after(code + ")")
    assert "llguidance" in modules_after(code + ", regex='a')")
