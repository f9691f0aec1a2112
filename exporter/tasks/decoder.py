"""Chooses what a decoder is compared by, and asks PyTorch for the answers.

N places, V vocabulary, K tokens whose logits are known
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ...runtime.apps.check.case import Case, CaseSet, Integers, Known, Measure, Row, Text
from ...runtime.apps.check.decoder import reduce
from ...runtime.apps.check.decoders import MAX_BATCH, PART, Context
from ...runtime.apps.check.draws import PREFIX, SPARE, Batch
from ...runtime.apps.check.files import choose_evenly
from ...runtime.apps.check.metrics import Logits, Metrics, TextMetrics
from ...runtime.apps.check.places import Seen, measure_columns, measure_logits, measure_passages
from ...runtime.bundle.bundle import Bundle
from ...runtime.bundle.manifest import Manifest
from ...runtime.progress import PartCounter, Report, report_nothing
from ..errors import VerificationError
from ..levels import FULL, Level
from ..limits import Gaps
from ..reference.decoder_samples import (
    CONTEXT_ROWS,
    DECODE_STEPS,
    PROMPT_TOKENS,
    choose_prompts,
    describe_left_out,
    encode_texts,
    fill_for_level,
    list_edges,
    thin_passages,
)
from ..reference.draw import (
    TAIL,
    TEXTS,
    Drawing,
    count_alike,
    count_longest,
    count_room,
    count_step_rows,
    count_weights,
    draw_batches,
    draw_columns,
    draw_far_batches,
    draw_text,
    find_most_repeats,
    list_sizes,
)
from ..reference.passages import LOGITS_BYTES, cut_passages

if TYPE_CHECKING:
    from ..reference.decoder import Reference
    from ..reference.model import ReferenceModel
    from ..reference.rounding import Rounding

GRAPH = "decoder"
LOGITS = Measure("logits", ("logits",), Metrics.LIMITED)
COLUMNS = Measure("columns", ("columns",), ("max_error",), PREFIX)
PASSAGES = Measure("passages", ("likeliest", "logprob", "logits"), TextMetrics.LIMITED)


class Builder:
    """Collects texts, and cases that read them."""

    def __init__(self) -> None:
        self.texts: list[Text] = []
        self.cases: list[Case] = []
        self.wanted: dict[str, dict[int, Known]] = {}

    def add_text(self, text: Text, **places: Sequence[int]) -> int:
        """Add a text, and of each output the positions that are wanted; return its number."""
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
    """Return what a decoder is compared by, without answers; a level below "full" has less.

    There are prompts of unequal length, one of a single token, real text, a full context, and batches that a
    seed draws at random.
    """
    from ..reference.decoder import make_reference

    reference = make_reference(model)
    weights = count_weights(model)
    manifest = bundle.manifest
    context = manifest.max_length
    most = max(artifact.axis("batch").max for artifact in manifest.artifacts)
    encoded, real = encode_texts(bundle, texts)
    steps = min(DECODE_STEPS + 1, context // 2)
    prompts = choose_prompts(encoded, min(PROMPT_TOKENS, context - steps), level, weights)
    every_passage, _ = cut_passages(encoded, context)
    passages = thin_passages(every_passage, level.count_text(weights))
    filled = fill_for_level(reference, real, context, level, weights)
    builder = Builder()
    vocabulary = find_vocabulary(manifest)
    add_prompts(builder, prompts, steps, min(MAX_BATCH, most))
    add_edges(builder, (filled.tokens or real), list_edges(bundle, len(filled.tokens)))
    if filled:
        add_context(builder, filled)
    columns: tuple[int, ...] = ()
    if level.draw_work:
        # Another exporter's mask of a window may count the cache's columns; that is right as long as no
        # padding stands between a row's tokens, and `generate` leaves none there.
        parts = 1 if manifest.source.get("exporter") else 2
        drawing = Drawing(real, context, most, seed, parts, level)
        columns = add_random(builder, reference, drawing, weights, vocabulary)
    add_passages(builder, passages, vocabulary)
    left_out = describe_left_out(
        counts={
            "prompts": (len(prompts) - 1, len(encoded)),
            "passages of real text": (len(passages), len(every_passage)),
        },
        context=(len(filled), len(filled.tokens), min(context, reference.count_read(context))),
        full_context=context,
        weights=weights,
        sizes=most,
        level=level,
    )
    return CaseSet(tuple(builder.texts), tuple(builder.cases), builder.wanted, columns, tuple(left_out))


def add_prompts(builder: Builder, prompts: Sequence[tuple[int, ...]], steps: int, most: int) -> None:
    """Add prompts that PyTorch continues: token by token, freely in batches, and some tokens at a time."""
    rows = []
    for prompt in prompts:
        wanted = range(len(prompt) - 1, len(prompt) - 1 + steps)
        text = builder.add_text(Text(prompt, continues=steps), logits=wanted, margin=wanted)
        rows.append(Row(text, tuple(range(len(prompt), len(prompt) + steps))))
    for row in rows:
        builder.add_case(Case("prefill and decode, batch 1", GRAPH, (row,), LOGITS))
    for size in sorted({min(2, most), most}):
        batch = [*(rows[i % max(1, len(rows) - 1)] for i in range(size - 1)), rows[-1]]
        first = tuple(replace(row, ends=row.ends[:1]) for row in batch)
        builder.add_case(Case(f"greedy, batch {size}, padded", GRAPH, first, LOGITS, "greedy"))
    whole = tuple(Row(row.text, row.ends[-1:]) for row in rows[-most:])
    for row in whole:
        builder.add_case(Case(f"parts of {PART} tokens, batch 1", GRAPH, (row,), LOGITS, "every", chunk=PART))
    if len(whole) > 1:
        name = f"parts of {PART} tokens, batch {len(whole)}, padded"
        of_few = LOGITS._replace(limited=("max_error",))  # the mean of so few rows says no more
        builder.add_case(Case(name, GRAPH, whole, of_few, chunk=PART))


def add_edges(builder: Builder, tokens: Sequence[int], edges: Sequence[int]) -> None:
    """Add prompts of the lengths at which something changes."""
    if not edges:
        return
    text = builder.add_text(Text(tuple(tokens[: max(edges)])), logits=[edge - 1 for edge in edges])
    name = f"prompts of {', '.join(map(str, edges))} tokens"
    for edge in edges:
        builder.add_case(Case(name, GRAPH, (Row(text, (edge,)),), LOGITS))


def add_context(builder: Builder, filled: Context) -> None:
    """Add a full context: the prompt in chunks, then token by token up to the last slot of the cache."""
    tokens = (*filled.tokens, *filled.tail)
    past = len(filled.tokens) if filled.repeats > 1 else 0
    rows = min(CONTEXT_ROWS, len(filled) - 1)
    ends = tuple(range(len(tokens) - rows + 1, len(tokens) + 1))
    text = builder.add_text(Text(tokens, past=past, repeats=filled.repeats), logits=[end - 1 for end in ends])
    row = Row(text, (past, *ends) if past else ends)
    builder.add_case(Case("full context", GRAPH, (row,), LOGITS, shares_past=bool(past)))


def add_random(
    builder: Builder, reference: Reference, drawing: Drawing, weights: int, vocabulary: int
) -> tuple[int, ...]:
    """Add batches, lengths, pasts and split points that a seed draws; return the tokens that are compared."""
    random = np.random.default_rng(drawing.seed)
    longest = count_longest(weights, drawing.context, drawing.level)
    lengths = [longest, *[max(1, longest // (TEXTS - 1))] * (TEXTS - 1)]
    tokens = [draw_text(random, drawing.real, length) for length in lengths]
    columns = draw_columns(random, vocabulary)
    numbers = [builder.add_text(Text(one), columns=range(len(one))) for one in tokens]
    sizes = list_sizes(drawing.max_batch)
    alike = count_alike(weights, sizes, drawing.level)
    room = count_room(weights, longest, len(sizes) * alike, drawing.level)
    near = draw_batches(random, lengths, sizes, room, drawing.context, drawing.parts, alike)
    repeats = find_most_repeats(reference, longest, drawing)
    far = draw_far_batches(random, sizes, longest, drawing, repeats)
    repeated: dict[tuple[int, int], int] = {}  # the number of the text, by its past and how often it is there

    def find_text(batch: Batch, row: int) -> int:
        if batch.repeats < 2:
            return numbers[batch.texts[row]]
        place = (batch.ends[0][row], batch.repeats)
        if place not in repeated:
            past = place[0]
            text = Text(tokens[0][: past + TAIL], past=past, repeats=batch.repeats)
            repeated[place] = builder.add_text(text, columns=range(past, past + TAIL))
        return repeated[place]

    for batch in (*near, *far):
        rows = [
            Row(find_text(batch, row), tuple(ends[row] for ends in batch.ends))
            for row in range(len(batch.texts))
        ]
        name = f"random batches, seed {drawing.seed}"
        shares_past = bool(batch.repeats)
        builder.add_case(Case(name, GRAPH, tuple(rows), COLUMNS, shares_past=shares_past, spare=SPARE))
    add_single_steps(
        builder, numbers[0], longest, min(count_step_rows(weights, longest, drawing.level), drawing.max_batch)
    )
    return columns


def add_single_steps(builder: Builder, text: int, length: int, most: int) -> None:
    """Add single steps at every position of a text but the first, which the rows divide among them."""
    rows = min(most, length - 1)
    if not rows:
        return
    count = math.ceil((length - 1) / rows)
    pasts = [min(1 + row * count, length - count) for row in range(rows)]
    name = f"single steps at positions 1 to {pasts[-1] + count - 1}"
    steps = tuple(Row(text, tuple(range(past, past + count + 1))) for past in pasts)
    builder.add_case(Case(name, GRAPH, steps, COLUMNS, shares_past=True))


def add_passages(builder: Builder, passages: Sequence[tuple[int, ...]], vocabulary: int) -> None:
    """Add real text, of which every token is predicted; whole logits are known where memory allows."""
    for tokens in passages:
        every = range(len(tokens) - 1)
        allowed = max(1, LOGITS_BYTES // (len(passages) * vocabulary * 4))
        some = choose_evenly(len(every), allowed)
        text = builder.add_text(Text(tokens), likeliest=every, logprob=every, logits=some)
        builder.add_case(Case("real text", GRAPH, (Row(text, (len(every),)),), PASSAGES, "every"))


def find_vocabulary(manifest: Manifest) -> int:
    """Return how many tokens a bundle's graphs give logits of."""
    outputs = next(artifact.outputs for artifact in manifest.artifacts if artifact.graph == GRAPH)
    size = next(spec for spec in outputs if spec.name == "logits").axes[-1]
    assert isinstance(size, int)
    return size


def answer(
    model: ReferenceModel,
    case_set: CaseSet,
    rounding: Rounding | None = None,
    report: Report = report_nothing,
) -> CaseSet:
    """Return the set with PyTorch's answers; rounded, the answers of the same texts in that precision.

    A rounding of weights is applied by the caller, for all that is asked of the model then.
    """
    from ..reference.decoder import make_reference

    reference = make_reference(model, rounding)
    case_set = replace(case_set, texts=continue_texts(reference, case_set.texts))
    parts = PartCounter(report, len(case_set.texts))
    repeated = answer_repeated(reference, case_set)
    answers: dict[str, dict[int, Known]] = {}
    for number in range(len(case_set.texts)):
        for output, known in (repeated.get(number) or answer_text(reference, case_set, number)).items():
            if not np.isfinite(known.values).all():
                raise VerificationError("the PyTorch model's own logits are not finite; check its weights")
            answers.setdefault(output, {})[number] = known
        parts.finish_one()
    return replace(case_set, answers=answers)


def continue_texts(reference: Reference, texts: Sequence[Text]) -> tuple[Text, ...]:
    """Return texts with the tokens that PyTorch chooses behind those that it is to continue."""
    open_ones = [number for number, text in enumerate(texts) if text.continues]
    if not open_ones:
        return tuple(texts)
    steps = texts[open_ones[0]].continues
    continued = reference.continue_greedily([texts[number].tokens for number in open_ones], steps)
    done = list(texts)
    for number, tokens in zip(open_ones, continued, strict=True):
        done[number] = Text((*texts[number].tokens, *tokens))
    return tuple(done)


def answer_repeated(reference: Reference, case_set: CaseSet) -> dict[int, dict[str, Known]]:
    """Return the answers to beginnings of one text that are there more than once; it is read once for all."""
    known = {
        number: known.positions
        for number, known in case_set.answers.get("columns", {}).items()
        if case_set.texts[number].repeats > 1
    }
    if not known:
        return {}
    texts = {number: case_set.texts[number] for number in known}
    longest = max(texts.values(), key=lambda text: text.past)
    places = [(text.past, text.repeats) for text in texts.values()]
    found = reference.compute_repeated(longest.tokens, places, TAIL, case_set.columns)
    return {
        number: {"columns": Known(positions, found[text.past, text.repeats][positions - text.past])}
        for (number, positions), text in zip(known.items(), texts.values(), strict=True)
    }


def answer_text(reference: Reference, case_set: CaseSet, number: int) -> dict[str, Known]:
    """Return PyTorch's answers at the wanted places of a text, by output."""
    text = case_set.texts[number]
    wanted = {
        output: by_text[number].positions for output, by_text in case_set.answers.items() if number in by_text
    }
    every = np.unique(np.concatenate(list(wanted.values())))
    if set(wanted) == {"columns"}:
        logits = reference.compute_columns(text.tokens[: every[-1] + 1], case_set.columns)
        return {"columns": Known(every, logits[every])}
    logits = compute_logits(reference, text, every)
    return {
        output: Known(
            positions, reduce(case_set, output, number, positions, logits[np.searchsorted(every, positions)])
        )
        for output, positions in wanted.items()
    }


def compute_logits(reference: Reference, text: Text, positions: Integers) -> Logits:
    """Return the logits (N, V) behind some positions of a text."""
    if text.repeats == 1:
        return reference.compute_logits(text.tokens[: positions[-1] + 1], positions.tolist())
    pairs = reference.compute_keys_values(text.tokens[: text.past])
    tail = text.tokens[text.past : positions[-1] + 1]
    return reference.continue_repeated(pairs, text.repeats, tail, len(tail))[positions - text.past]


def measure_gaps(case_set: CaseSet, rounded: CaseSet) -> Gaps:
    """Measure how far rounded answers are from PyTorch's own, by the beginning of limits' names.

    A case has some of the texts, so the mean KL is that of the worst of them.
    """
    by_kind: dict[str, list[Seen]] = {}
    kinds = {row.text: case.measure.kind for case in case_set.cases for row in case.rows}
    for text, kind in kinds.items():
        values = {output: by_text[text] for output, by_text in rounded.answers.items() if text in by_text}
        if values:
            by_kind.setdefault(kind, []).append(Seen(text, 0, 0, text, values))
    gaps: Gaps = {}
    if seen := by_kind.get("logits"):
        worst = max(measure_logits([one], case_set)[0].mean_kl for one in seen)
        gaps[""] = replace(measure_logits(seen, case_set)[0], mean_kl=worst)
    if seen := by_kind.get("passages"):
        gaps["text"] = measure_passages(seen, case_set)
    if seen := by_kind.get("columns"):
        gaps[PREFIX] = measure_columns(seen, case_set)[0]
    return gaps
