"""The server as a process: uvicorn with our limits, which stops in order."""

from __future__ import annotations

from types import FrameType

import uvicorn
from starlette.applications import Starlette

from .limits import bound_connections
from .registry import Registry
from .settings import ServerSettings

KEEP_ALIVE_SECONDS = 15


class Server(uvicorn.Server):
    """uvicorn's server, whose requests are refused once it is to stop, and which stops if a model fails."""

    def __init__(self, config: uvicorn.Config, registry: Registry) -> None:
        super().__init__(config)
        self.registry = registry

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Take a signal that asks to stop."""
        self.registry.closing = True
        super().handle_exit(sig, frame)

    async def on_tick(self, counter: int) -> bool:
        """Return whether to stop; called ten times a second."""
        if self.registry.failure is not None:
            self.should_exit = True
        return await super().on_tick(counter)


def make_server(app: Starlette, settings: ServerSettings) -> Server:
    """Return a server of an application that `make_app` returned."""
    config = uvicorn.Config(
        app,
        http=bound_connections(settings),
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=max(1, round(settings.grace)),
        h11_max_incomplete_event_size=settings.header_bytes,
    )
    return Server(config, app.state.registry)
