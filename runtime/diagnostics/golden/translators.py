"""Compares an encoder-decoder with golden data: what its encoder writes, and what its decoder makes of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from ..metrics import Outcome, ScoreMetrics, judge_outcome
from .cases import Case, Skipped, longest, too_long
from .decoders import errors_of_steps, measure_parts
from .divergence import follow, with_divergence
from .translation_engine import Engine
from .translations import Golden, Sample, measure_attention, measure_cross

MAX_BATCH = 4  # of the padded cases, or the graphs' largest

Score = Callable[[Sample, "tuple[int, ...]"], float]


def encoder_cases(engine: Engine, golden: Golden, limits: Mapping[str, float]) -> dict[str, Case]:
    """Return what is compared of the encoder, by name, as far as it takes so many tokens."""
    *texts, single, full = golden.samples
    room = longest(engine.encoder.artifact)
    texts = [sample for sample in texts if len(sample.source) <= room]
    batch = [*texts, single][-most_sources(engine) :]

    def one_by_one() -> Outcome:
        got = [engine.cross([sample])[0] for sample in texts]
        return judge_outcome(measure_cross(got, [s.cross for s in texts]), limits, "cross.")

    found: dict[str, Case] = {"one by one": one_by_one} if texts else {}
    found[f"batch of {len(batch)}, padded"] = cross_case(engine, batch, limits)
    found["1 token"] = cross_case(engine, [single], limits)
    if len(full.source) <= room:
        found[f"{len(full.source)} tokens"] = cross_case(engine, [full], limits)
    return found


def decoder_cases(
    engine: Engine, golden: Golden, limits: Mapping[str, float], score: Score | None = None
) -> dict[str, Case]:
    """Return what is compared of the decoder, by name, as far as both graphs take so many tokens.

    Args:
        score: computes the score of a target that golden data does not know; None if nothing can.
    """
    *texts, single, full = golden.samples
    samples = [sample for sample in (*texts, single) if fits(engine, sample)]
    most = most_sources(engine)
    batch = samples[-most:]
    beams = golden.search.num_beams
    at_a_time = min(most, engine.decoder.artifact.axis("batch").max // beams)
    searched = [sample for sample in samples if sample.beams][:at_a_time]

    def force_tokens(samples: Sequence[Sample]) -> Case:
        def run() -> Outcome:
            parts = [(engine.teacher_forced(s), s.logits) for s in samples]
            return judge_outcome(measure_parts(parts), limits, errors=errors_of_steps(parts))

        return run

    def greedily() -> Outcome:
        run = engine.run(batch, 1, min(len(sample.target) for sample in batch))
        followed = follow(run, run.decode([engine.start] * len(batch)), batch, limits)
        outcome = judge_outcome(measure_parts(followed.parts), limits, "", followed.failures)
        sources = [engine.source_tokenizer.decode(sample.source) for sample in batch]
        return with_divergence(outcome, followed, sources, batch, engine.target_tokenizer.decode_known)

    found: dict[str, Case] = {}
    if samples and samples[0].attention.size:
        found["attention, 2 rows of a source"] = attention_case(engine, samples, limits)
    if samples:
        found["decode, batch 1"] = force_tokens(samples)
        found["at once, batch 1"] = at_once_case(engine, samples, limits)
        found[f"greedy, batch {len(batch)}, padded"] = greedily
    if fits(engine, full):
        found[f"full target of {len(full.target)} tokens"] = force_tokens([full])
    if searched:
        name = f"{beams} beams, batch {len(searched)}, padded"
        found[name] = beams_case(engine, searched, golden, limits, score)
    return found


def find_skipped(engine: Engine, golden: Golden) -> list[Skipped]:
    """Return what `encoder_cases` and `decoder_cases` leave out."""
    encoder = engine.encoder.artifact
    decoder = engine.decoder.artifact
    found = []
    sources = [len(sample.source) for sample in golden.samples if len(sample.source) > longest(encoder)]
    if sources:
        found.append(too_long(encoder, f"{len(sources)} of {len(golden.samples)} sources", max(sources)))
    targets = [max(len(s.source), len(s.target)) for s in golden.samples if not fits(engine, s)]
    if targets:
        found.append(too_long(decoder, f"{len(targets)} of {len(golden.samples)} targets", max(targets)))
    beams = golden.search.num_beams
    rows = decoder.axis("batch").max
    if beams > rows:
        found.append(Skipped(decoder.id, f"{beams} beams", f"{beams} rows are needed, it takes {rows}"))
    return found


def fits(engine: Engine, sample: Sample) -> bool:
    """Tell whether both graphs take so many tokens."""
    source = longest(engine.encoder.artifact)
    target = longest(engine.decoder.artifact)
    return len(sample.source) <= source and len(sample.target) <= target


def most_sources(engine: Engine) -> int:
    """Return how many sources a batch may have."""
    rows = engine.decoder.artifact.axis("batch").max
    return min(MAX_BATCH, engine.encoder.max_batch, rows)


def cross_case(engine: Engine, samples: Sequence[Sample], limits: Mapping[str, float]) -> Case:
    """Return the case of what the decoder reads of the sources, as one batch."""
    want = [sample.cross for sample in samples]
    return lambda: judge_outcome(measure_cross(engine.cross(samples), want), limits, "cross.")


def at_once_case(engine: Engine, samples: Sequence[Sample], limits: Mapping[str, float]) -> Case:
    """Return the case of all of PyTorch's tokens in one step, without a past."""
    return lambda: judge_outcome(measure_parts([(engine.at_once(s), s.logits) for s in samples]), limits)


def attention_case(engine: Engine, samples: Sequence[Sample], limits: Mapping[str, float]) -> Case:
    """Return the case of what each target token attends to, in each of two rows that share a source."""

    def run() -> Outcome:
        want = [sample.attention for sample in samples for _ in range(2)]
        got = [weights for sample in samples for weights in engine.attention(sample)]
        return judge_outcome(measure_attention(got, want), limits, "attention.")

    return run


def beams_case(
    engine: Engine,
    samples: Sequence[Sample],
    golden: Golden,
    limits: Mapping[str, float],
    score: Score | None,
) -> Case:
    """Return the case of beams over a padded batch: the same targets, with the scores the model gives them.

    A search may prune another beam where two are as good as equal. So another target than PyTorch's is a
    failure only if it is worse than PyTorch's own by more than rounding explains. Golden data knows the
    scores of those that PyTorch found.
    """

    def run() -> Outcome:
        allowed = limits["score_error"]
        errors = []
        failures = []
        for sample, got in zip(samples, engine.search(samples, golden.search), strict=True):
            known = {hypothesis.token_ids: hypothesis.score for hypothesis in sample.beams}
            if score is not None:
                unknown = {h.token_ids for h in got} - known.keys()
                known |= {tokens: score(sample, tokens) for tokens in unknown}
            errors += [abs(h.score - known[h.token_ids]) for h in got if h.token_ids in known]
            best = sample.beams[0]
            second = sample.beams[min(1, len(sample.beams) - 1)]
            # Of a target without a known score, check only that PyTorch hardly preferred its own.
            lost = best.score - known.get(got[0].token_ids, second.score)
            if got[0].token_ids != best.token_ids and not lost <= 2 * allowed:
                failures.append(
                    f"the best target is {list(got[0].token_ids)}, PyTorch's is {list(best.token_ids)},"
                    f" better by {lost:.3g} (at most {2 * allowed:.3g} is rounding)"
                )
        if not errors:
            failures.append("none of the targets is known, so no score could be compared")
        worst = float(np.max(errors, initial=0.0))
        metrics = ScoreMetrics(worst, bool(np.isfinite(worst)), len(errors))
        return judge_outcome(metrics, limits, "", failures)

    return run
