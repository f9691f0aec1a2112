"""What tests of hostile bundles and of file systems share."""

from __future__ import annotations

from pathlib import Path

import pytest

from planforge.exporter.bundle.writer import install, open_staging_folder

from ..helpers.staging import stage


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small bundle whose files are not read as what they are named."""
    output = tmp_path / "bundle"
    with open_staging_folder(output) as staging:
        install(staging, stage(staging, "old"), output)
    return output
