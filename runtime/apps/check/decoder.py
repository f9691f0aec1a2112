"""Runs a decoder's cases through the runtime's own loop, and compares what it gives with PyTorch's answers.

B rows of a batch, N places, V vocabulary
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice

import numpy as np

from ...bundle.manifest import Artifact
from ...decoding.cache_shapes import PREFILL_CHUNK
from ...decoding.decoder import Decoder, DecoderRun
from ...decoding.sampling import compute_logprobs
from ...text.tokenizer import Tokenizer
from .case import Case, CaseSet, Integers, Known
from .cases import find_room
from .decoders import Sample, measure_parts
from .divergence import add_divergence, follow
from .draws import SPARE, take_step
from .metrics import Logits, Outcome, judge_outcome
from .places import JUDGES, Seen


def run(decoder: Decoder, case_set: CaseSet, number: int) -> Iterator[Seen]:
    """Yield what a graph gives at the known places of a case, whose tokens are all known."""
    case = case_set.cases[number]
    running = start(decoder, case_set, case)
    first = 1 if case.shares_past else 0
    for step, cuts in islice(enumerate(case.list_steps()), first, None):
        rows = [
            case_set.texts[row.text].tokens[begin:end]
            for row, (begin, end) in zip(case.rows, cuts, strict=True)
        ]
        if case.runner == "every":
            ((begin, end),) = cuts
            logits = np.concatenate(list(running.extend(rows[0], min(end - begin, PREFILL_CHUNK))))
            text = case.rows[0].text
            yield Seen(number, step, 0, text, read_places(case_set, text, begin, logits))
            continue
        got = take_step(running, rows, has_past=step > 0)
        for place, (row, (_, end)) in enumerate(zip(case.rows, cuts, strict=True)):
            values = read_places(case_set, row.text, end - 1, got[place : place + 1])
            yield Seen(number, step, place, row.text, values)


def start(decoder: Decoder, case_set: CaseSet, case: Case) -> DecoderRun:
    """Return a run of a case's rows, which have read their past where they share one."""
    # A graph that writes a slot too far is told by its results, where the engine itself would raise an error.
    capacity = min(find_room(decoder.artifact), case_set.count_columns(case) + SPARE)
    if not case.shares_past:
        return decoder.start(len(case.rows), capacity)
    pasts = [row.ends[0] for row in case.rows]
    longest = case.rows[int(np.argmax(pasts))]
    tokens = case_set.texts[longest.text].tokens
    running = start_on_past(decoder, tokens, pasts, capacity)
    if (repeats := case_set.texts[longest.text].repeats) > 1:
        running.repeat(repeats)
    return running


def start_on_past(decoder: Decoder, tokens: Sequence[int], pasts: Sequence[int], capacity: int) -> DecoderRun:
    """Return a run whose rows have read so many of some tokens."""
    if decoder.artifact.window is None:
        running = decoder.start(1, capacity, copies=len(pasts))
        running.prefill([tokens[: max(pasts)]])
        running.spread()
        for row, past in enumerate(pasts):
            running.truncate_row(row, past)
        return running
    running = decoder.start(len(pasts), capacity)  # what a window needs of shorter ones is gone
    for row, past in enumerate(pasts):
        for begin in range(0, past, PREFILL_CHUNK):
            running.extend_row(row, tokens[begin : min(begin + PREFILL_CHUNK, past)])
    return running


def read_places(case_set: CaseSet, text: int, begin: int, logits: Logits) -> dict[str, Known]:
    """Return by output what logits (N, V) say at the positions of a text from one on, where it is wanted."""
    found: dict[str, Known] = {}
    for output, places in case_set.places.items():
        wanted = np.asarray(places.get(text, ()), np.int64)
        wanted = wanted[(wanted >= begin) & (wanted < begin + len(logits))]
        if len(wanted):
            tokens = case_set.texts[text].tokens
            found[output] = Known(
                wanted, reduce(output, logits[wanted - begin], wanted, tokens, case_set.columns)
            )
    return found


def reduce(
    output: str, logits: Logits, positions: Integers, tokens: Sequence[int], columns: Sequence[int]
) -> Logits:
    """Return what an output keeps of logits (N, V) at some positions of a text."""
    if output == "columns":
        known = logits[:, columns]
        known[~np.isfinite(logits).all(axis=1)] = np.nan
        return known
    if output == "likeliest":
        likeliest: Logits = logits.argmax(-1)
        return likeliest
    if output == "logprob":
        following = np.asarray(tokens)[positions + 1]
        return compute_logprobs(logits, following).astype(np.float32)
    if output == "margin":
        best = np.sort(logits, axis=-1)[:, -2:]
        margin: Logits = best[:, 1] - best[:, 0]
        return margin
    return logits


def compare(
    decoder: Decoder,
    case_set: CaseSet,
    numbers: Sequence[int],
    limits: Mapping[str, float],
    tokenizer: Tokenizer,
) -> Outcome:
    """Return the outcome of the cases of one name, by their numbers."""
    case = case_set.cases[numbers[0]]
    if case.runner == "greedy":
        return compare_greedy(decoder, case_set, case, limits, tokenizer)
    seen = chain.from_iterable(run(decoder, case_set, number) for number in numbers)
    return JUDGES[case.metrics[0]](seen, case_set, case.metrics, limits)


def compare_greedy(
    decoder: Decoder, case_set: CaseSet, case: Case, limits: Mapping[str, float], tokenizer: Tokenizer
) -> Outcome:
    """Return the outcome of a padded batch whose tokens the engine chooses."""
    samples = [read_sample(case_set, row.text, row.ends[0]) for row in case.rows]
    steps = min(len(sample.continuation) for sample in samples)
    batch = decoder.start(len(samples), max(len(sample.prompt) for sample in samples) + steps)
    followed = follow(batch, batch.prefill([sample.prompt for sample in samples]), samples, limits)
    outcome = judge_outcome(measure_parts(followed.parts), limits, failures=followed.failures)
    prompts = [tokenizer.decode(sample.prompt) for sample in samples]
    return add_divergence(outcome, followed, prompts, samples, tokenizer.decode_known)


def read_sample(case_set: CaseSet, text: int, length: int) -> Sample:
    """Return a prompt of so many tokens, with how PyTorch continues it."""
    tokens = case_set.texts[text].tokens
    logits = case_set.answers["logits"][text]
    margins = case_set.answers["margin"][text].values
    steps = tuple(int(position) - length + 1 for position in logits.positions)
    return Sample(tokens[:length], tokens[length:], tuple(map(float, margins)), steps, logits.values)


def list_outcomes(
    decoder: Decoder, artifact: Artifact, case_set: CaseSet, limits: Mapping[str, float], tokenizer: Tokenizer
) -> Iterator[tuple[str, Outcome]]:
    """Yield the outcome of each comparison, by its name, as far as the graph takes its rows and tokens."""
    by_name: dict[str, list[int]] = {}
    for number, case in enumerate(case_set.cases):
        if case.graph == artifact.graph and case_set.fits(case, artifact):
            by_name.setdefault(case.name, []).append(number)
    for name, numbers in by_name.items():
        yield name, compare(decoder, case_set, numbers, limits, tokenizer)
