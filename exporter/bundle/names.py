"""Names of a bundle's files, which follow from their content: no name stands for two contents."""

from __future__ import annotations

from pathlib import Path

from ...runtime.bundle.bundle import compute_sha256

DIGITS = 8  # of the content's sha256 in a name


def name_by_content(path: Path) -> Path:
    """Rename a file from STEM.ENDING to STEM-HASH.ENDING, and return its path."""
    named = path.with_name(f"{path.stem}-{compute_sha256(path)[:DIGITS]}{path.suffix}")
    return path.rename(named)
