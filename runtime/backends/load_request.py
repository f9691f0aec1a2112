"""What a caller of `load` asks for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class LoadRequest:
    """The options of one `load`; `LoadOptions` says what they mean."""

    backend: str = "auto"
    precision: str | None = None
    threads: int | None = None
    max_length: int | None = None
    memory_limit: int | None = None
    verify: bool = False
    device: int = 0
