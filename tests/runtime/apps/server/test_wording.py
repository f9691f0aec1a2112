"""Over HTTP: variables of the chat template, and going on with an assistant's message, as vLLM names them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from planforge.runtime import TextGenerator

from ....helpers.chat import copy_with_template
from ....helpers.openai_client import connect_openai
from ....helpers.serving import running_server

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{{ ' (briefly)' if enable_thinking is false }} {% endif %}"
)
ASKED = {"role": "user", "content": "Who is he?"}
BEGUN = {"role": "assistant", "content": "He is the"}


@pytest.fixture(scope="module")
def model(llama_demo_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TextGenerator]:
    folder = tmp_path_factory.mktemp("wording") / "bundle"
    bundle = copy_with_template(llama_demo_bundle, folder, TEMPLATE)
    with TextGenerator.load(bundle, backend="ort-cpu", precision="fp32") as model:
        yield model


@pytest.fixture(scope="module")
def client(model: TextGenerator) -> Iterator[openai.OpenAI]:
    with running_server({"llama": model}) as server, connect_openai(server) as client:
        yield client


def ask(client: openai.OpenAI, messages: list[Any], **extra: Any) -> str:
    body: dict[str, Any] = {"model": "llama", "messages": messages, "max_tokens": 12, "temperature": 0}
    whole: str | None = client.chat.completions.create(**body, extra_body=extra).choices[0].message.content
    parts = [
        chunk.choices[0].delta.content or ""
        for chunk in client.chat.completions.create(**body, extra_body=extra, stream=True)
    ]
    assert "".join(parts) == whole
    assert whole is not None
    return whole


def test_variables_and_beginnings_word_the_prompt(client: openai.OpenAI, model: TextGenerator) -> None:
    """What they word is the prompt that a user would write by hand."""

    def continue_text(prompt: str) -> str:
        return model.generate(prompt, max_new_tokens=12).text

    begin = "user: Who is he?\nassistant:"
    assert ask(client, [ASKED]) == model.chat([ASKED], max_new_tokens=12, temperature=0).text
    thought = ask(client, [ASKED], chat_template_kwargs={"enable_thinking": False})
    assert thought.lstrip() == continue_text(f"{begin} (briefly) ").lstrip()
    wanted = continue_text(f"{begin} He is the")
    for extra in ({}, {"add_generation_prompt": False}):
        assert ask(client, [ASKED, BEGUN], continue_final_message=True, **extra) == wanted


@pytest.mark.parametrize(
    ("extra", "param", "words"),
    [
        ({"chat_template_kwargs": {"thinking": 1}}, "chat_template_kwargs", "does not use 'thinking'"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs", "'tools' is set by"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs", "chat_template_kwargs"),
        ({"continue_final_message": True}, "continue_final_message", "the role 'user'"),
        (
            {"continue_final_message": True, "add_generation_prompt": True},
            "add_generation_prompt",
            "cannot both",
        ),
        ({"add_generation_prompt": False}, "add_generation_prompt", "nor both false"),
    ],
)
def test_what_has_no_meaning_is_refused(
    client: openai.OpenAI, extra: dict[str, Any], param: str, words: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=words) as refused:
        ask(client, [ASKED], **extra)
    assert refused.value.param == param
