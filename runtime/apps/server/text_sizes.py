"""How much text a request may have: what is too long is refused before its tokens fill the memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

from .calls import Call
from .errors import ApiError

Item: TypeAlias = str | tuple[str, str]


def measure_texts(call: Call[Any], items: Iterable[Item], names: tuple[str, str] = ("input", "input")) -> int:
    """Return the bytes of texts, or of pairs; refuse a text that is too long, and too many together.

    Args:
        call: the request.
        items: what is tokenized: a query counts with each document that it is paired with.
        names: of the parameters that have the texts; of pairs, the first and the second ones.
    """
    total = 0
    for item in items:
        for name, text in zip(names, (item,) if isinstance(item, str) else item, strict=False):
            size = len(text.encode())
            if size > call.served.max_bytes:
                raise ApiError(
                    400,
                    f"{name} has a text of {size} bytes; the model {call.served.name!r} takes at most"
                    f" {call.served.max_bytes} bytes, even with truncation. Send it in parts",
                    param=name,
                    code="context_length_exceeded",
                )
            total += size
            if total > call.max_bytes:
                raise ApiError(
                    413,
                    f"{name} has more than the {call.max_bytes} bytes of text allowed in a request; a text"
                    " that is paired with several others counts once for each. Send fewer texts at a time",
                    param=name,
                    code="too_large",
                )
    return total
