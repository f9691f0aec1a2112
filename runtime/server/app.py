"""The server as an ASGI application: routes, who may call them, and how errors are answered."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..model import Model
from .auth import KeyRing
from .calls import Call, Readers, read_body, read_parameters
from .endpoints import ENDPOINTS, Endpoint
from .errors import ApiError, find_api_error
from .metrics import MEDIA_TYPE, Metrics
from .openapi import describe_api
from .registry import Loader, Registry
from .settings import ServerSettings

PAGE = Path(__file__).parent / "page"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
# Paths that need no key, beside the page's files: they say nothing that a key protects.
OPEN = ("/", "/health", "/ready")
SECURITY = (
    (b"x-content-type-options", b"nosniff"),
    (
        b"content-security-policy",
        b"default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    ),
    (b"referrer-policy", b"no-referrer"),
)

Handler = Callable[[Request], Awaitable[Response]]


def make_app(models: Mapping[str, Model | Loader], settings: ServerSettings | None = None) -> Starlette:
    """Return a server of models as an ASGI application.

    Args:
        models: by their names; of a function that loads one, the model is there some time after the start.
        settings: see `ServerSettings`.

    Returns:
        An application, whose `state.registry` has the models.
    """
    settings = settings or ServerSettings()
    metrics = Metrics()
    registry = Registry(models, settings, metrics)
    readers = Readers(settings.readers)
    guard = Guard.Rules(KeyRing(settings.keys), settings.hosts, metrics)

    @contextlib.asynccontextmanager
    async def run(app: Starlette) -> AsyncIterator[None]:
        """Load the models while the server answers already; free them at its end."""
        loop = asyncio.get_running_loop()
        loading = loop.run_in_executor(None, registry.load)
        yield
        registry.closing = True
        await loading
        await loop.run_in_executor(None, registry.close)
        readers.close()

    middleware = [Middleware(Guard, rules=guard)]
    if settings.origins:
        middleware.insert(0, allow_origins(settings.origins))
    routes = [*list_plain_routes(registry, metrics, settings)]
    routes += [Route(one.path, make_handler(one, registry, readers), methods=["POST"]) for one in ENDPOINTS]
    if settings.page:
        routes += list_page_routes()
    app = Starlette(
        routes=routes,
        middleware=middleware,
        lifespan=run,
        exception_handlers={
            HTTPException: answer_http_error,
            ApiError: answer_error,
            Exception: answer_error,
        },
    )
    app.state.registry = registry
    return app


def allow_origins(origins: Sequence[str]) -> Middleware:
    return Middleware(
        CORSMiddleware,
        allow_origins=list(origins),
        allow_methods=["GET", "POST"],
        allow_headers=["authorization", "content-type"],
    )


def make_handler(endpoint: Endpoint, registry: Registry, readers: Readers) -> Handler:
    """Return what answers the requests of an endpoint."""
    settings = registry.settings

    async def handle(request: Request) -> Response:
        began = time.perf_counter()
        served = None
        try:
            data = await read_body(request, settings)
            pool = readers.choose(len(data))
            body = await read_parameters(data, endpoint.body, pool)
            served = registry.find(body.get("model"), endpoint.capability)
            call = Call(
                request=request,
                body=body,
                served=served,
                client=f"{request.state.client} {body.get('user', '')}",
                timeout=min(body.get("timeout", settings.timeout), settings.timeout),
                readers=pool,
            )
            return await endpoint.handle(call)
        except Exception as error:
            return find_api_error(error).to_response()
        finally:
            if served is not None:
                registry.metrics.observe(served.name, "request", time.perf_counter() - began)

    return handle


def list_plain_routes(registry: Registry, metrics: Metrics, settings: ServerSettings) -> list[BaseRoute]:
    """Return the routes that say something of the server itself."""
    api = describe_api(ENDPOINTS, bool(settings.keys))

    async def say_health(request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def say_ready(request: Request) -> Response:
        models = {name: registry.find_state(name) for name in registry.names}
        status = 200 if registry.ready else 503
        return JSONResponse({"status": "ready" if registry.ready else "not ready", "models": models}, status)

    async def show_metrics(request: Request) -> Response:
        loaded = list(registry.loaded.items())
        counts = [(name, served.model.count_requests) for name, served in loaded]  # type: ignore[attr-defined]
        return PlainTextResponse(metrics.write(counts), media_type=MEDIA_TYPE)

    async def list_models(request: Request) -> Response:
        data = [served.to_json() for served in list(registry.loaded.values())]
        return JSONResponse({"object": "list", "data": data})

    async def show_model(request: Request) -> Response:
        return JSONResponse(registry.find(request.path_params["name"]).to_json())

    async def show_api(request: Request) -> Response:
        return JSONResponse(api)

    return [
        Route("/health", say_health),
        Route("/ready", say_ready),
        Route("/metrics", show_metrics),
        Route("/v1/models", list_models),
        Route("/v1/models/{name:path}", show_model),
        Route("/openapi.json", show_api),
    ]


def list_page_routes() -> list[BaseRoute]:
    """Return a route for each file of the page, index.html at /."""

    def make_route(path: Path) -> BaseRoute:
        async def show_file(request: Request) -> Response:
            return FileResponse(path, media_type=TYPES[path.suffix], headers={"Cache-Control": "no-cache"})

        return Route("/" if path.name == "index.html" else f"/{path.name}", show_file)

    return [make_route(path) for path in sorted(PAGE.iterdir()) if path.suffix in TYPES]


async def answer_http_error(request: Request, error: Exception) -> Response:
    """Answer an unknown path or method in OpenAI's form."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path[:200]}: {error.detail}"
    response = ApiError(error.status_code, message).to_response()
    response.headers.update(error.headers or {})
    return response


async def answer_error(request: Request, error: Exception) -> Response:
    return find_api_error(error).to_response()


class Guard:
    """Refuses who has no key, or calls the server by a name that is not its own; counts the answers.

    A page of another site may let its own name point here (DNS rebinding); its requests have that name.
    """

    class Rules:
        """Who may call."""

        def __init__(self, keys: KeyRing, hosts: Sequence[str], metrics: Metrics) -> None:
            self.keys = keys
            self.hosts = hosts
            self.metrics = metrics

    def __init__(self, app: ASGIApp, rules: Rules) -> None:
        self.app = app
        self.rules = rules

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        refusal = self.check(scope)

        async def count_and_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *SECURITY]
                self.rules.metrics.count_request(find_route(scope), message["status"])
            await send(message)

        app = self.app if refusal is None else refusal.to_response()
        await app(scope, receive, count_and_send)

    def check(self, scope: Scope) -> ApiError | None:
        """Return why a request is refused, if it is."""
        headers = Headers(scope=scope)
        rules = self.rules
        host = headers.get("host", "").rpartition(":")[0] or headers.get("host", "")
        if rules.hosts and host.lower() not in rules.hosts:
            return ApiError(
                403,
                f"this server is not called {host!r:.200} but {', '.join(rules.hosts)}; with an API key it"
                " answers to any name",
            )
        client = scope["client"][0] if scope.get("client") else ""
        path = scope["path"].removeprefix(scope.get("root_path", ""))  # of an application that it is part of
        if rules.keys and path not in OPEN and not is_page_file(path):
            known = rules.keys.find_client(headers.get("authorization"))
            if known is None:
                return ApiError(401, "a key is needed: Authorization: Bearer KEY", code="invalid_api_key")
            client = known
        scope.setdefault("state", {})["client"] = client
        return None


def is_page_file(path: str) -> bool:
    """Return whether a path is of the page's folder, whether there is such a file or not."""
    return path.count("/") == 1 and Path(path).suffix in TYPES


def find_route(scope: Scope) -> str:
    """Return the route of a request; of paths that there are not, one name for all."""
    route = scope.get("route")
    return getattr(route, "path", "other")
