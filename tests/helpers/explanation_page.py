"""What a reader of an explanation's page does, and what the page shows."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Generator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from .browser import Page

Show = Callable[..., Page]
FIGURES = "[...document.querySelectorAll('.token')].map((t) => t.dataset.figure)"
SHARES = "[...document.querySelectorAll('.token')].map((t) => Number(t.style.getPropertyValue('--share')))"
GROUNDS = "[...document.querySelectorAll('.token')].map((t) => getComputedStyle(t).backgroundColor)"
TONES = "[...document.querySelectorAll('.token')].map((t) => t.style.getPropertyValue('--tone'))"
CURRENT = "Number(document.querySelector('.token.current').dataset.token)"
STATUS = "document.querySelector('.explain [role=status]').textContent"
SIDE = "document.querySelector('.beside').innerText"
READING = "document.querySelector('.text-place > .reading').textContent"


def open_view(page: Page, view: str) -> None:
    page.click(f".tabs [data-view={view}]")
    assert page.evaluate("document.querySelector('.tabs [aria-selected=true]').dataset.view") == view
    if view == "attention":
        page.wait("document.querySelector('.beside .shares')")


def choose(page: Page, label: str, value: str) -> None:
    """Choose an option of the select with this label."""
    labels = "[...document.querySelectorAll('.controls label')]"
    select = f"{labels}.find((one) => one.textContent === {label!r}).control"
    page.evaluate(f"{select}.value = {value!r}")
    assert page.evaluate(f"{select}.value") == value
    page.evaluate(f"{select}.dispatchEvent(new Event('change'))")


def token(place: int) -> str:
    """Return the selector of a token of the text."""
    return f"[data-token='{place}'].token"


def percent(share: float, *, signed: bool = False) -> str:
    """Return a share as the page writes it."""
    size = abs(share)
    figure = "<0.1" if 0 < size < 0.0005 else f"{100 * size:.{0 if size > 0.0995 else 1}f}"
    sign = "" if size < 0.00005 else "\u2212" if share < 0 else "+" if signed else ""
    return f"{sign}{figure} %"


def shares_of(row: list[float | None]) -> list[float]:
    """Return a row's shares, 0 for what is not read."""
    values = np.array([value or 0.0 for value in row])
    shares: list[float] = (values / np.abs(values).sum()).tolist()
    return shares


def check_tints(
    page: Page, shares: list[float], *, faintest: float = 0.01, tone: int | None = None, most: float = 0.0
) -> None:
    """Tokens are tinted by their shares of the largest, in the sign's colour, with the percentages below."""
    most = most or max(map(abs, shares))
    assert page.evaluate(SHARES) == pytest.approx([abs(share) / most for share in shares], abs=6e-4)
    expected = ["" if abs(s) < faintest else f"{100 * s:.0f}".replace("-", "\u2212") for s in shares]
    assert page.evaluate(FIGURES) == expected
    signs = [int(share < 0) if tone is None else tone for share in shares]
    assert page.evaluate(TONES) == [f"var(--tone-{sign})" for sign in signs]
    assert len(set(page.evaluate(GROUNDS))) > 3


@contextlib.contextmanager
def serving_folder(folder: Path) -> Generator[str, None, None]:
    """Serve the files of a folder."""

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()
