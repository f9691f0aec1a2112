"""/openapi.json as a fuzzer reads it: whatever a request holds, at whatever place, is taken or refused.

    FUZZ_EXAMPLES=500 pytest tests/runtime/apps/server/test_fuzz.py

tries more, and others each time.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import negative_data_rejection, positive_data_acceptance

from planforge.runtime.apps.server.decode_body import decode_body
from planforge.runtime.apps.server.endpoints import ENDPOINTS, Endpoint
from planforge.runtime.apps.server.errors import ApiError
from planforge.runtime.apps.server.openapi import describe_api

from ....helpers.serving import Address
from .test_refusals import MINIMAL, read_error

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "0"))
# JSON of every type and out of every range.
HOSTILE = (
    "1e999",
    "-1e999",
    "NaN",
    "-Infinity",
    "1e308",
    "5e-324",
    "-0.0",
    str(10**40),
    str(-(10**40)),
    str(2**63),
    "0",
    "0.5",
    "-1",
    "true",
    "null",
    '""',
    '"\\ud800"',
    '"\\u0000"',
    '"<|endoftext|>"',
    "[]",
    "[[]]",
    "{}",
    '{"": 1}',
)
NOT_JSON = ("1e999", "-1e999", "NaN", "-Infinity", '"\\ud800"')  # or numbers beyond float64
PLACE = "what is put at a place"


def list_places(schema: dict[str, Any]) -> Iterator[Any]:
    """Yield values of a schema, each with `PLACE` at another one of its places, first of all as a whole."""
    yield PLACE
    for option in schema.get("anyOf", ()):
        yield from list(list_places(option))[1:]
    required = {name: make_sample(schema["properties"][name]) for name in schema.get("required", ())}
    for name, inner in schema.get("properties", {}).items():
        yield from ({**required, name: value} for value in list_places(inner))
    if "items" in schema:
        yield from ([value] * schema.get("minItems", 1) for value in list_places(schema["items"]))
    if isinstance(schema.get("additionalProperties"), dict):
        yield from ({"1": value} for value in list_places(schema["additionalProperties"]))


def make_sample(schema: dict[str, Any]) -> Any:
    """Return a value that a schema describes."""
    if "anyOf" in schema:
        return make_sample(schema["anyOf"][0])
    if "enum" in schema:
        return schema["enum"][0]
    if schema["type"] == "object":
        return {name: make_sample(schema["properties"][name]) for name in schema.get("required", ())}
    if schema["type"] == "array":
        return [make_sample(schema["items"])] * schema.get("minItems", 1)
    return {"string": "a", "integer": 1, "number": 1, "boolean": True}[schema["type"]]


def resolve(schema: Any, named: dict[str, Any]) -> Any:
    """Return a schema with those that it refers to in their places."""
    if isinstance(schema, list):
        return [resolve(part, named) for part in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return resolve(named[schema["$ref"].rpartition("/")[2]], named)
    return {name: resolve(part, named) for name, part in schema.items()}


def read_bodies(server: Address) -> dict[str, dict[str, Any]]:
    """Return the schemas of bodies by their routes, as the server describes them."""
    api = server.client.get("/openapi.json").json()
    named = api["components"]["schemas"]
    return {
        path: resolve(operations["post"]["requestBody"]["content"]["application/json"]["schema"], named)
        for path, operations in api["paths"].items()
        if "post" in operations
    }


@pytest.mark.parametrize("path", MINIMAL)
def test_no_value_at_any_place_breaks_the_server(server: Address, path: str) -> None:
    schema = read_bodies(server)[path]
    count = 0
    for name, part in schema["properties"].items():
        for argument in list_places(part):
            body = json.dumps({**MINIMAL[path], name: argument})
            for value in HOSTILE:
                content = body.replace(json.dumps(PLACE), value)
                response = server.client.post(
                    path, content=content, headers={"Content-Type": "application/json"}
                )
                allowed = (200, 400, 404, 504 if name == "timeout" else 200)
                assert response.status_code in allowed, (content, response.text)
                count += 1
                if response.status_code in (400, 404) and value not in NOT_JSON:
                    error = read_error(response, response.status_code)
                    param = error["param"]
                    assert param is not None, (content, error)
                    assert param.partition("[")[0].partition(".")[0] == name, (content, error)
    assert count >= len(HOSTILE) * len(schema["properties"])


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=MINIMAL)
def test_what_is_taken_is_what_is_described(endpoint: Endpoint) -> None:
    """By jsonschema, which takes 1.0 for an integer."""
    api = describe_api(ENDPOINTS, has_keys=False)
    schema = resolve({"$ref": endpoint.body.__name__}, api["components"]["schemas"])
    seen = set()
    for name, part in schema["properties"].items():
        if "contentEncoding" in part:  # jsonschema decodes no base64
            continue
        validator = jsonschema.Draft202012Validator(part)
        for argument in list_places(part):
            for value in HOSTILE:
                inner = json.dumps(argument).replace(json.dumps(PLACE), value)
                if value in NOT_JSON or value in ("1e308", "-0.0"):
                    continue
                body = json.dumps({**MINIMAL[endpoint.path], name: PLACE}).replace(json.dumps(PLACE), inner)
                expected = validator.is_valid(json.loads(inner))
                try:
                    decode_body(body.encode(), endpoint.body)
                    taken = True
                except ApiError:
                    taken = False
                assert taken == expected, body
                seen.add(taken)
    assert seen == {True, False}


@pytest.mark.parametrize("mode", list(GenerationMode))
def test_a_fuzzer_finds_no_fault(server: Address, mode: GenerationMode) -> None:
    """schemathesis makes bodies that /openapi.json describes, and such as it does not.

    Those may be refused: a schema does not say how long a model's context is. These may be taken: null is as
    good as leaving out.
    """
    raw = server.client.get("/openapi.json").json()
    schema: Any = schemathesis.openapi.from_dict(raw)
    seen = set()
    for result in schema.get_all_operations():
        operation = result.ok()
        if operation.method.upper() != "POST":
            continue
        seen.add(operation.path)
        bounded = settings(
            max_examples=EXAMPLES or 10,
            deadline=None,
            database=None,
            derandomize=not EXAMPLES,
            phases=[Phase.explicit, Phase.generate],
            suppress_health_check=list(HealthCheck),
        )

        @bounded
        @given(case=operation.as_strategy(generation_mode=mode))
        def call(case: Any) -> None:
            if isinstance(case.body, dict):
                case.body.pop("timeout", None)  # 504 is right where it is 1e-80 s
                if isinstance(case.body.get("steps"), int):  # a thousand of a picture take long
                    case.body["steps"] = min(case.body["steps"], 2)
            response = case.call(base_url=server.url)
            assert response.status_code < 500, response.text
            case.validate_response(
                response, excluded_checks=[positive_data_acceptance, negative_data_rejection]
            )

        call()
    assert seen == {endpoint.path for endpoint in ENDPOINTS}
