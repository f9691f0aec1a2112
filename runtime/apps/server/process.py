"""The server as a process: uvicorn with our limits, which stops in order."""

from __future__ import annotations

import asyncio
import logging
import math
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn
from starlette.applications import Starlette

from .limits import bound_connections
from .registry import Registry
from .settings import ServerSettings

log = logging.getLogger("planforge")

KEEP_ALIVE_SECONDS = 15
LEFT_SECONDS = 5  # for what ends after its client was cut off


class Server(uvicorn.Server):
    """uvicorn's server, whose requests are refused once it is to stop, and which stops if a model fails.

    Args:
        config: uvicorn's.
        registry: has the models.
        announce_ready: called once, when all models are loaded.
    """

    def __init__(
        self, config: uvicorn.Config, registry: Registry, announce_ready: Callable[[], object] | None
    ) -> None:
        super().__init__(config)
        self.registry = registry
        self.grace = registry.settings.grace
        self.announce_ready = announce_ready

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Take a signal that asks to stop."""
        self.registry.closing = True
        super().handle_exit(sig, frame)

    async def on_tick(self, counter: int) -> bool:
        """Return whether to stop; called ten times a second."""
        if self.registry.failure is not None:
            self.should_exit = True
        if self.registry.ready and self.announce_ready is not None:
            self.announce_ready()
            self.announce_ready = None
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop; what is answered then may go on for the grace."""
        timer = asyncio.get_running_loop().call_later(self.grace, self.cut_off)
        await super().shutdown(sockets)
        timer.cancel()

    def cut_off(self) -> None:
        """End the connections that are left; their requests are cancelled as those of clients that left."""
        connections = list(self.server_state.connections)
        if connections:
            log.warning("requests cut off %g s (--grace) after the stop: %d", self.grace, len(connections))
        for connection in connections:
            connection.transport.abort()


def make_server(
    app: Starlette, settings: ServerSettings, announce_ready: Callable[[], object] | None = None
) -> Server:
    """Return a server of an application that `make_app` returned; see `Server`."""
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
        timeout_graceful_shutdown=math.ceil(settings.grace) + LEFT_SECONDS,
        h11_max_incomplete_event_size=settings.header_bytes,
    )
    return Server(config, app.state.registry, announce_ready)
