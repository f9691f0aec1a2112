"""What tests of prepared graphs share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder of the test's own."""
    monkeypatch.setenv("PLANFORGE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "prepared"
