"""The server as an ASGI application: routes, who may call them, and how errors are answered."""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import BaseRoute, Route

from ...model import Model
from ..explain import page as explanation_page
from .access import EXPLANATIONS, TYPES, AccessMiddleware, Rules
from .answers import Health, ModelList, Readiness
from .auth import KeyRing
from .calls import Call, read_body, read_parameters
from .endpoints import ENDPOINTS, Endpoint
from .errors import ApiError, find_api_error
from .json_text import JsonResponse
from .metrics import MEDIA_TYPE
from .openapi import describe_api
from .readers import Readers
from .registry import Loader, Registry
from .settings import ServerSettings

LONGEST_PATH = 60  # characters of one that is perhaps mistyped
PAGE = Path(__file__).parent / "page"
# What draws explanations, and what any page begins with: files of the page that `planforge explain` writes.
EXPLANATION_FILES = {
    f"{EXPLANATIONS}{name}": explanation_page.FOLDER / name for name in explanation_page.SHARED
}
Handler = Callable[[Request], Awaitable[Response]]


def make_app(models: Mapping[str, Model | Loader], settings: ServerSettings | None = None) -> Starlette:
    """Return a server of models as an ASGI application.

    Args:
        models: by their names; of a function that loads one, the model is there some time after the start,
            when it has run once. One that is loaded already is taken as it is, and never closed.
        settings: see `ServerSettings`.

    Returns:
        An application, whose `state.registry` has the models.
    """
    settings = settings or ServerSettings()
    registry = Registry(models, settings)
    readers = Readers(settings)
    rules = Rules(KeyRing(settings.keys), settings.hosts, registry.metrics)

    @contextlib.asynccontextmanager
    async def run(app: Starlette) -> AsyncIterator[None]:
        """Load the models while the server answers already; free them at its end."""
        # No thread of a pool, whose end the loop's own end would wait for.
        loading = threading.Thread(target=registry.load, name="planforge-loader", daemon=True)
        loading.start()
        yield
        registry.closing = True
        await asyncio.to_thread(loading.join, settings.grace)
        await asyncio.to_thread(registry.close)
        readers.close()

    middleware = [Middleware(AccessMiddleware, rules=rules)]
    if settings.origins:
        middleware.insert(0, allow_origins(settings.origins))
    routes = [*list_plain_routes(registry, settings)]
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
        allow_headers=["*"],  # OpenAI's client sends a dozen of its own, and newer ones more
        expose_headers=["x-request-id", "retry-after"],
    )


def make_handler(endpoint: Endpoint, registry: Registry, readers: Readers) -> Handler:
    """Return what answers the requests of an endpoint."""
    settings = registry.settings

    async def handle(request: Request) -> Response:
        began = time.perf_counter()
        served = None
        try:
            data = await read_body(request, settings, endpoint.takes_form)
            arrival = time.monotonic()
            latest = arrival + settings.timeout
            body = await read_parameters(request, data, endpoint.body, readers, latest)
            served = registry.find(body.model, endpoint.capability)
            call = Call(
                request=request,
                body=body,
                served=served,
                size=len(data),
                client=request.state.client,
                deadline=min(arrival + (body.timeout or settings.timeout), latest),
                max_bytes=settings.body_bytes,
                readers=readers,
            )
            return await endpoint.handle(call)
        except Exception as error:
            return find_api_error(error, endpoint.names).to_response()
        finally:
            if served is not None:
                registry.metrics.observe(served.model_name, "request", time.perf_counter() - began)

    return handle


def list_plain_routes(registry: Registry, settings: ServerSettings) -> list[BaseRoute]:
    """Return the routes that say something of the server itself."""
    api = describe_api(ENDPOINTS, bool(settings.keys))

    async def say_health(request: Request) -> Response:
        return JsonResponse(Health("ok"))

    async def say_ready(request: Request) -> Response:
        is_ready = registry.ready
        states = {name: registry.find_state(name) for name in registry.names}
        return JsonResponse(Readiness("ready" if is_ready else "not ready", states), 200 if is_ready else 503)

    async def show_metrics(request: Request) -> Response:
        return Response(registry.metrics.write(), media_type=MEDIA_TYPE)

    async def list_models(request: Request) -> Response:
        return JsonResponse(ModelList([registry.describe(name) for name in registry.list_names()]))

    async def show_model(request: Request) -> Response:
        return JsonResponse(registry.describe(request.path_params["name"]))

    async def show_api(request: Request) -> Response:
        return JsonResponse(api)

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

    def make_route(path: str, file: Path) -> BaseRoute:
        async def show_file(request: Request) -> Response:
            return FileResponse(file, media_type=TYPES[file.suffix], headers={"Cache-Control": "no-cache"})

        return Route(path, show_file)

    own = [file for file in sorted(PAGE.iterdir()) if file.suffix in TYPES]
    files = {"/" if file.name == "index.html" else f"/{file.name}": file for file in own} | EXPLANATION_FILES
    return [make_route(path, file) for path, file in files.items()]


async def answer_http_error(request: Request, error: Exception) -> Response:
    """Answer an unknown path or method in OpenAI's form; a mistyped path with the one that is like it."""
    assert isinstance(error, HTTPException)
    path = request.url.path
    message = f"{request.method} {path[:200]}: {error.detail}"
    if error.status_code == 404:
        paths = [one.path for one in ENDPOINTS] + ["/v1/models", "/health", "/ready", "/metrics"]
        close = difflib.get_close_matches(path[:LONGEST_PATH], paths, n=1, cutoff=0.8)
        message += f"; did you mean {close[0]!r}?" if close else ""
    response = ApiError(error.status_code, message).to_response()
    response.headers.update(error.headers or {})
    return response


async def answer_error(request: Request, error: Exception) -> Response:
    return find_api_error(error).to_response()
