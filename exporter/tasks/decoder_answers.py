"""PyTorch's answers to a decoder's cases, and how far rounding moves them.

N places, V vocabulary
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ...runtime.apps.check.case import CaseSet, Integers, Known, Text, to_arrays
from ...runtime.apps.check.decoder import reduce
from ...runtime.apps.check.draws import PREFIX
from ...runtime.apps.check.files import choose_evenly, fits
from ...runtime.apps.check.judge import Seen, measure_columns, measure_passages, measure_values
from ...runtime.apps.check.metrics import Logits, Metrics, measure_scale
from ...runtime.bundle.bundle import Bundle
from ...runtime.progress import PartCounter, Report, report_nothing
from ..errors import VerificationError
from ..limits import CAPS, Gaps
from ..reference.draw import CONTEXT_ROWS, TAIL
from ..reference.model import is_module
from .decoder import CONTEXT, LOGITS

if TYPE_CHECKING:
    from ..reference.decoder import Reference
    from ..reference.model import ReferenceModel
    from ..reference.rounding import Rounding

# Of a text's logits, in units of their spread: ten times what engines in fp32 may be off.
NEAR = 10 * CAPS["fp32"]["max_error"]
KEPT_LOGITS = ((3, 8), (2, 4), (1, 1))  # of a prompt and of another text, in golden data; the first that fits


def answer(
    model: ReferenceModel,
    bundle: Bundle,
    case_set: CaseSet,
    report: Report = report_nothing,
    rounding: Rounding | None = None,
) -> CaseSet:
    """Return the set with PyTorch's answers; rounded, the answers of the same texts in that precision.

    A rounding of weights is applied by the caller, for all that is asked of the model then.
    """
    from ..reference.open import make_reference

    reference = make_reference(model, rounding)
    case_set = replace(case_set, texts=continue_texts(reference, case_set.texts))
    numbers = sorted({number for by_text in case_set.answers.values() for number in by_text})
    parts = PartCounter(report, len(numbers))
    repeated = answer_repeated(reference, case_set)
    answers: dict[str, dict[int, Known]] = {}
    for number in numbers:
        for output, known in (repeated.get(number) or answer_text(reference, case_set, number)).items():
            if rounding is None and not np.isfinite(known.values).all():
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


def read_to(reference: Reference, text: Text, end: int) -> Logits:
    """Run PyTorch over the first tokens of a text; return the logits (1, V) behind them."""
    return compute_logits(reference, text, np.array([end - 1]))


def answer_again(model: ReferenceModel, bundle: Bundle, golden: CaseSet) -> CaseSet:
    """Ask a decoder what follows the same tokens; a token that is as likely but for rounding is kept."""
    prompts = golden.answers["margin"]
    chosen = {number: Known.wanted(known.positions.tolist()) for number, known in prompts.items()}
    likeliest = dict(golden.answers.get("likeliest", {}))
    asked = replace(golden, answers={**golden.answers, "likeliest": {**likeliest, **chosen}})
    answered = answer(model, bundle, asked)
    found = dict(answered.answers["likeliest"])
    texts = list(golden.texts)
    for number in list(found):
        tokens = texts[number].tokens
        positions = found[number].positions
        if number not in prompts:
            given = likeliest[number].values
            found[number] = Known(positions, choose_likeliest(model, tokens, found[number], given))
            continue
        given = np.array(tokens)[positions + 1]
        own = choose_likeliest(model, tokens, found.pop(number), given)
        texts[number] = replace(texts[number], tokens=(*tokens[: positions[0] + 1], *own.tolist()))
    return replace(answered, texts=tuple(texts), answers={**answered.answers, "likeliest": found})


def choose_likeliest(
    model: ReferenceModel, tokens: Sequence[int], found: Known, given: npt.NDArray[Any]
) -> npt.NDArray[Any]:
    """Return the likeliest token at each place; the given one where it is as likely but for rounding."""
    from ..reference.open import make_reference

    differs = found.values != given
    if not differs.any():
        return given
    logits = make_reference(model).compute_logits(tokens, found.positions[differs].tolist())
    behind = logits.max(axis=-1) - np.take_along_axis(logits, given[differs, None], axis=-1)[:, 0]
    chosen: npt.NDArray[Any] = found.values.copy()
    chosen[differs] = np.where(behind <= NEAR * measure_scale(logits), given[differs], found.values[differs])
    return chosen


def measure_gaps(model: ReferenceModel, bundle: Bundle, case_set: CaseSet, rounding: Rounding) -> Gaps:
    """Measure how far the rounded model is from itself, by the beginning of limits' names."""
    assert is_module(model)
    asked, has_ends = choose_for_gap(case_set, rounding)
    with rounding.apply(model):
        rounded = answer(model, bundle, asked, rounding=rounding)
    return compare_answers(asked, rounded, has_ends)


def choose_for_gap(case_set: CaseSet, rounding: Rounding) -> tuple[CaseSet, bool]:
    """Return which texts tell what rounding does, and whether the ends of passages are judged as a context's.

    Rounded weights lose as much at any position: the context would only take as long as all else. Where
    little of a context is read, ends of passages stand for its end, and half of the passages are enough.
    """
    context = {row.text for case in case_set.cases if case.name == CONTEXT for row in case.rows}
    passages = case_set.list_texts("passages")
    texts = {*case_set.answers["margin"], *context, *passages, *case_set.list_texts("columns")}
    if rounding.weights and not rounding.cache_scales:
        return case_set.restrict(texts - context), False
    longest = max((len(case_set.texts[number].tokens) for number in passages), default=0)
    read = [case_set.texts[number] for number in context]
    is_short = all((text.past or len(text.tokens)) <= 2 * longest for text in read)
    if rounding.dtype is None or not case_set.left_out or not is_short:
        return case_set.restrict(texts), False
    few = {passages[i] for i in choose_evenly(len(passages), math.ceil(len(passages) / 2))}
    return case_set.restrict(texts - context - set(passages) | few), True


def compare_answers(case_set: CaseSet, rounded: CaseSet, has_ends: bool = False) -> Gaps:
    """Measure how far rounded answers are from PyTorch's own, by the beginning of limits' names.

    A case has some of the texts, so the mean KL is that of the worst of them.
    """

    def list_seen(texts: Sequence[int]) -> list[Seen]:
        return [
            Seen(text, 0, 0, text, {output: of[text] for output, of in rounded.answers.items() if text in of})
            for text in texts
        ]

    gaps: Gaps = {}
    seen = list_seen(case_set.list_texts("logits"))
    passages = list_seen(case_set.list_texts("passages"))
    if has_ends:
        seen += [one._replace(values={"logits": one.values["logits"].end(CONTEXT_ROWS)}) for one in passages]
    if seen:
        whole = measure_values(seen, case_set, LOGITS)
        alone = [measure_values([one], case_set, LOGITS) for one in seen]
        assert isinstance(whole, Metrics)
        worst = max(part.mean_kl for part in alone if isinstance(part, Metrics))
        gaps[""] = replace(whole, mean_kl=worst)
    if passages:
        gaps["text"] = measure_passages(passages, case_set)
    if columns := list_seen(case_set.list_texts("columns")):
        gaps[PREFIX] = measure_columns(columns, case_set)[0]
    return gaps


def thin(case_set: CaseSet, texts: int) -> CaseSet:
    """Return the set with at most so many prompts and passages, without what takes as long as all of them."""
    passages = case_set.list_texts("passages")
    prompts = sorted(case_set.answers["margin"])[-texts:]
    return case_set.restrict({*prompts, *(passages[i] for i in choose_evenly(len(passages), texts))})


def thin_for_file(case_set: CaseSet) -> CaseSet:
    """Return the set as golden data keeps it, with whole logits of few places: GPT-2 has 200 kB of each.

    Where the file is full, they are of fewer.
    """
    prompts = case_set.answers["margin"]
    thinned = case_set
    for of_prompts, of_texts in KEPT_LOGITS:
        logits = {
            text: known.thin(of_prompts if text in prompts else of_texts)
            for text, known in case_set.answers["logits"].items()
        }
        thinned = replace(case_set, answers={**case_set.answers, "logits": logits})
        if fits(to_arrays(thinned)):
            break
    return thinned
