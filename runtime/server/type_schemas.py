"""JSON schemas of types: of the answers' TypedDicts, and of the dataclasses that encoders return."""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, Literal, TypeAlias, Union, get_args, get_origin, get_type_hints, is_typeddict

from .answers import ListOf, Usage

Schema: TypeAlias = Mapping[str, Any]

PLAIN = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}


class TypeSchemas:
    """Makes the schemas of types; those that have a name are kept, and referred to.

    Attributes:
        named: the schemas of TypedDicts and dataclasses by their names.
    """

    def __init__(self) -> None:
        self.named: dict[str, Schema] = {}

    def describe(self, kind: Any) -> Schema:
        """Return the schema of a type."""
        if isinstance(kind, ListOf):
            return self._describe_list(kind)
        if kind is Any:
            return {}
        if kind in PLAIN:
            return {"type": PLAIN[kind]}
        if is_typeddict(kind) or is_dataclass(kind):
            return self._refer(kind)
        origin = get_origin(kind)
        arguments = get_args(kind)
        if origin is Literal:
            return {"enum": list(arguments)}
        if origin in (Union, types.UnionType):
            return {"anyOf": [self.describe(one) for one in arguments]}
        if origin in (list, tuple, Sequence):
            return {"type": "array", "items": self.describe(arguments[0])}
        assert origin in (dict, Mapping), f"{kind!r} has no schema"
        return {"type": "object", "additionalProperties": self.describe(arguments[1])}

    def _refer(self, kind: Any) -> Schema:
        name = kind.__name__
        if name not in self.named:
            self.named[name] = {}  # its place, for types that refer to themselves
            members = get_type_hints(kind)
            required = [one.name for one in fields(kind)] if is_dataclass(kind) else kind.__required_keys__
            self.named[name] = self._describe_members(members, required, kind.__doc__)
        return {"$ref": f"#/components/schemas/{name}"}

    def _describe_members(self, members: Mapping[str, Any], required: Any, doc: str | None) -> Schema:
        return {
            "type": "object",
            "description": (doc or "").partition("\n")[0],
            "properties": {name: self.describe(kind) for name, kind in members.items()},
            "required": [name for name in members if name in required],
            "additionalProperties": False,
        }

    def _describe_list(self, kind: ListOf) -> Schema:
        entry = kind.entry
        if is_dataclass(entry):
            members = {"index": int, **get_type_hints(entry), **kind.more}
            item = self._describe_members(members, members, entry.__doc__)
        else:
            item = self.describe(entry)
        answer = {"object": Literal["list"], "data": list[Any], "model": str, "usage": Usage}
        described = dict(self._describe_members(answer, answer, "An entry for each text."))
        described["properties"] = {**described["properties"], "data": {"type": "array", "items": item}}
        return described
