"""A stand-in of the server, and the page of it."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from .....helpers.browser import Browser, Page
from .....helpers.page import PANEL, Open
from .....helpers.page_server import StandIn, stand_in


@pytest.fixture
def server() -> Generator[StandIn, None, None]:
    with stand_in() as server:
        yield server


@pytest.fixture
def open_page(browser: Browser, server: StandIn) -> Generator[Open, None, None]:
    """Open a tab of the page; in the end nothing may have gone wrong, and no request have left the server."""
    pages: list[Page] = []

    def open_tab(tab: str = "chat", width: int = 1200, height: int = 800, dark: bool = False) -> Page:
        page = browser.open(f"{server.url}#{tab}", width, height, dark=dark)
        pages.append(page)
        page.wait(f"{PANEL} ?? document.querySelector('#trouble:not([hidden]), #key:not([hidden])')")
        return page

    yield open_tab
    for page in pages:
        page.evaluate("1")  # hears what is still on its way
        page.close()
        assert page.troubles == []
        assert [url for url in page.requests if not url.startswith(server.url)] == []
