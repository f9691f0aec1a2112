"""Computes PyTorch's answers to a translator's cases.

L layers, H heads, D head size, P places, V vocabulary
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from ...runtime.apps.check.case import Case, CaseSet, Known, Row, Text
from ...runtime.apps.check.decoder import reduce
from ...runtime.apps.check.judge import Limits
from ...runtime.apps.check.metrics import Logits, ScoreMetrics, measure_scale
from ...runtime.apps.check.translator import TranslatorEngine, make_search, stack_places
from ...runtime.bundle.bundle import Bundle
from ...runtime.bundle.manifest import Artifact
from ...runtime.decoding.constraints import Constraints
from ...runtime.decoding.decoder import Decoder
from ...runtime.translate.source_encoder import SourceEncoder
from ...runtime.translate.sources import open_tokenizers
from ..limits import CAPS, GAP_FACTOR, Gaps
from .base import Asked, OpenProgram, find_partner, list_wanted
from .translator import DECODER, ENCODER, START, has_attention

if TYPE_CHECKING:
    from ..reference_model import ReferenceModel
    from .pytorch_translator import Reference
    from .rounding import Rounding

KEPT = ((3, 2), (2, 1), (1, 1))  # places of a target and of a source, in golden data; the first that fits


def open_reference(model: ReferenceModel, bundle: Bundle, rounding: Rounding | None = None) -> Reference:
    """Return the reference that answers for a translator; it has no int8 keys and values."""
    from .pytorch_translator import open_reference

    defaults = bundle.manifest.generation
    assert defaults is not None and defaults.decoder_start is not None
    return open_reference(model, defaults.decoder_start, has_attention(bundle.manifest))


def open_engine(bundle: Bundle, artifact: Artifact, open_program: OpenProgram) -> TranslatorEngine:
    """Open an encoder with the decoder that fits it best, or a decoder with the encoder."""
    encoder = find_partner(bundle, artifact, ENCODER)
    decoder = find_partner(bundle, artifact, DECODER)
    return TranslatorEngine(
        SourceEncoder(open_program(encoder), encoder, decoder),
        Decoder(open_program(decoder), decoder),
        partial(open_tokenizers, bundle),
    )


def calibrate(reference: Reference, case_set: CaseSet) -> None:
    """Run PyTorch over the sources to calibrate with, and over its translations of them."""
    greedy = replace(make_search(case_set), num_beams=1, n_best=1)
    for text in case_set.calibration:
        (best,) = reference.search(text.tokens, greedy)
        reference.compute_results(text.tokens, best.token_ids)


def read_row(reference: Reference, case_set: CaseSet, case: Case, row: Row) -> object:
    """Run PyTorch over a source, or over a target up to a row's end."""
    text = case_set.texts[row.text]
    if text.source is None:
        return reference.encode_source(text.tokens)
    return compute_results(reference, case_set, replace(text, tokens=text.tokens[: row.ends[-1]]))


def answer_texts(
    reference: Reference, case_set: CaseSet, numbers: Sequence[int]
) -> Iterator[tuple[int, dict[str, Known]]]:
    """Yield PyTorch's answers to texts, by their numbers and outputs."""
    for number in numbers:
        yield number, answer_text(reference, case_set, number)


def complete(reference: Reference, case_set: CaseSet) -> CaseSet:
    """Return the set with PyTorch's likeliest targets, texts that quote them, and its beams' targets."""
    return add_beams(reference, write_texts(reference, case_set))


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


def add_beams(reference: Reference, case_set: CaseSet) -> CaseSet:
    """Return the set with the targets of PyTorch's own search, whose scores are wanted."""
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
    wanted = {output: known.positions for output, known in list_wanted(case_set, number).items()}
    if text.source is None:
        places = wanted["cross"]
        results = [tensor[0].numpy() for tensor in reference.encode_source(text.tokens)]
        return {"cross": Known(places, stack_places(results, places))}
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


def choose_for_gaps(case_set: CaseSet, rounding: Rounding) -> Asked:
    """Return the texts that show the effect of rounding; targets of a search are measured by themselves."""
    asked = case_set.restrict(set(range(len(case_set.texts))) - set(case_set.answers.get("score", {})))
    cases = tuple(case for case in asked.cases if case.runner != "beams")
    return replace(asked, cases=cases), ()


def limit_scores(case_set: CaseSet, gaps: Gaps, limits: Limits) -> dict[str, float]:
    """Return the limit of the scores of targets.

    A logit's error moves a token's log-probability by at most twice as much, and so their mean. That is the
    most: errors of many tokens cancel, so what rounding does to the scores themselves counts.
    """
    scale = max(map(measure_scale, (known.values for known in case_set.answers["logits"].values())))
    most = 2 * limits["max_error"] * scale
    own = gaps.get("score")
    if isinstance(own, ScoreMetrics):
        least = 2 * CAPS["fp32"]["max_error"] * scale
        most = max(least, min(most, GAP_FACTOR * own.score_error))
    return {"score_error": most}


def count_kept(case_set: CaseSet, output: str, text: int, counts: tuple[int, ...]) -> int | None:
    """Return how many places of a source or target golden data keeps."""
    of_targets, of_sources = counts
    return {"logits": of_targets, "attention": of_targets, "cross": of_sources}.get(output)
