"""API keys: read from a file or the environment, compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
import os
from pathlib import Path

from ...errors import DataError, InputError
from .errors import ApiError

VARIABLE = "PLANFORGE_API_KEY"


def read_keys(path: Path | None) -> tuple[str, ...]:
    """Return the keys of a file, one a line, and that of the environment; "#" begins a comment's line.

    Raises:
        InputError: there is no such file, or no key in it; a server that was to ask for one would ask for
            none.
    """
    keys = [os.environ[VARIABLE]] if os.environ.get(VARIABLE) else []
    if path is not None:
        try:
            text = path.read_text(encoding="utf-8")
        except (FileNotFoundError, IsADirectoryError) as error:
            raise InputError(f"the API key file {path} does not exist or is a folder") from error
        except UnicodeDecodeError as error:
            raise InputError(f"the API key file {path} is not UTF-8 text") from error
        lines = [line.strip() for line in text.splitlines()]
        found = [line for line in lines if line and not line.startswith("#")]
        if not found:
            raise InputError(f"{path} has no API key; write one key per line")
        keys += found
    for key in keys:
        if not key.isascii() or not key.isprintable() or " " in key:
            raise DataError("an API key must be of printable ASCII characters without spaces")
    return tuple(dict.fromkeys(keys))


class KeyRing:
    """The keys that a server accepts."""

    def __init__(self, keys: tuple[str, ...]) -> None:
        self._digests = [hash_key(key) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def find_client(self, authorization: str | None) -> str:
        """Return a name for whom an Authorization header is from; raise an ApiError where that is nobody."""
        scheme, _, key = (authorization or "").partition(" ")
        given = hash_key(key.strip())
        # All are compared, so that the time says nothing.
        same = [hmac.compare_digest(given, digest) for digest in self._digests]
        if scheme.lower() != "bearer" or not key.strip():
            raise ApiError(
                401,
                "an API key is required: send the header Authorization: Bearer KEY",
                code="invalid_api_key",
            )
        if not any(same):
            raise ApiError(401, "the API key is invalid", code="invalid_api_key")
        return f"key {same.index(True)}"


def hash_key(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
