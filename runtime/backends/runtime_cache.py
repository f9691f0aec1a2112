"""Kernels that TensorRT-RTX compiled for one GPU, kept in a file beside the plan."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
from pathlib import Path

log = logging.getLogger("planforge")

MAX_FILE_BYTES = 2**30


class RuntimeCache:
    """The cache file. Its first line says what it belongs to and holds the sha256 of the rest.

    A cache that is missing, cut short, changed, or of another plan or GPU, is passed over; where none can be
    written, as in a folder that is only readable, kernels are compiled at each start.
    """

    def __init__(self, plan: Path, version: str, sm: str) -> None:
        self.path = plan.with_name(f"{plan.name}.{sm}.cache")
        self.belongs_to = {"plan": plan.name, "version": version, "sm": sm}
        self.loaded: str | None = None

    def load(self) -> bytes | None:
        """Return what was saved; None where it cannot be used."""
        if not self.path.is_file():  # nor is a pipe waited for
            return None
        try:
            with self.path.open("rb") as file:
                said = json.loads(file.readline(4096))
                content = file.read(MAX_FILE_BYTES)
        except (OSError, ValueError, RecursionError):
            return None
        sha256 = hashlib.sha256(content).hexdigest()
        if said != {**self.belongs_to, "sha256": sha256}:
            log.info("%s is damaged or belongs to another plan; it is not used", self.path.name)
            return None
        self.loaded = sha256
        return content

    def save(self, content: bytes) -> None:
        """Replace the file if the content differs from what was loaded."""
        content = bytes(content)
        sha256 = hashlib.sha256(content).hexdigest()
        if sha256 == self.loaded or not content:
            return
        head = json.dumps({**self.belongs_to, "sha256": sha256}).encode() + b"\n"
        partial = self.path.with_name(f".{self.path.name}.{secrets.token_hex(6)}")
        try:
            with partial.open("xb") as file:  # never through a link
                file.write(head + content)
            os.replace(partial, self.path)
        except OSError as error:
            log.info("%s cannot be saved: %s", self.path.name, error.strerror)
            partial.unlink(missing_ok=True)
