"""Writes a query and a document as one text, as a checkpoint's chat template does, and reads its tokens.

What a text spells stays text: the special tokens of what is written are the template's own, and those of a
prompt of the checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from ..bundle.pair_templates import PROMPT, PairTemplate
from ..bundle.role_defaults import DOCUMENT, QUERY
from ..errors import ContextLengthError, InputError
from ..text.long_text import FittedText, Piece
from ..text.special_tokens import SpecialTokenEscaper
from ..text.tokenizer import Tokenizer

HEAD = "head"
# Two texts without a common end, by which sentence-transformers finds the tokens behind the texts.
FILLERS = ("0", "1 2 3 4")


@dataclass(frozen=True)
class PairWriter:
    """Writes pairs by a template.

    Attributes:
        template: what writes them.
        tokenizer: reads what is written.
        prompt: of each pair; "" for a template without a place for it.
        is_own: whether the prompt is the checkpoint's, whose special tokens are read as such.
        parse_special: whether those of all texts are.
        max_tokens: of a sequence.
        truncation: "head", or None, which refuses a pair that is too long.
    """

    template: PairTemplate
    tokenizer: Tokenizer
    prompt: str
    is_own: bool
    parse_special: bool
    max_tokens: int
    truncation: str | None

    def __post_init__(self) -> None:
        if self.truncation not in (HEAD, None):
            raise InputError(
                f"truncation={self.truncation!r} cannot be used with this model, whose chat template writes a"
                f" pair as one text; use {HEAD!r}, which keeps the template's end, or None",
                option="truncation",
            )

    def read(self, query: str, document: str) -> FittedText:
        """Return a pair's sequence.

        As in sentence-transformers, one of full length ends with the tokens that the template ends with.
        """
        ids = self.encode(query, document)
        most = self.max_tokens
        if not ids:
            raise InputError("the pair is empty: it has no tokens, and this model's chat template adds none")
        if len(ids) > most and self.truncation is None:
            raise ContextLengthError(
                f"the two texts have {len(ids)} tokens, with those of the chat template; the model takes"
                f" {most}. Shorten what is given, or choose the truncation {HEAD!r}",
                tokens=len(ids),
                limit=most,
            )
        kept = ids[:most]
        if len(ids) >= most and self.ending:
            end = self.ending[-most:]
            kept[-len(end) :] = end
        piece = Piece(kept, [0] * len(kept), range(len(kept)), None, prefix=0)
        return FittedText((piece,), len(ids) - len(kept))

    def encode(self, query: str, document: str) -> list[int]:
        """Return the tokens of a pair at its full length."""
        mark = self._escaper.mark
        prompt = self.prompt if self.is_own else mark(self.prompt)
        written = self.template.fill({PROMPT: prompt, QUERY: mark(query), DOCUMENT: mark(document)})
        return self._escaper.encode(written, self.tokenizer)

    @cached_property
    def ending(self) -> Sequence[int]:
        """The tokens that every pair ends with."""
        first, second = (self.encode(filler, filler) for filler in FILLERS)
        shorter = min(len(first), len(second))
        count = next((n for n in range(shorter) if first[-1 - n] != second[-1 - n]), 0)
        return first[len(first) - count :]

    @cached_property
    def _escaper(self) -> SpecialTokenEscaper:
        return SpecialTokenEscaper(() if self.parse_special else self.tokenizer.special_tokens)
