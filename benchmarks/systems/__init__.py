"""One file for each family of systems; `SYSTEM` is what a case names by the file's name."""

from __future__ import annotations

import importlib

from .system import System


def system_named(name: str) -> System:
    """The system of a file of this folder, or of a module elsewhere by its full name.

    Its libraries are loaded when it prepares or opens a model, not here.
    """
    module = name if "." in name else f"{__name__}.{name}"
    system = importlib.import_module(module).SYSTEM
    assert isinstance(system, System)
    return system
