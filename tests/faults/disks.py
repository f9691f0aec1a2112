"""Small disks of memory, where the system lets them be mounted."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

DISK = 2**30  # bytes of the disk while nothing is tried on it


@contextlib.contextmanager
def mount_disk(folder: str | Path) -> Iterator[Path | None]:
    """Yield a disk of memory, mounted in a folder; None where that is not allowed."""
    disk = Path(folder, "disk")
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(disk)]
    if sys.platform != "linux" or subprocess.run(mount, capture_output=True).returncode != 0:
        yield None
        return
    try:
        yield disk
    finally:
        subprocess.run(["umount", disk], check=True)


def remount(disk: Path | None, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", str(disk)], check=True)
