"""Runs beam search on a decoder; each prompt is computed once.

B prompts
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import numpy as np

from .beam import BeamSearch, Search
from .decoder import Decoder


def search_steps(
    decoder: Decoder, prompts: Sequence[Sequence[int]], search: Search, limits: Sequence[int], capacity: int
) -> Iterator[tuple[BeamSearch, float]]:
    """Search for what follows each of several prompts.

    Args:
        decoder: computes logits; has room for B * num_beams rows.
        prompts: token ids, B of them.
        search: how to search.
        limits: the most new tokens that each prompt has room for, (B,).
        capacity: tokens that each row of the cache needs.

    Yields:
        After each step the search, which ends when it is done, and the step's seconds. The first step
        takes in the prompts.

    Raises:
        MemoryLimitError: the engine's own memory has no room for the cache.
        BackendError: an active row's logits have NaN, infinity, or nothing but -inf.
        InputError: the options leave no token at all.
        ClosedError: the decoder is closed.
    """
    start = time.perf_counter()
    beams = BeamSearch.after_prompts(prompts, search, limits)
    run = decoder.start(len(prompts), capacity, copies=search.num_beams)
    logits = np.repeat(run.prefill(prompts), search.num_beams, axis=0)  # all beams of a prompt begin alike
    run.spread()
    while True:
        copies = beams.advance(logits)
        yield beams, time.perf_counter() - start
        if beams.done:
            return
        start = time.perf_counter()
        run.copy_rows(copies)
        logits = run.decode(beams.tokens, beams.active)
