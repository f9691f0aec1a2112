"""How a chat template writes a query and a document as one text, as a bundle's manifest records it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import ManifestError
from .json_reader import FILE_NAME, Reader
from .role_defaults import DOCUMENT, QUERY

PROMPT = "prompt"
SLOTS = (PROMPT, QUERY, DOCUMENT)


@dataclass(frozen=True)
class PairTemplate:
    """A text with places for a query, a document, and a prompt.

    Attributes:
        texts: what stands before, between and behind the places; its special tokens are read as such.
        slots: what comes into the places, of `SLOTS`, in order.
        trimmed: those whose text loses the spaces at its ends.
    """

    texts: tuple[str, ...]
    slots: tuple[str, ...]
    trimmed: tuple[str, ...] = ()

    def fill(self, values: Mapping[str, str]) -> str:
        """Return the text with values in its places."""
        written = self.texts[0]
        for slot, behind in zip(self.slots, self.texts[1:], strict=True):
            value = values[slot]
            written += (value.strip() if slot in self.trimmed else value) + behind
        return written

    @staticmethod
    def from_json(value: Any, what: str) -> PairTemplate:
        r = Reader(value, what)
        template = PairTemplate(
            r.list_of("texts", str), r.list_of("slots", str), r.list_of("trimmed", str, ())
        )
        if len(template.texts) != len(template.slots) + 1 or set(template.slots) - set(SLOTS):
            raise ManifestError(
                f"{FILE_NAME}: {what} must have slots of {', '.join(SLOTS)}, and one text more than slots"
            )
        return template


@dataclass(frozen=True)
class PairTemplates:
    """What writes pairs.

    Attributes:
        plain: without a prompt.
        prompted: with one; None where the chat template has no place for it.
    """

    plain: PairTemplate
    prompted: PairTemplate | None = None

    @staticmethod
    def from_json(value: Any) -> PairTemplates | None:
        if value is None:
            return None
        r = Reader(value, "encoder.pairs")
        prompted = r.value.get("prompted")
        return PairTemplates(
            PairTemplate.from_json(r.get("plain", dict), "encoder.pairs.plain"),
            None if prompted is None else PairTemplate.from_json(prompted, "encoder.pairs.prompted"),
        )
