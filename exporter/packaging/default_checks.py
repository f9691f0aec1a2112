"""Checks of a package by its own settings: the texts or labels that a program gets without any options.

Greedy, without beams, is all that is asked for. What a runtime answers is compared with what the bundle
answers here, in our runtime, with the bundle's settings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...runtime import TextEncoder, TextGenerator, Translator, load
from ...runtime.apps.check import answers as golden_answers
from ...runtime.apps.check.case_arrays import from_arrays
from ...runtime.apps.check.cases import find_room
from ...runtime.apps.check.divergence import Sample, list_samples
from ...runtime.apps.check.golden_texts import find_texts, read_texts
from ...runtime.apps.check.metrics import Logits, measure_scale
from ...runtime.apps.check.outcome import Outcome
from ...runtime.apps.check.selftest import load_golden
from ...runtime.apps.check.texts import open_text_tokenizers
from ...runtime.bundle.artifact import Artifact
from ...runtime.bundle.bundle import Bundle
from ...runtime.bundle.defaults import EncoderDefaults, GenerationDefaults
from ...runtime.encode.pooling import share_classes, softmax
from ...runtime.text.long_text import Piece
from ..task_traits import TRAITS
from .check import Answer, Check, describe_difference, report

MAX_TEXTS = 4
MAX_NEW_TOKENS = 48  # where the bundle has no limit of its own, or a larger one
LIKELIEST = 5  # tokens of each place whose logits our runtime tells
# Of bytes that are no whole character each library makes another text, and C's texts end at a NUL.
UNEQUAL = ("\N{REPLACEMENT CHARACTER}", "\0")
LABELLED = ("sequence_classification", "token_classification", "masked_lm")  # heads that give names


@dataclass(frozen=True)
class OwnAnswer:
    """Our runtime's answer to a text."""

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[Mapping[int, float], ...]  # of the likeliest tokens at each place; none of a translation
    sample: Sample  # the text's golden data

    def measure_margin(self, place: int, token: int) -> float:
        """Return by how much our token was preferred to another one, in logits; inf where that is unknown."""
        if place < len(self.logprobs):
            known = self.logprobs[place]
            own = known.get(self.tokens[place], np.inf)
            return abs(own - known.get(token, -np.inf))
        if self.tokens[:place] == self.sample.continuation[:place] and place < len(self.sample.margins):
            return self.sample.margins[place]
        return float(np.inf)


def list_default_checks(bundle: Bundle, artifact: Artifact) -> list[Check]:
    """Return the check of a package's default results; none without golden prompts as texts, or labels."""
    manifest = bundle.manifest
    if manifest.generation is not None:
        samples = find_text_samples(bundle, artifact)
        return [make_generation_check(bundle, artifact, samples)] if samples else []
    assert manifest.encoder is not None
    head = next((head for head in manifest.encoder.heads if head in LABELLED), None)
    is_score = head == "sequence_classification" and len(manifest.encoder.labels) == 1
    if head is None or is_score or find_texts(bundle) is None:
        return []
    return [make_label_check(bundle, artifact, head)]


def find_text_samples(bundle: Bundle, artifact: Artifact) -> dict[str, Sample]:
    """Return golden prompts, or sources, that are texts and leave room for an answer."""
    arrays, _ = load_golden(bundle)
    tokenizer = open_text_tokenizers(bundle)[0]
    samples: dict[str, Sample] = {}
    if TRAITS[bundle.manifest.task].has_sources:
        for sample in list_samples(from_arrays(arrays)):
            samples[golden_answers.find_text(bundle.manifest, tokenizer, sample.source)] = sample
    else:
        room = find_room(artifact) - MAX_NEW_TOKENS
        for prompt in list_samples(from_arrays(arrays)):
            if len(prompt.prompt) <= room:
                samples[golden_answers.find_text(bundle.manifest, tokenizer, prompt.prompt)] = prompt
    samples.pop("", None)
    return dict(list(samples.items())[:MAX_TEXTS])


def make_generation_check(bundle: Bundle, artifact: Artifact, samples: Mapping[str, Sample]) -> Check:
    """Return the check of the texts that a runtime generates as one batch, with the package's settings."""
    defaults = bundle.manifest.generation
    assert defaults is not None
    own_limit = defaults.max_new_tokens is not None and defaults.max_new_tokens <= MAX_NEW_TOKENS
    limit = None if own_limit else MAX_NEW_TOKENS
    _, limits = load_golden(bundle)
    max_error = limits[artifact.precision]["max_error"]

    def judge(answers: Sequence[Answer]) -> Outcome:
        (answer,) = answers
        own = ask_own_runtime(bundle, artifact, samples, limit)
        failures = [
            compare_answers(text, given, expected, defaults, max_error)
            for (text, expected), given in zip(own.items(), answer["answers"], strict=True)
        ]
        return report("texts", len(own), [failure for failure in failures if failure])

    question = {"kind": "generate", "texts": list(samples), "max_new_tokens": limit}
    return Check("texts to texts, with the package's settings", [question], judge)


def ask_own_runtime(
    bundle: Bundle, artifact: Artifact, samples: Mapping[str, Sample], limit: int | None
) -> dict[str, OwnAnswer]:
    """Return the answers of the bundle in our runtime, by its settings but always greedily."""
    options: dict[str, Any] = {} if limit is None else {"max_new_tokens": limit}
    answers = {}
    with load(bundle.folder, backend="ort-cpu", precision=artifact.precision) as model:
        for text, sample in samples.items():
            if isinstance(model, Translator):
                translation = model.translate(text, num_beams=1, **options)
                answers[text] = OwnAnswer(translation.text, translation.token_ids, (), sample)
                continue
            assert isinstance(model, TextGenerator)
            one = model.generate(
                text, generation="checkpoint", num_beams=1, temperature=0.0, top_logprobs=LIKELIEST, **options
            )
            known = tuple({top.token_id: top.logprob for top in tops} for tops in one.top_logprobs)
            answers[text] = OwnAnswer(one.text, one.token_ids, known, sample)
    return answers


def compare_answers(
    text: str, given: Answer, own: OwnAnswer, defaults: GenerationDefaults, max_error: float
) -> str:
    """Return how an answer differs from ours by more than rounding explains, or ""."""
    difference = f"{text!r:.60} {describe_difference(given['text'], own.text)}"
    fill = {defaults.pad, *defaults.eos, given.get("pad")}  # what stands behind a row's end in a batch
    tokens, expected = (strip_end(row, fill) for row in (given["tokens"], own.tokens))
    place = next((i for i, (a, b) in enumerate(zip(tokens, expected, strict=False)) if a != b), None)
    if place is None and len(tokens) != len(expected):
        place = min(len(tokens), len(expected))
    if place is None:
        is_plain = not any(part in own.text for part in UNEQUAL)
        return difference if is_plain and given["text"] != own.text else ""
    if place < min(len(given["tokens"]), len(own.tokens)):
        margin = own.measure_margin(place, given["tokens"][place])
        if margin <= 2 * max_error * measure_scale(own.sample.logits):
            return ""
    return f"{difference}; new token {place} is the first to differ"


def strip_end(tokens: Sequence[int], fill: set[int | None]) -> list[int]:
    """Return tokens without the end and padding tokens behind them."""
    count = len(tokens)
    while count and tokens[count - 1] in fill:
        count -= 1
    return list(tokens[:count])


def make_label_check(bundle: Bundle, artifact: Artifact, head: str) -> Check:
    """Return the check of a pipeline's labels and scores for texts, their tokens, or the masks in them."""
    defaults = bundle.manifest.encoder
    assert defaults is not None
    file = find_texts(bundle)
    assert file is not None
    (tokenizer,) = open_text_tokenizers(bundle)
    inputs = [one for one in read_texts(file).plain_inputs if one.pair is None and one.text.strip()]
    inputs = [one for one in inputs if len(one.ids) < defaults.max_length][:MAX_TEXTS]
    ids = [list(one.ids) for one in inputs]
    texts = [one.text for one in inputs]
    if head == "masked_lm":  # the mask takes the place behind [CLS]
        mask = defaults.tokens["mask"]
        ids = [[row[0], mask, *row[1:]] for row in ids]
        texts = [f"{tokenizer.spell(mask)} {text}" for text in texts]
    _, limits = load_golden(bundle)
    name = next(spec.name for spec in artifact.outputs if spec.role == head)
    max_error = limits[artifact.precision][f"{name}.max_error"]

    def judge(answers: Sequence[Answer]) -> Outcome:
        (answer,) = answers
        with load(bundle.folder, backend="ort-cpu", precision=artifact.precision) as model:
            assert isinstance(model, TextEncoder)
            logits = [compute_logits(model, row, head) for row in ids]
        failures = [
            compare_labels(text, given, own, defaults, head, max_error)
            for text, given, own in zip(texts, answer["labels"], logits, strict=True)
        ]
        return report("texts", len(texts), [failure for failure in failures if failure])

    question = {"kind": "label", "texts": texts, "head": head}
    return Check("texts to labels, with the package's settings", [question], judge)


def compute_logits(model: TextEncoder, ids: Sequence[int], head: str) -> Logits:
    """Compute a head's logits for one sequence: a row for each token, or one for the text or its mask."""
    piece = Piece(list(ids), [0] * len(ids), range(0), None)
    ((logits,),) = model.encoder.run_batch([piece], [head], [[1]] if head == "masked_lm" else None)
    rows: Logits = np.atleast_2d(logits)
    return rows


def compare_labels(
    text: str,
    given: Sequence[Mapping[str, Any]],
    logits: Logits,
    defaults: EncoderDefaults,
    head: str,
    max_error: float,
) -> str:
    """Return which label of a text has a score other than ours, or "".

    A score moves at most as far as its logit, so that the limit of logits is one of scores.
    """
    shares = softmax(logits)
    if head == "sequence_classification":
        known = share_classes(logits, defaults.problem_type)
        shares = logits if known is None else known  # of a regression the values themselves
    allowed = max_error * measure_scale(logits)
    if not given:
        return f"{text!r:.60} has no label"
    for one in given:
        row = int(one["place"])
        if head == "masked_lm":
            number = int(one["label"])
        elif one["label"] in defaults.labels:
            number = defaults.labels.index(one["label"])
        else:
            return (
                f"{text!r:.60} has the label {one['label']!r}, the bundle's are {', '.join(defaults.labels)}"
            )
        want = float(shares[row, number])
        if not abs(float(one["score"]) - want) <= allowed:
            return (
                f"{text!r:.60} has the label {one['label']!r} with the score {one['score']:.6f}, the bundle's"
                f" is {want:.6f} (at most {allowed:.2g} is rounding)"
            )
    return ""
