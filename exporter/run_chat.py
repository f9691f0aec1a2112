"""`planforge run --chat`: texts as a user's messages, and a model's answers."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import typer

from ..runtime.errors import InputError
from .run_translation import Item


def converse(
    model: Any, items: Iterable[Item], options: dict[str, Any], one: bool, system: str | None, as_json: bool
) -> None:
    """Answers each text, shown as it comes.

    Args:
        one: the texts are turns of one conversation; otherwise each begins its own.
        system: what the conversation begins with.
    """
    begin = [] if system is None else [message("system", system)]
    messages = list(begin)
    if one:
        options["reuse_prompt"] = True
    for text in items:
        if not isinstance(text, str):
            raise InputError("--chat takes messages, not pairs of texts")
        messages = [*(messages if one else begin), message("user", text)]
        if as_json:
            answer = model.chat(messages, **options)
            typer.echo(json.dumps({"prompt": text, **answer.to_json()}, ensure_ascii=False))
            said = answer.text
        else:
            pieces = []
            for piece in model.stream_chat(messages, **options):
                typer.echo(str(piece), nl=False)
                pieces.append(str(piece))
            typer.echo()
            said = "".join(pieces)
        messages.append(message("assistant", said))


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}
