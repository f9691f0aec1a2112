"""One browser for all pages; each of them has storage of its own."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from ..helpers.browser import Browser, running_browser


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Generator[Browser, None, None]:
    with running_browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser
