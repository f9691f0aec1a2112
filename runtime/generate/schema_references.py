"""References of a JSON schema: each becomes a pointer from its root, so that it can be part of another."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any
from urllib.parse import quote, unquote, urldefrag, urljoin

from ..errors import SchemaError
from .json_schema import Path, list_all_schemas, list_schemas, write_path

ROOT_NAMES = ("$schema", "id")  # of a whole schema


def resolve_references(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema whose references are pointers from its root, and that has no other names of parts.

    A part may be named by `$id`, which its own references count from, and by `$anchor`.

    Raises:
        SchemaError: a reference names no schema in the schema.
    """
    resolved: dict[str, Any] = deepcopy({key: part for key, part in schema.items() if key not in ROOT_NAMES})
    bases: dict[Path, str] = {(): ""}  # of the parts that references in them count from, their URIs
    pointers = {"": "#"}  # by URI
    for path, part in list_schemas(resolved, ()):
        name = part.pop("$id", None)
        anchor = part.pop("$anchor", None)
        pointer = write_pointer(path)
        if isinstance(name, str):
            uri = join_uri(find_base(bases, path), name)
            pointers[uri] = pointer
            if not name.startswith("#"):  # such is an anchor, in drafts 6 and 7
                bases[path] = uri
        if isinstance(anchor, str):
            pointers[f"{find_base(bases, path)}#{anchor}"] = pointer
    # References in what is no schema, such as an example or "x-...", are left as they are.
    targets = {unquote(write_pointer(path)) for path, _ in list_all_schemas(resolved, ())}
    for path, part in list_schemas(resolved, ()):
        reference = part.get("$ref")
        if isinstance(reference, str):
            part["$ref"] = find_pointer(pointers, join_uri(find_base(bases, path), reference))
            if unquote(part["$ref"]) not in targets:
                place = write_path((*path, "$ref"))
                raise SchemaError(
                    f"json_schema: {place} is {reference!r:.200}, which is not in this schema; put the schema"
                    " it refers to into $defs",
                    path=place,
                )
    return resolved


def move_schema(schema: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Return a schema, whose references are resolved, as it is to stand at a place of another."""
    moved: dict[str, Any] = deepcopy(dict(schema))
    for _, part in list_schemas(moved, ()):
        if isinstance(part.get("$ref"), str):
            part["$ref"] = place + part["$ref"][1:]
    return moved


def find_base(bases: Mapping[Path, str], path: Path) -> str:
    """Return the URI that references at a place count from: of the innermost part around it that has one."""
    return next(bases[path[:length]] for length in range(len(path), -1, -1) if path[:length] in bases)


def join_uri(base: str, reference: str) -> str:
    """Return the whole URI of a reference, without a fragment that is empty."""
    joined = base + reference if reference.startswith("#") else urljoin(base, reference)
    return joined.removesuffix("#")


def find_pointer(pointers: Mapping[str, str], uri: str) -> str:
    """Return the pointer from the root to what a URI names; "" where it names nothing."""
    resource, fragment = urldefrag(uri)
    if fragment.startswith("/"):
        start = pointers.get(resource, "")
        return start and start + fragment
    return pointers.get(uri, "")


def write_pointer(path: Path) -> str:
    keys = (quote(str(key).replace("~", "~0").replace("/", "~1"), safe="$~") for key in path)
    return "#" + "".join(f"/{key}" for key in keys)
