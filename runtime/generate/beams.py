"""Answers that beam search finds: which options go with it, and what comes of each prompt."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ..decoding.beam import BeamSearch, Hypothesis, Search
from ..decoding.cache_shapes import find_capacity
from ..decoding.chunk import Usage
from ..decoding.decoder import Decoder
from ..errors import InputError
from ..text.tokenizer import Tokenizer
from .generation import Generation, GenerationCandidate, Timings
from .request import SAMPLING_OPTIONS, GenerationRequest
from .row import Row


def answer_by_beams(
    decoder: Decoder,
    tokenizer: Tokenizer,
    rows: Sequence[Row],
    search: Search,
    logprobs: bool,
    max_length: int,
    adapter: int = 0,
) -> list[Generation]:
    """Return the likeliest answers to prompts that run together; the rows stay as they are."""
    prompts = [row.prompt for row in rows]
    limits = [row.max_left for row in rows]
    beams, seconds = search_answers(decoder, prompts, search, limits, max_length, adapter)
    generations = []
    for row, hypotheses in zip(rows, beams.list_hypotheses(), strict=True):
        candidates = tuple(make_candidate(tokenizer, row, hypothesis, logprobs) for hypothesis in hypotheses)
        best = candidates[0]
        generation = Generation(
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
        generations.append(generation)
    return generations


def search_answers(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    search: Search,
    limits: Sequence[int],
    max_length: int | None = None,
    adapter: int = 0,
) -> tuple[BeamSearch, list[float]]:
    """Return a finished search for what follows prompts, by at most `limits` tokens, and each step's seconds.

    Each prompt is computed once, by the first step.
    """
    start = time.perf_counter()
    capacity = find_capacity(decoder.artifact, [len(prompt) for prompt in prompts], limits)
    beams = BeamSearch(prompts, search, limits)
    capacity = decoder.widen(len(prompts) * search.num_beams, capacity, max_length)
    adapters = [adapter] * len(prompts)
    run = decoder.start(len(prompts), capacity, copies=search.num_beams, adapters=adapters)
    logits = np.repeat(run.prefill(prompts), search.num_beams, axis=0)  # all beams of a prompt begin alike
    run.expand()
    seconds: list[float] = []
    while True:
        copies = beams.advance(logits)
        seconds.append(time.perf_counter() - start)
        if beams.done:
            return beams, seconds
        start = time.perf_counter()
        run.copy_rows(copies)
        logits = run.decode(beams.tokens, beams.active)


def make_candidate(
    tokenizer: Tokenizer, row: Row, hypothesis: Hypothesis, logprobs: bool
) -> GenerationCandidate:
    """Return the text of an answer behind its context, its tokens, and their log-probabilities if wanted."""
    reason = hypothesis.finish_reason
    return GenerationCandidate(
        text=tokenizer.decode_known(hypothesis.token_ids, row.context),
        token_ids=hypothesis.token_ids,
        score=hypothesis.score,
        finish_reason=row.full if reason in ("length", "context") else reason,
        logprobs=hypothesis.logprobs if logprobs else (),
    )


def resolve_search(request: GenerationRequest, eos: Sequence[int], *, streams: bool = False) -> Search | None:
    """Return how a call searches, or None where it follows one answer only; refuse what beams do not take.

    repetition_penalty, no_repeat_ngram_size, ignore_eos, min_new_tokens, max_new_tokens and the
    checkpoint's rules go with beams, as in transformers: the penalty multiplies log-probabilities there, not
    logits.
    """
    sampling = request.sampling
    search = Search(
        num_beams=request.num_beams,
        length_penalty=request.length_penalty,
        early_stopping=request.early_stopping,
        n_best=request.n_best,
        max_new_tokens=request.max_new_tokens,
        repetition_penalty=sampling.repetition_penalty,
        constraints=replace(
            request.make_constraints(eos),
            no_repeat_ngram_size=sampling.no_repeat_ngram_size,
            min_new_tokens=min(request.min_new_tokens, request.max_new_tokens),
        ),
    )
    if search.num_beams == 1:
        return None
    if streams:
        raise InputError(
            f"num_beams={search.num_beams} cannot stream: the best beam is only known at the end; use"
            " generate, or num_beams=1"
        )
    if given := request.list_options_without_beams():
        name, value = given[0]
        hint = "leave it out"
        if name in SAMPLING_OPTIONS:
            hint = "beam search does not sample: leave it out, or give temperature=0"
        raise InputError(f"{name}={value!r:.80} does not go with num_beams={search.num_beams}; {hint}")
    return search
