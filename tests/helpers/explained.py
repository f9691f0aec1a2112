"""Models whose explanations are tested."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from planforge.runtime import load


def open_model(bundle: Path, **options: Any) -> Any:
    """Open a bundle of any task; what it is, its test knows."""
    return load(bundle, **options)
