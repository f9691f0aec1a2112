"""What an answer must look like: a JSON schema, a pattern, a grammar, or one of some texts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from .errors import ApiError


def read_structure(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the option that structures an answer, if a body asks for one."""
    options = {name: body[name] for name in ("regex", "grammar", "choices") if name in body}
    names = list(options)
    form = body.get("response_format", {"type": "text"})
    if form["type"] != "text":
        names.append("response_format")
        options["json_schema"] = {"type": "object"}
    if form["type"] == "json_schema":
        if "json_schema" not in form:
            refuse("response_format.json_schema", "is missing")
        options["json_schema"] = form["json_schema"]["schema"]
        if options["json_schema"] is None:
            refuse("response_format.json_schema.schema", "is missing")
    if len(names) > 1:
        refuse(names[-1], f"does not go with {names[0]}; give one")
    return options


def asks_for_grammar(body: Mapping[str, Any]) -> bool:
    """Return whether a grammar must be compiled, which may take a second, before an answer begins."""
    form = body.get("response_format", {"type": "text"})["type"]
    called = body.get("tool_choice") not in (None, "auto", "none")
    return form != "text" or called or any(name in body for name in ("regex", "grammar", "choices"))


def refuse(name: str, reason: str) -> NoReturn:
    raise ApiError(400, f"{name} {reason}", param=name, code="invalid_value")
