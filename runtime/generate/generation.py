"""The results of generating text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from ..decoding.chunk import FinishReason, TopLogprob, Usage
from .row import Row
from .tools import ToolCall

if TYPE_CHECKING:
    from ..search.neighbour_index import Neighbour


@dataclass(frozen=True)
class Timings:
    """Where a call's time went. A batch's rows share one clock.

    Attributes:
        prefill_ms: from the tokens of the prompt to its logits.
        decode_ms: all later steps.
        tokens_per_s: new tokens of this row over both.
    """

    prefill_ms: float
    decode_ms: float
    tokens_per_s: float

    @staticmethod
    def of(seconds: Sequence[float], new_tokens: int) -> Timings:
        """Return the timings of steps that took these seconds; the first one is the prefill."""
        prefill = seconds[0]
        decode = sum(seconds[1:])
        rate = new_tokens / (prefill + decode) if new_tokens else 0.0
        return Timings(prefill * 1e3, decode * 1e3, rate)


@dataclass(frozen=True)
class GenerationCandidate:
    """One of several answers that beam search found; the fields are `Generation`'s."""

    text: str
    token_ids: tuple[int, ...]
    score: float
    finish_reason: FinishReason
    logprobs: tuple[float, ...]


@dataclass(frozen=True)
class Generation:
    """One prompt's answer.

    Attributes:
        text: without the prompt, special tokens, or the stop string.
        token_ids: every new token, the end-of-text token included.
        finish_reason: "eos", "stop" (a stop string), "length" (max_new_tokens), "context" (full) or
            "cancelled" (by on_token).
        logprobs: of each new token under the model itself, before temperature and the like; empty with
            logprobs=False.
        usage: how many tokens the model read and made.
        top_logprobs: of each new token's place the likeliest tokens, the likeliest first; empty unless
            asked for.
        prompt_tokens_cut: tokens that truncation="tail" dropped.
        prompt_tokens_reused: tokens of the prompt that reuse_prompt=True found computed.
        drafted_tokens: guesses of speculative="prompt-lookup" that the model verified.
        accepted_tokens: those of them that were right; each saved a step.
        score: of beam search, the sum of the tokens' log-probabilities / their number ** length_penalty,
            as transformers' sequences_scores; None without beams.
        candidates: the n_best answers of beam search, this one first; empty without beams.
        tool_calls: calls that the text asks for, where tools were given; the text has them too.
        neighbours: of each complete chunk of prompt and answer that was read, the neighbours that an index
            found, the nearest first; none without an index, and of beam search.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[float, ...]
    timings: Timings
    usage: Usage
    top_logprobs: Sequence[tuple[TopLogprob, ...]] = ()
    prompt_tokens_cut: int = 0
    prompt_tokens_reused: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    score: float | None = None
    candidates: tuple[GenerationCandidate, ...] = ()
    tool_calls: tuple[ToolCall, ...] = ()
    neighbours: tuple[tuple[Neighbour, ...], ...] = ()

    def to_json(self) -> dict[str, object]:
        """Return the fields of `planforge run --json`."""
        return asdict(replace(self, top_logprobs=tuple(self.top_logprobs)))


def make_generation(row: Row, seconds: Sequence[float]) -> Generation:
    """Return the answer of a row that has a finish reason, after steps that took these seconds."""
    assert row.finish_reason is not None
    text = "".join(row.pieces)
    tools = row.request.tools
    return Generation(
        text=text,
        token_ids=tuple(row.token_ids),
        finish_reason=row.finish_reason,
        logprobs=tuple(row.logprobs),
        timings=Timings.of(seconds, len(row.token_ids)),
        usage=row.usage,
        top_logprobs=row.list_top_logprobs(0),
        prompt_tokens_cut=row.cut,
        prompt_tokens_reused=row.reused,
        drafted_tokens=row.drafted,
        accepted_tokens=row.accepted,
        tool_calls=() if tools is None else tools.find_calls(text),
        neighbours=tuple(map(tuple, row.found)),
    )
