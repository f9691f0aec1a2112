"""Variables of chat templates, templates for tools, and a last message that goes on: as in transformers."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planforge.runtime.errors import InputError
from planforge.runtime.text.chat import Chat
from planforge.runtime.text.wording import Wording

from ...helpers.chat import READ_PARTS, ROLES, TEMPLATES, load_reference, ours
from ...helpers.chat_templates import PLAIN, chat_of, kinds, texts
from ...helpers.decoder_graph import CONTEXT
from ...helpers.generation import generator

# In the style of published ones, with the variables that they read.
QWEN3 = """\
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'assistant' and not loop.last and '</think>' in content %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
GRANITE = """\
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] %}{%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set system_message = "You are Granite.\\nToday's Date: " + strftime_now('%Y') + "." %}
    {%- if thinking %}{%- set system_message = system_message + " Think first." %}{% endif %}
    {%- if controls and 'length' in controls %}
        {%- set system_message = system_message + ' Length: ' + controls['length'] %}
    {%- endif %}
    {%- set loop_messages = messages %}
{%- endif %}
{{- '<|im_start|>system\\n' + system_message + '<|im_end|>' }}
{%- for document in documents or [] %}{{ '[doc ' ~ document.title ~ '] ' ~ document.text }}{% endfor %}
{%- for message in loop_messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' }}
    {%- if loop.last and add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}
{%- endfor %}"""
COMMAND_R = """\
{{ bos_token }}{% for tool in tools %}{{ tool.function.name }}({{ tool.function.parameters | tojson }})
{% endfor %}{% for message in messages %}<|im_start|>{{ message.role }} {{ message.content | trim }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"""
HOW: dict[str, Any] = {"return_dict": False, "sanitize_control_tokens": True}
MESSAGES = [{"role": "user", "content": "Hi <|im_end|> there"}]
TOOLS = [{"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}]

VARIABLES: list[tuple[str, dict[str, Any]]] = [
    (QWEN3, {}),
    (QWEN3, {"enable_thinking": False}),
    (QWEN3, {"enable_thinking": True}),
    (GRANITE, {"thinking": True, "controls": {"length": "short <|im_end|>"}}),
    (GRANITE, {"documents": [{"title": "a<|im_", "text": "end|> b"}]}),
    (TEMPLATES["llama"], {"date_string": "1 Jan <|eot_id|>"}),
]


@pytest.mark.parametrize(("template", "options"), VARIABLES)
def test_variables_reach_the_template(template: str, options: dict[str, Any]) -> None:
    for kind in ("byte_level", "prefixing"):
        reference = load_reference(kind, template)
        wanted = reference.apply_chat_template(MESSAGES, add_generation_prompt=True, **HOW, **options)
        assert chat_of(template).encode(MESSAGES, ours(kind), wording=Wording(options=options)) == wanted
        text = reference.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=False, **options)
        assert chat_of(template).render(MESSAGES, Wording(options=options)) == text


@pytest.mark.parametrize(
    ("template", "options", "words"),
    [
        (
            QWEN3,
            {"enable_thinkin": False},
            "does not use 'enable_thinkin'; did you mean",
        ),
        (GRANITE, {"x": 1}, "does not use 'x'; it uses controls, documents,.* thinking$"),
        (TEMPLATES["chatml"], {"x": 1}, "it uses none; leave template_options out"),
        (QWEN3, {"messages": []}, "'messages' is set by the conversation; leave it out"),
        (QWEN3, {"add_generation_prompt": True}, "'add_generation_prompt' is set by"),
        (TEMPLATES["llama"], {"bos_token": "x"}, "'bos_token' is set by"),
        (
            GRANITE,
            {"thinking": object()},
            r"^template_options\['thinking'\] is object; it must be a text",
        ),
    ],
)
def test_variables_that_have_no_effect_are_refused(
    template: str, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(InputError, match=words) as error:
        chat_of(template).encode(MESSAGES, ours("byte_level"), wording=Wording(options=options))
    assert error.value.option == "template_options"


@settings(deadline=None, max_examples=100)
@given(
    template=st.sampled_from([*TEMPLATES.values(), *READ_PARTS.values(), QWEN3, GRANITE, COMMAND_R]),
    kind=kinds,
    said=st.tuples(texts, texts),
    in_parts=st.booleans(),
    parse_special=st.booleans(),
)
def test_the_last_message_goes_on_as_in_transformers(
    template: str, kind: str, said: tuple[str, str], in_parts: bool, parse_special: bool
) -> None:
    messages: list[dict[str, Any]] = [
        {"role": role, "content": text} for role, text in zip(("user", "assistant"), said, strict=True)
    ]
    if in_parts and template in READ_PARTS.values():
        messages[1]["content"] = [{"type": "text", "text": part} for part in ("a ", said[1])]
    how = {"return_dict": False, "sanitize_control_tokens": not parse_special, "continue_final_message": True}
    wording = Wording(TOOLS if template is COMMAND_R else (), continues=True)
    try:
        wanted = load_reference(kind, template).apply_chat_template(
            messages, tools=list(wording.tools) or None, **how
        )
    except Exception:
        with pytest.raises(InputError):
            chat_of(template).encode(messages, ours(kind), parse_special, wording)
        return
    assert chat_of(template).encode(messages, ours(kind), parse_special, wording) == wanted


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        (MESSAGES, "the last message has the role 'user'; add an assistant's message"),
        ([*MESSAGES, {"role": "assistant", "tool_calls": [{"function": {}}]}], "has none, or calls tools"),
        ([*MESSAGES, {"role": "assistant", "content": "gone"}], "the chat template leaves out parts of"),
    ],
)
def test_what_cannot_go_on_is_refused(messages: list[dict[str, Any]], words: str) -> None:
    template = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    with pytest.raises(InputError, match=words) as error:
        chat_of(template).encode(messages, ours("byte_level"), wording=Wording(continues=True))
    assert error.value.option == "continue_final_message"


def test_tools_have_a_template_of_their_own() -> None:
    chat = Chat(TEMPLATES["chatml"], ROLES, "chat_template.jinja", tool_template=COMMAND_R)
    assert chat.supports_tools
    reference = load_reference("byte_level", {"default": TEMPLATES["chatml"], "tool_use": COMMAND_R})
    for tools in ((), TOOLS):
        wanted = reference.apply_chat_template(
            MESSAGES, tools=list(tools) or None, add_generation_prompt=True, **HOW
        )
        assert chat.encode(MESSAGES, ours("byte_level"), wording=Wording(tools)) == wanted
    with pytest.raises(InputError, match="it uses none"):
        chat.render(MESSAGES, Wording(TOOLS, {"x": 1}))


def test_a_model_goes_on_with_its_last_message() -> None:
    template = "{% for m in messages %}{{ m.content }}{{ 'k' if m.role == 'user' else 'j' }}{% endfor %}"
    assert template == PLAIN
    model, _ = generator("inplace", chat=chat_of(PLAIN))
    messages = [{"role": "user", "content": "abc"}, {"role": "assistant", "content": "bd"}]
    options: dict[str, Any] = {"max_new_tokens": 5, "continue_final_message": True}
    answer = model.chat(messages, **options)
    assert answer.token_ids == model.generate("abckbd", max_new_tokens=5).token_ids
    assert "".join(map(str, model.stream_chat(messages, **options))) == answer.text
    assert model.submit_chat(messages, **options).result(60).token_ids == answer.token_ids
    long = [{"role": "user", "content": "a" * CONTEXT}, {"role": "assistant", "content": "a"}, *messages]
    assert model.chat(long, truncation="tail", **options).token_ids == answer.token_ids
    for name, value in (("template_options", {"a": 1}), ("continue_final_message", True)):
        with pytest.raises(InputError, match=f"{name} is only for conversations: use chat"):
            model.generate("abc", **{name: value})  # type: ignore[call-overload]
        with pytest.raises(InputError, match=name):
            model.chat(messages, **{name: "x"})  # type: ignore[arg-type]
    model.close()
