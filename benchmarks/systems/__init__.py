"""One file for each family of systems; a case names a file, whose `SYSTEM` it means."""

from __future__ import annotations

import importlib

from .system import System


def system_named(name: str) -> System:
    """Return the system of a file of this folder, or of a module elsewhere by its full name.

    Its libraries are loaded when it prepares or opens a model, not here.
    """
    module = name if "." in name else f"{__name__}.{name}"
    system = importlib.import_module(module).SYSTEM
    assert isinstance(system, System)
    return system
