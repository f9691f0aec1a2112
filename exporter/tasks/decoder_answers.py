"""Computes PyTorch's answers to a decoder's cases.

N places, V vocabulary
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ...runtime.apps.check.case import Case, CaseSet, Integers, Known, Row, Text
from ...runtime.apps.check.decoder import DecoderEngine, Tokenizers, reduce
from ...runtime.apps.check.files import choose_evenly
from ...runtime.apps.check.metrics import Logits, measure_scale
from ...runtime.bundle.bundle import Bundle
from ...runtime.bundle.manifest import Artifact
from ...runtime.decoding.decoder import Decoder
from ..limits import CAPS
from .base import Asked, OpenProgram, list_wanted
from .decoder import CONTEXT
from .passages import open_plain_tokenizer
from .random_cases import TAIL

if TYPE_CHECKING:
    from ..reference_model import ReferenceModel
    from .pytorch_decoder import Reference
    from .rounding import Rounding

# Of a text's logits, in units of their spread: ten times what engines in fp32 may be off.
NEAR = 10 * CAPS["fp32"]["max_error"]
KEPT_LOGITS = ((3, 8), (2, 4), (1, 1))  # of a prompt and of another text, in golden data; the first that fits


def open_reference(model: ReferenceModel, bundle: Bundle, rounding: Rounding | None = None) -> Reference:
    """Return the reference that answers for a decoder."""
    from .pytorch_decoder import open_reference

    return open_reference(model, rounding)


def open_engine(bundle: Bundle, artifact: Artifact, open_program: OpenProgram) -> DecoderEngine:
    """Open a decoder's graph."""

    def open_tokenizers() -> Tokenizers:
        tokenizer = open_plain_tokenizer(bundle)
        return tokenizer, tokenizer

    return DecoderEngine(Decoder(open_program(artifact), artifact), open_tokenizers)


def calibrate(reference: Reference, case_set: CaseSet) -> None:
    """Run PyTorch over the texts to calibrate with."""
    for text in case_set.calibration:
        reference.compute_logits(text.tokens, slice(None))


def read_row(reference: Reference, case_set: CaseSet, case: Case, row: Row) -> Logits:
    """Run PyTorch over a row's tokens; if its beginning is repeated, last over the tokens behind that."""
    return compute_logits(reference, case_set.texts[row.text], np.array([row.ends[-1] - 1]))


def answer_texts(
    reference: Reference, case_set: CaseSet, numbers: Sequence[int]
) -> Iterator[tuple[int, dict[str, Known]]]:
    """Yield PyTorch's answers to texts, by their numbers and outputs."""
    repeated = answer_repeated(reference, case_set)
    for number in numbers:
        yield number, repeated.get(number) or answer_text(reference, case_set, number)


def continue_texts(reference: Reference, case_set: CaseSet) -> CaseSet:
    """Return the set with the tokens that PyTorch chose to continue texts with."""
    texts = case_set.texts
    open_ones = [number for number, text in enumerate(texts) if text.continues]
    if not open_ones:
        return case_set
    steps = texts[open_ones[0]].continues
    with reference.use([texts[number].adapter for number in open_ones]):
        continued = reference.continue_greedily([texts[number].tokens for number in open_ones], steps)
    done = list(texts)
    for number, tokens in zip(open_ones, continued, strict=True):
        done[number] = replace(texts[number], tokens=(*texts[number].tokens, *tokens), continues=0)
    return replace(case_set, texts=tuple(done))


def answer_repeated(reference: Reference, case_set: CaseSet) -> dict[int, dict[str, Known]]:
    """Return the answers to repeated beginnings of one text, which is read once for all of them."""
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
    wanted = {output: known.positions for output, known in list_wanted(case_set, number).items()}
    every = np.unique(np.concatenate(list(wanted.values())))
    if set(wanted) == {"columns"}:
        with reference.use([text.adapter]):
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
        with reference.use([text.adapter]):
            return reference.compute_logits(text.tokens[: positions[-1] + 1], positions.tolist())
    pairs = reference.compute_keys_values(text.tokens[: text.past])
    tail = text.tokens[text.past : positions[-1] + 1]
    return reference.continue_repeated(pairs, text.repeats, tail, len(tail))[positions - text.past]


def answer_again(reference: Reference, answer: Callable[[CaseSet], CaseSet], golden: CaseSet) -> CaseSet:
    """Ask a decoder for the next tokens again; keep a token that is equally likely but for rounding."""
    prompts = golden.answers["margin"]
    chosen = {number: Known.wanted(known.positions.tolist()) for number, known in prompts.items()}
    likeliest = dict(golden.answers.get("likeliest", {}))
    asked = replace(golden, answers={**golden.answers, "likeliest": {**likeliest, **chosen}})
    answered = answer(asked)
    found = dict(answered.answers["likeliest"])
    texts = list(golden.texts)
    for number in list(found):
        tokens = texts[number].tokens
        positions = found[number].positions
        if number not in prompts:
            given = likeliest[number].values
            with reference.use([texts[number].adapter]):
                own = choose_likeliest(reference, tokens, found[number], given)
            found[number] = Known(positions, own)
            continue
        given = np.array(tokens)[positions + 1]
        with reference.use([texts[number].adapter]):
            own = choose_likeliest(reference, tokens, found.pop(number), given)
        texts[number] = replace(texts[number], tokens=(*tokens[: positions[0] + 1], *own.tolist()))
    return replace(answered, texts=tuple(texts), answers={**answered.answers, "likeliest": found})


def choose_likeliest(
    reference: Reference, tokens: Sequence[int], found: Known, given: npt.NDArray[Any]
) -> npt.NDArray[Any]:
    """Return the likeliest token at each place; the given one where it is equally likely but for rounding."""
    differs = found.values != given
    if not differs.any():
        return given
    logits = reference.compute_logits(tokens, found.positions[differs].tolist())
    behind = logits.max(axis=-1) - np.take_along_axis(logits, given[differs, None], axis=-1)[:, 0]
    chosen: npt.NDArray[Any] = found.values.copy()
    chosen[differs] = np.where(behind <= NEAR * measure_scale(logits), given[differs], found.values[differs])
    return chosen


def choose_for_gaps(case_set: CaseSet, rounding: Rounding) -> Asked:
    """Return the texts that show the effect of rounding, and the passages whose ends count as a context's.

    Rounded weights lose as much at any position: the context would only take as long as all else. Where
    little of a context is read, ends of passages stand for its end, and half of the passages are enough.
    """
    context = {row.text for case in case_set.cases if case.name == CONTEXT for row in case.rows}
    passages = case_set.list_texts("passages")
    texts = {*case_set.answers["margin"], *context, *passages, *case_set.list_texts("columns")}
    if rounding.weights and not rounding.cache_scales:
        return case_set.restrict(texts - context), ()
    longest = max((len(case_set.texts[number].tokens) for number in passages), default=0)
    read = [case_set.texts[number] for number in context]
    is_short = all((text.past or len(text.tokens)) <= 2 * longest for text in read)
    if rounding.dtype is None or not case_set.left_out or not is_short:
        return case_set.restrict(texts), ()
    few = [passages[i] for i in choose_evenly(len(passages), math.ceil(len(passages) / 2))]
    return case_set.restrict((texts - context - set(passages)).union(few)), few


def thin(case_set: CaseSet, texts: int) -> CaseSet:
    """Return the set with at most so many prompts and passages, without cases that take long."""
    passages = case_set.list_texts("passages")
    prompts = sorted(case_set.answers["margin"])
    alone = [number for number in prompts if not case_set.texts[number].adapter][-texts:]
    by_adapter = {case_set.texts[number].adapter: number for number in prompts}
    return case_set.restrict(
        {*alone, *by_adapter.values(), *(passages[i] for i in choose_evenly(len(passages), texts))}
    )


def count_kept(case_set: CaseSet, output: str, text: int, counts: tuple[int, ...]) -> int | None:
    """Return how many places of a text golden data keeps: few, as whole logits are 200 kB each in GPT-2."""
    of_prompts, of_texts = counts
    if output != "logits":
        return None
    return of_prompts if text in case_set.answers["margin"] else of_texts
