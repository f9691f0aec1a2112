"""Answers that beam search finds: which options go with it, and what comes of each prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..decoding.beam import Hypothesis, Search
from ..decoding.beam_steps import search_steps
from ..decoding.cache import capacity_for
from ..decoding.chunk import Usage
from ..decoding.constraints import Constraints
from ..decoding.decoder import Decoder
from ..errors import InputError
from ..text.tokenizer import Tokenizer
from .generation import Generation, GenerationCandidate, Timings
from .request import DRAWING, GenerationRequest
from .row import Row


@dataclass(frozen=True)
class BeamGenerator:
    """Searches for the likeliest answers of a batch of prompts."""

    decoder: Decoder
    tokenizer: Tokenizer

    def batch_size(self, search: Search) -> int:
        """Return how many prompts may run together; refuse more beams than the bundle allows rows."""
        rows = self.decoder.artifact.axis("batch").max
        if search.num_beams > rows:
            raise InputError(
                f"num_beams={search.num_beams} is more than the {rows} rows that this bundle allows; ask for"
                " fewer, or export it again with a larger max_batch"
            )
        return rows // search.num_beams

    def answer(self, rows: Sequence[Row], search: Search, *, logprobs: bool = True) -> list[Generation]:
        """Return each prompt's answers.

        Args:
            rows: prompts, at most `batch_size` of them; they stay as they are.
            search: how to search.
            logprobs: whether to give each token's log-probability.
        """
        prompts = [row.prompt for row in rows]
        limits = [row.most_left for row in rows]
        capacity = capacity_for(self.decoder.artifact, [len(prompt) for prompt in prompts], limits)
        steps = list(search_steps(self.decoder, prompts, search, limits, capacity))
        beams = steps[-1][0]
        seconds = [step for _, step in steps]
        return [
            self._generation(row, hypotheses, seconds, logprobs)
            for row, hypotheses in zip(rows, beams.hypotheses(), strict=True)
        ]

    def _generation(
        self, row: Row, hypotheses: Sequence[Hypothesis], seconds: Sequence[float], logprobs: bool
    ) -> Generation:
        candidates = tuple(self._candidate(hypothesis, logprobs) for hypothesis in hypotheses)
        best = candidates[0]
        return Generation(
            text=best.text,
            token_ids=best.token_ids,
            finish_reason=best.finish_reason,
            logprobs=best.logprobs,
            timings=Timings.of(seconds, len(best.token_ids)),
            usage=Usage(prompt_tokens=len(row.prompt), completion_tokens=len(best.token_ids)),
            prompt_tokens_cut=row.cut,
            score=best.score,
            candidates=candidates,
        )

    def _candidate(self, hypothesis: Hypothesis, logprobs: bool) -> GenerationCandidate:
        stream = self.tokenizer.stream()
        known = [token for token in hypothesis.token_ids if token < self.tokenizer.vocab_size]
        return GenerationCandidate(
            text="".join(map(stream.push, known)) + stream.finish(),
            token_ids=hypothesis.token_ids,
            score=hypothesis.score,
            finish_reason=hypothesis.finish_reason,
            logprobs=hypothesis.logprobs if logprobs else (),
        )


def resolve_search(request: GenerationRequest, eos: Sequence[int], *, streams: bool = False) -> Search | None:
    """Return how a call searches, or None where it follows one answer only.

    repetition_penalty, no_repeat_ngram_size, ignore_eos and max_new_tokens go with beams, as in
    transformers: the penalty multiplies log-probabilities there, not logits.

    Args:
        request: the call's options.
        eos: tokens that end an answer.
        streams: whether the answer is asked for piece by piece.

    Raises:
        InputError: an option of beams has no such value, or another one does not go with beams.
    """
    sampling = request.sampling
    search = Search(
        num_beams=request.num_beams,
        length_penalty=request.length_penalty,
        early_stopping=request.early_stopping,
        n_best=request.n_best,
        max_new_tokens=request.max_new_tokens,
        repetition_penalty=sampling.repetition_penalty,
        constraints=Constraints(
            eos=() if request.ignore_eos else tuple(eos),
            no_repeat_ngram_size=sampling.no_repeat_ngram_size,
        ),
    )
    if search.num_beams == 1:
        return None
    if streams:
        raise InputError(
            f"num_beams={search.num_beams} cannot stream: which beam is the answer is known at the end; use"
            " generate, or num_beams=1"
        )
    if given := request.options_without_beams():
        name, value = given[0]
        way_out = "leave it out"
        if name in DRAWING:
            way_out = "beams take likely tokens and draw none: leave it out, or give temperature=0"
        raise InputError(f"{name}={value!r:.80} does not go with num_beams={search.num_beams}; {way_out}")
    return search
