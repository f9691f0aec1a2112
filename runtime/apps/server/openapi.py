"""/openapi.json, made of the types by which msgspec decodes requests and encodes answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, TypeAlias

import msgspec

from .access import OPEN
from .answers import ErrorAnswer, Health, ModelEntry, ModelList, Readiness
from .bodies import Body
from .decode_body import describe_body
from .endpoints import Endpoint
from .form_data import MEDIA_TYPE as FORM

FAILURES = {
    "400": "A parameter that cannot be used.",
    "401": "The API key is missing or invalid.",
    "403": "The Host header is not allowed.",
    "404": "No such model.",
    "408": "The body came too slowly.",
    "413": "The body is too large.",
    "415": "The body is of a type that this route does not take.",
    "429": "Too many requests wait.",
    "500": "The model failed.",
    "501": "An extra that this needs is not installed.",
    "503": "The model is loading, or the server is stopping.",
    "504": "The request timed out.",
}
Schemas: TypeAlias = Mapping[Any, Any]

EVERYWHERE = ("401", "403")


@dataclass(frozen=True)
class Page:
    """A route that says something of the server itself.

    Attributes:
        answers: by status, the type of the answer; None is text.
        failures: statuses with which it may be refused.
        parameter: of its path, if it has one.
    """

    path: str
    summary: str
    answers: Mapping[str, Any]
    failures: Sequence[str] = EVERYWHERE
    parameter: str = ""


PAGES = (
    Page("/health", "Say that the server runs.", {"200": Health}, ("403",)),
    Page(
        "/ready",
        "Say whether all models are loaded, and have run once.",
        {"200": Readiness, "503": Readiness},
        ("403",),
    ),
    Page("/metrics", "Return counts for Prometheus.", {"200": None}),
    Page("/v1/models", "List the models.", {"200": ModelList}),
    Page("/v1/models/{name}", "Describe a model.", {"200": ModelEntry}, (*EVERYWHERE, "404"), "name"),
    Page("/openapi.json", "Return this description.", {"200": dict[str, Any]}),
)


def describe_api(endpoints: Sequence[Endpoint], has_keys: bool) -> dict[str, Any]:
    """Return the description of all routes."""
    schemas, named = describe_types(endpoints)
    failures = {status: describe_failure(status, schemas) for status in FAILURES}
    paths: dict[str, Any] = {page.path: {"get": describe_page(page, schemas, failures)} for page in PAGES}
    for endpoint in endpoints:
        paths[endpoint.path] = {"post": describe_endpoint(endpoint, schemas, failures)}
    api: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "PlanForge", "version": version("planforge")},
        "paths": paths,
        "components": {"schemas": named},
    }
    if has_keys:
        api["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        api["security"] = [{"key": []}]
        for path in OPEN:
            if path in paths:
                paths[path]["get"]["security"] = []
    return api


def describe_types(endpoints: Sequence[Endpoint]) -> tuple[Schemas, dict[str, Any]]:
    """Return the schemas of all types, and by their names those that they refer to."""
    kinds = [ErrorAnswer, *(kind for page in PAGES for kind in page.answers.values() if kind)]
    for endpoint in endpoints:
        kinds += [endpoint.body, endpoint.answer, *([endpoint.event] if endpoint.event else [])]
    described, named = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    for schema in named.values():
        schema["description"] = schema["description"].partition("\n")[0]
        schema["additionalProperties"] = False  # of the encoders' dataclasses too
    return dict(zip(kinds, described, strict=True)), named


def describe_page(page: Page, schemas: Schemas, failures: Mapping[str, Any]) -> dict[str, Any]:
    """Return the operation of a route that says something of the server itself."""
    responses = {status: failures[status] for status in page.failures}
    for status, kind in page.answers.items():
        media_type = "text/plain" if kind is None else "application/json"
        schema = {"type": "string"} if kind is None else schemas[kind]
        description = "Done." if status == "200" else FAILURES[status]
        responses[status] = {"description": description, "content": {media_type: {"schema": schema}}}
    operation: dict[str, Any] = {"summary": page.summary, "responses": responses}
    if page.parameter:
        place = {"name": page.parameter, "in": "path", "required": True, "schema": {"type": "string"}}
        operation["parameters"] = [place]
    return operation


def describe_endpoint(endpoint: Endpoint, schemas: Schemas, failures: Mapping[str, Any]) -> dict[str, Any]:
    """Return the operation of a route that a model answers."""
    content: dict[str, Any] = {"application/json": {"schema": schemas[endpoint.answer]}}
    done = "Done."
    if endpoint.event is not None:
        done = 'Done; a stream has events "data: " and JSON as x-event says, and "data: [DONE]" at its end.'
        content["text/event-stream"] = {"x-event": schemas[endpoint.event]}
    bodies = {"application/json": {"schema": schemas[endpoint.body]}}
    if endpoint.takes_form:
        bodies[FORM] = {"schema": describe_form(endpoint.body)}
    return {
        "summary": endpoint.summary,
        "requestBody": {"required": True, "content": bodies},
        "responses": {"200": {"description": done, "content": content}, **failures},
    }


def describe_form(body: type[Body]) -> dict[str, Any]:
    """Return the schema of a body as a form, in which files are not in base64."""
    schema = dict(describe_body(body))
    schema["properties"] = {
        name: {"type": "string", "contentMediaType": "application/octet-stream"}
        if one.get("contentEncoding") == "base64"
        else one
        for name, one in schema["properties"].items()
    }
    return schema


def describe_failure(status: str, schemas: Schemas) -> dict[str, Any]:
    """Return the answer of a status other than 200."""
    content = {"application/json": {"schema": schemas[ErrorAnswer]}}
    return {"description": FAILURES[status], "content": content}
