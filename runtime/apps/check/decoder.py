"""Runs a decoder's cases through the runtime's own loop, and compares what it gives with PyTorch's answers.

B rows of a batch, N places, V vocabulary
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import ClassVar, TypeAlias

import numpy as np

from ...bundle.manifest import Artifact
from ...decoding.cache_shapes import PREFILL_CHUNK
from ...decoding.decoder import Decoder, DecoderRun
from ...decoding.sampling import compute_logprobs
from ...decoding.state import NONE_PENDING, PendingContext
from ...text.tokenizer import Tokenizer
from ...translate.source_encoder import SourceEncoder
from .case import Case, CaseSet, Encoding, Integers, Known, Location
from .cases import find_room
from .divergence import Followed, Sample, follow, judge_followed, read_sample
from .judge import Limits, Seen, compare_known
from .metrics import Logits
from .outcome import Outcome

Tokenizers: TypeAlias = tuple[Tokenizer, Tokenizer]  # of what a model is given, and of what it writes


@dataclass(frozen=True)
class DecoderEngine:
    """A decoder in the runtime's own loop; tokenizers are opened where tokens have to be shown."""

    decoder: Decoder
    open_tokenizers: Callable[[], Tokenizers]
    encoding: ClassVar[Encoding | None] = None

    @property
    def artifacts(self) -> tuple[Artifact]:
        return (self.decoder.artifact,)

    def run(self, case_set: CaseSet, case: Case) -> Iterator[Seen]:
        return run(self.decoder, case_set, case)

    def compare(self, case_set: CaseSet, cases: Sequence[Case], limits: Limits) -> Outcome:
        if cases[0].runner == "greedy":
            return compare_greedy(self.decoder, case_set, cases, limits, self.open_tokenizers())
        return compare_known(self.run, case_set, cases, limits)

    def close(self) -> None:
        self.decoder.close()


def run(
    decoder: Decoder, case_set: CaseSet, case: Case, encoder: SourceEncoder | None = None
) -> Iterator[Seen]:
    """Yield what a graph gives at the wanted places of a case, whose tokens are all known.

    A translator's reads what its encoder gives.
    """
    running = start(decoder, case_set, case, encoder)
    first = 1 if case.shares_past else 0
    for step, cuts in islice(enumerate(case.list_steps()), first, None):
        rows = [
            case_set.texts[row.text].tokens[begin:end]
            for row, (begin, end) in zip(case.rows, cuts, strict=True)
        ]
        if case.runner == "every":
            chunk = min(case.chunk or PREFILL_CHUNK, decoder.artifact.axis("rows").max)
            logits = np.concatenate(list(running.extend(rows[0], chunk)))
            yield see(case_set, Location(case, step, 0), cuts[0][0], logits)
            continue
        whole = case.chunk == 0
        got = take_step(running, rows, has_past=step > 0) if whole else running.prefill(rows, case.chunk)
        for row, (_, end) in enumerate(cuts):
            yield see(case_set, Location(case, step, row), end - 1, got[row : row + 1])


def start(
    decoder: Decoder, case_set: CaseSet, case: Case, encoder: SourceEncoder | None = None
) -> DecoderRun:
    """Return a run of a case's rows, which have read their past where they share one."""
    context = NONE_PENDING if encoder is None else encoder.prepare(case_set.list_sources(case))
    capacity = min(find_room(decoder.artifact), case_set.count_columns(case) + case.spare)
    if not case.shares_past:
        adapters = [case_set.texts[row.text].adapter for row in case.rows]
        return decoder.start(len(case.rows), capacity, context, adapters=adapters)
    pasts = [row.ends[0] for row in case.rows]
    longest = case_set.texts[case.rows[int(np.argmax(pasts))].text]
    running = start_on_past(decoder, longest.tokens, pasts, capacity, context)
    if longest.repeats > 1:
        running.repeat(longest.repeats)
    return running


def take_step(run: DecoderRun, rows: Sequence[Sequence[int]], has_past: bool) -> Logits:
    """Run each row's tokens on top of what it has read; return the logits (B, V) behind the last of each."""
    width = max(map(len, rows))
    if width == 1:
        return run.decode([tokens[0] for tokens in rows])
    return run.prefill(rows, choose_chunk(run.decoder.artifact, len(rows), width, has_past))


def choose_chunk(artifact: Artifact, rows: int, width: int, has_past: bool) -> int:
    """Return how many tokens of each row a graph reads in one run.

    A translator's graph whose kernel takes one behind a past reads one, and without a past all of them.
    """
    if artifact.dialect != "ort" or not artifact.reads_source or rows == 1:
        return PREFILL_CHUNK
    return 1 if has_past else width


def start_on_past(
    decoder: Decoder,
    tokens: Sequence[int],
    pasts: Sequence[int],
    capacity: int,
    context: PendingContext = NONE_PENDING,
) -> DecoderRun:
    """Return a run whose rows have read so many of some tokens, which are read once."""
    if decoder.artifact.keeps_state:  # which cannot go back
        run = decoder.start(len(pasts), capacity, context)
        run.prefill([tokens[:past] for past in pasts])
        return run
    if decoder.artifact.window is None:
        run = decoder.start(1, capacity, context, copies=len(pasts))
        run.prefill([tokens[: max(pasts)]])
        run.expand()
        for row, past in enumerate(pasts):
            run.truncate_row(row, past)
        return run
    run = decoder.start(len(pasts), capacity)  # what a window needs of shorter ones is gone
    for row, past in enumerate(pasts):
        for begin in range(0, past, PREFILL_CHUNK):
            run.extend_row(row, tokens[begin : min(begin + PREFILL_CHUNK, past)])
    return run


def see(case_set: CaseSet, location: Location, begin: int, logits: Logits) -> Seen:
    """Return what logits (N, V) at the positions of a row's text from one on say, where that is wanted."""
    case = location.case
    text = case.rows[location.row].text
    values: dict[str, Known] = {}
    for output in chain.from_iterable(measure.outputs for measure in case.measures):
        if (known := case_set.answers.get(output, {}).get(text)) is None:
            continue
        inside = (known.positions >= begin) & (known.positions < begin + len(logits))
        if inside.any():
            positions = known.positions[inside]
            values[output] = Known(
                positions, reduce(case_set, output, text, positions, logits[positions - begin])
            )
    return Seen(text, values, location)


def reduce(case_set: CaseSet, output: str, text: int, positions: Integers, logits: Logits) -> Logits:
    """Return what an output keeps of logits (N, V) at some positions of a text.

    It is NaN, but for whole logits and the likeliest token, where any of the V is not finite.
    """
    if output == "logits":
        return logits
    if output == "likeliest":
        likeliest: Logits = logits.argmax(-1)
        return likeliest
    is_finite = np.isfinite(logits).all(axis=1)
    if output == "columns":
        kept = logits[:, case_set.columns]
    elif output == "logprob":
        following = np.asarray(case_set.texts[text].tokens)[positions + 1]
        kept = np.full(len(logits), np.nan, np.float32)
        kept[is_finite] = compute_logprobs(logits[is_finite], following[is_finite])
    else:
        assert output == "margin", output
        best = np.sort(logits, axis=-1)[:, -2:]
        kept = best[:, 1] - best[:, 0]
    kept[~is_finite] = np.nan
    return kept


def compare_greedy(
    decoder: Decoder,
    case_set: CaseSet,
    cases: Sequence[Case],
    limits: Limits,
    tokenizers: Tokenizers,
    encoder: SourceEncoder | None = None,
) -> Outcome:
    """Return the outcome of padded batches whose tokens the engine chooses.

    The tokenizers are those of what it is given, a prompt or a source, and of what it writes.
    """
    samples: list[Sample] = []
    found: list[Followed] = []
    for case in cases:
        own = [read_sample(case_set, row) for row in case.rows]
        prompts = [sample.prompt for sample in own]
        batch = start(decoder, case_set, case, encoder)
        followed = follow(batch, take_step(batch, prompts, has_past=False), own, limits)
        moved = [replace(one, row=one.row + len(samples)) for one in followed.divergences]
        found.append(replace(followed, divergences=tuple(moved)))
        samples += own
    everything = Followed(
        tuple(part for one in found for part in one.parts),
        tuple(divergence for one in found for divergence in one.divergences),
        min(one.steps for one in found),
    )
    reader, writer = tokenizers
    texts = [reader.decode(sample.source or sample.prompt) for sample in samples]
    return judge_followed(everything, samples, texts, writer, limits)
