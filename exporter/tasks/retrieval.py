"""Chooses the cases of a decoder that reads neighbours: texts that end before, at and behind chunks' ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ...runtime.apps.check.case import Case, CaseSet, Measure, Row, Text
from ...runtime.apps.check.files import choose_evenly
from ...runtime.apps.check.metrics import VectorMetrics
from ...runtime.apps.check.retrieval import DECODER, ENCODER, sample_neighbours
from ...runtime.bundle.bundle import Bundle
from ...runtime.bundle.retrieval_defaults import RetrievalDefaults
from ..levels import FULL, Level
from .decoder import LOGITS, PASSAGES, Builder, add_passages, find_vocabulary
from .passages import clamp_count, cut_passages, encode_texts, thin_passages
from .random_cases import CONTEXT_ROWS, count_weights, sample_text

if TYPE_CHECKING:
    from ..reference_model import ReferenceModel

CROSS = Measure("layers", ("cross",), VectorMetrics.LIMITED, "cross.")
MEASURES = (LOGITS, PASSAGES, CROSS)  # what has limits
PARTS = (0, 1, 3, 7, 64)  # tokens of a step; 0 for all at once
NAMES = {0: "a text at once", 1: "a token at a time"}
REST = 7  # tokens of a text behind its chunks
MAX_BATCH = 4  # of a batch, or the graph's largest
CHUNKS = 6  # whose neighbours the encoder reads, at most
POSITIONS = 8  # of all neighbours of a chunk, whose keys and values are compared
REPLAY = 5  # tokens of a replay behind its chunks
ATTEMPTS = 100  # texts that are sampled for one whose chunks find what is wanted


def choose(
    model: ReferenceModel, bundle: Bundle, texts: Sequence[str], seed: int = 0, level: Level = FULL
) -> CaseSet:
    """Return the cases of both graphs, without answers; a level below "full" has fewer."""
    manifest = bundle.manifest
    defaults = manifest.retrieval
    assert defaults is not None
    context = manifest.max_length
    length = defaults.chunk_length
    weights = count_weights(model)
    most = max(artifact.axis("batch").max for artifact in manifest.artifacts)
    encoded, real = encode_texts(bundle, texts)
    random = np.random.default_rng(seed)
    builder = Builder()
    add_chunks(
        builder, [sample_text(random, real, length) for _ in range(CHUNKS)], defaults.read_length, most
    )
    vocabulary = find_vocabulary(manifest)
    replay = builder.add_text(Text(sample_replay(random, real, defaults, context, vocabulary)))
    add_steps(builder, sample_text(random, real, min(context, 2 * length + REST)), length)
    rows = [sample_text(random, real, min(context, 2 * length)) for _ in range(min(MAX_BATCH, most))]
    add_batch(builder, rows, length)
    read = clamp_count(max(level.count_context(weights), 3 * length), context)
    if read > 2 * length + REST:
        add_context(builder, sample_text(random, real, read))
    every_passage, calibration = cut_passages(encoded, context)
    passages = thin_passages(every_passage, level.count_text(weights))
    add_passages(builder, passages, vocabulary)
    left_out = []
    if len(passages) < len(every_passage):
        left_out.append(f"{len(every_passage) - len(passages)} of {len(every_passage)} passages of real text")
    if read < context:
        left_out.append(f"positions {read:,} to {context - 1:,} of a context")
    steps = next(case for case in builder.cases if case.runner == "every")
    whole = Row(replay, (len(builder.texts[replay].tokens),))
    drive = Case("a chunk's end", DECODER, (whole,), (), "every")
    chunk = next(case for case in builder.cases if case.graph == ENCODER)
    passage = Row(max(builder.wanted["likeliest"]), (len(passages[-1]),))
    return CaseSet(
        texts=tuple(builder.texts),
        cases=tuple(builder.cases),
        answers=builder.wanted,
        left_out=tuple(left_out),
        calibration=tuple(map(Text, calibration)),
        few=(steps, chunk),
        replays=(drive, chunk),
        ranges=(Case("passages", DECODER, (passage,), ()), chunk),
    )


def sample_replay(
    random: np.random.Generator,
    real: Sequence[int],
    defaults: RetrievalDefaults,
    context: int,
    vocabulary: int,
) -> tuple[int, ...]:
    """Return a text of two chunks and a little more: the first finds all neighbours, the second none.

    What the first one's neighbours left in the decoder's inputs must not be read behind the second. It may
    be another text, where there is no such one among many.
    """
    length = defaults.chunk_length
    for _ in range(ATTEMPTS):
        tokens = sample_text(random, real, min(context, 2 * length + REPLAY))
        chunks = [tokens[begin : begin + length] for begin in (0, length)]
        first, second = sample_neighbours(chunks, defaults, vocabulary)
        if len(first) == defaults.neighbours and not second:
            break
    return tokens


def add_chunks(builder: Builder, chunks: Sequence[tuple[int, ...]], read_length: int, most: int) -> None:
    """Add chunks whose neighbours the encoder reads, alone and together."""
    places = choose_evenly(read_length, POSITIONS)
    rows = []
    for tokens in chunks:
        text = builder.add_text(Text(tokens), chunk=range(len(tokens)), cross=places)
        rows.append(Row(text, (len(tokens),)))
    for row in rows[:2]:
        builder.add_case(Case("neighbours of a chunk", ENCODER, (row,), (CROSS,), "once"))
    for begin in range(0, len(rows), most):
        batch = tuple(rows[begin : begin + most])
        builder.add_case(Case(f"neighbours of {len(rows)} chunks", ENCODER, batch, (CROSS,), "once"))


def add_steps(builder: Builder, tokens: tuple[int, ...], length: int) -> None:
    """Add a text of some chunks, read at once, in parts, and token by token."""
    count = len(tokens)
    text = builder.add_text(Text(tokens), logits=range(count))
    for chunk in PARTS:
        name = NAMES.get(chunk, f"parts of {chunk} tokens")
        builder.add_case(Case(name, DECODER, (Row(text, (count,)),), (LOGITS,), "every", chunk=chunk))
    for end in sorted({1, length - 1, length, length + 1, 2 * length} & set(range(1, count + 1))):
        name = f"prompts that end about a chunk's end, {length} tokens"
        ends = tuple(range(end, min(end + 3, count + 1)))
        builder.add_case(Case(name, DECODER, (Row(text, ends),), (LOGITS,)))


def add_batch(builder: Builder, texts: Sequence[tuple[int, ...]], length: int) -> None:
    """Add texts of one length that are read together, past a chunk's end."""
    count = len(texts[0])
    begin = max(1, min(length - 2, count - 4))
    ends = (*range(begin, min(begin + 4, count)), count)
    wanted = [end - 1 for end in ends]
    rows = [Row(builder.add_text(Text(tokens), logits=wanted), ends) for tokens in texts]
    builder.add_case(Case(f"a batch of {len(rows)}", DECODER, tuple(rows), (LOGITS,)))


def add_context(builder: Builder, tokens: tuple[int, ...]) -> None:
    """Add a long text, which is read in chunks, and then token by token."""
    rows = min(CONTEXT_ROWS, len(tokens) - 1)
    ends = tuple(range(len(tokens) - rows + 1, len(tokens) + 1))
    text = builder.add_text(Text(tokens), logits=[end - 1 for end in ends])
    builder.add_case(Case("full context", DECODER, (Row(text, ends),), (LOGITS,), is_costly=True))


def thin(case_set: CaseSet, texts: int) -> CaseSet:
    """Return the set with at most so many passages, and without a long text."""
    passages = case_set.list_texts("passages")
    costly = {row.text for case in case_set.cases if case.is_costly for row in case.rows}
    kept = {passages[i] for i in choose_evenly(len(passages), texts)}
    return case_set.restrict(set(range(len(case_set.texts))) - (costly - kept))


def keep_every_chunk(case_set: CaseSet, output: str, text: int, counts: tuple[int, ...]) -> int | None:
    """Return how many places of an output golden data keeps: of chunks all, which the encoder reads."""
    return counts[0] if output in ("logits", "cross") else None
