"""PyTorch's answers to a translator's cases, and how far rounding moves them.

L layers, H heads, D head size, P places, V vocabulary
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from ...runtime.apps.check.case import CaseSet, Known, Measure, Text, to_arrays
from ...runtime.apps.check.decoder import reduce
from ...runtime.apps.check.draws import PREFIX, measure_error
from ...runtime.apps.check.files import fits
from ...runtime.apps.check.judge import Seen, measure_columns, measure_values
from ...runtime.apps.check.metrics import DrawMetrics, Logits, ScoreMetrics, measure_scale
from ...runtime.apps.check.translator import SEARCH, make_search
from ...runtime.bundle.bundle import Bundle
from ...runtime.decoding.constraints import Constraints
from ...runtime.progress import PartCounter, Report, report_nothing
from ..errors import VerificationError
from ..limits import Gaps
from ..reference.model import is_module
from .translator import ATTENTION, CROSS, LOGITS, START, has_attention

if TYPE_CHECKING:
    from ..reference.model import ReferenceModel
    from ..reference.rounding import Rounding
    from ..reference.translation import Reference

KEPT = ((3, 2), (2, 1), (1, 1))  # places of a target and of a source, in golden data; the first that fits


def open_reference(model: ReferenceModel, bundle: Bundle) -> Reference:
    """Return what asks a translator."""
    from ..reference.translation import make_reference

    defaults = bundle.manifest.generation
    assert defaults is not None and defaults.decoder_start is not None
    return make_reference(model, defaults.decoder_start, has_attention(bundle.manifest))


def answer(
    model: ReferenceModel, bundle: Bundle, case_set: CaseSet, report: Report = report_nothing
) -> CaseSet:
    """Return the set with PyTorch's answers, as the model is now: a caller may have rounded it."""
    reference = open_reference(model, bundle)
    parts = PartCounter(report, len(case_set.texts))
    case_set = add_beams(reference, write_texts(reference, case_set))
    answers: dict[str, dict[int, Known]] = {}
    numbers = sorted({number for by_text in case_set.answers.values() for number in by_text})
    for number in numbers:
        for output, known in answer_text(reference, case_set, number).items():
            if not np.isfinite(known.values).all():
                raise VerificationError("the PyTorch model's own logits are not finite; check its weights")
            answers.setdefault(output, {})[number] = known
        parts.finish_one()
    return replace(case_set, answers=answers)


def write_texts(reference: Reference, case_set: CaseSet) -> CaseSet:
    """Return the set with PyTorch's likeliest targets, and texts that quote them."""
    texts = list(case_set.texts)
    written: list[int] = []
    for number, text in enumerate(texts):
        if not text.continues:
            continue
        assert text.source is not None
        search = make_search(case_set)
        greedy = replace(
            search,
            num_beams=1,
            n_best=1,
            max_new_tokens=text.continues,
            constraints=Constraints(eos=(), suppressed=search.constraints.suppressed),
        )
        (best,) = reference.search(texts[text.source].tokens, greedy)
        written += best.token_ids
        texts[number] = replace(text, tokens=(*text.tokens, *best.token_ids), continues=0)
    for number, text in enumerate(texts):
        if text.quotes:
            tokens = [reference.start if place == START else written[place] for place in text.tokens]
            texts[number] = replace(text, tokens=tuple(tokens), quotes=False)
    return replace(case_set, texts=tuple(texts))


def translate(model: ReferenceModel, bundle: Bundle, case_set: CaseSet) -> None:
    """Run PyTorch over the sources to calibrate with, and over its translations of them."""
    reference = open_reference(model, bundle)
    greedy = replace(make_search(case_set), num_beams=1, n_best=1)
    for text in case_set.calibration:
        (best,) = reference.search(text.tokens, greedy)
        reference.compute_results(text.tokens, best.token_ids)


def add_beams(reference: Reference, case_set: CaseSet) -> CaseSet:
    """Return the set with the targets that PyTorch's own search finds, whose scores are wanted."""
    if "score" in case_set.answers:
        return case_set
    texts = list(case_set.texts)
    wanted = {}
    rows = chain.from_iterable(case.rows for case in case_set.cases if case.runner == "beams")
    for row in rows:
        source = texts[row.text].source
        assert source is not None
        for found in reference.search(texts[source].tokens, make_search(case_set)):
            wanted[len(texts)] = Known.wanted([0])
            texts.append(Text((reference.start, *found.token_ids), source=source))
    answers = {**case_set.answers, "score": wanted} if wanted else case_set.answers
    return replace(case_set, texts=tuple(texts), answers=answers)


def answer_text(reference: Reference, case_set: CaseSet, number: int) -> dict[str, Known]:
    """Return PyTorch's answers at the wanted places of a source, or of a target, by output."""
    text = case_set.texts[number]
    wanted = {
        output: by_text[number].positions for output, by_text in case_set.answers.items() if number in by_text
    }
    if text.source is None:
        places = wanted["cross"]
        values = reference.stack_keys_values(text.tokens)[:, places].swapaxes(0, 1)  # (P, 2 * L, H * D)
        return {"cross": Known(places, values)}
    source = case_set.texts[text.source].tokens
    if "score" in wanted:
        return {"score": Known(wanted["score"], np.array([reference.score(source, text.tokens[1:])]))}
    end = max(int(places[-1]) for places in wanted.values()) + 1
    logits, attention = compute_results(reference, case_set, replace(text, tokens=text.tokens[:end]))
    found = {}
    for output, places in wanted.items():
        if output == "attention":
            values = np.moveaxis(attention[:, :, places], 2, 0)  # (P, L, H, S)
        else:
            values = reduce(case_set, output, number, places, logits[places])
        found[output] = Known(places, values)
    return found


def compute_results(reference: Reference, case_set: CaseSet, text: Text) -> tuple[Logits, Logits]:
    """Return the logits (T, V) behind each token of a target, and its attention (L, H, T, S)."""
    assert text.source is not None
    # The model is fed a target but for its last token, so there has to be one more.
    return reference.compute_results(case_set.texts[text.source].tokens, [*text.tokens[1:], 0])


def measure_gaps(model: ReferenceModel, bundle: Bundle, case_set: CaseSet, rounding: Rounding) -> Gaps:
    """Measure how far the rounded model is from itself, by the beginning of limits' names."""
    assert is_module(model)
    asked = case_set.restrict(
        [n for n in range(len(case_set.texts)) if n not in case_set.answers.get("score", {})]
    )
    with rounding.apply(model):
        rounded = answer(model, bundle, asked)
    gaps: Gaps = {}
    for measure in (LOGITS, CROSS, ATTENTION):
        if seen := list_seen(rounded, measure):
            gaps[measure.prefix] = measure_values(seen, case_set, measure)
    seen = list_seen(rounded, Measure("columns", ("columns",), ()))
    if seen:
        gaps[PREFIX] = measure_columns(seen, case_set)[0]
    found = [case_set.texts[number] for number in case_set.answers.get("score", {})]
    return gaps | measure_search_gaps(model, bundle, case_set, found, rounding)


def list_seen(rounded: CaseSet, measure: Measure) -> list[Seen]:
    """Return an output's rounded answers."""
    (output,) = measure.outputs
    by_text = rounded.answers.get(output, {})
    return [Seen(text, 0, 0, text, {output: known}) for text, known in by_text.items()]


def measure_search_gaps(
    model: ReferenceModel, bundle: Bundle, case_set: CaseSet, found: Sequence[Text], rounding: Rounding
) -> Gaps:
    """Measure the logits and scores that rounding gives the targets of beam searches."""
    from ..reference.translation import compute_score

    assert is_module(model)
    if not found:
        return {}
    reference = open_reference(model, bundle)
    scales = find_scales(case_set)
    pairs = [(case_set.texts[text.source].tokens, text) for text in found if text.source is not None]
    with rounding.apply(model):
        rounded = [reference.compute_results(source, text.tokens[1:])[0] for source, text in pairs]
    scores = []
    errors = []
    for (source, text), logits in zip(pairs, rounded, strict=True):
        target = text.tokens[1:]
        exact, _ = reference.compute_results(source, target)
        scores.append(abs(compute_score(logits, target) - compute_score(exact, target)))
        assert text.source is not None
        errors.append(measure_error(logits, exact, scales[text.source]))
    worst = float(np.max(scores))
    error = max(errors)
    return {
        "score": ScoreMetrics(worst, math.isfinite(worst), len(scores)),
        SEARCH: DrawMetrics(error, math.isfinite(error), len(errors)),
    }


def find_scales(case_set: CaseSet) -> dict[int, float]:
    """Return the unit of logits' errors of each source: that of the target that PyTorch writes to it."""
    logits = case_set.answers["logits"]
    return {
        source: measure_scale(known.values)
        for number, known in logits.items()
        if (source := case_set.texts[number].source) is not None
    }


def thin_for_file(case_set: CaseSet) -> CaseSet:
    """Return the set as golden data keeps it, with few places of each source and target."""
    thinned = case_set
    for of_targets, of_sources in KEPT:
        counts = {"logits": of_targets, "attention": of_targets, "cross": of_sources}
        answers = {
            output: {
                text: known.thin(counts.get(output, len(known.positions))) for text, known in by_text.items()
            }
            for output, by_text in case_set.answers.items()
        }
        thinned = replace(case_set, answers=answers)
        if fits(to_arrays(thinned)):
            break
    return thinned
