"""JSON schemas: which can be enforced, and where one that cannot has its fault."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

from ..errors import InputError, SchemaError
from ..suggest import did_you_mean

# What an answer is held to. "not", "uniqueItems" and others of JSON Schema's are not enforced yet.
ENFORCED = {
    "$ref",
    "allOf",
    "anyOf",
    "const",
    "enum",
    "format",
    "oneOf",
    "type",
    "additionalProperties",
    "maxProperties",
    "minProperties",
    "patternProperties",
    "properties",
    "required",
    "additionalItems",
    "items",
    "maxItems",
    "minItems",
    "prefixItems",
    "maxLength",
    "minLength",
    "pattern",
    "exclusiveMaximum",
    "exclusiveMinimum",
    "maximum",
    "minimum",
    "multipleOf",
}
# What says nothing of whether a value is valid; some of it is OpenAPI's.
NOTES = {
    "$anchor",
    "$comment",
    "$defs",
    "$id",
    "$schema",
    "$vocabulary",
    "definitions",
    "id",
    "contentEncoding",
    "contentMediaType",
    "contentSchema",
    "default",
    "deprecated",
    "description",
    "discriminator",
    "example",
    "examples",
    "externalDocs",
    "readOnly",
    "title",
    "writeOnly",
    "xml",
}
SCHEMAS = ("additionalItems", "additionalProperties", "items")  # keywords whose value is a schema
SCHEMA_LISTS = ("allOf", "anyOf", "items", "oneOf", "prefixItems")
SCHEMA_MAPS = ("$defs", "definitions", "patternProperties", "properties")
MAX_DEPTH = 64
# llguidance's. White space between the parts of JSON is little, as some models would go on with it.
JSON_OPTIONS = {"whitespace_pattern": r" |\t|(\r?\n){1,2}[ \t]{0,20}", "lenient": False}
SEARCH_SECONDS = 0.5  # for the place of a fault, after which it is as near as it got

Path = tuple[str | int, ...]


def read_schema(schema: Any, max_length: int) -> str:
    """Return a schema, a mapping or its JSON, as JSON; refuse keywords that could not be enforced."""
    if isinstance(schema, str):
        if len(schema) > max_length:
            raise InputError(
                f"json_schema has {len(schema)} characters; at most {max_length} are allowed",
                option="json_schema",
            )
        text = schema
    else:
        text = write_schema(schema)
    try:
        parsed = json.loads(text, parse_constant=refuse_constant)
    except RecursionError as error:
        raise SchemaError("json_schema is nested too deep", path="") from error
    except ValueError as error:
        raise SchemaError(f"json_schema is not valid JSON: {error}", path="") from error
    if not isinstance(parsed, dict):
        raise SchemaError(
            f"json_schema is {json.dumps(parsed)[:40]}; it must be an object, such as"
            ' {"type": "object"}, which allows any object',
            path="",
        )
    check_depth(parsed, ())
    for path, part in list_schemas(parsed, ()):
        check_keywords(part, path)
    return json.dumps(parsed)


def write_schema(schema: Any) -> str:
    try:
        return json.dumps(schema, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise SchemaError(f"json_schema is not valid JSON: {error}", path="") from error


def refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def check_depth(value: Any, path: Path) -> None:
    """Refuse what is nested deeper than MAX_DEPTH."""
    if len(path) > MAX_DEPTH:
        place = write_path(path)
        raise SchemaError(f"json_schema is nested more than {MAX_DEPTH} deep, at {place:.200}", path=place)
    for key, child in list_children(value):
        check_depth(child, (*path, key))


def list_schemas(schema: Any, path: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield a schema and those in it that are objects, with their places."""
    return ((place, part) for place, part in list_all_schemas(schema, path) if isinstance(part, dict))


def list_all_schemas(schema: Any, path: Path) -> Iterator[tuple[Path, dict[str, Any] | bool]]:
    """Yield a schema and those in it, true and false too, with their places."""
    if not isinstance(schema, dict | bool):
        return
    yield path, schema
    for key, value in list_children(schema):
        if key in SCHEMAS:
            yield from list_all_schemas(value, (*path, key))
        if key in (SCHEMA_LISTS if isinstance(value, list) else SCHEMA_MAPS):
            for name, part in list_children(value):
                yield from list_all_schemas(part, (*path, key, name))


def check_keywords(schema: dict[str, Any], path: Path) -> None:
    """Refuse a keyword that is not enforced, and what keys that come twice would break."""
    for key in schema:
        if key in ENFORCED or key in NOTES or (key.startswith("x-") and key != "x-guidance"):
            continue
        place = write_path((*path, key))
        hint = did_you_mean(key, sorted(ENFORCED)) or "; leave it out"
        raise SchemaError(f"json_schema: {place} is not supported{hint}", path=place)
    fewest = schema.get("minProperties")
    required = schema.get("required")
    known = len(required) if isinstance(required, list) else 0
    if isinstance(fewest, int) and fewest > max(1, known):
        place = write_path((*path, "minProperties"))
        raise SchemaError(
            f"json_schema: {place} above 1 is not supported; list the keys in required instead",
            path=place,
        )


def find_fault(schema: dict[str, Any], find_error: Callable[[dict[str, Any]], str]) -> str:
    """Return the place of what makes a schema unusable: the part without which the error is another.

    `find_error` returns what is wrong with a schema, "" for nothing.
    """
    end = time.monotonic() + SEARCH_SECONDS
    error = find_error(schema)
    path: Path = ()
    part: Any = schema
    while time.monotonic() < end:
        # What is referred to is looked at before what refers to it.
        for key, child in sorted(list_children(part), key=lambda child: rank_child(child[0], error)):
            if time.monotonic() < end and find_error(remove(schema, (*path, key))) != error:
                path = (*path, key)
                part = child
                break
        else:
            break
    return write_path(path)


def rank_child(key: str | int, error: str) -> int:
    """Return when a key is looked at: what the error names sooner than other keys."""
    if key in ("$defs", "definitions"):
        return 0
    if key == "$ref":
        return 3
    return 1 if str(key) in error else 2


def list_children(value: Any) -> list[tuple[str | int, Any]]:
    """Return the keys and values of an object, or the numbers and values of an array."""
    if isinstance(value, dict):
        return list(value.items())
    return list(enumerate(value)) if isinstance(value, list) else []


def remove(schema: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return a copy of a schema without one of its parts."""
    copy = deepcopy(schema)
    parent: Any = copy
    for key in path[:-1]:
        parent = parent[key]
    del parent[path[-1]]
    return copy


def write_path(path: Path) -> str:
    return "/".join(map(str, path))
