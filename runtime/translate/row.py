"""The chunks of one greedy translation as it is made."""

from __future__ import annotations

from ..decoding.beam import BeamSearch
from ..decoding.chunk import Chunk, FinishReason, OnToken, Usage, report_chunk
from ..text.tokenizer import Tokenizer


class TranslationRow:
    """Tells what each step of a greedy search added to one translation.

    It is row `row` of the search; `number` is the text's index in the call.
    """

    def __init__(self, tokenizer: Tokenizer, source_tokens: int, *, row: int = 0, number: int = 0) -> None:
        self.row = row
        self.finish_reason: FinishReason | None = None
        self._source_tokens = source_tokens
        self.number = number
        self._vocab_size = tokenizer.vocab_size
        self._text = tokenizer.stream()
        self._told = 0  # tokens that are in chunks already

    def make_chunk(self, beams: BeamSearch) -> Chunk:
        """Return what came since the last chunk."""
        if beams.active[self.row]:
            tokens = tuple(beams.histories[self.row][1:])
        else:
            (best,) = beams.list_hypotheses()[self.row]
            tokens = best.token_ids
            self.finish_reason = best.finish_reason
        new = tuple(int(token) for token in tokens[self._told :])
        self._told = len(tokens)
        text = "".join(self._text.push(token) for token in new if token < self._vocab_size)
        if self.finish_reason is not None:
            text += self._text.finish()
        return Chunk(
            text=text,
            token_ids=new,
            logprobs=(),
            top_logprobs=(),
            finish_reason=self.finish_reason,
            usage=Usage(prompt_tokens=self._source_tokens, completion_tokens=self._told),
            index=self.number,
        )

    def report(self, beams: BeamSearch, on_token: OnToken | None) -> Chunk:
        """Return what came since the last chunk; see `report_chunk`."""
        return report_chunk(lambda: self.make_chunk(beams), lambda: beams.cancel(self.row), on_token)
