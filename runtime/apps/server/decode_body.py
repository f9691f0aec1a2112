"""Decodes the bodies of requests; says what is wrong with one in JSON's words, and at which place."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any, NoReturn, TypeAlias, TypeVar, get_type_hints

import msgspec

from ...suggest import did_you_mean
from .bodies import INPUTS, MAX_OPTION_BYTES, MAX_TOKENS, Body
from .errors import ApiError, refuse
from .json_text import encode_json

HIGH_HALF = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])")  # of a surrogate pair

B = TypeVar("B", bound=Body)
MEMBERS = msgspec.json.Decoder(dict[str, msgspec.Raw])
Schema: TypeAlias = Mapping[str, Any]

STEP = re.compile(r"\.(\w+)|\[(\d+)\]")  # of a path such as $.messages[0].content
LIMIT = re.compile(r"Expected `(\w+)`( of length)?(?: ([<>]=?))? ([^` ]+)")
SIGNS = {">=": "at least ", "<=": "at most ", ">": "over ", None: ""}
NUMBERS = ({"type": "integer"},)  # of the names of a mapping, where not all are allowed
UNITS = {"str": " characters", "array": " items", "object": " members"}
HINTS = {  # where to put what is looked for at the wrong place
    "json_schema": 'a schema goes into response_format={"type": "json_schema", "json_schema": {"name": ...,'
    ' "schema": ...}}',
    "functions": "give them as tools",
    "function_call": "give it as tool_choice",
}


def decode_body(data: bytes, kind: type[B]) -> B:
    """Return a request's body; raises an ApiError that names the place of what cannot be used."""
    check_sizes(data, kind)
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        fault = str(error)
    body = parse_json(data)
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    refuse_body(fault, body, kind)


def check_sizes(data: bytes, kind: type[Body]) -> None:
    """Refuse a body with a parameter that is too large, before it is decoded: no thread can run meanwhile."""
    if len(data) <= MAX_OPTION_BYTES:
        return
    schema = describe_body(kind)
    read = others = 0  # bytes of all parameters, and of those that are no input
    for name, raw in split_members(data).items():
        if name not in schema["properties"]:
            refuse_object(f"`{name}`", "", {name: None}, [schema])
        content = bytes(raw)
        read += len(content)
        others += 0 if name in INPUTS else len(content)
        if others > MAX_OPTION_BYTES:
            reason = f"must have at most {MAX_OPTION_BYTES} bytes of JSON, together with other options"
            refuse(name, f"{reason}, not {others}")
        if b'"' not in content and (count := content.count(b",") + 1) > MAX_TOKENS:
            refuse(name, f"must have at most {MAX_TOKENS} token ids, not {count}")
    if len(data) - read > MAX_OPTION_BYTES:
        reason = "has more than a megabyte of white space, or a duplicate name"
        raise ApiError(400, f"the body {reason}", code="invalid_json")


def split_members(data: bytes) -> dict[str, msgspec.Raw]:
    """Return the JSON of each member of a body, which is looked through and not decoded."""
    try:
        return MEMBERS.decode(data)
    except msgspec.ValidationError:
        raise ApiError(400, "the body must be a JSON object", code="invalid_json") from None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise find_syntax_error(data, error) from None


def parse_json(data: bytes) -> Any:
    """Return what JSON says; refuse NaN, too long numbers, too deep nesting and half characters."""
    try:
        return msgspec.json.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise find_syntax_error(data, error) from None


def find_syntax_error(data: bytes, error: Exception) -> ApiError:
    """Return the error of a body that is not valid JSON."""
    reason = f"the body is not valid JSON in UTF-8: {error}"[:300]
    if HIGH_HALF.search(data):  # of which msgspec says that the data was truncated
        reason += "; a lone surrogate, such as \\ud800, is not a character"
    return ApiError(400, reason, code="invalid_json")


def refuse_body(fault: str, body: dict[str, Any], kind: type[Body]) -> NoReturn:
    """Raise the error of a body in which msgspec found a fault, such as "Expected `int` >= 1 - at `$.n`".

    Where a body has a name twice, the values at hand may be others than the faulty ones.
    """
    before, _, after = fault.rpartition(" - at `")
    path = after if before else ""
    reason = before or after
    place, value, schemas = find_place(path, body, [describe_body(kind)])
    if reason.startswith("Object "):
        refuse_object(reason, place, value, schemas)
    if value is None and not place.endswith("]"):
        refuse(place, "is missing")
    if isinstance(value, dict) and (path.startswith("key`") or path.endswith("[...]`")):
        hint = get_type_hints(kind, include_extras=True).get(place, Any)
        wrong = find_wrong_name(value, hint)
        if path.startswith("key`"):
            refuse(place, f"has a name that {explain(reason, wrong, NUMBERS)}")
        schemas = [one["additionalProperties"] for one in schemas if "additionalProperties" in one]
        value = value.get(wrong)
        place = join(place, wrong)[:200]
    refuse(place, explain(reason, value, schemas))


def find_place(path: str, value: Any, schemas: list[Schema]) -> tuple[str, Any, list[Schema]]:
    """Return the name of a place, its value, and the schemas of which it must have one."""
    place = ""
    with suppress(LookupError, TypeError):  # a name in a body may look like a path
        for name, index in STEP.findall(path):
            value = value[name] if name else value[int(index)]
            place = join(place, name) if name else f"{place}[{index}]"
            inner = [one.get("properties", {}).get(name) if name else one.get("items") for one in schemas]
            schemas = [one for each in inner if each for one in each.get("anyOf", [each])]
    return place, value, schemas


def refuse_object(reason: str, place: str, value: Any, schemas: Sequence[Schema]) -> NoReturn:
    """Raise the error of an object that has too many members, or too few."""
    known: dict[str, Schema] = {}
    for one in schemas:
        known |= one.get("properties", {})
    members = value if isinstance(value, dict) else {}
    for name, schema in known.items():  # what a part is, before what it lacks then
        if name in members and members[name] not in schema.get("enum", [members[name]]):
            refuse(join(place, name), explain("", members[name], [schema]))
    name = reason.split("`")[1]
    if name in known:
        refuse(join(place, name), "is missing")
    name = next((one for one in members if one not in known), name)
    place = join(place, name)
    hint = f"; {HINTS[name]}." if name in HINTS else did_you_mean(name, known) or "."
    supported = [one for one, schema in known.items() if not has_one_value(schema)]
    raise ApiError(
        400,
        f"{place!r:.200} is not supported{hint} Supported: {', '.join(supported)}",
        param=place[:200],
        code="unsupported_parameter",
    )


def has_one_value(schema: Schema) -> bool:
    """Return whether a member may be left out, null, or have one value: it then has no effect."""
    kinds = [one for one in schema.get("anyOf", [schema]) if one.get("type") != "null"]
    return all(len(one.get("enum", ())) == 1 for one in kinds)


def find_wrong_name(mapping: Mapping[str, Any], hint: Any) -> str:
    """Return the first name of a mapping that its type refuses, or whose value it refuses."""
    for name, value in mapping.items():
        try:
            msgspec.convert({name: value}, hint, str_keys=True)
        except msgspec.ValidationError:
            return name
    return ""


def explain(reason: str, value: Any, schemas: Sequence[Schema]) -> str:
    """Return what a value must be, and what it is."""
    got = encode_json(value).decode()
    verb = "be"
    if limit := LIMIT.fullmatch(reason):
        kind, counted, sign, bound = limit.groups()
        allowed = SIGNS[sign] + bound.removesuffix(".0")
        if counted and isinstance(value, str | list | dict):
            verb = "have"
            allowed += UNITS[kind]
            got = str(len(value))
    else:
        allowed = describe(schemas)
    hints = [one["x-refusal"] for one in schemas if "x-refusal" in one]
    if "got `" in reason:
        hints += [one["x-other-type"] for one in schemas if "x-other-type" in one]
    return f"must {verb} {allowed}, not {got:.80}" + "".join(f" ({hint})" for hint in hints[:1])


def describe(schemas: Sequence[Schema]) -> str:
    """Return the values that one of some schemas allows, in words."""
    words: list[str] = []
    for one in schemas:
        if "anyOf" in one:
            words.append(describe(one["anyOf"]))
        elif "enum" in one:
            words += [encode_json(value).decode() for value in one["enum"]]
        elif one.get("items"):
            words.append(f"an array of ({describe([one['items']])})")
        elif one.get("type") != "null":
            kind = one.get("type", "value")
            words.append(f"{'an' if kind[0] in 'aio' else 'a'} {kind}")
    return " or ".join(words)


@cache
def describe_body(kind: type[Body]) -> Schema:
    """Return the schema of a body, with those that it refers to in their places."""
    (schema,), components = msgspec.json.schema_components([kind], ref_template="{name}")

    def resolve(part: Any) -> Any:
        if isinstance(part, list):
            return [resolve(one) for one in part]
        if not isinstance(part, dict):
            return part
        if "$ref" in part:
            return resolve(components[part["$ref"]])
        return {name: resolve(one) for name, one in part.items()}

    resolved: Schema = resolve(schema)
    return resolved


def join(place: str, name: str) -> str:
    return f"{place}.{name}" if place else name
