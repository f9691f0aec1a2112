"""Measures what was seen at places of texts, by an engine or by PyTorch rounded, against PyTorch's answers.

N places, V vocabulary, K tokens whose logits are known
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np

from ...bundle.manifest import Artifact
from .case import Array, Case, CaseSet, Encoding, Known, Location, Measure
from .metrics import (
    ErrorMetrics,
    Logits,
    Measured,
    PathMetrics,
    TextMetrics,
    VectorMetrics,
    measure,
    measure_error,
    measure_errors,
    measure_fields,
    measure_kl,
    measure_labels,
    measure_max_error,
    measure_scale,
    measure_vectors,
    summarize_text,
)
from .outcome import Outcome, judge_outcome, locate_failure
from .ranking import measure_ranking

Limits: TypeAlias = Mapping[str, float]  # by the metrics' names
Compare: TypeAlias = "Callable[[], Outcome]"
ENOUGH = 500  # tokens of real text; what is counted in fewer says no more of an engine than of the text
COUNTED = ("top1_changes", "perplexity_change")


class Seen(NamedTuple):
    """What is known of a text's places; of a graph what one step of a row gave there."""

    text: int
    values: Mapping[str, Known]  # by output
    location: Location | None = None


class Engine(Protocol):
    """A task's graphs, opened in the runtime's own loop."""

    @property
    def artifacts(self) -> Sequence[Artifact]:
        """The graphs that have cases."""

    @property
    def encoding(self) -> Encoding | None:
        """What a translator's encoder takes of a case's sources."""

    def run(self, case_set: CaseSet, case: Case) -> Iterator[Seen]:
        """Yield what a graph gives at the wanted places of a case, whose tokens are all known."""

    def compare(self, case_set: CaseSet, cases: Sequence[Case], limits: Limits) -> Outcome:
        """Compare cases of one name with PyTorch."""

    def close(self) -> None:
        """Close the graphs."""


def find_answers(case_set: CaseSet, output: str, one: Seen) -> Array:
    """Return PyTorch's answers (N, ...) at the places that were seen."""
    return case_set.answers[output][one.text].find_values(one.values[output].positions)


def measure_values(seen: Sequence[Seen], case_set: CaseSet, wanted: Measure) -> Measured:
    """Measure an output's values at all places together."""
    (output,) = wanted.outputs
    if wanted.kind in ("fields", "paths"):
        pairs = [(one.values[output].values, find_answers(case_set, output, one)) for one in seen]
        fields = measure_fields(pairs)
        return fields if wanted.kind == "fields" else PathMetrics(*vars(fields).values())
    if wanted.kind == "attention":  # a vector is what a token attends to in a layer and head
        pairs = [(one.values[output].values, find_answers(case_set, output, one)) for one in seen]
        flat = [[side.reshape(-1, side.shape[-1]) for side in pair] for pair in pairs]
        return find_worst([measure_vectors(got, want) for got, want in flat])
    if wanted.kind == "ranking":
        sides = (
            [one.values[output].values for one in seen],
            [find_answers(case_set, output, one) for one in seen],
        )
        return measure_ranking(*sides, wanted.similarity)
    got = np.concatenate([one.values[output].values for one in seen])
    want = np.concatenate([find_answers(case_set, output, one) for one in seen])
    if wanted.kind == "logits":
        return measure(got, want)
    if wanted.kind == "values":
        return measure_errors(got, want)
    if wanted.kind == "layers":
        layers = range(want.shape[1])
        return find_worst([measure_vectors(got[:, layer], want[:, layer]) for layer in layers])
    if wanted.kind == "scores":
        return measure_vectors(got.reshape(1, -1), want.reshape(1, -1), min_scale=1.0)
    if wanted.kind == "vectors":
        return measure_vectors(got, want, of_texts=wanted.of_texts)
    return measure_labels(got, want, independent=wanted.kind == "flags", of_texts=wanted.of_texts)


def find_worst(measured: Sequence[VectorMetrics]) -> VectorMetrics:
    """Return the largest of each metric; not finite if one is not."""
    rows = sum(each.rows for each in measured)
    if not all(each.finite for each in measured):
        return VectorMetrics(math.nan, math.nan, math.nan, False, rows)
    return VectorMetrics(
        max(each.max_error for each in measured),
        max(each.cosine_gap for each in measured),
        max(each.mean_cosine_gap for each in measured),
        True,
        rows,
    )


def judge_values(seen: Iterable[Seen], case_set: CaseSet, wanted: Measure, limits: Limits) -> Outcome:
    """Return the outcome of whole values; of encoders with the first row that is over its limits."""
    (output,) = wanted.outputs
    known = [one for one in seen if output in one.values]
    metrics = measure_values(known, case_set, wanted)
    outcome = judge_outcome(
        metrics, limits, wanted.prefix, names=wanted.limited, errors=list_step_errors(known, case_set, output)
    )
    if not outcome.failures or not wanted.prefix:
        return outcome

    def is_over(one: Seen) -> bool:
        own = measure_values([one], case_set, wanted)
        return bool(judge_outcome(own, limits, wanted.prefix, names=wanted.limited).failures)

    first = next(filter(is_over, known), None)
    if first is None:
        return outcome
    assert first.location is not None
    return locate_failure(outcome, f"at first {describe_place(case_set, first.location)}", first.location)


def list_step_errors(seen: Sequence[Seen], case_set: CaseSet, output: str) -> list[float]:
    """Return the largest error of each step over all rows, where there are several steps."""
    by_step: dict[int, list[Seen]] = {}
    for one in seen:
        assert one.location is not None
        by_step.setdefault(one.location.step, []).append(one)
    if len(by_step) < 2:
        return []
    return [
        measure_max_error(
            np.concatenate([one.values[output].values for one in own]),
            np.concatenate([find_answers(case_set, output, one) for one in own]),
        )
        for _, own in sorted(by_step.items())
    ]


def measure_columns(
    seen: Iterable[Seen], case_set: CaseSet
) -> tuple[ErrorMetrics, list[tuple[Location | None, float]]]:
    """Measure logits of some tokens; also return the error at each place."""
    scale = find_scale(case_set)
    errors = []
    for one in seen:
        if "columns" in one.values:
            want: Logits = find_answers(case_set, "columns", one)
            errors.append((one.location, measure_error(one.values["columns"].values, want, scale)))
    worst = max(error for _, error in errors)
    return ErrorMetrics(worst, math.isfinite(worst), len(errors)), errors


def find_scale(case_set: CaseSet) -> float:
    """Return the unit of errors of some tokens' logits: that of all texts together."""
    whole = [
        known.values
        for text, known in case_set.answers["columns"].items()
        if case_set.texts[text].repeats == 1
    ]
    return measure_scale(np.concatenate(whole))


def judge_columns(seen: Iterable[Seen], case_set: CaseSet, wanted: Measure, limits: Limits) -> Outcome:
    """Return the outcome of logits of some tokens, with the first place where they are over their limit."""
    metrics, errors = measure_columns(seen, case_set)
    outcome = judge_outcome(metrics, limits, wanted.prefix, names=wanted.limited)
    limit = limits[f"{wanted.prefix}max_error"]
    over = next((location for location, error in errors if not error <= limit), None)
    if over is None:
        return outcome
    return locate_failure(outcome, f"at first {describe_place(case_set, over)}", over)


def describe_place(case_set: CaseSet, location: Location) -> str:
    """Return in words where a case failed."""
    case, step, row = location
    where = f"in row {row} of a batch of {len(case.rows)}"
    if (noise := case_set.texts[case.rows[row].text].noise) is not None and case.graph != "text_encoder":
        steps = f", in step {case.rows[row].ends[step]}" if case.runner == "forced" else ""
        return f"{where} of latents of {noise.height} x {noise.width}{steps}"
    lengths = ", ".join(str(case_set.texts[one.text].count(one.ends[step])) for one in case.rows)
    if case.runner == "once":
        return f"{where}, of {lengths} tokens"
    begin, end = list(case.list_steps())[step][row]
    return f"{where}, in the step of its tokens {begin} to {end - 1}, where the rows have read {lengths}"


def measure_passages(seen: Iterable[Seen], case_set: CaseSet) -> TextMetrics:
    """Measure how texts are predicted, of which every token is: a text at a time is in memory."""
    kl: list[Array] = []
    changed: list[Array] = []
    lost: list[Array] = []  # of each token's log-probability
    finite = True
    for one in seen:
        if "likeliest" not in one.values:
            continue
        likeliest = one.values["likeliest"].values
        changed.append(likeliest != find_answers(case_set, "likeliest", one))
        logprobs = one.values["logprob"].values
        finite = finite and bool(np.isfinite(logprobs).all())
        lost.append(find_answers(case_set, "logprob", one) - logprobs)
        if "logits" in one.values:
            got = one.values["logits"].values
            finite = finite and bool(np.isfinite(got).all())
            kl.append(
                measure_kl(find_answers(case_set, "logits", one), got) if finite else np.array([math.nan])
            )
    rows = sum(map(len, changed))
    if not finite:
        return TextMetrics(math.nan, 1.0, math.nan, False, rows)
    return summarize_text(kl, changed, lost)


def judge_passages(seen: Iterable[Seen], case_set: CaseSet, wanted: Measure, limits: Limits) -> Outcome:
    """Return the outcome of texts; what is counted in few tokens is shown and not judged."""
    metrics = measure_passages(seen, case_set)
    names = [name for name in wanted.limited if metrics.rows >= ENOUGH or name not in COUNTED]
    return judge_outcome(metrics, limits, wanted.prefix, names=names)


def judge(seen: Iterable[Seen], case_set: CaseSet, measures: Sequence[Measure], limits: Limits) -> Outcome:
    """Return the outcome of all measures of a case."""
    every = list(seen) if len(measures) > 1 else seen
    first, *others = [
        JUDGES.get(wanted.kind, judge_values)(every, case_set, wanted, limits) for wanted in measures
    ]
    for other in others:
        first = Outcome(
            metrics={**first.metrics, **other.metrics},
            limits={**first.limits, **other.limits},
            failures=(*first.failures, *other.failures),
            errors=first.errors or other.errors,
            location=first.location or other.location,
        )
    return first


def compare_known(
    run: Callable[[CaseSet, Case], Iterator[Seen]], case_set: CaseSet, cases: Sequence[Case], limits: Limits
) -> Outcome:
    """Return the outcome of cases of one name, whose tokens are all known."""
    seen = chain.from_iterable(run(case_set, case) for case in cases)
    return judge(seen, case_set, cases[0].measures, limits)


def list_comparisons(
    engine: Engine, case_set: CaseSet, artifact: Artifact, limits: Limits
) -> dict[str, Compare]:
    """Return what compares a graph with PyTorch, by name, as far as it takes the rows and tokens."""
    by_name: dict[str, list[Case]] = {}
    for case in case_set.cases:
        if case.graph == artifact.graph and (parts := case_set.fit(case, artifact, engine.encoding)):
            by_name.setdefault(case.name, []).extend(parts)
    return {name: partial(engine.compare, case_set, cases, limits) for name, cases in by_name.items()}


JUDGES = {
    "columns": judge_columns,
    "passages": judge_passages,
}  # by a measure's kind; others are whole values
