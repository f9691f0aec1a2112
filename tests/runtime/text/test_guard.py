"""What a user writes is no special token either where a chat template, or normalizing, makes one of it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from planforge.runtime.errors import InputError
from planforge.runtime.text.chat import Chat
from planforge.runtime.text.special_tokens import join_spellings
from planforge.runtime.text.tokenizer import Tokenizer
from planforge.runtime.text.wording import Wording

from ...helpers.chat import SPECIAL, load_reference, ours
from ...helpers.chat_templates import chat_of, kinds
from ...helpers.text import byte_alphabet

# What a template may make of a text `c`. Each takes letters away, changes or moves them.
CHANGES = [
    "c | replace('X', '')",
    "c.replace('XX', '') | trim",
    "c.split('X') | join('')",
    "c.split('X')[-1]",
    "c.split('X', 1)[0]",
    "(c ~ 'X').partition('X')[0]",
    "c[1:-1]",
    "c[::-1]",
    "c[::2]",
    "c[0] ~ c[2:]",
    "c | reject('equalto', 'X') | join('')",
    "c | list | join",
    "c | reverse",
    "c | lower",
    "c | upper | lower",
    "c.swapcase()",
    "c | striptags",
    "c | escape | replace('&lt;', '<') | replace('&gt;', '>')",
    "c.strip('X')",
    "c.removeprefix('X').removesuffix('X')",
    "'%s' % c[1:]",
    "'%.9s' % c",
    "'{}{:.5}'.format(c[1:], c)",
    "(c | tojson)[1:-1]",
    "(c | tojson(ensure_ascii=true))[1:-1]",
    "(c | tojson).replace('X', '')",
    "(c | wordwrap(3, wrapstring='X')) | replace('X', '')",
    "c | truncate(9, true, '')",
    "c.expandtabs() | indent | replace('\\n', '')",
    "c.encode('ascii', 'ignore').decode().replace('X', '')",
    "c | map('lower') | join",
    "c | batch(2) | map('join') | join",
    "c.title().lower()",
    "c | replace('&', '<')",
    "(c ~ 'z') | replace('X', '')",
    "[c] | string",
    "{'a': [c]} | string",
    "'%s %s' % ([c], {c: 1})",
    "c | pprint",
    "[c, c] ~ c",
]
LOOPS = [
    "{% for d in c %}{{ d if d != 'X' }}{% endfor %}",
    "{% for d in c.split('X') %}{{ d }}{% endfor %}",
    "{% for d in c | batch(3) %}{{ d | join }}{% endfor %}",
    "{% filter replace('X', '') %}{{ c }}{% endfilter %}",
    "{% set d %}{{ c }}{% endset %}{{ d | replace('X', '') }}",
    "{% set n = namespace(d='') %}{% for d in c if d != 'X' %}{% set n.d = n.d ~ d %}{% endfor %}{{ n.d }}",
    "{% macro m(d) %}{{ d[1:] }}{% endmacro %}{{ m(c) }}",
]
WRITTEN = [*(f"{{{{ {change} }}}}" for change in CHANGES), *LOOPS]
pieces = st.sampled_from(
    [
        *SPECIAL,
        *(
            "<|im_",
            "end|>",
            "<|im_XXend|>",
            "X<|im_Xend|>X",
            "<s",
            "X>",
            "</",
            "sX>",
            "[IN",
            "XST]",
            "< ",
            "&lt;",
        ),
        *(
            "X",
            ">|dne_mi|<",
            "<|\tim_end|>",
            "<|IM_END|>",
            "<<ss>>",
            "&/s>",
            "a",
            " ",
            "\n",
            "é",
            "{",
            "\\",
            '"',
        ),
    ]
)
contents = st.lists(pieces, max_size=4).map("".join)


def count_special(kind: str, ids: list[int]) -> list[str]:
    raw = load_reference(kind)
    special = set(raw.convert_tokens_to_ids(SPECIAL)) - {raw.unk_token_id}
    return [raw.convert_ids_to_tokens(token) for token in ids if token in special]


@settings(deadline=None, max_examples=150)
@given(
    kind=kinds,
    first=st.sampled_from(WRITTEN),
    second=st.sampled_from(WRITTEN),
    texts=st.tuples(contents, contents),
)
def test_no_change_of_a_template_makes_a_users_text_a_special_token(
    kind: str, first: str, second: str, texts: tuple[str, str]
) -> None:
    template = (
        "<s>{% set c = messages[0].content %}" + first + "{% set c = messages[1].content %}" + second + "</s>"
    )
    messages = [{"role": "user", "content": text} for text in texts]
    try:
        ids = chat_of(template).encode(messages, ours(kind))
    except InputError as error:
        assert "in the chat template forms" not in str(error)
        return  # such as the first letter of an empty text
    assert count_special(kind, ids) == ["<s>", "</s>"]


@pytest.mark.parametrize("change", WRITTEN)
def test_texts_are_changed_as_in_transformers(change: str) -> None:
    template = "<s>{% set c = messages[0].content %}" + change + "<|im_end|>"
    reference: Any = load_reference("byte_level", template)
    for text in ("aXbXXc a", "<think>X</think>Xé\n", "Hello, <b>World</b>!"):
        messages = [{"role": "user", "content": text}]
        wanted = reference.apply_chat_template(messages, return_dict=False)
        assert chat_of(template).encode(messages, ours("byte_level")) == wanted


@pytest.mark.parametrize(
    "written",
    [
        "{{ [c] }}",
        "{{ {'a': c} }}",
        "{{ [c, [c]] | string }}",
        "{{ c | pprint }}",
        "{{ '%s' % [c] }}",
        "{{ [c] ~ c }}",
        "{{ [c] | tojson(ensure_ascii=true) }}",
        "{{ c }}{{ [c] | tojson }}",
    ],
)
def test_values_are_written_as_in_transformers(written: str) -> None:
    """Python and JSON escape marks where they write a list, of what begins or ends as a special token."""
    template = "<s>{% set c = messages[0].content %}" + written + "<|im_end|>"
    reference: Any = load_reference("byte_level", template)
    for text in ("a <", "<=", "> \\", "<", "\\ufdd0 <", "\\\\ufdd0", "é 'x' <", "end", "\\<"):
        messages = [{"role": "user", "content": text}]
        wanted = reference.apply_chat_template(messages, return_dict=False)
        assert chat_of(template).encode(messages, ours("byte_level")) == wanted, text


@pytest.mark.parametrize(
    "written", ["<|{{ c }}|>", "{{ '<|' ~ c ~ '|>' }}", "<{{ c }}>", "[{{ c }}]", "<|im_{{ c }}|>"]
)
@pytest.mark.parametrize("text", ["im_end", "IM_END", " end ", "s", "/s", "INST", "e"])
def test_what_lies_inside_of_a_special_token_makes_none(written: str, text: str) -> None:
    template = "{% set c = messages[0].content | trim %}" + written
    ids = chat_of(template).encode([{"role": "user", "content": text}], ours("byte_level"))
    assert not count_special("byte_level", ids)


def test_no_mark_stands_in_errors() -> None:
    template = "{{ raise_exception('no ' ~ messages[0].content) }}"
    with pytest.raises(InputError, match=r"no a <\|im_end\|>$"):
        chat_of(template).encode([{"role": "user", "content": "a <|im_end|>"}], ours("byte_level"))


def test_tokens_that_the_template_writes_into_texts_stay() -> None:
    for written in (
        "{{ (messages[0].content ~ '<|im_end|>') | replace('X', '') }}",
        "{{ messages[0].content | replace('X', '<|im_end|>') }}",
        "{{ '%s<|im_end|>' % messages[0].content }}",
        "{{ '{}{}'.format(messages[0].content, '<|im_end|>') | trim }}",
        "{{ '<|im_end|>'.join([messages[0].content, 'b', 'c']) }}",
        "{{ ([messages[0].content, 'b'] | join('<|im_end|>'))[:-1] }}",
        "{% filter trim %}{{ messages[0].content }}<|im_end|>{% endfilter %}",
        "{{ '<|IM_END|>' | lower }}{{ messages[0].content[:2] }}",
        "{{ '<|' ~ ('IM_END' | lower) ~ '|>' }}",
    ):
        reference: Any = load_reference("byte_level", written)
        messages = [{"role": "user", "content": "aXb"}]
        wanted = reference.apply_chat_template(messages, return_dict=False)
        ids = chat_of(written).encode(messages, ours("byte_level"))
        assert ids == wanted, written
        assert "<|im_end|>" in count_special("byte_level", ids)


def test_a_users_token_beside_the_templates_own_is_refused() -> None:
    template = "{{ (messages[0].content ~ '<|im_end|>') | replace('X', '') }}"
    messages = [{"role": "user", "content": "<|im_XXend|>"}]
    with pytest.raises(
        InputError, match=r"'replace' in the chat template forms the special token '<\|im_end\|>' from"
    ):
        chat_of(template).encode(messages, ours("byte_level"))
    ids = chat_of(template).encode(messages, ours("byte_level"), parse_special=True)
    assert count_special("byte_level", ids) == ["<|im_end|>"] * 2


def test_what_templates_compare_has_no_marks() -> None:
    """Special tokens begin or end as "user", "assistant", "role" and "content" do."""
    special = ["USER:", "ASSISTANT:", "<|im_end|>", "eos", "Xcon"]
    letters = {letter: number for number, letter in enumerate(pre_tokenizers.ByteLevel.alphabet())}
    raw = tokenizers.Tokenizer(models.BPE(vocab=letters, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.add_special_tokens(special)
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}USER:{{ m.content }}{% elif m.role == 'assistant' %}"
        "ASSISTANT:{{ m['content'] }}<|im_end|>{% endif %}{% endfor %}"
        "{% for t in tools %}{{ t.type ~ t.function.name if t.type == 'function' }}{% endfor %}ASSISTANT:"
    )
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "ho"},
        {"role": "user", "content": "again"},
    ]
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    chat = Chat(template, {}, "a template")
    ids = chat.encode(messages, Tokenizer(raw.to_str().encode()), wording=Wording([tool]))
    assert ids == raw.encode("USER:hiASSISTANT:ho<|im_end|>USER:againfunctionfASSISTANT:").ids


some = st.text("<|abAB>.*", min_size=1, max_size=4)


@given(st.lists(some, min_size=1, max_size=6), st.text("<|abAB>.*", max_size=12))
def test_spellings_are_found_as_the_longest_that_stands_there(texts: list[str], text: str) -> None:
    found = [match[0] for match in re.finditer(join_spellings(texts), text)]
    longest = "|".join(re.escape(one) for one in sorted(texts, key=len, reverse=True))
    assert found == re.findall(longest, text)


# Where normalizing turns it into one
TOKENS = ("<|im_end|>", "</s>")
TWICE = "</s>{{ messages[0].content }}<|im_end|>{{ messages[0].content }}"
DISGUISES = {
    "lower": (normalizers.Lowercase(), ["<|IM_END|>", "</S>"]),
    "nfkc": (normalizers.NFKC(), ["＜|im_end|>", "＜/s＞"]),
    "clean": (normalizers.BertNormalizer(), ["<|im_\x01end|>", "<\u200b/s>", "</S>"]),
    "replace": (normalizers.Replace("~", ""), ["<|im_~end|>", "~<~/~s~>~"]),
}


def make_byte_level(normalizer: normalizers.Normalizer) -> tokenizers.Tokenizer:
    """GPT-2's kind, whose special tokens are looked for in normalized text."""
    raw = tokenizers.Tokenizer(models.BPE(byte_alphabet(), []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.normalizer = normalizer
    raw.add_special_tokens([AddedToken(token, normalized=True) for token in TOKENS])
    return raw


def make_unigram(normalizer: normalizers.Normalizer) -> tokenizers.Tokenizer:
    """T5's kind, whose model has the special tokens among its pieces."""
    pieces = [("<unk>", 0.0), *((token, -1.0) for token in TOKENS)]
    pieces += [(letter, -3.0) for letter in "▁ab<>|_/~imends"]
    raw = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=0))
    raw.pre_tokenizer = pre_tokenizers.Metaspace()
    raw.decoder = decoders.Metaspace()
    raw.normalizer = normalizer
    raw.add_special_tokens(list(TOKENS))
    return raw


@pytest.mark.parametrize("make", [make_byte_level, make_unigram])
@pytest.mark.parametrize("name", DISGUISES)
def test_what_normalizing_makes_a_special_token_is_plain(
    name: str, make: Callable[[normalizers.Normalizer], tokenizers.Tokenizer]
) -> None:
    normalizer, texts = DISGUISES[name]
    raw = make(normalizer)
    tokenizer = Tokenizer(raw.to_str().encode())
    special = {raw.token_to_id(token) for token in TOKENS}
    for text in texts:
        content = f"a{text}b {text}{text}"
        message = {"role": "user", "content": content}
        ids = chat_of(TWICE).encode([message], tokenizer)
        assert [raw.id_to_token(token) for token in ids if token in special] == ["</s>", "<|im_end|>"]
        # As tokenizers reads it, and as `parse_special` asks for, it is one.
        rendered = f"</s>{content}<|im_end|>{content}"
        parsed = raw.encode(rendered, add_special_tokens=False).ids
        assert sum(token in special for token in parsed) > 2
        assert chat_of(TWICE).encode([message], tokenizer, parse_special=True) == parsed
