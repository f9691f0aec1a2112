"""Puts the bundle's files into a package: as reflinks or copies, or as hard links if asked for."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path

FICLONE = 0x40049409  # the request of Linux's ioctl that makes a reflink, from linux/fs.h


@dataclass
class FilePlacer:
    """Puts files of a bundle into a package, and remembers which of them take no disk.

    Attributes:
        hard_links: whether a file gets a second name. By default it is a reflink, a file of its own whose
            blocks are shared until one of the two is written to, or a copy.
        shared: the files of the package whose blocks are those of the bundle's files.
    """

    hard_links: bool = False
    shared: set[Path] = field(default_factory=set)

    def place(self, source: Path, target: Path) -> None:
        """Put a file at `target`; it is a copy where the file system shares no blocks."""
        target.parent.mkdir(parents=True, exist_ok=True)
        if link_file(source, target) if self.hard_links else clone_file(source, target):
            self.shared.add(target)
        else:
            shutil.copyfile(source, target)


def link_file(source: Path, target: Path) -> bool:
    """Give a file a second name; return whether the file system does so."""
    try:
        os.link(source.resolve(), target)
    except OSError:  # it has no hard links, or ends in between
        return False
    return True


def clone_file(source: Path, target: Path) -> bool:
    """Make a reflink; return whether the system and the file system do so."""
    if sys.platform != "linux":
        return False
    import fcntl

    with source.open("rb") as data, target.open("wb") as clone:
        try:
            fcntl.ioctl(clone, FICLONE, data.fileno())
        except OSError:  # it has no reflinks, or ends in between
            return False
    return True
