"""What a server is told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...errors import InputError
from ...option_checks import check_whole

MEGABYTE = 2**20
LONGEST = 86_400.0  # seconds


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """How a server answers.

    Attributes:
        keys: the API keys that it accepts; without any it asks for none.
        schedule: the options of each text generator's `schedule`, such as `running`.
        queue_size: the most requests of a model that wait; as many may wait to be read.
        timeout: seconds after its body came in which a request must be answered; one may ask for fewer.
        body_bytes: the most of a request's body.
        body_seconds: in which a body must have come.
        header_bytes: the most of a request's line and headers.
        header_seconds: in which they must have come.
        write_seconds: in which a client must take something of an answer that waits for it.
        connections: the most at a time.
        grace: seconds that running answers have to finish when the server is told to stop; 0 ends them at
            once.
        share_prompts: whether a key's requests may use what another's computed, from which it could tell that
            these begin alike; None lets them where there are not several keys.
        hosts: the names by which it may be called; any where there are none.
        origins: the origins whose pages may call it from a browser; "*" is any.
        page: whether the page is at /.
        readers: threads that read prompts, beside one for large ones.
    """

    keys: tuple[str, ...] = ()
    schedule: Mapping[str, Any] = field(default_factory=dict)
    queue_size: int = 128
    timeout: float = 600.0
    body_bytes: int = 8 * MEGABYTE
    body_seconds: float = 30.0
    header_bytes: int = 32 * 1024
    header_seconds: float = 10.0
    write_seconds: float = 60.0
    connections: int = 512
    grace: float = 30.0
    share_prompts: bool | None = None
    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    page: bool = True
    readers: int = 2

    def __post_init__(self) -> None:
        for name in ("queue_size", "body_bytes", "header_bytes", "connections", "readers"):
            check_whole(name, getattr(self, name), 1)
        for name in ("timeout", "body_seconds", "header_seconds", "write_seconds"):
            seconds = getattr(self, name)
            if not 0 < seconds <= LONGEST:  # NaN is not either
                raise InputError(f"{name}={seconds!r} must be over 0 and at most {LONGEST:g} seconds")
        if not 0 <= self.grace <= LONGEST:
            raise InputError(f"grace={self.grace!r} must be from 0 to {LONGEST:g} seconds")

    @property
    def has_several_clients(self) -> bool:
        """Whether there are several keys, whose owners may have nothing to do with each other."""
        return len(set(self.keys)) > 1
