"""Chooses a translator's cases: real sources and PyTorch's own targets, beams, random batches."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ...runtime.apps.check.case import Case, CaseSet, Measure, Row, Searching, Text
from ...runtime.apps.check.cases import find_room
from ...runtime.apps.check.files import choose_evenly
from ...runtime.apps.check.metrics import ErrorMetrics, ScoreMetrics, VectorMetrics
from ...runtime.apps.check.translator import SEARCH
from ...runtime.bundle.bundle import Bundle
from ...runtime.bundle.manifest import Manifest
from ...runtime.translate.sources import open_tokenizers
from ..errors import VerificationError
from ..levels import FULL, Level
from .decoder import (
    COLUMNS,
    LOGITS,
    RANDOM,
    Builder,
    add_single_steps,
    find_vocabulary,
    make_random_case,
)
from .random_cases import (
    CONTEXT_ROWS,
    SMALL_SIZES,
    TEXTS,
    Random,
    RandomCases,
    Rows,
    count_longest,
    count_tokens,
    count_weights,
    describe_fewer_cases,
    sample_batches,
    sample_columns,
    sample_far_batches,
    sample_length,
    sample_steps,
    sample_text,
)

if TYPE_CHECKING:
    from ..reference_model import ReferenceModel

ENCODER = "encoder"  # the graphs
DECODER = "decoder"
REPLAY_TOKENS = (12, 7)  # at most, of the two targets of a replay
MAX_BATCH = 4  # of the padded cases, or the graphs' largest
SOURCE_TOKENS = 48  # at most; several lengths below that are used
DECODE_STEPS = 32
NUM_BEAMS = 4
POSITIONS = 6  # of each source, whose keys and values are compared
RANDOM_POSITIONS = 3  # of each random source
START = -1  # stands for the token that targets begin with, in texts that quote
CROSS = Measure("layers", ("cross",), VectorMetrics.LIMITED, "cross.")
ATTENTION = Measure("attention", ("attention",), VectorMetrics.LIMITED, "attention.")
BEAMS = Measure("beams", ("score",), ScoreMetrics.LIMITED)
ALONG_BEAMS = Measure("beams", ("score",), ErrorMetrics.LIMITED, SEARCH)
MEASURES = (LOGITS, CROSS, ATTENTION, ALONG_BEAMS, COLUMNS, BEAMS)  # what has limits


@dataclass(frozen=True)
class Sizes:
    """The most tokens and rows that a translator's graphs take."""

    source: int
    target: int
    rows: int  # of sources
    beams: int  # of rows of a decoder

    @classmethod
    def of(cls, manifest: Manifest) -> Sizes:
        """Return the sizes of a bundle's graphs."""
        longest = manifest.max_length  # of a graph that reads a token at a time
        limits = {a.graph: (min(longest, find_room(a)), a.axis("batch").max) for a in manifest.artifacts}
        return cls(limits[ENCODER][0], limits[DECODER][0], limits[ENCODER][1], limits[DECODER][1])


def choose(
    model: ReferenceModel, bundle: Bundle, texts: Sequence[str], seed: int = 0, level: Level = FULL
) -> CaseSet:
    """Return a translator's cases, without answers; a level below "full" has fewer.

    There are sources of unequal length, one of a single token, a full one, and random batches.
    """
    manifest = bundle.manifest
    defaults = manifest.generation
    assert defaults is not None and defaults.source_eos is not None and defaults.decoder_start is not None
    end = defaults.source_eos
    sizes = Sizes.of(manifest)
    tokenizer, _ = open_tokenizers(bundle)
    encoded = [tokens for tokens in map(tokenizer.encode, texts) if tokens]
    if not encoded:
        raise VerificationError(
            "the texts to verify with have no tokens of the model's vocabulary; give others with --prompts"
        )
    most = min(SOURCE_TOKENS, sizes.source - 1)
    judged, others = split_sources(encoded, most)
    weights = count_weights(model)
    count = min(len(judged), level.count_samples(weights, SOURCE_TOKENS + DECODE_STEPS))
    compared = choose_evenly(len(judged), int(count))
    left_out = []
    if len(compared) < len(judged):
        left_out.append(f"{len(judged) - len(compared)} of {len(judged)} sources")
    left_out += describe_fewer_cases(weights, sizes.source, sizes.rows, level)
    judged = [judged[i] for i in compared]
    real = tuple(token for tokens in judged for token in tokens[:most])
    sources = [(*t[: max(1, most // (1 + i % 3))], end) for i, t in enumerate(judged)]
    builder = Builder()
    steps = min(DECODE_STEPS, sizes.source)
    start = Text((defaults.decoder_start,), continues=steps)
    targets = add_sources(builder, [*sources, (end,)], start, has_attention(manifest), sizes)
    written = steps * len(targets)
    add_full(builder, (*(real * (sizes.source // len(real) + 1))[: sizes.source - 1], end), written, sizes)
    add_beams(builder, targets, sizes)
    columns: tuple[int, ...] = ()
    if level.random_work:
        # As for imported decoders there is no padding between a row's tokens.
        parts = 1 if manifest.source.get("exporter") else 2
        cases = RandomCases(
            weights, tuple(range(written)), sizes.target, min(sizes.rows, sizes.beams), seed, parts, level
        )
        columns = add_random(builder, cases, real, end, sizes, find_vocabulary(manifest))
    few, replays, ranges = list_node_cases(builder)
    return CaseSet(
        texts=tuple(builder.texts),
        cases=tuple(builder.cases),
        answers=builder.wanted,
        columns=columns,
        left_out=tuple(left_out),
        calibration=tuple(Text((*tokens, end)) for tokens in others),
        search=Searching(NUM_BEAMS, steps, tuple(defaults.eos), tuple(defaults.suppressed)),
        few=few,
        replays=replays,
        ranges=ranges,
    )


def list_node_cases(builder: Builder) -> tuple[tuple[Case, ...], tuple[Case, ...], tuple[Case, ...]]:
    """Return the cases that run node by node: the few that are compared, short replays, and those for ranges.

    A replay reads sources as a padded batch, or targets, and then a token of each.
    """
    fixed = [case for case in builder.cases if not case.is_costly]
    sources = sorted({row.text for case in fixed if case.graph == ENCODER for row in case.rows})
    logits = builder.wanted["logits"]
    targets = sorted(logits)
    some = choose_few(sources)
    few = [make_source_case(f"{len(some)} sources", builder, some)]
    some = choose_few(targets)
    for number in some:
        row = Row(number, (int(logits[number].positions[-1]) + 1,))
        few.append(Case(f"{len(some)} targets at once", DECODER, (row,), (LOGITS,), "every"))
    ends = {number: builder.texts[number].count() - 1 for number in targets}
    short = {n: min(ends[n], most) for n, most in zip(targets[:2], REPLAY_TOKENS, strict=True)}

    def make_replays(sources: Sequence[int], targets: Mapping[int, int]) -> tuple[Case, Case]:
        rows = tuple(Row(number, (end - 1, end)) for number, end in targets.items())
        return make_source_case("sources", builder, sources), Case("targets", DECODER, rows, ())

    return tuple(few), make_replays(sources[:2], short), make_replays(sources, ends)


def choose_few(numbers: Sequence[int]) -> list[int]:
    """Return two texts, a single token and the longest, which come after the others."""
    return list(dict.fromkeys([*numbers[:2], *numbers[-2:]]))


def has_attention(manifest: Manifest) -> bool:
    """Tell whether a graph returns the attention of targets over the source."""
    roles = [spec.role for artifact in manifest.artifacts for spec in artifact.outputs]
    return any(role.startswith("cross_attention.") for role in roles)


def split_sources(
    encoded: Sequence[Sequence[int]], most: int
) -> tuple[Sequence[Sequence[int]], Sequence[Sequence[int]]]:
    """Return sources to judge by their first `most` tokens, and sources of at most as many to calibrate with.

    For calibration, long texts give what follows, short ones every third text; a single short text is both.
    """
    behind = [t[start : start + most] for t in encoded for start in range(most, len(t), most)]
    if behind:
        return encoded, behind
    others = encoded[2::3]
    return [t for i, t in enumerate(encoded) if i % 3 != 2], others or encoded


def add_sources(
    builder: Builder,
    sources: Sequence[tuple[int, ...]],
    start: Text,
    attention: bool,
    sizes: Sizes,
) -> list[int]:
    """Add sources, the last of one token, and targets that PyTorch writes; return the targets' numbers."""
    steps = start.continues
    numbers = [
        builder.add_text(Text(source), cross=choose_evenly(len(source), POSITIONS)) for source in sources
    ]
    *texts, single = numbers
    batch = numbers[-min(MAX_BATCH, sizes.rows, sizes.beams) :]
    for number in texts:
        builder.add_case(make_source_case("one by one", builder, [number]))
    padded = make_source_case(f"{len(batch)} sources, padded", builder, batch)
    builder.add_case(replace(padded, is_padded=True))
    builder.add_case(make_source_case("1 token", builder, [single]))
    places = range(steps)
    wanted = {"logits": places, "margin": places} | ({"attention": places} if attention else {})
    targets = [builder.add_text(replace(start, source=number), **wanted) for number in numbers]
    rows = {target: Row(target, tuple(range(1, steps + 1))) for target in targets}
    for row in rows.values():
        builder.add_case(Case("decode, batch 1", DECODER, (row,), (LOGITS,)))
    for target in targets:
        whole = Row(target, (steps,))
        if attention:
            name = "attention, 2 rows of a source"
            builder.add_case(Case(name, DECODER, (whole, whole), (ATTENTION,), "attention"))
        builder.add_case(Case("at once, batch 1", DECODER, (whole,), (LOGITS,), "every"))
    together = targets[-len(batch) :]
    first = tuple(Row(target, (1,)) for target in together)
    name = f"greedy, {len(together)} sources, padded"
    builder.add_case(Case(name, DECODER, first, (LOGITS,), "greedy", is_padded=True))
    return targets


def add_beams(builder: Builder, targets: Sequence[int], sizes: Sizes) -> None:
    """Add a search of beams over some of the sources, but that of one token."""
    if most := min(MAX_BATCH, sizes.rows, sizes.beams // NUM_BEAMS):
        searched = tuple(Row(target, (1,)) for target in (targets[:-1] or targets)[-most:])
        name = f"{NUM_BEAMS} beams, {len(searched)} sources, padded"
        builder.add_case(Case(name, DECODER, searched, (BEAMS,), "beams", is_padded=True))


def add_full(builder: Builder, source: tuple[int, ...], written: int, sizes: Sizes) -> None:
    """Add the longest source, and the longest target that PyTorch writes for the others."""
    number = builder.add_text(Text(source), cross=choose_evenly(len(source), POSITIONS))
    builder.add_case(make_source_case(f"{len(source)} tokens", builder, [number]))
    length = len(source)
    tokens = (START, *(place % written for place in range(length)))
    last = range(length - min(CONTEXT_ROWS, length), length)
    target = builder.add_text(Text(tokens, source=number, quotes=True), logits=last)
    row = Row(target, tuple(place + 1 for place in last))
    builder.add_case(Case(f"full target of {length} tokens", DECODER, (row,), (LOGITS,)))


def make_source_case(name: str, builder: Builder, numbers: Sequence[int]) -> Case:
    """Return the case of sources that the encoder reads together."""
    rows = tuple(Row(number, (len(builder.texts[number].tokens),)) for number in numbers)
    return Case(name, ENCODER, rows, (CROSS,), "once")


def add_random(
    builder: Builder,
    cases: RandomCases,
    real: tuple[int, ...],
    end: int,
    sizes: Sizes,
    vocabulary: int,
) -> tuple[int, ...]:
    """Add sources, targets and batches at random; return the tokens that are compared.

    A translator's decoder and its encoder have about half of the weights each, so both read as much as a
    decoder does.
    """
    random = np.random.default_rng(cases.seed)
    longest = cases.longest
    most_of_others = count_tokens(cases.weights, cases.level) // 2 // (TEXTS - 1)
    lengths = [longest, *[max(1, min(longest, most_of_others))] * (TEXTS - 1)]
    tokens = [(START, *sample_text(random, cases.real, length - 1)) for length in lengths]
    columns = sample_columns(random, vocabulary)
    most = count_longest(cases.weights, sizes.source, cases.level)
    sources = sample_sources(random, real, end, most, cases.room // min(SMALL_SIZES, cases.max_batch))
    numbers = [
        builder.add_text(Text(source), cross=choose_evenly(len(source), RANDOM_POSITIONS))
        for source in sources
    ]
    texts = [
        builder.add_text(Text(own, source=number, quotes=True), columns=range(len(own)))
        for own, number in zip(tokens, numbers, strict=True)
    ]
    by_text = dict(zip(texts, lengths, strict=True))
    batches = sample_batches(random, cases, by_text, dict(zip(texts, map(len, sources), strict=True)))
    if cases.max_batch > 1:
        batches.append(sample_widest_batch(random, by_text))
    name = f"{RANDOM}, seed {cases.seed}"
    source_of = dict(zip(texts, numbers, strict=True))
    for rows in batches:
        padded = make_source_case(name, builder, [source_of[row.text] for row in rows])
        builder.add_case(replace(padded, is_costly=True, is_padded=True))
        builder.add_case(make_random_case(DECODER, rows, cases.seed))
    for rows in sample_far_batches(random, cases, 1, lambda past, repeats: texts[0]):
        builder.add_case(make_random_case(DECODER, rows, cases.seed, shares_past=True))
    add_single_steps(builder, texts[0], longest, min(cases.step_rows, sizes.beams))
    return columns


def sample_sources(
    random: Random, real: tuple[int, ...], end: int, most: int, most_of_all: int
) -> list[tuple[int, ...]]:
    """Return a source for each text, from one token up to `most`, evenly spread by their logarithm.

    The first, which stands in every batch, has at most `most_of_all`.
    """
    steps = np.linspace(0, math.log(most), TEXTS)
    spread = np.exp(random.uniform(steps[:-1], steps[1:])).round().astype(int).tolist()
    first = int(random.integers(1, max(1, min(most, most_of_all)) + 1))
    lengths = [first, 1, *spread[1:-1], most]
    return [(*sample_text(random, real, length - 1), end) for length in lengths]


def sample_widest_batch(random: Random, lengths: Mapping[int, int]) -> Rows:
    """Return a batch of the shortest source and the longest: as much padding as there can be."""
    _, shortest, *_, longest = lengths
    texts = random.permutation([shortest, longest]).tolist()
    totals = [sample_length(random, min(2, lengths[text]), lengths[text]) for text in texts]
    return sample_steps(random, texts, totals, steps=min(2, *totals), parts=1)
