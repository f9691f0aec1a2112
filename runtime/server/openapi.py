"""/openapi.json, made of the tables by which requests are checked."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from .endpoints import Endpoint
from .schema import Schema

ERROR: Schema = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
            "required": ["message", "type", "param", "code"],
        }
    },
    "required": ["error"],
}
FAILURES = {
    "400": "A parameter that cannot be used.",
    "401": "No key that this server accepts.",
    "403": "Called by a name that is not this server's.",
    "404": "No such model.",
    "408": "The body came too slowly.",
    "413": "The body is too large.",
    "415": "The body is not JSON.",
    "429": "Too many requests wait.",
    "500": "The model failed.",
    "501": "An extra that this needs is not installed.",
    "503": "The model is loading, or the server is stopping.",
    "504": "The answer was not there in time.",
}
PLAIN = {
    "/health": ("Say that the server runs.", "application/json", ()),
    "/ready": ("Say whether all models are loaded.", "application/json", ("503",)),
    "/metrics": ("Return counts for Prometheus.", "text/plain", ("401", "403")),
    "/v1/models": ("List the models.", "application/json", ("401", "403")),
    "/openapi.json": ("Return this description.", "application/json", ("401", "403")),
}


def describe_api(endpoints: Sequence[Endpoint], has_keys: bool) -> dict[str, Any]:
    """Return the description of all routes."""
    paths: dict[str, Any] = {}
    for path, (summary, media_type, failures) in PLAIN.items():
        responses = {"200": {"description": "Done.", "content": {media_type: {}}}}
        paths[path] = {"get": {"summary": summary, "responses": responses | describe_failures(failures)}}
    for endpoint in endpoints:
        content: dict[str, Any] = {
            "application/json": {"schema": {"type": "object", "required": list(endpoint.answer)}}
        }
        if "stream" in endpoint.body["properties"]:
            content["text/event-stream"] = {}
        paths[endpoint.path] = {
            "post": {
                "summary": endpoint.summary,
                "requestBody": {"required": True, "content": {"application/json": {"schema": endpoint.body}}},
                "responses": {
                    "200": {"description": "Done.", "content": content},
                    **describe_failures(FAILURES),
                },
            }
        }
    api: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "PlanForge", "version": version("planforge")},
        "paths": paths,
        "components": {"schemas": {"Error": ERROR}},
    }
    if has_keys:
        api["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        api["security"] = [{"key": []}]
    return api


def describe_failures(statuses: Any) -> dict[str, Any]:
    schema = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {status: {"description": FAILURES[status], "content": schema} for status in statuses}
