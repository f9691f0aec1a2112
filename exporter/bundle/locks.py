"""Locks between processes, and between containers that share a volume: the kernel frees a dead process's."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from pathlib import Path

NO_LINK = getattr(os, "O_NOFOLLOW", 0)  # a stranger's bundle may have a link to elsewhere in a lock's place
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP)  # of filesystems that have none


@contextlib.contextmanager
def hold_lock(path: Path) -> Iterator[None]:
    """Hold a lock by a file that is made and removed here; wait while another process or thread has it."""
    descriptor = acquire(path, wait=True)
    assert descriptor is not None
    try:
        yield
    finally:
        release(path, descriptor)


def acquire(path: Path, *, wait: bool) -> int | None:
    """Return an open descriptor that holds the lock; None if somebody else does, and `wait` is off.

    Whoever releases a lock removes its file, so the file that was locked may have gone meanwhile: then
    another one is made. The file of another user, who keeps it from us, counts as held.
    """
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | NO_LINK, 0o666)
        except PermissionError:
            if wait:
                raise
            return None
        try:
            if not lock_file(descriptor, wait=wait):
                os.close(descriptor)
                return None
            if is_same_file(path, descriptor):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def release(path: Path, descriptor: int) -> None:
    """Remove the lock's file and free the lock."""
    with contextlib.suppress(OSError):  # Windows removes no open file; the next one that locks it does
        path.unlink(missing_ok=True)
    os.close(descriptor)


def is_same_file(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


if sys.platform == "win32":
    import msvcrt

    def lock_file(descriptor: int, *, wait: bool) -> bool:
        """Lock an open file's first byte; return whether that succeeded."""
        while True:
            try:
                msvcrt.locking(descriptor, msvcrt.LK_LOCK if wait else msvcrt.LK_NBLCK, 1)
                return True
            except OSError:  # LK_LOCK gives up after ten seconds
                if not wait:
                    return False

else:
    import fcntl

    def lock_file(descriptor: int, *, wait: bool) -> bool:
        """Lock an open file; return whether that succeeded."""
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno in NO_LOCKS:
                return wait  # a caller that waits goes on without a lock; one that does not gets False
            raise
        return True
