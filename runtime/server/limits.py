"""Bounds what connections may take: their number, their headers, and the time these take to come."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from .settings import ServerSettings


def bound_connections(settings: ServerSettings) -> type[H11Protocol]:
    """Return uvicorn's protocol for HTTP with our limits; their size is an option of uvicorn's."""

    class BoundedProtocol(H11Protocol):
        """Closes a connection that is one too many, or whose headers take too long."""

        header_timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            if len(self.connections) > settings.connections:
                transport.close()
                return
            self.start_header_timer()

        def data_received(self, data: bytes) -> None:
            if self.header_timer is None and self.is_idle:
                self.start_header_timer()
            super().data_received(data)
            if not self.is_idle:
                self.stop_header_timer()

        def connection_lost(self, exc: Exception | None) -> None:
            self.stop_header_timer()
            super().connection_lost(exc)

        @property
        def is_idle(self) -> bool:
            """Whether no request is being answered."""
            return self.cycle is None or self.cycle.response_complete

        def start_header_timer(self) -> None:
            self.header_timer = self.loop.call_later(settings.header_seconds, self.transport.close)

        def stop_header_timer(self) -> None:
            if self.header_timer is not None:
                self.header_timer.cancel()
                self.header_timer = None

        def on_response_complete(self) -> None:
            self.stop_header_timer()
            super().on_response_complete()

    return BoundedProtocol
