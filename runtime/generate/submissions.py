"""Requests that callers submit to one model, which share its engine."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ..decoding.decoder import Decoder
from ..errors import ClosedError, InputError
from ..option_checks import check_options, check_switch, check_whole
from ..scheduling.options import ScheduleOptions, observe_nothing
from ..scheduling.queue import count_places
from ..scheduling.worker import find_deadline
from .pending import PendingGeneration
from .request import GenerationRequest
from .row import Row
from .row_reader import RowReader
from .scheduler import GenerationScheduler, ScheduleSettings, count_rows

RUNNING = 8
PREFIX_MEMORY = 256_000_000  # bytes
QUEUE_SIZE = 128
HINTS = {  # of options that do not go with requests that share an engine
    "speculative": "requests that share a step get one token each; leave it out",
    "reuse_prompt": "submit always reuses what earlier requests computed; leave it out",
    "on_token": "iterate over what submit returns, or subscribe to it",
}


class Submissions:
    """The requests that share one decoder, and the settings by which they do.

    Args:
        decoder: whose graph runs.
        rows: makes rows of prompts.
    """

    def __init__(self, decoder: Decoder, rows: RowReader) -> None:
        self.decoder = decoder
        self.rows = rows
        self._lock = threading.Lock()
        self._settings: ScheduleSettings | None = None
        self._scheduler: GenerationScheduler | None = None
        self._closed = False

    def configure(self, options: ScheduleOptions) -> None:
        """Say how requests share the engine, before the first is submitted."""
        settings = self._read(options)
        with self._lock:
            if self._scheduler is not None:
                raise InputError("schedule() must be called before the first submit(), not after it")
            self._settings = settings

    def submit(
        self,
        read: Callable[[RowReader], list[Row]],
        client: str = "",
        timeout: float | None = None,
    ) -> list[PendingGeneration]:
        """Let requests wait for their turn: all, or where one is refused, none.

        `read` makes their rows for the context that requests have.
        """
        deadline = find_deadline(timeout)
        settings = self._find_settings()
        rows = read(replace(self.rows, max_length=settings.context))
        refuse_options(rows[0].request)
        pendings = [PendingGeneration(row, client, deadline) for row in rows]
        scheduler = self._open(settings)
        try:
            for pending in pendings:
                scheduler.submit(pending)
        except BaseException:
            for pending in pendings:
                pending.cancel()
            raise
        return pendings

    def count(self) -> tuple[int, int]:
        """Return how many requests wait, and how many are being answered."""
        return (0, 0) if self._scheduler is None else self._scheduler.count_requests()

    def count_places(self) -> int:
        """Return how many requests a client may submit at once, where no others run or wait."""
        settings = self._find_settings()
        rows, _ = count_rows(self.decoder, settings)
        return count_places(settings.queue_size + rows, settings.divide_queue)

    def free_memory(self) -> None:
        """Drop what earlier requests left, unless a request runs."""
        if self._scheduler is not None:
            self._scheduler.free_memory()

    def stop(self) -> None:
        """Take no more requests; wait for nothing."""
        with self._lock:
            self._closed = True
        if self._scheduler is not None:
            self._scheduler.stop()

    def close(self) -> None:
        """End all requests."""
        self.stop()
        if self._scheduler is not None:
            self._scheduler.close()

    def _find_settings(self) -> ScheduleSettings:
        with self._lock:
            if self._settings is None:
                self._settings = self._read({})
            return self._settings

    def _open(self, settings: ScheduleSettings) -> GenerationScheduler:
        with self._lock:
            if self._closed:
                raise ClosedError
            if self._scheduler is None:
                self._scheduler = GenerationScheduler(self.decoder, settings)
            return self._scheduler

    def _read(self, options: ScheduleOptions) -> ScheduleSettings:
        check_options(options, ScheduleOptions)
        most = self.decoder.artifact.axis("batch").max
        context = self.rows.max_length
        settings: dict[str, Any] = {
            "running": min(RUNNING, most),
            "context": context,
            "prefix_memory": PREFIX_MEMORY,
            "queue_size": QUEUE_SIZE,
            "share_prompts": True,
            "divide_queue": False,
            "observe": observe_nothing,
            **options,
        }
        check_whole("running", settings["running"], 1, most, what="the rows that the bundle allows")
        check_whole("context", settings["context"], 2, context, what="the model's context")
        check_whole("prefix_memory", settings["prefix_memory"], 0)
        check_whole("queue_size", settings["queue_size"], 1)
        for name in ("share_prompts", "divide_queue"):
            check_switch(name, settings[name])
        return ScheduleSettings(**settings)


def refuse_options(request: GenerationRequest) -> None:
    """Refuse what needs an engine of its own."""
    if request.num_beams > 1:
        raise InputError(f"num_beams={request.num_beams} does not go with submit; use generate")
    for name, hint in HINTS.items():
        value = getattr(request, name)
        if value:
            raise InputError(f"{name}={value!r:.80} does not go with submit; {hint}")
