"""Who may call the server, and by which name."""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .auth import KeyRing
from .errors import ApiError
from .metrics import Metrics
from .request_log import REQUEST_ID, name_requests_in_log

log = logging.getLogger("planforge")

PLAIN_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
MAX_PATH = 200  # characters of a path in the log
# Kinds of the page's files, by the endings of their names.
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
EXPLANATIONS = "/explain/"  # the folder of those that it shares with the page of an explanation
# Paths that need no key, beside the page's files: they say nothing that a key protects.
OPEN = ("/", "/health", "/ready")
SECURITY = (
    (b"x-content-type-options", b"nosniff"),
    (
        b"content-security-policy",
        b"default-src 'self'; img-src 'self' data:; frame-ancestors 'none'; base-uri 'none';"
        b" form-action 'none'",
    ),
    (b"referrer-policy", b"no-referrer"),
)


@dataclass(frozen=True)
class Rules:
    """Who may call.

    Attributes:
        keys: of which a request must have one, if there are any.
        hosts: names by which the server may be called; any where there are none.
        metrics: counts the answers.
    """

    keys: KeyRing
    hosts: Sequence[str]
    metrics: Metrics


class AccessMiddleware:
    """Refuses who has no key, or calls the server by a name that is not its own; counts the answers.

    A page of another site may let its own name point here (DNS rebinding); its requests have that name.
    """

    def __init__(self, app: ASGIApp, rules: Rules) -> None:
        self.app = app
        self.rules = rules
        name_requests_in_log()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_id = choose_id(Headers(scope=scope).get("x-request-id", ""))
        REQUEST_ID.set(request_id)
        began = time.perf_counter()
        refusal = self.check(scope)
        status = 0

        async def count_and_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                own = (b"x-request-id", request_id.encode())
                message["headers"] = [*message.get("headers", ()), *SECURITY, own]
                self.rules.metrics.count_request(find_route(scope), status)
            await send(message)

        app = self.app if refusal is None else refusal.to_response()
        try:
            await app(scope, receive, count_and_send)
        finally:
            seconds = time.perf_counter() - began
            path = scope["path"][:MAX_PATH]
            log.info("%s %a %d %.3f s", scope["method"], path, status, seconds)

    def check(self, scope: Scope) -> ApiError | None:
        """Return why a request is refused, if it is; note whose it is."""
        headers = Headers(scope=scope)
        rules = self.rules
        host = find_name(headers.get("host", ""))
        if rules.hosts and host not in rules.hosts:
            return ApiError(
                403,
                f"the Host {host!r:.200} is not allowed; use one of {', '.join(rules.hosts)}, or start the"
                " server with --api-key-file, which allows any host",
            )
        client = scope["client"][0] if scope.get("client") else ""
        path = scope["path"].removeprefix(scope.get("root_path", ""))  # of an application that it is part of
        if rules.keys and path not in OPEN and not is_page_file(path):
            try:
                client = rules.keys.find_client(headers.get("authorization"))
            except ApiError as refusal:
                return refusal
        scope.setdefault("state", {})["client"] = client
        return None


def choose_id(given: str) -> str:
    """Return the id that a client or a proxy gave a request, if it may stand in a log; else a new one."""
    return given if PLAIN_ID.fullmatch(given) else f"req_{uuid.uuid4().hex}"


def find_name(host: str) -> str:
    """Return the name of a Host header, without its port: "localhost", "[::1]"."""
    if host.startswith("["):
        name, bracket, _ = host.partition("]")
        return (name + bracket).lower()
    return host.partition(":")[0].lower()


def is_page_file(path: str) -> bool:
    """Return whether a path is of the page's folders, whether there is such a file or not."""
    folder, slash, name = path.rpartition("/")
    return folder + slash in ("/", EXPLANATIONS) and Path(name).suffix in TYPES


def find_route(scope: Scope) -> str:
    """Return the route of a request; of paths that there are not, one name for all."""
    route = scope.get("route")
    return getattr(route, "path", "other")
