"""The page of an explanation in a browser."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from planforge.runtime.apps.explain.page import make_page

from .....helpers.browser import Browser, Page
from .....helpers.explanation_page import Show, open_view


@pytest.fixture
def show(browser: Browser, tmp_path: Path) -> Generator[Show, None, None]:
    """Open the page of an explanation; in the end nothing may have gone wrong, and nothing been asked for."""
    pages: list[Page] = []
    file = tmp_path / "page.html"
    url = file.as_uri()

    def write_and_open(data: dict[str, Any], width: int = 1200, dark: bool = False, view: str = "") -> Page:
        file.write_text(make_page(data), encoding="utf-8")
        page = browser.open(url, width, 800, dark=dark)
        pages.append(page)
        page.wait("document.querySelector('.explain')")
        if view:
            open_view(page, view)
        return page

    yield write_and_open
    for page in pages:
        page.evaluate("1")  # hears what is still on its way
        page.close()
        assert page.troubles == []
        assert [one for one in page.requests if one != url and not one.startswith("data:")] == []
