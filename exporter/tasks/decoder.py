"""Chooses the cases of a decoder: prompts, real text, a full context, and random batches."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from ...runtime.apps.check.case import Case, CaseSet, Known, Measure, Row, Text
from ...runtime.apps.check.files import choose_evenly
from ...runtime.apps.check.metrics import ErrorMetrics, Metrics, TextMetrics
from ...runtime.bundle.bundle import Bundle
from ...runtime.bundle.manifest import Manifest
from ...runtime.decoding.cache_shapes import PREFILL_CHUNK
from ..levels import FULL, Level
from .passages import clamp_count, cut_passages, encode_texts, thin_passages
from .random_cases import (
    BEGINNING,
    CONTEXT_ROWS,
    RANDOM_PREFIX,
    TAIL,
    TEXTS,
    RandomCases,
    Rows,
    count_weights,
    describe_fewer_cases,
    sample_batches,
    sample_columns,
    sample_far_batches,
    sample_text,
)

if TYPE_CHECKING:
    from ..reference_model import ReferenceModel
    from .pytorch_decoder import Reference

GRAPH = "decoder"
CONTEXT = "full context"  # the name of its case
RANGE_TEXTS = 3  # passages in which ranges are measured
REPLAY_TOKENS = (24, 13)  # at most, of the two texts of a replay
RANDOM = "random batches, padded"  # how the name of their case begins
MAX_BATCH = 8  # of the padded cases, or the graph's largest
SPARE = 8  # slots of a cache behind what a random batch needs
PART = 7  # tokens of a step on top of a past; divides no round length
DECODE_STEPS = 16
PROMPT_TOKENS = 48  # at most; several lengths below that are used
LOGITS_BYTES = 128 * 2**20  # of all passages together: where that is too little, of some positions
LOGITS = Measure("logits", ("logits",), Metrics.LIMITED)
COLUMNS = Measure("columns", ("columns",), ErrorMetrics.LIMITED, RANDOM_PREFIX)
PASSAGES = Measure("passages", ("likeliest", "logprob", "logits"), TextMetrics.LIMITED)
# Rounding costs another model of its own: what adapters lose is compared with what they lose in PyTorch.
ADAPTED_LOGITS = LOGITS._replace(prefix="adapters.")
ADAPTED_PASSAGES = PASSAGES._replace(prefix="adapters.text.")


class Builder:
    """Collects texts, and cases that read them."""

    def __init__(self) -> None:
        self.texts: list[Text] = []
        self.cases: list[Case] = []
        self.wanted: dict[str, dict[int, Known]] = {}

    def add_text(self, text: Text, **places: Sequence[int]) -> int:
        """Add a text, and for each output the positions whose results are wanted; return its number."""
        number = len(self.texts)
        self.texts.append(text)
        for output, positions in places.items():
            self.wanted.setdefault(output, {})[number] = Known.wanted(positions)
        return number

    def add_case(self, case: Case) -> None:
        self.cases.append(case)


def choose(
    model: ReferenceModel, bundle: Bundle, texts: Sequence[str], seed: int = 0, level: Level = FULL
) -> CaseSet:
    """Return a decoder's cases, without answers; a level below "full" has fewer.

    There are prompts of unequal length, one of a single token, real text, a full context, and random batches,
    which a seed decides.
    """
    from .pytorch_decoder import open_reference

    reference = open_reference(model)
    weights = count_weights(model)
    manifest = bundle.manifest
    context = manifest.max_length
    most = max(artifact.axis("batch").max for artifact in manifest.artifacts)
    encoded, real = encode_texts(bundle, texts)
    steps = min(DECODE_STEPS + 1, context // 2)
    prompts = choose_prompts(encoded, min(PROMPT_TOKENS, context - steps), level, weights)
    every_passage, calibration = cut_passages(encoded, context)
    passages = thin_passages(every_passage, level.count_text(weights))
    filled = fill_for_level(reference, real, context, level, weights)
    builder = Builder()
    vocabulary = find_vocabulary(manifest)
    add_prompts(builder, prompts, steps, min(MAX_BATCH, most))
    if manifest.generation is not None:
        add_adapters(builder, prompts, manifest.generation.adapters, steps, min(MAX_BATCH, most))
    known = filled.tokens[: filled.past or None]
    add_edges(builder, known or real, list_edges(bundle, len(known)))
    if known:
        add_context(builder, filled)
    # Another exporter's mask of a window may count the cache's columns; that is right as long as no padding
    # stands between a row's tokens, and `generate` leaves none there.
    parts = 1 if manifest.source.get("exporter") else 2
    cases = RandomCases(weights, real, context, most, seed, parts, level)
    columns = add_random(builder, reference, cases, vocabulary) if level.random_work else ()
    add_passages(builder, passages, vocabulary)
    if manifest.generation is not None:
        for slot in range(1, 1 + len(manifest.generation.adapters)):
            add_passages(builder, [passages[slot % len(passages)]], vocabulary, slot)
    few, replays, ranges = list_node_cases(builder)
    left_out = describe_left_out(
        counts={
            "prompts": (len(prompts) - 1, len(encoded)),
            "passages of real text": (len(passages), len(every_passage)),
        },
        context=(filled.count(), len(known), min(context, reference.count_read(context))),
        cases=cases,
    )
    return CaseSet(
        texts=tuple(builder.texts),
        cases=tuple(builder.cases),
        answers=builder.wanted,
        columns=columns,
        left_out=tuple(left_out),
        calibration=tuple(map(Text, calibration)),
        few=few,
        replays=replays,
        ranges=ranges,
    )


def list_measures(case_set: CaseSet) -> tuple[Measure, ...]:
    """Return what has limits of a decoder."""
    has_adapters = any(text.adapter for text in case_set.texts)
    return (LOGITS, PASSAGES, COLUMNS, *((ADAPTED_LOGITS, ADAPTED_PASSAGES) if has_adapters else ()))


def list_node_cases(builder: Builder) -> tuple[tuple[Case, ...], tuple[Case, ...], tuple[Case, ...]]:
    """Return the cases that run node by node: the few that are compared, a replay, and one for ranges.

    A replay reads texts as a padded batch, and then a token of each.
    """
    prompts = builder.wanted["margin"]
    text, known = next(iter(builder.wanted["logits"].items()))
    length = int(known.positions[-1]) + 1
    row = Row(text, (length,))
    every = Case("prefill of every position", GRAPH, (row,), (LOGITS,), "every", chunk=length)
    context = [case for case in builder.cases if case.name == CONTEXT]
    longest_first = sorted(prompts, key=lambda number: -len(builder.texts[number].tokens))
    short = [
        (number, min(builder.texts[number].count(), most + 1))
        for number, most in zip((longest_first[0], longest_first[-1]), REPLAY_TOKENS, strict=True)
    ]
    passages = [(number, len(builder.texts[number].tokens)) for number in builder.wanted["likeliest"]]

    def make_replay(name: str, texts: Sequence[tuple[int, int]]) -> Case:
        return Case(name, GRAPH, tuple(Row(number, (end - 1, end)) for number, end in texts), ())

    replays = (make_replay("short texts", short),)
    return (every, *context), replays, (make_replay("passages", passages[:RANGE_TEXTS]),)


def choose_prompts(
    encoded: Sequence[Sequence[int]], longest: int, level: Level, weights: int
) -> list[tuple[int, ...]]:
    """Return the beginnings of some texts, of three lengths, and a single token."""
    count = clamp_count(level.count_samples(weights, PROMPT_TOKENS) - 1, len(encoded))
    few = choose_evenly(len(encoded), count)
    chosen = [tuple(encoded[k][: max(1, longest // (1 + i % 3))]) for i, k in enumerate(few)]
    return [*chosen, tuple(encoded[0][:1])]


def list_edges(bundle: Bundle, known: int) -> tuple[int, ...]:
    """Return the lengths of prompts at which behaviour changes, up to that of the known text."""
    tuned = {artifact.axis("tokens").opt for artifact in bundle.manifest.artifacts}
    lengths = {length for edge in (*tuned, PREFILL_CHUNK) for length in (edge, edge + 1)}
    return tuple(sorted(length for length in lengths if length < known))


def fill_for_level(
    reference: Reference, text: Sequence[int], context: int, level: Level, weights: int
) -> Text:
    """Return a context with no more tokens to read than the level allows, besides those that a window sees.

    Where keys and values cannot be repeated, it ends before the model's own does. It may be empty.
    """
    most = clamp_count(level.count_context(weights), context)
    if not most:
        return Text(())
    if most >= context:
        return fill_context(text, context, reference.count_read(context))
    if not reference.repeats:
        return fill_context(text, most, most)
    windows = [window for window in reference.model.config.windows if window is not None]
    read = min(reference.count_read(context), max(most, max(windows, default=0) + CONTEXT_ROWS))
    return fill_context(text, context, read)


def fill_context(text: Sequence[int], length: int, read: int) -> Text:
    """Return a text that fills a context of `length` tokens, of which about `read` are read."""
    tokens = tuple(text) * (length // len(text) + 1)
    repeats = length // read
    if repeats < 2:
        return Text(tokens[:length])
    past = (length - CONTEXT_ROWS) // repeats
    return Text(tokens[: length - (repeats - 1) * past], past=past, repeats=repeats)


def describe_left_out(
    counts: Mapping[str, tuple[int, int]], context: tuple[int, int, int], cases: RandomCases
) -> Iterator[str]:
    """Yield the cases of "full" that the level leaves out, in words.

    Args:
        counts: how many of each kind are compared, and how many there are.
        context: how long the context is that is filled, how much of it is read, and how much "full" reads.
        cases: the random ones.
    """
    for what, (some, every) in counts.items():
        if some < every:
            yield f"{every - some} of {every} {what}"
    length, read, usually_read = context
    if not length:
        yield "a full context, and prompts as long as a prefill's chunk"
    elif length < cases.context:
        yield f"positions {length:,} to {cases.context - 1:,} of a context"
    elif read < usually_read:
        yield f"reading {usually_read:,} tokens of a context: {read:,} are, and stand in it more than once"
    yield from describe_fewer_cases(cases.weights, cases.context, cases.max_batch, cases.level)


def add_prompts(builder: Builder, prompts: Sequence[tuple[int, ...]], steps: int, most: int) -> None:
    """Add prompts that PyTorch continues: token by token, freely in batches, and several tokens at a time."""
    rows = []
    for prompt in prompts:
        wanted = range(len(prompt) - 1, len(prompt) - 1 + steps)
        text = builder.add_text(Text(prompt, continues=steps), logits=wanted, margin=wanted)
        rows.append(make_row(text, prompt, steps))
    for row in rows:
        builder.add_case(Case("prefill and decode, batch 1", GRAPH, (row,), (LOGITS,)))
    for size in sorted({min(2, most), most}):
        batch = [*(rows[i % max(1, len(rows) - 1)] for i in range(size - 1)), rows[-1]]
        first = tuple(replace(row, ends=row.ends[:1]) for row in batch)
        name = f"greedy, {size} prompts, padded"
        builder.add_case(Case(name, GRAPH, first, (LOGITS,), "greedy", is_padded=True))
    whole = tuple(Row(row.text, row.ends[-1:]) for row in rows[-most:])
    for row in whole:
        builder.add_case(
            Case(f"parts of {PART} tokens, batch 1", GRAPH, (row,), (LOGITS,), "every", chunk=PART)
        )
    if len(whole) > 1:
        name = f"parts of {PART} tokens, {len(whole)} prompts, padded"
        of_few = LOGITS._replace(limited=("max_error",))  # the mean of so few rows says no more
        builder.add_case(Case(name, GRAPH, whole, (of_few,), chunk=PART, is_padded=True))


def add_adapters(
    builder: Builder, prompts: Sequence[tuple[int, ...]], names: Sequence[str], steps: int, most: int
) -> None:
    """Add prompts that adapters continue: each alone, and all in one batch with the model without one."""
    if not names:
        return
    without = next(iter(builder.wanted["margin"]))
    rows = [make_row(without, prompts[0], steps)]
    for slot, name in enumerate(names, 1):
        for prompt in (prompts[0], prompts[-1]):
            wanted = range(len(prompt) - 1, len(prompt) - 1 + steps)
            text = builder.add_text(Text(prompt, steps, adapter=slot), logits=wanted, margin=wanted)
            rows.append(make_row(text, prompt, steps))
            builder.add_case(Case(f"adapter {name}, batch 1", GRAPH, (rows[-1],), (ADAPTED_LOGITS,)))
    for begin in range(0, len(rows) if most > 1 else 0, most):
        batch = tuple(rows[begin : begin + most])
        name = "adapters in one batch, padded"
        builder.add_case(Case(name, GRAPH, batch, (ADAPTED_LOGITS,), is_padded=True))


def make_row(text: int, prompt: tuple[int, ...], steps: int) -> Row:
    """Return the row that reads a prompt, and then token by token what follows."""
    return Row(text, tuple(range(len(prompt), len(prompt) + steps)))


def add_edges(builder: Builder, tokens: Sequence[int], edges: Sequence[int]) -> None:
    """Add prompts of the lengths at which behaviour changes."""
    if not edges:
        return
    text = builder.add_text(Text(tuple(tokens[: max(edges)])), logits=[edge - 1 for edge in edges])
    name = f"prompts of {', '.join(map(str, edges))} tokens"
    for edge in edges:
        builder.add_case(Case(name, GRAPH, (Row(text, (edge,)),), (LOGITS,), is_costly=True))


def add_context(builder: Builder, filled: Text) -> None:
    """Add a full context: the prompt in chunks, then token by token up to the last slot of the cache."""
    length = len(filled.tokens)
    rows = min(CONTEXT_ROWS, filled.count() - 1)
    ends = tuple(range(length - rows + 1, length + 1))
    text = builder.add_text(filled, logits=[end - 1 for end in ends])
    row = Row(text, (filled.past, *ends) if filled.past else ends)
    builder.add_case(Case(CONTEXT, GRAPH, (row,), (LOGITS,), shares_past=bool(filled.past), is_costly=True))


def add_random(
    builder: Builder, reference: Reference, cases: RandomCases, vocabulary: int
) -> tuple[int, ...]:
    """Add batches of random lengths, pasts and split points; return the tokens that are compared."""
    random = np.random.default_rng(cases.seed)
    longest = cases.longest
    lengths = [longest, *[max(1, longest // (TEXTS - 1))] * (TEXTS - 1)]
    tokens = [sample_text(random, cases.real, length) for length in lengths]
    columns = sample_columns(random, vocabulary)
    numbers = [builder.add_text(Text(one), columns=range(len(one))) for one in tokens]

    @cache
    def find_text(past: int, repeats: int) -> int:
        if repeats == 1:
            return numbers[0]
        text = Text(tokens[0][: past + TAIL], past=past, repeats=repeats)
        return builder.add_text(text, columns=range(past, past + TAIL))

    for rows in sample_batches(random, cases, dict(zip(numbers, lengths, strict=True)), {}):
        builder.add_case(make_random_case(GRAPH, rows, cases.seed))
    for rows in sample_far_batches(random, cases, find_most_repeats(reference, cases), find_text):
        builder.add_case(make_random_case(GRAPH, rows, cases.seed, shares_past=True))
    add_single_steps(builder, numbers[0], longest, min(cases.step_rows, cases.max_batch))
    return columns


def find_most_repeats(reference: Reference, cases: RandomCases) -> int:
    """Return how often the text's beginning is repeated to fill a context; 1 where the text itself is.

    That is so where it is long enough, for a model that cannot be given keys and values, or where a window
    would show tokens that are not there any more.
    """
    longest = cases.longest
    if longest >= cases.context or longest <= 2 * TAIL or not reference.repeats:
        return 1
    if any(reference.model.config.windows):
        return 1
    return math.ceil(cases.context / min(BEGINNING, longest - TAIL))


def make_random_case(graph: str, rows: Rows, seed: int, shares_past: bool = False) -> Case:
    """Return the case of a batch that a seed drew."""
    return Case(
        f"{RANDOM}, seed {seed}",
        graph,
        rows,
        (COLUMNS,),
        shares_past=shares_past,
        spare=SPARE,
        is_costly=True,
        is_padded=True,
    )


def add_single_steps(builder: Builder, text: int, length: int, most: int) -> None:
    """Add single steps at every position of a text but the first, which the rows divide among them."""
    rows = min(most, length - 1)
    if not rows:
        return
    count = math.ceil((length - 1) / rows)
    pasts = [min(1 + row * count, length - count) for row in range(rows)]
    name = f"single steps at positions 1 to {pasts[-1] + count - 1}"
    steps = tuple(Row(text, tuple(range(past, past + count + 1))) for past in pasts)
    builder.add_case(Case(name, GRAPH, steps, (COLUMNS,), shares_past=True, is_costly=True))


def add_passages(
    builder: Builder, passages: Sequence[tuple[int, ...]], vocabulary: int, adapter: int = 0
) -> None:
    """Add real text, of which every token is predicted; whole logits are known where memory allows."""
    for tokens in passages:
        every = range(len(tokens) - 1)
        allowed = max(1, LOGITS_BYTES // (len(passages) * vocabulary * 4))
        some = choose_evenly(len(every), allowed)
        text = builder.add_text(Text(tokens, adapter=adapter), likeliest=every, logprob=every, logits=some)
        name, measure = ("real text, by adapters", ADAPTED_PASSAGES) if adapter else ("real text", PASSAGES)
        builder.add_case(Case(name, GRAPH, (Row(text, (len(every),)),), (measure,), "every", is_costly=True))


def find_vocabulary(manifest: Manifest) -> int:
    """Return the number of tokens for which a bundle's graphs give logits."""
    outputs = next(artifact.outputs for artifact in manifest.artifacts if artifact.graph == GRAPH)
    size = next(spec for spec in outputs if spec.name == "logits").axes[-1]
    assert isinstance(size, int)
    return size
