"""Finds the user's folder for what can be made again."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from .errors import BackendError


def find_cache_folder(environment: Mapping[str, str] | None = None, system: str = sys.platform) -> Path:
    """Return the folder for what can be made again: PLANFORGE_CACHE, else the system's usual one."""
    environment = os.environ if environment is None else environment
    if folder := environment.get("PLANFORGE_CACHE"):
        return Path(folder)
    if system == "win32" and (folder := environment.get("LOCALAPPDATA")):
        return Path(folder) / "planforge" / "cache"
    try:
        home = Path.home()
    except RuntimeError as error:
        raise BackendError("there is no home folder; set PLANFORGE_CACHE to a folder") from error
    if system == "darwin":
        return home / "Library" / "Caches" / "planforge"
    folder = environment.get("XDG_CACHE_HOME", "")
    return (Path(folder) if os.path.isabs(folder) else home / ".cache") / "planforge"
