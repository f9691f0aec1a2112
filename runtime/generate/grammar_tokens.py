"""A model's tokens as llguidance needs them: the bytes that each adds to an answer, and texts in tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import InputError, TokenizerError
from ..text.tokenizer import Tokenizer

BYTES = [bytes([byte]) for byte in (*range(0xC0), *range(0xC2, 0xF5))]  # those that texts in UTF-8 have
BEFORE = "\n"  # stands before a text within an answer; no vocabulary joins it to a word


class GrammarTokens:
    """The tokens of one model.

    llguidance's own reading of a tokenizer.json knows two decoders, and takes the special token where a text
    must come that spells it. Here a token is what it adds to the text: a special one nothing.

    Args:
        llguidance: the module.
        tokenizer: the model's.
        eos: tokens that end an answer.

    Attributes:
        environment: llguidance's LLTokenizer, which its matchers are made with.
        spells_all: whether tokens spell every text. Where not, llguidance must cut no text into tokens: it
            would take some that the model does not have, one for each byte.
        openers: tokens that add less to a text where they are its first, such as "cat" instead of " cat". Of
            each the tokens that add the same elsewhere.
    """

    bos_token_id = None

    def __init__(self, llguidance: Any, tokenizer: Tokenizer, eos: Sequence[int]) -> None:
        if tokenizer.decodes_words:
            raise InputError(
                "json_schema, regex, grammar and choices need a tokenizer whose tokens always decode to the"
                " same text; this one adds spaces depending on the next token. Leave them out, and check the"
                " answer afterwards"
            )
        self._tokenizer = tokenizer
        ends = list(eos) or [tokenizer.vocab_size]  # llguidance wants one: where there is none, one made up
        ids = range(max(tokenizer.vocab_size, ends[0] + 1))
        self.eos_token_id = ends[0]
        self.tokens = [b"" if token in ends else tokenizer.find_bytes(token) for token in ids]
        self.spells_all = set(BYTES) <= set(self.tokens)
        if not self.spells_all:
            self.tokens += BYTES
        self._greedy: Any = None
        self.environment: Any = llguidance.LLTokenizer(llguidance.TokenizerWrapper(self), None, ends)
        self._greedy = self.environment
        self.openers = self._find_openers(set(ends))

    def __call__(self, data: bytes) -> list[int]:
        """Return the tokens of a text (UTF-8) within an answer, as llguidance asks for them."""
        text = data.decode()
        try:
            before = self._tokenizer.encode(BEFORE)
            ids = self._tokenizer.encode(BEFORE + text)[len(before) :]
        except TokenizerError:  # the vocabulary cannot express it
            ids = []
        if self._greedy is not None and b"".join(self.tokens[token] for token in ids) != data:
            ids = self._greedy.greedy_tokenize(text)
        return ids

    def _find_openers(self, ends: set[int]) -> dict[int, list[int]]:
        openers: dict[int, list[int]] = {}
        if self._tokenizer.byte_level:
            return openers
        for token in set(range(self._tokenizer.vocab_size)) - ends:
            spelled = self._tokenizer.find_bytes(token, begins=True)
            if spelled != self.tokens[token]:
                openers[token] = self.environment.greedy_tokenize(spelled.decode())
        return openers
