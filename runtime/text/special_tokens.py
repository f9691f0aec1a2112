"""Keeps special tokens that users' texts spell plain text, whatever a chat template makes of the texts."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

from .tokenizer import Tokenizer

MARK = "\ufdd0"  # Unicode keeps it from being a character of any text
SPELLED_MARK = "\\ufdd0"  # what Python and JSON write of it where a template writes a list or an object
ESCAPED_MARK = re.compile(r"(?<!\\)((?:\\\\)*)\\ufdd0")


class FormedTokenError(ValueError):
    """A template changes a text so that it spells a special token, and nothing tells whose the token is."""


class SpecialTokenEscaper:
    """Keeps special tokens that a text spells plain text after a template has put it in its place.

    Marks stand between the letters of each. They stand too behind the beginning of one at a text's end,
    before the end of one at a text's beginning, and before a text that lies inside of one, as templates join
    texts. What a template changes in a text is marked anew. So every token in what a template renders has a
    mark inside, unless the template itself wrote it.
    """

    def __init__(self, special_tokens: Sequence[str]) -> None:
        # A single letter is read as the token everywhere: see Tokenizer.encode.
        tokens = tuple(token for token in special_tokens if len(token) > 1)
        self.longest = max(map(len, tokens), default=1)
        self.spelled, self.any_case, self.beginnings, self.ends, self.insides = find_spellings(tokens)

    def mark(self, text: str) -> str:
        """Put a mark into each special token that a text spells, or that it may spell beside another text."""
        marked = self._mark(text, self.any_case.finditer(text))  # templates change case
        return marked.replace(SPELLED_MARK, f"\\{MARK}{SPELLED_MARK[1:]}")

    def mark_made(self, name: str, made: Any, given: Sequence[Any]) -> Any:
        """Mark what a template's filter or method made of values: it may have taken letters away.

        Special tokens that one of the values spells stay, as the template wrote them: users' have marks.

        Args:
            name: of the filter or method.
            made: what it made; beside texts, lists of them count where they are made of a text.
            given: the value that it changes, then its arguments.

        Raises:
            FormedTokenError: there are more special tokens in a text than the template wrote there.
        """
        if isinstance(made, str):
            if made == given[0]:
                return made
            made = read_marks(made)
            return self._mark(made, self._find_formed(name, made, given))
        if isinstance(made, list | tuple) and isinstance(given[0], str | bytes):
            return type(made)([self.mark_made(name, part, given) for part in made])
        return made

    def _find_formed(self, name: str, made: str, given: Sequence[Any]) -> Iterator[re.Match[str]]:
        """Yield the special tokens in a text that no value has of which it was made."""
        found = list(self.any_case.finditer(made))
        if not found:
            return
        own = Counter(self._list_spelled(given[:1]))
        told = set(self._list_spelled(given[1:]))
        grown = Counter(match[0].lower() for match in found) - own
        for match in found:
            spelled = match[0].lower()
            if spelled in told:
                continue
            if spelled not in own:
                yield match
            elif grown[spelled] and isinstance(given[0], str) and name != "join":
                raise FormedTokenError(
                    f"{name!r} in the chat template forms the special token {match[0]!r} from other text"
                )

    def _list_spelled(self, values: Sequence[Any]) -> Iterator[str]:
        """Yield the special tokens without marks in values, in lower case."""
        left: list[Any] = list(values)
        while left:
            value = left.pop()
            if isinstance(value, str):
                yield from (found.lower() for found in self.any_case.findall(value))
            elif isinstance(value, Mapping):
                left += [*value.keys(), *value.values()]
            elif isinstance(value, list | tuple):
                left += value

    def _mark(self, text: str, found: Iterator[re.Match[str]]) -> str:
        """Put marks into what was found in a text, and where a special token may begin or end with it."""
        places = {place for each in found for place in range(each.start() + 1, each.end())}
        begin = len(text) - len(text.lstrip())  # templates trim
        body = text.strip()
        sizes = range(min(len(body), self.longest - 1), 0, -1)
        last = next((size for size in sizes if body[-size:].lower() in self.beginnings), 0)
        first = next((size for size in sizes if body[:size].lower() in self.ends), 0)
        end = begin + len(body)
        places |= {end - count for count in range(last)}
        places |= {begin + count for count in range(first)}
        if body and body.lower() in self.insides:
            places.add(begin)
        cuts = [0, *sorted(places), len(text)]
        return MARK.join(text[i:j] for i, j in pairwise(cuts)) if places else text

    def encode(self, text: str, tokenizer: Tokenizer) -> list[int]:
        """Return the tokens of a text with marks, which are left out."""
        if not self.beginnings:
            return tokenizer.encode(text.replace(MARK, ""), parse_special=True)
        text = read_marks(text)
        marks = [found.start() - number for number, found in enumerate(re.finditer(MARK, text))]
        text = text.replace(MARK, "")
        pieces = []
        begin = 0
        for found in self.spelled.finditer(text):
            if bisect_left(marks, found.end()) > bisect_right(marks, found.start()):
                pieces += [(text[begin : found.start()], True), (found[0], False)]
                begin = found.end()
        pieces.append((text[begin:], True))
        return encode_pieces(tokenizer, pieces)


def read_marks(text: str) -> str:
    """Return a text with its marks, also those that were escaped where a list or an object was written."""
    return ESCAPED_MARK.sub(rf"\1{MARK}", text) if SPELLED_MARK in text else text


@lru_cache(maxsize=8)
def find_spellings(
    tokens: tuple[str, ...],
) -> tuple[re.Pattern[str], re.Pattern[str], frozenset[str], frozenset[str], str]:
    """Return what finds tokens as spelled, in any case, and their beginnings, ends, insides in lower case."""
    pattern = join_spellings(tokens) if tokens else "(?!)"
    beginnings = frozenset(token[:size].lower() for token in tokens for size in range(1, len(token)))
    ends = frozenset(token[size:].lower() for token in tokens for size in range(1, len(token)))
    insides = "\n".join(token[1:-1] for token in tokens).lower()
    return re.compile(pattern), re.compile(pattern, re.IGNORECASE), beginnings, ends, insides


def join_spellings(texts: Sequence[str]) -> str:
    """Return a regular expression of any of the texts, the longest first.

    What several begin with stands there once. Else each of a thousand tokens would be tried at every place.
    """
    rests: dict[str, list[str]] = {}
    for text in filter(None, texts):
        rests.setdefault(text[0], []).append(text[1:])
    ways = [re.escape(first) + join_spellings(rest) for first, rest in rests.items()]
    if len(ways) == 1 and "" not in texts:
        return ways[0]
    joined = f"(?:{'|'.join(ways)})" if ways else ""
    return f"{joined}?" if ways and "" in texts else joined


def encode_pieces(tokenizer: Tokenizer, pieces: Sequence[tuple[str, bool]]) -> list[int]:
    """Return the tokens of a text that comes in pieces, each with whether special tokens are read in it."""
    (first, parse_special), *others = pieces
    ids = encode_written(tokenizer, first, parse_special)
    for piece, parse_special in others:
        if piece:
            ids += encode_continuation(tokenizer, piece, parse_special)
    return ids


def encode_continuation(tokenizer: Tokenizer, text: str, parse_special: bool) -> list[int]:
    """Return the tokens of a text that follows another: some tokenizers put a space before the first."""
    before = tokenizer.encode("\n")
    ids = encode_written(tokenizer, "\n" + text, parse_special)
    if ids[: len(before)] == before:
        return ids[len(before) :]
    return encode_written(tokenizer, text, parse_special)


def encode_written(tokenizer: Tokenizer, text: str, parse_special: bool) -> list[int]:
    """Return the tokens of a text, in which special ones are read where it spells them letter by letter.

    What is one only once it is normalized, such as ``</S>`` in lower case, has no mark: a user wrote it.
    """
    if not parse_special:
        return tokenizer.encode(text)
    (parsed,) = tokenizer.encode_batch([text], parse_special=True)
    disguised = tokenizer.find_disguised(text, parsed)
    if not disguised:
        return parsed.ids
    pieces = []
    begin = 0
    for start, end in disguised:
        pieces += [(text[begin:start], True), (text[start:end], False)]
        begin = end
    return encode_pieces(tokenizer, [*pieces, (text[begin:], True)])
