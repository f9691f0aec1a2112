"""Reads config.pbtxt, the configuration of a Triton model in protobuf's text format."""

from __future__ import annotations

import re
from typing import Any

TOKEN = re.compile(r"""\s*(?:\#[^\n]*\s*)*("(?:[^"\\]|\\.)*"|[\[\]{}:,;]|[^\s\[\]{}:,;"\#]+)""")
REPEATED = ("input", "output", "parameters", "instance_group", "dims")  # fields that may come several times


class Tokens:
    """The tokens of a text, one after the other."""

    def __init__(self, text: str) -> None:
        self.rest = TOKEN.findall(text)[::-1]

    def peek(self) -> str:
        """Return the next token; "" at the end."""
        return self.rest[-1] if self.rest else ""

    def take(self, *allowed: str) -> str:
        """Return the next token and advance; refuse any that is not allowed."""
        token = self.rest.pop() if self.rest else ""
        if not token or (allowed and token not in allowed):
            wanted = " or ".join(map(repr, allowed)) or "more"
            raise ValueError(f"config.pbtxt: {token!r} stands where {wanted} is wanted")
        return str(token)


def read_pbtxt(text: str) -> dict[str, Any]:
    """Return the fields of a text; those of `REPEATED` are lists."""
    return read_fields(Tokens(text), "")


def read_fields(tokens: Tokens, end: str) -> dict[str, Any]:
    """Return the fields up to the token that ends them."""
    fields: dict[str, Any] = {}
    while tokens.peek() != end:
        name = tokens.take()
        if tokens.peek() == ":":
            tokens.take()
        value = read_value(tokens)
        if tokens.peek() in (",", ";"):
            tokens.take()
        if name in REPEATED:
            fields.setdefault(name, []).extend(value if isinstance(value, list) else [value])
        elif name in fields:
            raise ValueError(f"config.pbtxt: {name} comes twice")
        else:
            fields[name] = value
    return fields


def read_value(tokens: Tokens) -> Any:
    """Return a text, a number, a flag, the name of a constant, a message or a list."""
    token = tokens.take()
    if token == "{":
        fields = read_fields(tokens, "}")
        tokens.take("}")
        return fields
    if token == "[":
        values = []
        while tokens.peek() != "]":
            values.append(read_value(tokens))
            if tokens.peek() != "]":
                tokens.take(",")
        tokens.take("]")
        return values
    if token.startswith('"'):
        return re.sub(r"\\(.)", r"\1", token[1:-1])
    if token in ("true", "false"):
        return token == "true"
    return int(token) if re.fullmatch(r"-?\d+", token) else token
