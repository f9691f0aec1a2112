"""Draws sources, targets and batches for a translator, as for a decoder."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ...runtime.apps.check.draws import Batch, Draws
from .draw import (
    SMALL_SIZES,
    TEXTS,
    Drawing,
    Random,
    SourceDrawing,
    answer_finitely,
    count_alike,
    count_longest,
    count_room,
    count_step_rows,
    count_tokens,
    count_weights,
    draw_batches,
    draw_columns,
    draw_ends,
    draw_far_batches,
    draw_length,
    draw_text,
    list_sizes,
)

if TYPE_CHECKING:
    from .translation import Reference


def draw_for_translator(reference: Reference, drawing: Drawing) -> Draws:
    """Draw sources, targets and batches for a translator, and compute what PyTorch makes of them.

    Its decoder and its encoder have about half of the weights each, so both read as much as a decoder does.
    """
    assert drawing.sources is not None
    random = np.random.default_rng(drawing.seed)
    weights = count_weights(reference.model)
    longest = count_longest(weights, drawing.context, drawing.level)
    most_of_others = count_tokens(weights, drawing.level) // 2 // (TEXTS - 1)
    lengths = [longest, *[max(1, min(longest, most_of_others))] * (TEXTS - 1)]
    texts = tuple((reference.start, *draw_text(random, drawing.real, length - 1)) for length in lengths)
    vocabulary = reference.compute_results((drawing.sources.end,), (0,))[0].shape[1]
    columns = draw_columns(random, vocabulary)
    sizes = list_sizes(drawing.max_batch)
    alike = count_alike(weights, sizes, drawing.level)
    room = count_room(weights, lengths[0], len(sizes) * alike, drawing.level)
    most = count_longest(weights, drawing.sources.longest, drawing.level)
    sources = draw_sources(random, drawing.sources, most, room // min(SMALL_SIZES, max(sizes)))
    widths = list(map(len, sources))
    batches = draw_batches(random, lengths, sizes, room, drawing.context, drawing.parts, alike, widths)
    widest = draw_widest_batches(random, lengths) if max(sizes) > 1 else ()
    far = draw_far_batches(random, sizes, lengths[0], drawing, repeats=1)
    draws = Draws(
        seed=drawing.seed,
        texts=texts,
        columns=columns,
        logits=(),
        scale=1.0,
        batches=(*batches, *widest, *far),
        step_rows=count_step_rows(weights, lengths[0], drawing.level),
        sources=sources,
    )
    return answer_finitely(reference, draws)


def draw_sources(
    random: Random, drawing: SourceDrawing, most: int, most_of_all: int
) -> tuple[tuple[int, ...], ...]:
    """Return a source for each text, from one token up to `most`, evenly spread by their logarithm.

    The first, which stands in every batch, has at most `most_of_all`.
    """
    steps = np.linspace(0, math.log(most), TEXTS)
    spread = np.exp(random.uniform(steps[:-1], steps[1:])).round().astype(int).tolist()
    first = int(random.integers(1, max(1, min(most, most_of_all)) + 1))
    lengths = [first, 1, *spread[1:-1], most]
    return tuple((*draw_text(random, drawing.real, length - 1), drawing.end) for length in lengths)


def draw_widest_batches(random: Random, lengths: Sequence[int]) -> tuple[Batch, ...]:
    """Return a batch of the shortest source and the longest: as much padding as there can be."""
    texts = random.permutation([1, TEXTS - 1]).tolist()
    totals = [draw_length(random, min(2, lengths[text]), lengths[text]) for text in texts]
    return (Batch(tuple(texts), draw_ends(random, totals, steps=min(2, *totals), parts=1)),)
