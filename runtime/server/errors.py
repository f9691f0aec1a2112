"""Errors in OpenAI's form, and what each of ours becomes."""

from __future__ import annotations

import logging
import re

from starlette.responses import JSONResponse

from ..errors import (
    BackendUnavailableError,
    ClosedError,
    ContextLengthError,
    DeadlineError,
    InputError,
    PlanForgeError,
    QueueFullError,
    SchemaError,
)
from .answers import ErrorAnswer

log = logging.getLogger("planforge")

RETRY_SECONDS = 1  # after which a client may try again what was refused for want of room
PLACE = re.compile(r"texts\[\d+\]: ")  # which of several texts an error is about
FIRST_NAME = re.compile(r"(\w+)(?:=| is | names |\[)")  # a message about an option begins with its name
NAMES = {
    "max_new_tokens": "max_tokens",
    "truncate_dim": "dimensions",
}  # of ours that a client knows otherwise


class ApiError(Exception):
    """A request that is refused, or that failed: what its client gets to read."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry: bool = False,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.retry = retry

    def to_json(self) -> ErrorAnswer:
        """Return the body of the answer."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        if self.status == 401:
            kind = "authentication_error"
        if self.status == 429:
            kind = "rate_limit_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def to_response(self) -> JSONResponse:
        """Return the answer."""
        headers = {"Retry-After": str(RETRY_SECONDS)} if self.retry else {}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return JSONResponse(self.to_json(), self.status, headers)


def find_api_error(error: BaseException) -> ApiError:
    """Return what a client reads of an error; what it could not have caused goes to the log as well."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ContextLengthError):
        return ApiError(400, str(error), code="context_length_exceeded")
    if isinstance(error, SchemaError):
        param = "tools" if error.path.startswith("tools/") else "response_format"
        return ApiError(400, str(error), param=param, code="unsupported_schema")
    if isinstance(error, InputError):
        return ApiError(400, str(error), param=find_parameter(str(error)), code="invalid_value")
    if isinstance(error, QueueFullError):
        return ApiError(429, str(error), code="queue_full", retry=True)
    if isinstance(error, DeadlineError):
        return ApiError(504, str(error), code="timeout")
    if isinstance(error, ClosedError):
        return ApiError(503, "the server is stopping", code="closing", retry=True)
    if isinstance(error, BackendUnavailableError):  # names the extra to install
        return ApiError(501, str(error), code="not_installed")
    if isinstance(error, PlanForgeError):
        log.error("a request failed: %s", error)
        return ApiError(500, str(error), code="model_failed")
    log.error("a request failed", exc_info=error)
    return ApiError(500, "the request failed; the server's log says why", code="internal_error")


def find_parameter(message: str) -> str | None:
    """Return the parameter that the message of an InputError begins with."""
    place = PLACE.match(message)
    match = FIRST_NAME.match(message, 0 if place is None else place.end())
    if match is None:
        return None if place is None else "input"
    return NAMES.get(match[1], match[1])
