"""What an answer must look like: a JSON schema, a pattern, a grammar, or one of some texts."""

from __future__ import annotations

from typing import Any

from .bodies import ChatRequest, GenerationRequest
from .errors import refuse


def read_structure(body: GenerationRequest) -> dict[str, Any]:
    """Return the option that structures an answer, if a body asks for one."""
    given = {"regex": body.regex, "grammar": body.grammar, "choices": body.choices}
    options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    names = list(options)
    form = body.response_format
    if form is not None and form.type != "text":
        names.append("response_format")
        options["json_schema"] = {"type": "object"}
        if form.type == "json_schema":
            if form.json_schema is None:
                refuse("response_format.json_schema", "is missing")
            options["json_schema"] = form.json_schema.schema
    if len(names) > 1:
        refuse(names[-1], f"does not go with {names[0]}; give one")
    return options


def asks_for_grammar(body: GenerationRequest) -> bool:
    """Return whether a grammar must be compiled, which may take a second, before an answer begins."""
    called = isinstance(body, ChatRequest) and body.tool_choice not in (None, "auto", "none")
    return called or bool(read_structure(body))
