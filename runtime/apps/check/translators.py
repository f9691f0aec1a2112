"""Compares an encoder-decoder with golden data: what its encoder writes, and what its decoder makes of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from ...bundle.manifest import Artifact
from .cases import Case, Skipped, find_room, skip_batches, skip_too_long
from .divergence import add_divergence, follow, measure_parts, measure_steps
from .draws import Draws, choose_places, find_skipped_draws, make_draw_cases, name_batches, reads
from .metrics import DrawMetrics, Logits, Outcome, ScoreMetrics, Spot, judge_outcome, locate_failure
from .translation_engine import Engine, Follower
from .translations import Golden, Sample, measure_attention, measure_cross

MAX_BATCH = 4  # of the padded cases, or the graphs' largest

SEARCH = "search."  # how the names of what is measured along a beam search begin
BEAMS = "beams, batch"  # in the name of the case of a search

Score = Callable[[Sample, "tuple[int, ...]"], float]
Start = Callable[[Sequence[Sample], int], Follower]  # gets the number of beams


def make_encoder_cases(engine: Engine, golden: Golden, limits: Mapping[str, float]) -> dict[str, Case]:
    """Return what is compared of the encoder, by name, as far as it takes so many tokens."""
    *texts, single, full = golden.samples
    room = find_room(engine.encoder.artifact)
    texts = [sample for sample in texts if len(sample.source) <= room]
    batch = [*texts, single][-count_sources(engine) :]

    def compare_one_by_one() -> Outcome:
        got = [read_cross(engine, [sample])[0] for sample in texts]
        return judge_outcome(measure_cross(got, [s.cross for s in texts]), limits, "cross.")

    cases: dict[str, Case] = {"one by one": compare_one_by_one} if texts else {}
    cases[f"batch of {len(batch)}, padded"] = make_cross_case(engine, batch, limits)
    cases["1 token"] = make_cross_case(engine, [single], limits)
    if len(full.source) <= room:
        cases[f"{len(full.source)} tokens"] = make_cross_case(engine, [full], limits)
    if golden.draws is not None and (batches := list_source_batches(engine, golden.draws)):
        cases[name_batches(golden.draws, batches)] = make_drawn_case(engine, golden.draws, batches, limits)
    return cases


def make_decoder_cases(
    engine: Engine, golden: Golden, limits: Mapping[str, float], score: Score, start: Start | None = None
) -> dict[str, Case]:
    """Return what is compared of the decoder, by name, as far as both graphs take so many tokens.

    `score` computes that of a target that golden data does not know; `start` starts PyTorch beside a search.
    """
    *texts, single, full = golden.samples
    samples = [sample for sample in (*texts, single) if fits(engine, sample)]
    most = count_sources(engine)
    batch = samples[-most:]
    searched = list_searched(engine, golden)

    def compare_steps(samples: Sequence[Sample]) -> Outcome:
        parts = [(engine.force_tokens(s), s.logits) for s in samples]
        return judge_outcome(measure_parts(parts), limits, errors=measure_steps(parts))

    def compare_greedy() -> Outcome:
        sources = [sample.source for sample in batch]
        run = engine.start_run(sources, 1, min(len(sample.target) for sample in batch))
        followed = follow(run, run.decode([engine.start] * len(batch)), batch, limits)
        outcome = judge_outcome(measure_parts(followed.parts), limits, "", followed.failures)
        texts = [engine.source_tokenizer.decode(source) for source in sources]
        return add_divergence(outcome, followed, texts, batch, engine.target_tokenizer.decode_known)

    cases: dict[str, Case] = {}
    if samples and samples[0].attention.size:
        cases["attention, 2 rows of a source"] = make_attention_case(engine, samples, limits)
    if samples:
        cases["decode, batch 1"] = lambda: compare_steps(samples)
        cases["at once, batch 1"] = make_at_once_case(engine, samples, limits)
        cases[f"greedy, batch {len(batch)}, padded"] = compare_greedy
    if fits(engine, full):
        cases[f"full target of {len(full.target)} tokens"] = lambda: compare_steps([full])
    if searched:
        name = f"{golden.search.num_beams} {BEAMS} {len(searched)}, padded"
        cases[name] = make_beams_case(engine, searched, golden, limits, score, start)
    if golden.draws is not None:
        cases |= make_draw_cases(engine.decoder, golden.draws, limits, engine.encoder)
    return cases


def list_searched(engine: Engine, golden: Golden) -> list[Sample]:
    """Return the samples for which beams are searched, as one batch."""
    samples = [sample for sample in golden.samples[:-1] if fits(engine, sample) and sample.beams]
    rows = engine.decoder.artifact.axis("batch").max
    return samples[: min(count_sources(engine), rows // golden.search.num_beams)]


def find_skipped(engine: Engine, golden: Golden) -> list[Skipped]:
    """Return what `make_encoder_cases` and `make_decoder_cases` leave out."""
    encoder = engine.encoder.artifact
    decoder = engine.decoder.artifact
    count = len(golden.samples)
    skipped = []
    sources = [len(sample.source) for sample in golden.samples]
    if long := [length for length in sources if length > find_room(encoder)]:
        skipped.append(skip_too_long(encoder, f"{len(long)} of {count} sources", max(long)))
    if long := [max(len(s.source), len(s.target)) for s in golden.samples if not fits(engine, s)]:
        skipped.append(skip_too_long(decoder, f"{len(long)} of {count} targets", max(long)))
    beams = golden.search.num_beams
    rows = decoder.axis("batch").max
    if beams > rows:
        skipped.append(Skipped(decoder.id, f"{beams} beams", f"{beams} rows are needed, it takes {rows}"))
    return skipped + find_skipped_draws(decoder, golden.draws) + find_skipped_sources(encoder, golden.draws)


def find_skipped_sources(encoder: Artifact, draws: Draws | None) -> list[Skipped]:
    """Return the drawn batches whose sources the encoder does not take."""
    every = [] if draws is None else [draws.list_sources(batch) for batch in draws.batches]
    left = [sources for sources in every if not reads(encoder, sources)]
    if not left:
        return []
    longest = max(len(source) for sources in left for source in sources)
    what = f"{len(left)} of {len(every)} drawn batches"
    return [skip_batches(encoder, what, max(map(len, left)), longest)]


def fits(engine: Engine, sample: Sample) -> bool:
    """Tell whether both graphs take so many tokens."""
    fits_encoder = len(sample.source) <= find_room(engine.encoder.artifact)
    return fits_encoder and len(sample.target) <= find_room(engine.decoder.artifact)


def count_sources(engine: Engine) -> int:
    """Return how many sources a batch may have."""
    rows = engine.decoder.artifact.axis("batch").max
    return min(MAX_BATCH, engine.encoder.max_batch, rows)


def make_cross_case(engine: Engine, samples: Sequence[Sample], limits: Mapping[str, float]) -> Case:
    """Return the case of what the decoder reads of the sources, as one batch."""
    want = [sample.cross for sample in samples]
    return lambda: judge_outcome(measure_cross(read_cross(engine, samples), want), limits, "cross.")


def read_cross(engine: Engine, samples: Sequence[Sample]) -> list[Logits]:
    """Return what the decoder would read of the sources, as one batch, at the known positions."""
    return engine.read_cross([s.source for s in samples], [s.positions for s in samples])


def list_source_batches(engine: Engine, draws: Draws) -> list[int]:
    """Return the numbers of the drawn batches of several sources that the encoder takes."""
    return [
        number
        for number, batch in enumerate(draws.batches)
        if not batch.repeats and reads(engine.encoder.artifact, draws.list_sources(batch))
    ]


def make_drawn_case(
    engine: Engine, draws: Draws, batches: Sequence[int], limits: Mapping[str, float]
) -> Case:
    """Return the case of drawn batches of sources, of which the first row that is over its limits is told."""

    def run() -> Outcome:
        got: list[Logits] = []
        want: list[Logits] = []
        spot: Spot | None = None
        for number in batches:
            sources = draws.list_sources(draws.batches[number])
            known = [draws.cross[text] for text in draws.batches[number].texts]
            found = engine.read_cross(sources, [choose_places(source) for source in sources])
            for row, pair in enumerate(zip(found, known, strict=True)):
                alone = measure_cross(*([array] for array in pair))
                if spot is None and judge_outcome(alone, limits, "cross.").failures:
                    spot = (number, 0, row)
            got += found
            want += known
        outcome = judge_outcome(measure_cross(got, want), limits, "cross.")
        if not outcome.failures or spot is None:
            return outcome
        number, _, row = spot
        sources = draws.list_sources(draws.batches[number])
        lengths = ", ".join(str(len(source)) for source in sources)
        where = f"at first in row {row} of a batch of {len(sources)}, of {lengths} tokens"
        return locate_failure(outcome, where, spot)

    return run


def make_at_once_case(engine: Engine, samples: Sequence[Sample], limits: Mapping[str, float]) -> Case:
    """Return the case of all of PyTorch's tokens in one step, without a past."""
    return lambda: judge_outcome(measure_parts([(engine.run_at_once(s), s.logits) for s in samples]), limits)


def make_attention_case(engine: Engine, samples: Sequence[Sample], limits: Mapping[str, float]) -> Case:
    """Return the case of what each target token attends to, in each of two rows that share a source."""

    def run() -> Outcome:
        want = [sample.attention for sample in samples for _ in range(2)]
        got = [weights for sample in samples for weights in engine.read_attention(sample)]
        return judge_outcome(measure_attention(got, want), limits, "attention.")

    return run


def make_beams_case(
    engine: Engine,
    samples: Sequence[Sample],
    golden: Golden,
    limits: Mapping[str, float],
    score: Score,
    start: Start | None,
) -> Case:
    """Return the case of beams over a padded batch: the scores are those that the model gives the targets.

    Which targets the search finds says nothing: where two are as good as equal another is pruned, and what
    the one that is kept comes to is anybody's guess. But the search decides by its logits alone, and it is
    the same code with every engine. So where there is a `start` each of its logits is held to PyTorch's,
    whichever targets they lead to. Golden data knows the scores of targets that PyTorch found; others get a
    `score`.
    """

    def run() -> Outcome:
        follower = None if start is None else start(samples, golden.search.num_beams)
        errors = []
        for sample, found in zip(samples, engine.search(samples, golden.search, follower), strict=True):
            known = {hypothesis.token_ids: hypothesis.score for hypothesis in sample.beams}
            for hypothesis in found:
                tokens = hypothesis.token_ids
                meant = known[tokens] if tokens in known else score(sample, tokens)
                errors.append(abs(hypothesis.score - meant))
        worst = float(np.max(errors))
        outcome = judge_outcome(ScoreMetrics(worst, math.isfinite(worst), len(errors)), limits)
        if follower is None:
            return outcome
        worst = float(np.max(follower.errors))
        metrics = DrawMetrics(worst, math.isfinite(worst), len(follower.errors))
        followed = judge_outcome(metrics, limits, SEARCH, outcome.failures)
        return replace(
            followed,
            metrics={**outcome.metrics, **followed.metrics},
            limits={**outcome.limits, **followed.limits},
        )

    return run
