"""The id of the request that is answered, in every line of the log that it causes."""

from __future__ import annotations

import logging
from contextvars import ContextVar

log = logging.getLogger("planforge")

REQUEST_ID: ContextVar[str | None] = ContextVar("request_id", default=None)  # of what is answered


def add_request_id(record: logging.LogRecord) -> bool:
    """Put the request's id behind a line of the log, if the line has one."""
    request_id = REQUEST_ID.get()
    if request_id is not None:
        record.msg = f"{record.getMessage()} request_id={request_id}"
        record.args = ()
    return True


def name_requests_in_log() -> None:
    """Let each line of PlanForge's log name the request that it is about."""
    log.addFilter(add_request_id)  # a second time it is the same one
