"""Checks values by the part of JSON Schema in which /openapi.json describes the bodies of requests."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NoReturn, TypeAlias

from ..suggest import did_you_mean
from .errors import ApiError

Schema: TypeAlias = Mapping[str, Any]

TYPES: dict[str, type | tuple[type, ...]] = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "integer": int,
    "number": (int, float),
    "null": type(None),
}


def check(value: Any, schema: Schema, name: str) -> None:
    """Refuse a value that a schema does not describe; `name` is the parameter that it belongs to."""
    if "anyOf" in schema:
        check_any(value, schema, name)
        return
    if "enum" in schema and not any(value == each and type(value) is type(each) for each in schema["enum"]):
        allowed = ", ".join(map(repr, schema["enum"]))
        refuse(
            name,
            f"must be {'one of ' if len(schema['enum']) > 1 else ''}{allowed}, not {value!r:.80}",
            schema,
        )
    if "type" in schema and not has_type(value, schema["type"]):
        hint = f" ({schema['x-other-type']})" if "x-other-type" in schema else ""
        refuse(name, f"must be of the type {schema['type']}, not {value!r:.80}{hint}", schema)
    if isinstance(value, dict):
        check_object(value, schema, name)
    elif isinstance(value, list):
        check_array(value, schema, name)
    elif isinstance(value, str):
        check_count(len(value), schema, "Length", "characters", name)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        check_number(value, schema, name)


def has_type(value: Any, name: str) -> bool:
    """Return whether a value has one of JSON's types; true is no number, and a number is finite."""
    if isinstance(value, bool) and name != "boolean":
        return False
    if isinstance(value, float) and not math.isfinite(value):
        return False
    return isinstance(value, TYPES[name])


def check_any(value: Any, schema: Schema, name: str) -> None:
    """Refuse a value that is of none of several schemas; of the one that has its type, say why."""
    alike = [one for one in schema["anyOf"] if has_type(value, one.get("type", "null"))]
    if isinstance(value, list) and value:  # of texts and of token ids, those that it has
        first = [one for one in alike if has_type(value[0], one.get("items", {}).get("type", "null"))]
        alike = first or alike
    reasons = []
    for one in alike:
        try:
            check(value, one, name)
            return
        except ApiError as error:
            reasons.append(error)
    if len({str(reason) for reason in reasons}) == 1 and "x-refusal" not in schema:
        raise reasons[0]
    kinds = " or ".join(describe(one) for one in schema["anyOf"])
    refuse(name, f"must be {kinds}, not {value!r:.80}", schema)


def describe(schema: Schema) -> str:
    """Return the kind of value that a schema is about, in words."""
    if schema.get("type") == "array":
        return f"an array of ({describe(schema.get('items', {}))})"
    if "anyOf" in schema:
        return " or ".join(describe(one) for one in schema["anyOf"])
    return str(schema.get("type", "anything"))


def check_object(value: Mapping[str, Any], schema: Schema, name: str) -> None:
    """Check an object's members; null is as good as leaving out one that is not required."""
    properties = schema.get("properties", {})
    required = schema.get("required", ())
    check_count(len(value), schema, "Properties", "members", name)
    for key in value.keys() & properties.keys():  # what a part is, before what it lacks then
        if "enum" in properties[key]:
            check(value[key], properties[key], join(name, key))
    for key in required:
        if value.get(key) is None and not is_nullable(properties.get(key, {})):
            refuse(join(name, key), "is missing", schema)
    others = schema.get("additionalProperties", True)
    for key, member in value.items():
        place = join(name, key)
        if key in properties:
            check(member, properties[key], place)
        elif others is False:
            hint = did_you_mean(key, properties) or "."
            if key in schema.get("x-hints", {}):
                hint = f"; {schema['x-hints'][key]}."
            known = ", ".join(properties)
            raise ApiError(
                400,
                f"{place!r:.200} is not supported{hint} There are: {known}",
                param=place[:200],
                code="unsupported_parameter",
            )
        elif isinstance(others, Mapping):
            check(member, others, place)


def check_array(value: list[Any], schema: Schema, name: str) -> None:
    check_count(len(value), schema, "Items", "items", name)
    if "items" in schema and not are_integers(value, schema["items"]):
        for index, item in enumerate(value):
            check(item, schema["items"], f"{name}[{index}]")


def are_integers(values: list[Any], schema: Schema) -> bool:
    """Return whether all are integers that a schema of integers allows."""
    if schema.get("type") != "integer" or set(map(type, values)) != {int}:
        return False
    return bool(
        min(values) >= schema.get("minimum", -math.inf) and max(values) <= schema.get("maximum", math.inf)
    )


def check_count(count: int, schema: Schema, what: str, unit: str, name: str) -> None:
    least = schema.get(f"min{what}", 0)
    most = schema.get(f"max{what}")
    if count < least:
        refuse(name, f"must have at least {least} {unit}, not {count}", schema)
    if most is not None and count > most:
        refuse(name, f"must have at most {most} {unit}, not {count}", schema)


def check_number(value: float, schema: Schema, name: str) -> None:
    least = schema.get("minimum")
    above = schema.get("exclusiveMinimum")
    most = schema.get("maximum")
    if least is not None and value < least:
        refuse(name, f"must be at least {least}, not {value!r:.80}", schema)
    if above is not None and value <= above:
        refuse(name, f"must be over {above}, not {value!r:.80}", schema)
    if most is not None and value > most:
        refuse(name, f"must be at most {most}, not {value!r:.80}", schema)


def is_nullable(schema: Schema) -> bool:
    return any(one.get("type") == "null" for one in schema.get("anyOf", ()))


def join(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key


def refuse(name: str, reason: str, schema: Schema) -> NoReturn:
    """Raise the error of a parameter whose value cannot be used."""
    hint = f" ({schema['x-refusal']})" if "x-refusal" in schema else ""
    raise ApiError(400, f"{name} {reason}{hint}", param=name or None, code="invalid_value")
