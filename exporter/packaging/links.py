"""Gives a package the bundle's files as links: second names, which take no disk."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def link_file(source: Path, target: Path) -> None:
    """Give a file a second name, or copy it where the file system has no hard links, or ends in between."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def copy_links(folder: Path) -> None:
    """Put copies in the place of files that have a second name elsewhere."""
    for path in folder.rglob("*"):
        if path.is_file() and path.stat().st_nlink > 1:
            copy = path.with_name(f"{path.name}.copy")
            shutil.copyfile(path, copy)
            copy.replace(path)
