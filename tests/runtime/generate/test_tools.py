"""Tools: what chat templates get of them, answers that are held to a call, calls that are read back."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from planforge.runtime import InputError, SchemaError, TextGenerator, ToolCall
from planforge.runtime.apps.server.call_splitter import CallSplitter
from planforge.runtime.generate.grammar import Grammars
from planforge.runtime.generate.tools import Tools, read_tools
from planforge.runtime.text.chat import Chat
from planforge.runtime.text.tokenizer import Tokenizer
from planforge.runtime.text.wording import Wording

from ...helpers.chat import HERMES, byte_level, ours

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 10}, "unit": {"$ref": "#/$defs/unit"}},
    "required": ["city", "unit"],
    "additionalProperties": False,
    "$defs": {"unit": {"enum": ["C", "F"]}},
}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
TOOLS = [WEATHER, {"type": "function", "function": {"name": "now", "description": "What time is it?"}}]
MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": "Is it warm in Rome?"}]
# In the style of Mistral and Llama 3, beside Hermes and Qwen.
MISTRAL = "{{ tools | tojson }}{% for m in messages %}[INST]{{ m.content }}[/INST]{% endfor %}[TOOL_CALLS]"
LLAMA = "{{ tools | tojson }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
# And newer Mistral, Granite and Phi-4-mini.
NAMED = MISTRAL + "[ARGS]"
WITH_ID = MISTRAL + "[CALL_ID]a1B2c3D4e[ARGS]"
GRANITE = LLAMA + "Call as <|tool_call|>[...]"
PHI = LLAMA + "Call as <|tool_call|>[...]<|/tool_call|>"
TEMPLATES = {"hermes": HERMES, "mistral": MISTRAL, "llama": LLAMA, "granite": GRANITE, "phi": PHI}
TEMPLATES |= {"named": NAMED, "with_id": WITH_ID}
WORDED = {
    "hermes": r"<tool_call>\n{.*}\n</tool_call>",
    "mistral": r"\[TOOL_CALLS\]\[{.*}\]",
    "llama": r"{.*}",
    "granite": r"<\|tool_call\|>\[{.*}\]",
    "phi": r"<\|tool_call\|>\[{.*}\]<\|/tool_call\|>",
    "named": r"\[TOOL_CALLS\](weather|now)\[ARGS\]{.*}",
    "with_id": r"\[TOOL_CALLS\](weather|now)\[CALL_ID\][a-zA-Z0-9]{9}\[ARGS\]{.*}",
}

Wear = Callable[[str], TextGenerator]


@pytest.fixture(scope="module")
def plain(llama_demo_bundle: Path) -> Iterator[TextGenerator]:
    with TextGenerator.load(llama_demo_bundle) as model:
        yield model


@pytest.fixture
def wear(plain: TextGenerator, monkeypatch: pytest.MonkeyPatch) -> Wear:
    def put_on(template: str) -> TextGenerator:
        chat = Chat(template, {}, "chat_template.jinja")
        rows = replace(plain._rows, chat=chat)
        monkeypatch.setattr(plain, "_rows", rows)
        monkeypatch.setattr(plain._submissions, "rows", rows)
        return plain

    return put_on


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("name", [None, "weather"])
def test_an_answer_is_held_to_a_call(wear: Wear, template: str, name: str | None) -> None:
    model = wear(TEMPLATES[template])
    choice: Any = "required" if name is None else {"type": "function", "function": {"name": name}}
    for seed in range(2):
        options: dict[str, Any] = {"temperature": 1.0, "seed": seed, "max_new_tokens": 130}
        answer = model.chat(MESSAGES, tools=TOOLS, tool_choice=choice, **options)
        assert answer.finish_reason == "stop"
        assert re.fullmatch(WORDED[template], answer.text, re.DOTALL)
        (call,) = answer.tool_calls
        if call.name == "weather":
            jsonschema.validate(json.loads(call.arguments), PARAMETERS)
        assert call.name == "weather" or (call.name == "now" and name is None)
        chunks = list(model.stream_chat(MESSAGES, tools=TOOLS, tool_choice=choice, **options))
        assert "".join(map(str, chunks)) == answer.text
    pending = model.submit_chat(MESSAGES, tools=TOOLS, tool_choice=choice, **options)
    assert pending.result(60).tool_calls == answer.tool_calls


MARKS = ["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<tool_call>", "</tool_call>", "<|tool_call|>"]


@pytest.mark.parametrize(
    ("template", "worded"),
    [
        (HERMES, r"<tool_call>\n{.*weather.*}\n</tool_call>"),
        (MISTRAL, r"\[TOOL_CALLS\]\[{.*}\]"),
        (GRANITE, r"<\|tool_call\|>\[{.*}\]"),
        (NAMED, r"\[TOOL_CALLS\]weather\[ARGS\]{.*}"),
        (WITH_ID, r"\[TOOL_CALLS\]weather\[CALL_ID\][a-zA-Z0-9]{9}\[ARGS\]{.*}"),
    ],
)
def test_marks_that_are_special_tokens_come_as_such(template: str, worded: str) -> None:
    """llguidance chooses at random; tokenizers spells what it chose."""
    raw = byte_level()
    raw.add_special_tokens(MARKS)
    tokenizer = Tokenizer(raw.to_str().encode())
    tools = read_tools(TOOLS, {"type": "function", "function": {"name": "weather"}})
    assert tools is not None
    structure = tools.write_structure(template, tokenizer)
    (eos,) = tokenizer.encode("</s>", parse_special=True)
    random = np.random.default_rng(1)
    grammars = Grammars(tokenizer, [eos], tokenizer.vocab_size)
    for _ in range(3):
        grammar = grammars.start(structure)
        ids: list[int] = []
        while not grammar.complete and len(ids) < 300:
            (allowed,) = np.nonzero(grammar.find_allowed())
            ids.append(int(random.choice(allowed)))
            grammar.take(ids[-1])
        shown = raw.decode(ids, skip_special_tokens=False).removesuffix("</s>")
        assert re.fullmatch(worded, shown, re.DOTALL)
        special = [raw.id_to_token(token) for token in ids if raw.id_to_token(token) in MARKS]
        assert special == [mark for mark in re.findall("|".join(map(re.escape, MARKS)), shown)]
        (call,) = tools.find_calls(tokenizer.decode(ids))
        jsonschema.validate(json.loads(call.arguments), PARAMETERS)


TREE: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "child": {"$ref": "#"}},
    "required": ["a"],
    "additionalProperties": False,
}


def make_reference(reference: str, definition: Any) -> dict[str, Any]:
    """Return a schema of objects whose one member refers to a definition."""
    return {
        "type": "object",
        "properties": {"a": {"$ref": reference}},
        "required": ["a"],
        "additionalProperties": False,
        "$defs": {"a [": definition},
    }


TREES = ([{"a": {"a": 1}}, {"a": {"a": 1, "child": {"a": 2}}}], [{"a": {"a": 1, "child": {}}}, {"a": 1}])
POINTERS: list[tuple[dict[str, Any], list[Any], list[Any]]] = [
    (TREE, [{"a": 1}, {"a": 1, "child": {"a": 2}}], [{"child": {"a": 2}}, {"a": 1, "child": {"name": "f"}}]),
    (
        {
            **TREE,
            "$id": "https://example.com/tree",
            "$schema": "https://json-schema.org/draft/2020-12/schema",
        },
        [{"a": 1, "child": {"a": 2}}],
        [{"a": 1, "child": {}}],
    ),
    (
        {
            "type": "object",
            "properties": {"n": {"$ref": "#/definitions/N"}},
            "definitions": {"N": {"type": "integer"}},
        },
        [{"n": 1}],
        [{"n": "1"}],
    ),
    (
        {"type": "object", "properties": {"a/b": {"type": "boolean"}, "c": {"$ref": "#/properties/a~1b"}}},
        [{"c": True}],
        [{"c": "1"}],
    ),
    (
        {
            "type": "object",
            "properties": {"x": {"$ref": "#/$defs/outer/$defs/inner"}, "$ref": {"type": "integer"}},
            "$defs": {"outer": {"$defs": {"inner": {"const": {"$ref": "#"}}}}},
        },
        [{"x": {"$ref": "#"}, "$ref": 3}],
        [{"x": {"$ref": "#/$defs/0"}}, {"$ref": "3"}],
    ),
    *[
        ({"$id": name, **make_reference(reference, {"type": "integer"})}, [{"a": 1}], [{"a": "x"}, {}])
        for name, reference in [
            ("https://e.org/s", "https://e.org/s#/$defs/a%20%5B"),
            ("https://e.org/s#", "s#/$defs/a%20%5B"),
            ("urn:example:s", "urn:example:s#/$defs/a%20%5B"),
        ]
    ],
    (make_reference("#/%24defs/a%20%5B", True), [{"a": 1}], [{}]),
    (
        make_reference("#/$defs/a%20%5B/anyOf/1", {"anyOf": [False, {"type": "null"}]}),
        [{"a": None}],
        [{"a": 1}],
    ),
    (make_reference("#/$defs/a%20%5B/items", {"items": {"type": "null"}}), [{"a": None}], [{"a": 1}]),
    (make_reference("#n", {"$anchor": "n", "type": "integer"}), [{"a": 1}], [{"a": "x"}]),
    (make_reference("https://e.org/n", {"$id": "https://e.org/n", **TREE}), *TREES),
    (make_reference("https://e.org/n#t", {"$id": "https://e.org/n", **TREE, "$anchor": "t"}), *TREES),
    (
        {**make_reference("t/n", {"$id": "t/n", **TREE}), "$id": "https://e.org/s"},
        *TREES,
    ),
    (
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "type": "object",
            "properties": {"a": {"$ref": "#n"}},
            "definitions": {"N": {"$id": "#n", "type": "integer"}},
        },
        [{"a": 1}],
        [{"a": "x"}],
    ),
    (
        make_reference(
            "#/$defs/a%20%5B",
            {
                "$id": "https://e.org/x",
                **make_reference("#n", {"$anchor": "n", "type": "string"}),
                "properties": {"a": {"$ref": "#n"}, "b": {"$ref": "/x#/$defs/a%20%5B"}},
            },
        ),
        [{"a": {"a": "x", "b": "y"}}],
        [{"a": {"a": 1}}, {"a": {"a": "x", "b": 1}}, {"a": "x"}],
    ),
]


@pytest.mark.parametrize(("parameters", "valid", "invalid"), POINTERS)
def test_pointers_mean_the_same_inside_a_call(
    wear: Wear, parameters: dict[str, Any], valid: list[Any], invalid: list[Any]
) -> None:
    """jsonschema judges the arguments by the tool's own schema, and the call by the schema that holds it."""
    functions = [{"name": "first"}, {"name": "f", "parameters": parameters}]
    tools = read_tools([{"type": "function", "function": each} for each in functions], "required")
    assert tools is not None
    held = json.loads(tools.write_structure(LLAMA, ours("byte_level")).text)
    for arguments in (*valid, *invalid):
        judge = jsonschema.validators.validator_for(parameters, jsonschema.Draft202012Validator)
        own = judge(parameters).is_valid(arguments)
        assert own == (arguments in valid)
        call = {"name": "f", "parameters": arguments}
        assert jsonschema.Draft202012Validator(held).is_valid(call) == own, arguments
    answer = wear(HERMES).chat(
        MESSAGES, tools=list(tools.definitions), tool_choice="required", max_new_tokens=1
    )
    assert answer.token_ids  # llguidance takes the schema too


@pytest.mark.parametrize("name", [{}, {"$id": "https://e.org/s"}])
def test_tools_keep_their_own_names_of_parts(wear: Wear, name: dict[str, str]) -> None:
    kinds: dict[str, Any] = {"f": {"type": "integer", "maximum": 9}, "g": {"type": "string", "maxLength": 2}}
    schemas = {tool: {**name, **make_reference("#n", {"$anchor": "n", **kinds[tool]})} for tool in kinds}
    functions = [{"name": tool, "parameters": schema} for tool, schema in schemas.items()]
    tools = read_tools([{"type": "function", "function": each} for each in functions], "required")
    assert tools is not None
    held = jsonschema.Draft202012Validator(json.loads(tools.write_structure(LLAMA, ours("byte_level")).text))
    for tool, schema in schemas.items():
        for arguments in ({"a": 1}, {"a": "x"}):
            valid = jsonschema.Draft202012Validator(schema).is_valid(arguments)
            assert held.is_valid({"name": tool, "parameters": arguments}) == valid
    for tool, schema in schemas.items():
        choice: Any = {"type": "function", "function": {"name": tool}}
        answer = wear(LLAMA).chat(
            MESSAGES, tools=list(tools.definitions), tool_choice=choice, max_new_tokens=90
        )
        (call,) = answer.tool_calls
        jsonschema.validate(json.loads(call.arguments), schema)


NO_SCHEMAS: dict[str, Any] = {"default": {"N": TREE}, "examples": [TREE], "x-n": {"N": TREE}, "x-": TREE}


@pytest.mark.parametrize(
    "reference",
    [
        *["#n", "https://e.org/s#/$defs/N", "other.json", "#/$defs", "#/$defs/N", "#/properties"],
        *[
            "#/x-n/N",
            "#/x%2Dn/N",
            "#/x-",
            "#/default/N",
            "#/examples/0",
            "#/$defs/a%20%5B/x-/properties/child",
        ],
    ],
)
def test_a_reference_to_no_schema_is_refused_by_its_place(reference: str) -> None:
    """References in what is no schema would stay as they are, and mean another place inside a call."""
    schema = {**make_reference(reference, {"x-": TREE}), **NO_SCHEMAS}
    tool = {"function": {"name": "f", "parameters": schema}}
    with pytest.raises(
        SchemaError, match=r"tools\[1\], f: .*properties/a/\$ref is .* is not in this schema"
    ) as caught:
        read_tools([TOOLS[1], tool], "required")
    assert caught.value.path == "tools/1/function/parameters/properties/a/$ref"
    assert read_tools([TOOLS[1], tool], "auto")  # nothing is held to it


def test_an_answer_need_not_call(wear: Wear) -> None:
    model = wear(HERMES)
    free = model.chat(MESSAGES, tools=TOOLS, max_new_tokens=8)
    assert free.tool_calls == () and free.text
    hidden = model.chat(MESSAGES, tools=TOOLS, tool_choice="none", max_new_tokens=8)
    assert hidden.usage.prompt_tokens == model.count_tokens(MESSAGES) < free.usage.prompt_tokens


def test_calls_and_their_results_reach_the_template() -> None:
    rendered: list[dict[str, Any]] = []
    chat = Chat(HERMES, {}, "chat_template.jinja")
    render = chat.compiled.render
    chat.compiled.render = lambda variables, *more: rendered.append(variables) or render(variables, *more)  # type: ignore
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    messages = [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": [call]}]
    messages.append({"role": "tool", "tool_call_id": "1", "content": "21"})

    tokenizer = ours("byte_level")
    text = "".join(map(tokenizer.show, chat.encode(messages, tokenizer, wording=Wording(TOOLS))))
    assert '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>' in text
    assert "<|im_start|>tool\n21<|im_end|>" in text
    assert json.dumps(WEATHER) in text
    assert rendered[0]["tools"] == TOOLS


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ('<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>', ["now"]),
        (
            'Let me see. <tool_call>{"name": "now", "arguments": {}}</tool_call>\n'
            '<tool_call>{"name": "weather", "arguments": {"city": "Ro\\u00e9"}}',
            ["now", "weather"],
        ),
        ('{"name": "weather", "parameters": {"city": "Rome"}}', ["weather"]),
        ('<|python_tag|>{"name": "now", "parameters": {}}', ["now"]),
        ('[TOOL_CALLS][{"name": "now", "arguments": {}}, {"name": "now", "arguments": {}}]', ["now", "now"]),
        ('[{"name": "now", "arguments": {}}]', ["now"]),
        # A text in the arguments may hold any mark.
        (
            '<tool_call>{"name": "weather", "arguments": {"city": "</tool_call> <tool_call>"}}</tool_call>'
            '<tool_call>{"name": "now", "arguments": {}}</tool_call>',
            ["weather", "now"],
        ),
        # Several calls of Llama 3, Mistral's newer wording, Phi-4-mini and Granite, and OLMo 3.
        ('{"name": "now", "parameters": {}}; {"name": "now", "parameters": {}}', ["now", "now"]),
        (
            '{"name": "now", "parameters": {}}\n{"name": "weather", "parameters": {"city": ";"}}',
            ["now", "weather"],
        ),
        ('[TOOL_CALLS]weather[ARGS]{"city": "Rome"}[TOOL_CALLS]now[ARGS]{}', ["weather", "now"]),
        ('[TOOL_CALLS]weather[CALL_ID]a1B2[ARGS]{"city": "Rome"}', ["weather"]),
        ('weather{"city": "[ARGS]{"}', ["weather"]),
        ('<|tool_call|>[{"name": "now", "arguments": {}}]<|/tool_call|>', ["now"]),
        ('<|tool_call|>[{"name": "now", "arguments": {}}, {"name": "now", "arguments": {}}]', ["now", "now"]),
        ('<tool_call>[{"name": "now", "arguments": {}}]', ["now"]),
        (
            'Yes. <function_calls>\nweather(city="</function_calls>", days=[1, true], more=null)\nnow()\n'
            "</function_calls>",
            ["weather", "now"],
        ),
        ("<function_calls>weather(__import__('os'))</function_calls>", []),
        ("<function_calls>weather(city=open('x'))</function_calls>", []),
        ("<function_calls>weather(city={'Rome'})</function_calls>", []),
        ("<function_calls>weather(city=1e999)</function_calls>", []),
        ('{"name": "now", "arguments": {"a": NaN}}', []),
        ('<tool_call>{"name": "now", "arguments": {}} and more', []),
        ("It is warm.", []),
        ("", []),
        ('{"name": "other", "arguments": {}}', []),
        ('{"name": "now", "arguments": []}', []),
        ('{"name": ["now"], "arguments": {}}', []),
        ('<tool_call>{"name": "now", "argum', []),
        ("[" * 100_000, []),
        ("3", []),
        ("[3]", []),
    ],
)
def test_calls_are_read_from_the_wordings_of_families(text: str, names: list[str]) -> None:
    tools = read_tools(TOOLS, None)
    assert isinstance(tools, Tools)
    calls = tools.find_calls(text)
    assert [call.name for call in calls] == names
    assert all(isinstance(json.loads(call.arguments), dict) for call in calls)
    if '\\u00e9"' in text:
        assert calls[1] == ToolCall("weather", '{"city": "Roé"}')


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tools": [{"name": "now"}]}, r"tools\[0\]=.* must be"),
        ({"tools": {"a": 1}}, "tools=.* must be a list"),
        ({"tools": [WEATHER, WEATHER]}, r"tools\[1\]: a function 'weather' is already given"),
        (
            {"tools": TOOLS, "tool_choice": "always"},
            "tool_choice='always' must be one of auto, none",
        ),
        ({"tools": TOOLS, "tool_choice": {"function": {"name": "wether"}}}, "did you mean 'weather'"),
        ({"tool_choice": "required"}, "tool_choice='required' needs tools"),
        ({"tools": TOOLS, "tool_choice": "required", "regex": "a"}, "tool_choice and regex both"),
        (
            {"tools": TOOLS, "tool_choice": "required", "num_beams": 2},
            "tool_choice='weather, now' does not",
        ),
        ({"tools": TOOLS, "tool_choice": "required", "ignore_eos": True}, "ignore_eos=True cannot be used"),
    ],
)
def test_tools_that_cannot_be_used_are_refused(wear: Wear, options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        wear(HERMES).chat(MESSAGES, **options)


def test_a_tools_schema_is_refused_by_its_place(wear: Wear) -> None:
    tool = {"function": {"name": "a", "parameters": {"properties": {"b": {"not": {}}}}}}
    with pytest.raises(SchemaError, match=r"tools\[0\], a: .*not is not supported") as caught:
        wear(HERMES).chat(MESSAGES, tools=[tool])
    assert caught.value.path == "tools/0/function/parameters/properties/b/not"


def test_what_words_no_tools_refuses_them(plain: TextGenerator) -> None:
    with pytest.raises(InputError, match="does not support tools"):
        plain.chat(MESSAGES, tools=TOOLS)
    with pytest.raises(InputError, match="tools are only for conversations"):
        plain.generate("And", tools=TOOLS)
    with pytest.raises(InputError, match="arguments are not valid JSON"):
        call = {"function": {"name": "now", "arguments": "{"}}
        plain.chat([{"role": "assistant", "tool_calls": [call]}])


@pytest.mark.parametrize(
    "behind", ['{"city": "Rome"}', ' {"city": "Rome"}', "[ARGS]{}", "a1B2c3D4e{}", '{}weather{"city": ""}']
)
def test_a_call_by_name_is_held_back_from_its_first_letter(behind: str) -> None:
    text = "weather" + behind
    assert read_tools(TOOLS, None).find_calls(text)  # type: ignore[union-attr]
    for size in range(1, len(text) + 1):
        assert CallSplitter(["weather", "now"]).push(text[:size]) == ""
    for other in ("weather is", "wet", "nowhere to", "weather: {"):
        splitter = CallSplitter(["weather", "now"])
        assert splitter.push(other) == other
        assert splitter.push(text) == text
