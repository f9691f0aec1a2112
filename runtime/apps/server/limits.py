"""Bounds what connections may take: their number, their headers, and how long both ways may take."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

from uvicorn.protocols.http.h11_impl import H11Protocol

from .settings import ServerSettings


class BoundedProtocol(H11Protocol):
    """Closes a connection that is one too many, or whose headers take too long, or that nobody reads.

    The last is looked at while nothing is written: while an answer waits for room, and when it is whole.
    """

    limits: ClassVar[ServerSettings]
    header_timer: asyncio.TimerHandle | None = None
    write_timer: asyncio.TimerHandle | None = None
    unsent = 0  # bytes that waited for the client when the timer began

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > self.limits.connections:
            transport.close()
            return
        self.start_header_timer()

    def data_received(self, data: bytes) -> None:
        if self.header_timer is None and self.is_idle:
            self.start_header_timer()
        super().data_received(data)
        if not self.is_idle:
            self.stop_header_timer()
            if not self.flow.write_paused:
                self.stop_write_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self.stop_header_timer()
        super().connection_lost(exc)
        self.stop_write_timer()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.start_write_timer()

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.is_idle:
            self.stop_write_timer()

    @property
    def is_idle(self) -> bool:
        """Whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def start_header_timer(self) -> None:
        self.header_timer = self.loop.call_later(self.limits.header_seconds, self.transport.close)

    def stop_header_timer(self) -> None:
        if self.header_timer is not None:
            self.header_timer.cancel()
            self.header_timer = None

    def start_write_timer(self) -> None:
        self.stop_write_timer()
        self.unsent = self.transport.get_write_buffer_size()
        if self.unsent:
            self.write_timer = self.loop.call_later(self.limits.write_seconds, self.check_write_progress)

    def stop_write_timer(self) -> None:
        if self.write_timer is not None:
            self.write_timer.cancel()
            self.write_timer = None

    def check_write_progress(self) -> None:
        """End a connection whose client took nothing in its time; its request is cancelled."""
        if self.transport.get_write_buffer_size() >= self.unsent:
            self.transport.abort()
        else:
            self.start_write_timer()

    def on_response_complete(self) -> None:
        self.stop_header_timer()
        super().on_response_complete()
        if self.is_idle:
            self.start_write_timer()


def bound_connections(settings: ServerSettings) -> type[H11Protocol]:
    """Return uvicorn's protocol for HTTP with our limits; that on the size of headers is its own option."""

    class Protocol(BoundedProtocol):
        limits = settings

    return Protocol
