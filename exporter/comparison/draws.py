"""Replays of drawn batches and single steps, to look for the fault of the row that failed.

B rows, T tokens of a run
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import numpy as np

from ...runtime.apps.check.draws import (
    STEPS,
    Batch,
    Draws,
    choose_chunk,
    list_compared_steps,
    plan_steps,
    start_batch,
    start_rows,
    take_step,
)
from ...runtime.apps.check.metrics import Spot
from ...runtime.backends.backend import Program
from ...runtime.bundle.manifest import Artifact
from ...runtime.decoding.cache_shapes import PREFILL_CHUNK
from ...runtime.decoding.decoder import Decoder, pad
from ...runtime.translate.source_encoder import SourceEncoder
from ..execution.replay import PADDING, Integers, Reading, Replay, Step

COMPARED = 256  # tokens of the row; of a longer one only the step that failed is compared

# Opens a decoder, and a translator's encoder beside it.
OpenDecoder: TypeAlias = "Callable[[Program], tuple[Decoder, SourceEncoder | None]]"


def make_draw_replay(
    artifact: Artifact, draws: Draws, spot: Spot, reading: Reading, open_decoder: OpenDecoder
) -> Replay:
    """Return the replay of the spot where a drawn batch, or the single steps, failed first.

    Of all rows that run, the one that failed is compared. `reading` runs PyTorch over its text.
    """
    number, step, row = spot
    if number == STEPS:
        return make_step_replay(artifact, draws, step, row, reading, open_decoder)
    return make_batch_replay(artifact, draws, draws.batches[number], step, row, reading, open_decoder)


def make_batch_replay(
    artifact: Artifact,
    draws: Draws,
    batch: Batch,
    step: int,
    row: int,
    reading: Reading,
    open_decoder: OpenDecoder,
) -> Replay:
    """Return the replay of the first steps of a batch, up to one of them."""

    def drive(program: Program) -> None:
        decoder, encoder = open_decoder(program)
        run = start_batch(decoder, draws, batch, encoder)
        for number, rows in list_compared_steps(draws, batch):
            if number <= step:
                take_step(run, rows, has_past=number > 0)

    steps = []
    begins = (0,) * len(batch.texts)
    # PyTorch reads what stands behind a repeated past by itself.
    known = batch.ends[0][row] if batch.repeats > 1 else 0
    for number, ends in enumerate(batch.ends[: step + 1]):
        if number == 0 and batch.repeats:
            steps += list_past_steps(artifact, ends)
            begins = ends
            continue
        is_compared = number == step or batch.ends[step][row] - known <= COMPARED
        name = f"step {number} of a batch of {len(batch.texts)}"
        for rows, positions in list_runs(artifact, begins, ends):
            own = np.array(rows)[:, None] == row
            kept = np.where(own & is_compared & (positions != PADDING), positions - known, PADDING)
            steps.append(Step(name, kept, rows))
        begins = ends
    readings = [reading if number == row else None for number in range(len(batch.texts))]
    return Replay(drive, tuple(steps), tuple(readings))


def list_runs(
    artifact: Artifact, begins: Sequence[int], ends: Sequence[int]
) -> Iterator[tuple[tuple[int, ...], Integers]]:
    """Yield the rows and the positions (B, T) of each run of the graph that a step of a batch makes."""
    spans = [range(begin, end) for begin, end in zip(begins, ends, strict=True)]
    ids, valid = pad(spans, artifact.padding_side)
    positions = np.where(valid, ids, PADDING)
    every = tuple(range(len(spans)))
    rows, width = positions.shape
    chunk = choose_chunk(artifact, rows, width, any(begins))
    for start in range(0, width, chunk):
        piece = positions[:, start : start + chunk]
        has_past = start > 0 or any(begins)
        if artifact.dialect == "ort" and has_past and 1 not in piece.shape:  # row by row
            for row in every:
                own = piece[row][piece[row] != PADDING]
                if own.size:
                    yield (row,), own[None]
        else:
            yield every, piece


def make_step_replay(
    artifact: Artifact, draws: Draws, step: int, row: int, reading: Reading, open_decoder: OpenDecoder
) -> Replay:
    """Return the replay of one of the single steps, behind pasts that are read at once."""
    planned = plan_steps(artifact, draws)
    pasts = [past + step for past in planned.pasts]
    text = draws.texts[0]
    capacity = planned.pasts[-1] + planned.count

    def drive(program: Program) -> None:
        decoder, encoder = open_decoder(program)
        run = start_rows(decoder, draws, pasts, capacity, encoder)
        run.decode([text[past] for past in pasts])

    every = tuple(range(len(pasts)))
    positions = np.full((len(pasts), 1), PADDING)
    positions[row] = pasts[row]
    last = Step(f"single step at position {pasts[row]}", positions, every)
    readings = [reading if number == row else None for number in every]
    return Replay(drive, (*list_past_steps(artifact, pasts), last), tuple(readings))


def list_past_steps(artifact: Artifact, pasts: Sequence[int]) -> list[Step]:
    """Return the runs of the graph that `start_rows` makes; none is compared."""
    lengths = [max(pasts)] if artifact.window is None else pasts
    return [
        Step("past", np.full((1, min(PREFILL_CHUNK, length - start)), PADDING), (0,))
        for length in lengths
        for start in range(0, length, PREFILL_CHUNK)
    ]


def find_text(draws: Draws, spot: Spot, artifact: Artifact) -> tuple[int, ...]:
    """Return what the row that failed had read."""
    number, step, row = spot
    if number == STEPS:
        return draws.texts[0][: plan_steps(artifact, draws).pasts[row] + step + 1]
    batch = draws.batches[number]
    return draws.texts[batch.texts[row]][: batch.ends[step][row]]
