"""Keeps golden texts in a file: what every reader of a bundle must make of the same texts and chats."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...bundle.bundle import Bundle
from ...errors import BundleError

PREFIX = "checks/texts-"  # of the file's name in a bundle
FORMAT = 1
MAX_BYTES = 16 * 2**20


@dataclass(frozen=True)
class GoldenText:
    """A text, its ids, special tokens that it spells read as such, and the text of these ids."""

    text: str
    ids: tuple[int, ...]
    decoded: str


@dataclass(frozen=True)
class GoldenInput:
    """A text, or for an encoder a pair, and all ids that the model reads of it.

    Attributes:
        input_type: what the text is, a query or a document, where a model reads them in two ways; "pair" of
            a pair that a chat template writes.
        seen: how many of the ids other tokens attend to.
        counted: the places of those whose vectors count, where each token has one.
        weighted: the places of those whose weights count; None where tokens have no weights.
        prompt: what a caller gives beside a pair; None for the checkpoint's own, if it has one.
    """

    text: str
    pair: str | None
    ids: tuple[int, ...]
    input_type: str | None = None
    seen: int | None = None
    counted: tuple[int, ...] = ()
    weighted: tuple[int, ...] | None = None
    prompt: str | None = None


@dataclass(frozen=True)
class GoldenChat:
    """A conversation, its text up to where the model is to answer, and the ids of that text."""

    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...]
    rendered: str | None  # None where the template refuses it
    ids: tuple[int, ...]


@dataclass(frozen=True)
class GoldenTexts:
    """What every reader of a bundle must make of the same texts and chats.

    Attributes:
        reference: what gave the ids, such as "tokenizers 0.23.3".
        chat_reference: what rendered the chats.
        hashes: of the tokenizers' files and the chat template, in the manifest's order.
        settings: what else decides how texts are read and answers are written, as plain JSON.
        sides: the texts of each tokenizer, a source's and a target's.
        inputs: texts with all that is put around them.
        chats: empty without a chat template.
    """

    reference: str
    chat_reference: str
    hashes: tuple[str, ...]
    settings: Mapping[str, Any]
    sides: tuple[tuple[GoldenText, ...], ...]
    inputs: tuple[GoldenInput, ...]
    chats: tuple[GoldenChat, ...]

    @property
    def plain_inputs(self) -> tuple[GoldenInput, ...]:
        """Return the inputs that are neither queries nor documents, nor pairs of a chat template."""
        return tuple(one for one in self.inputs if one.input_type is None)

    def to_json(self) -> str:
        """Return the content of the file."""
        value = {"format": FORMAT, **asdict(self)}
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")) + "\n"

    @staticmethod
    def from_json(text: str) -> GoldenTexts:
        """Read what `to_json` wrote; a ValueError, TypeError or LookupError where it is damaged."""
        value = json.loads(text)
        if value["format"] != FORMAT:
            raise ValueError(f"format {value['format']!r} is not {FORMAT}")
        return GoldenTexts(
            reference=str(value["reference"]),
            chat_reference=str(value["chat_reference"]),
            hashes=tuple(map(str, value["hashes"])),
            settings=dict(value["settings"]),
            sides=tuple(
                tuple(GoldenText(str(t["text"]), read_ids(t["ids"]), str(t["decoded"])) for t in side)
                for side in value["sides"]
            ),
            inputs=tuple(
                GoldenInput(
                    text=str(one["text"]),
                    pair=None if one["pair"] is None else str(one["pair"]),
                    ids=read_ids(one["ids"]),
                    input_type=one.get("input_type"),
                    seen=one.get("seen"),
                    counted=read_ids(one.get("counted", ())),
                    weighted=None if one.get("weighted") is None else read_ids(one["weighted"]),
                    prompt=one.get("prompt"),
                )
                for one in value["inputs"]
            ),
            chats=tuple(
                GoldenChat(
                    messages=read_messages(chat["messages"]),
                    tools=tuple(map(dict, chat["tools"])),
                    rendered=None if chat["rendered"] is None else str(chat["rendered"]),
                    ids=read_ids(chat["ids"]),
                )
                for chat in value["chats"]
            ),
        )


def read_ids(values: Any) -> tuple[int, ...]:
    if not all(type(value) is int for value in values):
        raise ValueError("an id is no integer")
    return tuple(values)


def read_messages(values: Any) -> tuple[Mapping[str, Any], ...]:
    if not values:
        raise ValueError("a chat has no message")
    return tuple(map(dict, values))


def find_texts(bundle: Bundle) -> Path | None:
    """Return the file of a bundle's golden texts, hashed; None where it has none."""
    names = [name for name in bundle.manifest.files if name.startswith(PREFIX)]
    return bundle.path(names[0]) if names else None


def read_texts(path: Path) -> GoldenTexts:
    """Read the file of golden texts."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ValueError(f"more than {MAX_BYTES} bytes")
        return GoldenTexts.from_json(path.read_text(encoding="utf-8"))
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise BundleError(
            f"{path}: the golden texts cannot be read by this version ({type(error).__name__}:"
            f" {str(error)[:200]}); export the bundle again"
        ) from error
