"""Remembers which large files were right, so that the next process need not read them whole before it starts.

A stamp lies in the cache folder of a user. It holds for a file of the same device, inode, size and times. The
last of them, `ctime`, is the system's own: no program sets it.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import time
from contextlib import suppress
from pathlib import Path

from ..cache_folder import find_cache_folder
from ..errors import BackendError

LEAST_BYTES = 2**24  # a smaller file is hashed within 15 ms
SETTLED = 2.0  # seconds without a change before a hash: within a tick of the clock another has the same time
UNUSED = 60 * 86400  # seconds after which a stamp is deleted


def is_known(path: Path, state: os.stat_result, sha256: str) -> bool:
    """Tell whether this user's process has found that a file, which is in this state, has this hash."""
    if state.st_size < LEAST_BYTES:
        return False
    try:
        stamp = find_stamp(path)
        own = stamp.stat()
        if own.st_uid != os.getuid() or own.st_mode & 0o022:
            return False
        return bool(json.loads(stamp.read_text(encoding="utf-8")) == describe(state, sha256))
    except (OSError, ValueError, AttributeError, BackendError):  # AttributeError: Windows has no users' ids
        return False


def keep(path: Path, state: os.stat_result, sha256: str) -> None:
    """Note that a file had this hash, if it was in this state before and is still; nothing fails here."""
    settled = time.time() - max(state.st_ctime, state.st_mtime) > SETTLED
    if os.name != "posix" or state.st_size < LEAST_BYTES or not settled:
        return
    with suppress(OSError, BackendError):
        if describe(path.stat(), sha256) != describe(state, sha256):
            return
        stamp = find_stamp(path)
        stamp.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        new = stamp.with_name(f".{secrets.token_hex(8)}")
        new.write_text(json.dumps(describe(state, sha256)), encoding="utf-8")
        new.chmod(0o600)
        new.replace(stamp)
        for other in stamp.parent.iterdir():
            if time.time() - other.stat().st_mtime > UNUSED:
                other.unlink()


def find_stamp(path: Path) -> Path:
    """Return where a file's stamp is kept; its name says nothing of the file's."""
    name = hashlib.sha256(os.fsencode(os.path.realpath(path))).hexdigest()[:32]
    return find_cache_folder() / "hashed" / f"{name}.json"


def describe(state: os.stat_result, sha256: str) -> dict[str, str | int]:
    """Return what a stamp says."""
    return {
        "device": state.st_dev,
        "inode": state.st_ino,
        "bytes": state.st_size,
        "mtime_ns": state.st_mtime_ns,
        "ctime_ns": state.st_ctime_ns,
        "sha256": sha256,
    }
