"""Splits an answer that comes in pieces into text and what may be a call of a tool."""

from __future__ import annotations

import re
from collections.abc import Collection

from ...generate.tool_calls import BLOCK, BLOCKS, STARTS, list_blocks
from ...text.stream import count_overlap

OBJECT = re.compile(r"\[?\s*\{")
MAY_BE_OBJECT = re.compile(r"\[?\s*")
# What may stand between a tool's name and its arguments; see `tool_calls.NAMED`.
NAME_ENDS = ("{", "[CALL_ID]", "[ARGS]")
BEHIND_NAME = re.compile(r"(?:[A-Za-z0-9]{9})?\s*")
MAY_BE_ID = re.compile("[A-Za-z0-9]{0,9}")
SPACE = re.compile(r"\s+")


class CallSplitter:
    """Tells of an answer, piece by piece, what is surely no call of a tool.

    Each piece takes time by its own length alone, however long the answer is.

    Args:
        names: of the tools.

    Attributes:
        shown: how many characters of the answer are surely no call.
    """

    def __init__(self, names: Collection[str]) -> None:
        self.shown = 0
        self._names = names
        self._begins = True  # whether the whole answer may still be a call
        self._calls = False  # whether the rest is held back, whatever it is
        self._held: list[str] = []
        self._beginning = ""  # what is held while the answer begins, with one space for any white space

    def push(self, piece: str) -> str:
        """Return the text that is surely no call, of a piece and of what was held back before it."""
        if self._calls:
            return ""
        self._held.append(piece)
        if self._begins:
            self._beginning = SPACE.sub(" ", self._beginning + piece)
            verdict = judge_beginning(self._beginning, self._names)
            self._calls = verdict is True
            self._begins = verdict is None
            if verdict is not False:
                return ""
        text = "".join(self._held)
        mark = BLOCK.search(text)
        self._calls = mark is not None
        overlap = max(count_overlap(text, begin) for begin in BLOCKS)
        place = len(text) - overlap if mark is None else mark.start()
        self._held = [text[place:]]
        self.shown += place
        return text[:place]


def judge_beginning(text: str, names: Collection[str]) -> bool | None:
    """Return whether an answer that begins with a text may be a call as a whole; None: it must be longer."""
    start = text.lstrip()
    marks = (*BLOCKS, *STARTS)
    if start.startswith(marks) or OBJECT.match(start):
        return True
    if MAY_BE_OBJECT.fullmatch(start) or any(mark.startswith(start) for mark in marks):
        return None
    verdicts = {judge_name(start, name) for name in names}
    return True if True in verdicts else None if None in verdicts else False


def judge_name(start: str, name: str) -> bool | None:
    """Return the same of a call that begins with a tool's name, as Mistral's newer wording without marks."""
    if name.startswith(start):
        return None
    if not start.startswith(name):
        return False
    behind = start[len(name) :]
    if MAY_BE_ID.fullmatch(behind):
        return None
    rest = BEHIND_NAME.sub("", behind, count=1)
    if rest.startswith(NAME_ENDS):
        return True
    return None if any(end.startswith(rest) for end in NAME_ENDS) else False


def cut_calls(text: str, names: Collection[str]) -> str:
    """Return what an answer that calls tools says beside its calls; space behind the first is left out."""
    parts = []
    place = 0
    for block in list_blocks(text, names):
        parts.append(text[place : block.begin])
        place = block.end
    parts.append(text[place:])
    before, *others = parts
    return before + "".join(part for part in others if part.strip())
