"""Errors in OpenAI's form, and what each of ours becomes."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import NoReturn

from ...errors import (
    BackendUnavailableError,
    ClosedError,
    ContextLengthError,
    DeadlineError,
    InputError,
    MemoryLimitError,
    PlanForgeError,
    QueueFullError,
    SchemaError,
)
from .answers import ErrorAnswer, ErrorFields
from .json_text import JsonResponse

log = logging.getLogger("planforge")

RETRY_SECONDS = 1  # after which a client may try again what was refused for want of room


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
        return ErrorAnswer(ErrorFields(str(self), kind, self.param, self.code))

    def to_response(self) -> JsonResponse:
        """Return the answer."""
        headers = {"Retry-After": str(RETRY_SECONDS)} if self.retry else {}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return JsonResponse(self.to_json(), self.status, headers)


def refuse(name: str, reason: str) -> NoReturn:
    """Raise the error of a parameter whose value cannot be used."""
    raise ApiError(400, f"{name} {reason}", param=name, code="invalid_value")


def find_api_error(error: BaseException, names: Mapping[str, str] | None = None) -> ApiError:
    """Return what a client reads of an error; what it could not have caused goes to the log as well.

    `names` are those that a route has for options of ours: see `Endpoint`.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InputError):
        param = find_parameter(error.option, names or {})
        message = translate_message(str(error), names or {})
        return ApiError(400, message, param=param, code=find_code(error))
    if isinstance(error, MemoryLimitError):  # says which size fits
        return ApiError(400, translate_message(str(error), names or {}), code="memory_limit")
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
    log.error("a request failed:", exc_info=error)
    return ApiError(500, "the request failed; see the server's log", code="internal_error")


def translate_message(message: str, names: Mapping[str, str]) -> str:
    """Return a message about options of ours in the words of a route: its parameters, and JSON's values."""
    message = re.sub(r" \(--[^()]*\)", "", message)  # an option of the command
    if names.get("height") == names.get("width") == "size":  # one parameter for both
        message = re.sub(r"height=(\d+) and width=(\d+)", r"size=\2x\1", message)
        message = message.replace("a height and a width", "a size")
    for ours, theirs in names.items():
        # Words such as "text" are parameters only where a value or an index follows.
        end = r"\b" if "_" in ours else r"(?=[=\[])"
        message = re.sub(rf"(?<![\w.]){ours}{end}", theirs, message)
    for ours, theirs in (("True", "true"), ("False", "false"), ("None", "null")):
        message = re.sub(rf"={ours}\b", f"={theirs}", message)
    return message


def find_code(error: InputError) -> str:
    """Return the code of what a request cannot be answered for."""
    if isinstance(error, ContextLengthError):
        return "context_length_exceeded"
    return "unsupported_schema" if isinstance(error, SchemaError) else "invalid_value"


def find_parameter(option: str | None, names: Mapping[str, str]) -> str | None:
    """Return the parameter of a route that an option of ours, such as "texts[2]", comes from."""
    if option is None:
        return None
    return names.get(option.partition("[")[0], option)
