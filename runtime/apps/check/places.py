"""Measures what was seen at places of texts, by an engine or by PyTorch rounded, against PyTorch's answers.

N places, V vocabulary, K tokens whose logits are known
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from .case import Array, CaseSet, Known, Measure
from .draws import measure_error
from .metrics import (
    DrawMetrics,
    Logits,
    Metrics,
    Outcome,
    TextMetrics,
    judge_outcome,
    locate_failure,
    measure,
    measure_kl,
    measure_max_error,
    measure_scale,
    summarize_text,
)

ENOUGH = 500  # tokens of real text; what is counted in fewer says no more of an engine than of the text
COUNTED = ("top1_changes", "perplexity_change")


class Seen(NamedTuple):
    """What one step of a row gave at the known places of its text."""

    case: int  # the number of the case in its set
    step: int
    row: int
    text: int
    values: Mapping[str, Known]  # by output


def find_answers(case_set: CaseSet, output: str, one: Seen) -> Array:
    """Return PyTorch's answers (N, ...) at the places that were seen."""
    return case_set.answers[output][one.text].find_values(one.values[output].positions)


def measure_logits(seen: Iterable[Seen], case_set: CaseSet) -> tuple[Metrics, list[float]]:
    """Measure whole logits; also return the largest error of each step over all rows."""
    pairs = [
        (one.step, one.values["logits"].values, find_answers(case_set, "logits", one))
        for one in seen
        if "logits" in one.values
    ]
    metrics = measure(*(np.concatenate([pair[side] for pair in pairs]) for side in (1, 2)))
    steps = sorted({step for step, _, _ in pairs})
    by_step = [[pair for pair in pairs if pair[0] == step] for step in steps]
    errors = [
        measure_max_error(*(np.concatenate([pair[side] for pair in own]) for side in (1, 2)))
        for own in by_step
    ]
    return metrics, errors


def judge_logits(
    seen: Iterable[Seen], case_set: CaseSet, wanted: Measure, limits: Mapping[str, float]
) -> Outcome:
    """Return the outcome of whole logits."""
    metrics, errors = measure_logits(seen, case_set)
    return judge_outcome(metrics, limits, wanted.prefix, names=wanted.limited, errors=errors)


def measure_columns(
    seen: Iterable[Seen], case_set: CaseSet
) -> tuple[DrawMetrics, dict[tuple[int, int, int], float]]:
    """Measure logits of some tokens; also return the error of each case, step and row."""
    scale = find_scale(case_set)
    errors: dict[tuple[int, int, int], float] = {}
    for one in seen:
        if "columns" in one.values:
            want: Logits = find_answers(case_set, "columns", one)
            errors[one.case, one.step, one.row] = measure_error(one.values["columns"].values, want, scale)
    worst = max(errors.values())
    return DrawMetrics(worst, math.isfinite(worst), len(errors)), errors


def find_scale(case_set: CaseSet) -> float:
    """Return the unit of errors of some tokens' logits: that of all texts together."""
    whole = [
        known.values
        for text, known in case_set.answers["columns"].items()
        if case_set.texts[text].repeats == 1
    ]
    return measure_scale(np.concatenate(whole))


def judge_columns(
    seen: Iterable[Seen], case_set: CaseSet, wanted: Measure, limits: Mapping[str, float]
) -> Outcome:
    """Return the outcome of logits of some tokens, with the first place where they are over their limit."""
    metrics, errors = measure_columns(seen, case_set)
    outcome = judge_outcome(metrics, limits, wanted.prefix, names=wanted.limited)
    limit = limits[f"{wanted.prefix}max_error"]
    over = next((place for place, error in errors.items() if not error <= limit), None)
    if over is None:
        return outcome
    return locate_failure(outcome, f"at first {describe_place(case_set, *over)}", over)


def describe_place(case_set: CaseSet, number: int, step: int, row: int) -> str:
    """Return in words where a case failed."""
    case = case_set.cases[number]
    read = ", ".join(str(case_set.texts[one.text].count(one.ends[step])) for one in case.rows)
    begin, end = list(case.list_steps())[step][row]
    return (
        f"in row {row} of a batch of {len(case.rows)}, in the step of its tokens {begin} to {end - 1}, where"
        f" the rows have read {read}"
    )


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


def judge_passages(
    seen: Iterable[Seen], case_set: CaseSet, wanted: Measure, limits: Mapping[str, float]
) -> Outcome:
    """Return the outcome of texts; what is counted in few tokens is shown and not judged."""
    metrics = measure_passages(seen, case_set)
    names = [name for name in wanted.limited if metrics.rows >= ENOUGH or name not in COUNTED]
    return judge_outcome(metrics, limits, wanted.prefix, names=names)


def judge(
    seen: Iterable[Seen], case_set: CaseSet, measures: Sequence[Measure], limits: Mapping[str, float]
) -> Outcome:
    """Return the outcome of all measures of a case."""
    every = list(seen) if len(measures) > 1 else seen
    first, *others = [JUDGES[wanted.kind](every, case_set, wanted, limits) for wanted in measures]
    for other in others:
        first = Outcome(
            metrics={**first.metrics, **other.metrics},
            limits={**first.limits, **other.limits},
            failures=(*first.failures, *other.failures),
            errors=first.errors or other.errors,
            spot=first.spot or other.spot,
        )
    return first


JUDGES = {"logits": judge_logits, "columns": judge_columns, "passages": judge_passages}  # by a measure's kind
