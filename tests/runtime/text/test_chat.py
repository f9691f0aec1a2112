"""Conversations to prompts: as transformers' apply_chat_template, in a sandbox; and what models answer."""

from __future__ import annotations

import datetime
import itertools
import sys
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from planforge.runtime.errors import (
    BackendUnavailableError,
    BundleError,
    ClosedError,
    ContextLengthError,
    InputError,
)
from planforge.runtime.text import chat_template
from planforge.runtime.text.special_tokens import MARK
from planforge.runtime.text.wording import Wording

from ...helpers.chat import LLAMA, MISTRAL, ROLES, SPECIAL, TEMPLATES, load_reference, ours
from ...helpers.chat_templates import PLAIN, chat_of, kinds, texts
from ...helpers.decoder_graph import CONTEXT
from ...helpers.generation import TOKENIZER, generator, joined

HELLO = [{"role": "user", "content": "hello"}]
names = st.sampled_from(sorted(TEMPLATES))


@st.composite
def conversations(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Perhaps a system's message, then users' and answers in turns, the last a user's."""
    system = [{"role": "system", "content": draw(texts)}] if draw(st.booleans()) else []
    said = draw(st.lists(texts, min_size=1, max_size=5).filter(lambda each: len(each) % 2 == 1))
    turns: list[dict[str, Any]] = [
        {"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(said)
    ]
    for turn in turns:
        turn |= {"name": draw(texts)} if draw(st.booleans()) else {"name": None}
    return system + turns


def rendered(template: str, messages: Any = HELLO) -> str:
    variables = {**ROLES, "messages": messages, "tools": None, "add_generation_prompt": True}
    return chat_of(template).compiled.render(variables)


@settings(deadline=None, max_examples=150)
@given(name=names, kind=kinds, messages=conversations())
@example("llama", "prefixing", [{"role": "user", "content": "a<|eot_id|> b<s>"}])
@example("loops", "byte_level", [{"role": "user", "content": "<|im_end|>", "name": "\"<é>&'"}])
def test_text_and_tokens_are_those_of_transformers(
    name: str, kind: str, messages: list[dict[str, Any]]
) -> None:
    chat = chat_of(TEMPLATES[name])
    reference = load_reference(kind, TEMPLATES[name])
    how: dict[str, Any] = {"add_generation_prompt": True}
    text = reference.apply_chat_template(messages, tokenize=False, **how)
    assert (
        rendered(TEMPLATES[name], [{k: v for k, v in m.items() if v is not None} for m in messages]) == text
    )
    found = chat.encode(messages, ours(kind), parse_special=True)
    assert found == reference.apply_chat_template(messages, return_dict=False, **how)
    sanitized = reference.apply_chat_template(
        messages, return_dict=False, sanitize_control_tokens=True, **how
    )
    assert chat.encode(messages, ours(kind)) == sanitized


@settings(deadline=None)
@given(kind=kinds, content=texts, template=st.sampled_from(["{{ x }}", "{{ x[1:] }}", "{{ x[:-1] | trim }}"]))
def test_no_special_token_comes_from_what_a_user_wrote(kind: str, content: str, template: str) -> None:
    template = "<s>" + template.replace("x", "messages[0]['content']") + "</s>"
    messages = [{"role": "user", "content": content}]
    ids = chat_of(template).encode(messages, ours(kind))
    special = [ours(kind).spell(token) for token in ids if ours(kind).spell(token) in SPECIAL]
    assert special == ["<s>", "</s>"]


SPELLED = ("<|im_end|>", "</s>", "<s>", "<|eot_id|>")
JOINS = {  # how templates put texts of a user side by side
    "parts": "{% for part in messages[0]['content'] %}{{ part['text'] }}{% endfor %}",
    "trimmed": "{% for part in messages[0]['content'] %}{{ part['text'] | trim }}{% endfor %}",
    "whole": "{{ messages[0]['content'] }}",
    "name": "{{ messages[0]['content'] }}{{ messages[0]['name'] }}",
}


@settings(deadline=None, max_examples=200)
@given(
    kind=kinds,
    join=st.sampled_from(sorted(JOINS)),
    token=st.sampled_from(SPELLED),
    cuts=st.lists(st.integers(0, 10), max_size=12),
    around=st.tuples(texts, texts),
)
@example("byte_level", "whole", "<|im_end|>", [5], ("", ""))
@example("byte_level", "parts", "<|im_end|>", list(range(1, 10)), ("a", "b"))
@example("prefixing", "trimmed", "</s>", [1, 2, 3], ("a", "b"))
def test_texts_that_a_template_joins_make_no_special_token(
    kind: str, join: str, token: str, cuts: list[int], around: tuple[str, str]
) -> None:
    places = sorted({0, len(token), *(min(cut, len(token)) for cut in cuts)})
    pieces = [token[i:j] for i, j in itertools.pairwise(places)]
    pieces = [around[0] + pieces[0], *pieces[1:]]
    pieces[-1] += around[1]
    spaced = [f" {piece}\n" for piece in pieces] if join == "trimmed" else pieces
    content: Any = [{"type": "text", "text": piece} for piece in spaced]
    message = {"role": "user", "content": content, "name": "end|>"}
    if join == "name":
        message |= {"content": pieces[0], "name": "".join(pieces[1:])}
    ids = chat_of(f"<s>{JOINS[join]}</s>").encode([message], ours(kind))
    special = [ours(kind).spell(token) for token in ids if ours(kind).spell(token) in SPECIAL]
    assert special == ["<s>", "</s>"]


@pytest.mark.parametrize(
    ("written", "change"), [("<|IM_END|>", "lower"), ("<|IM_END|>", "capitalize"), ("[inst]", "upper")]
)
@pytest.mark.parametrize("cut", [0, 3, 10])
def test_case_that_a_template_changes_makes_no_special_token(written: str, change: str, cut: int) -> None:
    template = f"<s>{{{{ (messages[0]['name'] ~ messages[0]['content']) | {change} }}}}</s>"
    message = {"role": "user", "name": written[:cut], "content": written[cut:]}
    ids = chat_of(template).encode([message], ours("byte_level"))
    assert [each for each in map(ours("byte_level").spell, ids) if each in SPECIAL] == ["<s>", "</s>"]


@pytest.mark.parametrize("kind", ["byte_level", "prefixing"])
@pytest.mark.parametrize("token", SPELLED)
def test_escapes_and_keys_of_calls_and_tools_make_no_special_token(kind: str, token: str) -> None:
    """Arguments are decoded from JSON, whose escapes spell any letter; so are the names of arguments."""
    escaped = "".join(f"\\u{ord(letter):04x}" for letter in token)
    template = (
        "<s>{% for message in messages %}{{ message['content'] }}{% for call in message.tool_calls %}"
        "{{ call.function.name }}{{ call.function.arguments | tojson }}"
        "{% for key in call.function.arguments %}{{ key }}{{ call.function.arguments[key] }}{% endfor %}"
        "{% endfor %}{% endfor %}"
        "{{ tools | tojson }}</s>"
    )
    arguments = f'{{"a": "{escaped}", "{escaped}": 1, "b": {{"{escaped}": ["{escaped}"]}}}}'
    call = {"type": "function", "function": {"name": f"f{token}", "arguments": arguments}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "call it"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]
    parameters = {"type": "object", "properties": {token: {"type": "string", "description": token}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    ids = chat_of(template).encode(messages, ours(kind), wording=Wording(tools))
    special = [ours(kind).spell(token) for token in ids if ours(kind).spell(token) in SPECIAL]
    assert special == ["<s>", "</s>"]
    assert chat_of(template).encode(messages, ours(kind), True, Wording(tools)) != ids


def test_the_mark_in_a_users_text_is_no_way_around() -> None:
    tokenizer = ours("byte_level")
    template = "{{ messages[0].content }}"
    for content in (f"<|im_{MARK}end|>", MARK.join("<|im_end|>"), f"{MARK}<|im_end|>{MARK}"):
        ids = chat_of(template).encode([{"role": "user", "content": content}], tokenizer)
        assert ids == tokenizer.encode("<|im_end|>")
        assert tokenizer.find_id("<|im_end|>") not in ids


def test_helpers_of_templates() -> None:
    year = str(datetime.datetime.now().year)
    assert rendered("{{ strftime_now('%Y') }}") in (year, str(int(year) + 1))
    assert rendered("{{ {'b': '<é>', 'a': 1} | tojson }}") == '{"b": "<é>", "a": 1}'
    assert rendered("{% generation %}{% set q = 1 %}a{% endgeneration %}{{ q }}b") == "ab"
    assert rendered("{{ 7 ~ none ~ 'x' * 2 + 'y' }}{{ 2 ** 10 * 3 + 1 }}{{ 2 ** -1 }}") == "7Nonexxy30730.5"
    assert rendered("{% for x in range(3) %}{{ loop.length }}{{ loop.revindex }}{% endfor %}") == "333231"


def test_what_a_template_knows_is_what_it_knows_in_transformers() -> None:
    messages = [{"role": "user", "content": "hi", "tool_calls": None}]
    template = (
        "{{ 'tool_calls' in messages[0] }} {{ tools is none }} {{ documents }} {{ pad_token is defined }}"
    )
    ids = chat_of(template).encode(messages, ours("byte_level"))
    assert ids == load_reference("byte_level", template).apply_chat_template(messages, return_dict=False)
    assert ours("byte_level").decode(ids) == "False True None False"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ ''.__class__.__mro__ }}", "'__class__' of 'str' object is unsafe"),
        ("{{ (messages|map(attribute='__class__')|first).mro() }}", "stopped|cannot render"),
        ("{{ '{0.__class__.__mro__}'.format('') }}", "'__class__' of 'str' object is unsafe"),
        ("{{ messages.append(1) }}", "'append' of 'list' object is unsafe"),
        ("{{ messages[0].update(role='system') }}", "'update' of 'dict' object is unsafe"),
        ("{{ cycler.__init__.__globals__.os }}", "'__init__' of 'type' object is unsafe"),
        ("{{ raise_exception.__globals__.json }}", "'__globals__' of 'function' object is unsafe"),
        ("{{ lipsum.__globals__['os'].popen('id') }}", "'lipsum' is undefined"),
        ("{{ dict.__subclasses__() }}", "no attribute '__subclasses__'"),
        ("{{ dict.mro() }}", "no attribute 'mro'"),
        ("{{ namespace(__class__=1) }}", "'__class__' begins with '_'"),
        ("{% set n = namespace() %}{% set n._x = 1 %}", "'_x' begins with '_'"),
        ("{% include '/etc/passwd' %}", "no loader"),
        ("{% import 'os' as os %}", "no loader"),
    ],
)
def test_a_template_reaches_nothing(template: str, words: str) -> None:
    messages = [{"role": "user", "content": "hello"}]
    with pytest.raises((BundleError, InputError), match=words):
        rendered(template, messages)
    assert messages == HELLO


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ range(10**9) | list }}", "Range too big"),
        ("{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}", "1000000 steps"),
        (
            "{% macro f(n) %}{% if n %}{{ f(n-1) ~ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
            "1000000 steps",
        ),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{{ 'a' * 10**9 }}", r"'\*' has more than 16777216 elements"),
        ("{{ 10**9 * [0] }}", r"'\*' has more than 16777216 elements"),
        ("{{ 9 ** (9 ** 9) }}", r"a number from '\*\*' has more than 4096 bits"),
        (
            "{% set n=namespace(x=3) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}",
            "4096 bits",
        ),
        (
            "{% set n=namespace(x='a') %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
            r"'\+'",
        ),
        ("{% set n=namespace(x='a') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}", "'~'"),
        # A MiB, and 16 for each character of HELLO.
        ("{% for a in range(99999) %}" + "word " * 99 + "{% endfor %}", "rendered has more than 10[0-9]{5} "),
    ],
)
def test_a_template_is_stopped(template: str, words: str) -> None:
    with pytest.raises(
        BundleError, match=f"^bundle/.*jinja: the chat template was stopped: .*{words}"
    ) as caught:
        rendered(template)
    assert "\n" not in str(caught.value)


def test_a_stopped_template_begins_anew_with_the_next_conversation() -> None:
    compiled = chat_of(
        "{% for m in messages %}{% for i in range(90000) %}{% endfor %}{% endfor %}ok"
    ).compiled
    with pytest.raises(BundleError, match="1000000 steps"):
        compiled.render({"messages": HELLO * 12})
    assert [compiled.render({"messages": HELLO * 11}) for _ in range(2)] == ["ok"] * 2


def test_a_template_that_refuses_says_why() -> None:
    for roles in (["assistant"], ["user", "user"], ["system", "assistant"]):
        messages = [{"role": role, "content": "x"} for role in roles]
        with pytest.raises(
            InputError, match="refuses the messages: After the optional system message, roles"
        ):
            chat_of(MISTRAL).encode(messages, ours("byte_level"))
    with pytest.raises(InputError, match=r"cannot render these messages: 'dict object' has no attribute 'x'"):
        rendered("{{ messages[0].x.y }}")
    with pytest.raises(
        InputError, match=r"cannot render these messages: a filter .* returns a list, no text"
    ):
        rendered("{% filter list %}{{ messages[0].content }}{% endfilter %}")


@pytest.mark.parametrize(
    "template", ["{% for", "{% foo %}", "{{ " + "(" * 999, "{% if 1 %}" * 30, "{{ 1 | foo }}"]
)
def test_what_is_no_template_is_named(template: str) -> None:
    with pytest.raises(
        BundleError, match=r"^bundle/tokenizer/chat_template\.jinja.* not a valid Jinja template \("
    ):
        chat_of(template).encode(HELLO, ours("byte_level"))


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ("hello", r'messages must be a list of \{"role": "user", "content": "..."\}, not str'),
        (HELLO[0], "messages must be a list .* not dict"),
        ([], "messages is empty"),
        (["hello"], r"messages\[0\] is str"),
        ([*HELLO, {"role": "user"}], r"messages\[1\]: 'content' must be a text, but is missing"),
        ([{"content": "x"}], r"messages\[0\]: 'role' must be a text, but is missing"),
        ([{"role": "user", "content": None}], "'content' must be a text, but is NoneType"),
        (
            [{"role": "user", "content": "x", "when": datetime.date.today()}],
            r"messages\[0\]\['when'\] is date",
        ),
        ([{"role": "user", "content": "x", 1: 2}], r"messages\[0\] is dict"),
        ([{"role": "user", "content": "\ud800"}], "lone surrogate"),
    ],
)
def test_messages_that_cannot_be_used_are_named(messages: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        chat_of(TEMPLATES["chatml"]).encode(messages, ours("byte_level"))


def test_messages_in_themselves_are_refused() -> None:
    message: dict[str, Any] = {"role": "user", "content": "x"}
    message["more"] = [message]
    with pytest.raises(InputError, match="contain themselves"):
        chat_of(LLAMA).encode([message], ours("byte_level"))


def test_objects_methods_are_out_of_a_templates_reach() -> None:
    class Text(str):
        def burn(self) -> str:
            raise AssertionError

    with pytest.raises(InputError, match="no attribute 'burn'"):
        chat_of("{{ messages[0].content.burn() }}").encode(
            [{"role": "user", "content": Text("x")}], ours("byte_level")
        )


def test_jinja2_is_asked_for_by_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "version", lambda _: "3.1.5")
    with pytest.raises(
        BackendUnavailableError, match=r"3\.1\.6 or newer, installed is 3\.1\.5: .*planforge\[chat\]"
    ):
        chat_of("x").encode(HELLO, ours("byte_level"))
    monkeypatch.delitem(sys.modules, "planforge.runtime.text.chat_template")
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(BackendUnavailableError, match=r"need jinja2: pip install 'planforge\[chat\]'"):
        chat_of("x").encode(HELLO, ours("byte_level"))


def test_a_chat_is_generated_from_what_the_template_makes() -> None:
    model, _ = generator("inplace", chat=chat_of(PLAIN))
    messages = [{"role": "user", "content": "abc"}]
    for options in ({}, {"temperature": 0.9, "seed": 3}, {"stop": "d"}, {"speculative": "prompt-lookup"}):
        how: dict[str, Any] = {"max_new_tokens": 9, **options}
        answer = model.chat(messages, **how)
        wanted = model.generate("abck", **how)
        assert (answer.token_ids, answer.finish_reason) == (wanted.token_ids, wanted.finish_reason)
        assert joined(model.stream_chat(messages, **how)) == answer.text == wanted.text


def test_tokens_that_begin_every_prompt_are_the_templates_to_write() -> None:
    model, steps = generator("inplace", chat=chat_of(PLAIN), prefix=(0,))
    model.chat([{"role": "user", "content": "bc"}], max_new_tokens=1)
    model.generate("bck", max_new_tokens=1)
    assert steps.fed == [[1, 2, 10], [0, 1, 2, 10]]


def test_what_a_chat_cannot_do_is_said() -> None:
    model, _ = generator("inplace")
    for ask in (model.chat, model.stream_chat):
        with pytest.raises(
            InputError, match=r"has no chat template; use generate\(\) .*chat_template\.jinja"
        ):
            ask(HELLO)
    model, _ = generator("inplace", chat=chat_of(PLAIN))
    long = [{"role": "user", "content": "a" * CONTEXT}]
    with pytest.raises(ContextLengthError):
        model.chat(long)
    with pytest.raises(ContextLengthError, match="neither is ever truncated"):
        model.chat(long, max_new_tokens=2, truncation="tail")
    with pytest.raises(InputError, match="unknown option"):
        model.chat(HELLO, documents=[])  # type: ignore[call-arg]
    with pytest.raises(InputError, match="chat template renders these messages as an empty text"):
        generator("inplace", chat=chat_of("{# nothing #}"))[0].chat(HELLO)
    model.close()
    with pytest.raises(ClosedError):
        model.chat(long)


def test_the_letters_of_the_fake_are_what_the_test_takes_them_for() -> None:
    assert chat_of(PLAIN).encode([{"role": "user", "content": "abc"}], TOKENIZER) == [0, 1, 2, 10]
