"""Chat templates in the style of published ones, and tokenizers that know their special tokens."""

from __future__ import annotations

import dataclasses
import functools
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tokenizers
import transformers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from planforge.runtime.bundle.bundle import Bundle, compute_sha256
from planforge.runtime.bundle.manifest import FileEntry
from planforge.runtime.text.tokenizer import Tokenizer

from .text import byte_alphabet

CHATML = """\
{%- if messages[0]['role'] != 'system' -%}
    {{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}
{%- endif -%}
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"""
LLAMA = """\
{{- bos_token }}
{%- if not date_string is defined %}{% set date_string = "26 Jul 2024" %}{% endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}{{ "Environment: ipython\\n" }}{% endif %}
{{- "Today Date: " ~ date_string ~ "\\n\\n" ~ system_message ~ "<|eot_id|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}
"""
MISTRAL = """\
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('After the optional system message, roles must alternate user/assistant') }}
    {%- endif %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message["role"] == "assistant" %}
        {%- generation %}{{ " " + message["content"] + eos_token }}{% endgeneration %}
    {%- endif %}
{%- endfor %}
"""
LOOPS = """\
{%- macro turn(message, last=false) -%}
<|im_start|>{{ message.role }}{% if message.name %} {{ message.name | tojson }}{% endif %}
{{ message.content.split('</think>')[-1] if not last else message.content }}<|im_end|>
{% endmacro -%}
{%- set ns = namespace(last_user=-1, seen=0) %}
{%- for message in messages[::-1] %}
    {%- if message.role == 'user' %}
        {%- set ns.last_user = messages | length - 1 - loop.index0 %}
        {%- break %}
    {%- endif %}
{%- endfor %}
{%- if tools %}# Tools: {{ tools | tojson(indent=2) }}{% endif %}
{%- for message in messages %}
    {%- if message.role == 'system' %}{% continue %}{% endif %}
    {%- set ns.seen = ns.seen + 1 %}
    {{- turn(message, last=loop.index0 == ns.last_user) }}
{%- endfor %}
{{- {'seen': ns.seen, 'last': messages[-1].content, 'extra': dict(a=[1, 2.5, none, true])} | tojson }}
    {% if messages | selectattr('role', 'equalto', 'system') | list %}
{{ (messages | map(attribute='content') | join(' | ')) ~ '*' * 3 }}
{%- endif %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}
"""
TEMPLATES = {"chatml": CHATML, "llama": LLAMA, "mistral": MISTRAL, "loops": LOOPS}
# Words tools, in the style of Hermes and Qwen.
HERMES = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Call as <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>
{% endif %}{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}<|im_start|>assistant
"""
# Contents that are lists of parts, in the style of models that see pictures too.
EITHER = """\
{{- bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {%- if message['content'] is string %}
        {{- message['content'] }}
    {%- else %}
        {%- for content in message['content'] %}
            {%- if content['type'] == 'image' %}{{- '<|image|>' }}
            {%- elif content['type'] == 'text' %}{{- content['text'] | trim }}{% endif %}
        {%- endfor %}
    {%- endif %}
    {{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}
"""
MACRO = """\
{%- macro written(content) -%}
    {%- if content is string %}{{ content }}
    {%- else %}{% for part in content %}{% if 'text' in part %}{{ part.text }}{% endif %}{% endfor %}
    {%- endif -%}
{%- endmacro -%}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' + written(message.content) + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""
PARTS_ONLY = """\
{%- for message in messages -%}
{{ message['role'] | capitalize }}:
{%- for line in message['content'] %}{% if line.type == 'text' %} {{ line.text }}{% endif %}{% endfor -%}
<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}
"""
READ_PARTS = {"either": EITHER, "macro": MACRO, "parts_only": PARTS_ONLY}
ROLES = {"bos_token": "<s>", "eos_token": "</s>"}
SPECIAL = [
    *("<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>", "[INST]", "[/INST]"),
    *("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
]


def byte_level() -> tokenizers.Tokenizer:
    """GPT-2's kind."""
    raw = tokenizers.Tokenizer(models.BPE(byte_alphabet(), []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(SPECIAL)
    return raw


def prefixing() -> tokenizers.Tokenizer:
    """Llama's first kind, which puts a space before a text."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "▁b", "é", "[", "|", "i"]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    raw = tokenizers.Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    raw.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    raw.add_special_tokens(SPECIAL)
    return raw


KINDS: dict[str, Callable[[], tokenizers.Tokenizer]] = {"byte_level": byte_level, "prefixing": prefixing}


@functools.cache
def ours(kind: str) -> Tokenizer:
    return Tokenizer(KINDS[kind]().to_str().encode())


def load_reference(kind: str, template: Any = None) -> Any:
    """The same tokenizer in transformers, whose own apply_chat_template is the reference.

    `template` is one, or several by name.
    """
    return load_kept(kind, template) if isinstance(template, str | None) else make_reference(kind, template)


def make_reference(kind: str, template: Any) -> Any:
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=KINDS[kind](), chat_template=template, unk_token="<unk>", **ROLES
    )


load_kept = functools.cache(make_reference)


def copy_with_template(bundle: Path, folder: Path, template: str) -> Path:
    """Return a copy of a bundle with another chat template; the two share their other files."""
    shutil.copytree(bundle, folder, copy_function=os.link)
    manifest = Bundle.open(folder).manifest
    name = manifest.tokenizer["chat_template"]["file"]
    path = folder / name
    path.unlink()
    path.write_text(template, encoding="utf-8")
    files = {**manifest.files, name: FileEntry(compute_sha256(path), path.stat().st_size)}
    (folder / "manifest.json").unlink()
    changed = dataclasses.replace(manifest, files=files)
    (folder / "manifest.json").write_text(changed.to_json(), encoding="utf-8")
    return folder
