"""Questions for a package's runtime, and the comparison of its answers with PyTorch's golden data.

B batch, T steps, V vocabulary
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

import numpy as np

from ...runtime.apps.check.case import Case, CaseSet, Location, Measure
from ...runtime.apps.check.case_arrays import from_arrays
from ...runtime.apps.check.cases import find_room
from ...runtime.apps.check.divergence import (
    Sample,
    follow,
    judge_followed,
    list_batches,
    list_samples,
    measure_parts,
    measure_steps,
)
from ...runtime.apps.check.encoder import is_per_token, list_positions, see
from ...runtime.apps.check.judge import Seen, judge
from ...runtime.apps.check.metrics import Logits
from ...runtime.apps.check.outcome import Outcome, judge_outcome
from ...runtime.apps.check.selftest import load_golden
from ...runtime.apps.check.texts import open_text_tokenizers
from ...runtime.bundle.artifact import Artifact
from ...runtime.bundle.bundle import Bundle
from ...runtime.text.tokenizer import Tokenizer
from ..tasks.encoder import RANDOM
from .check import Answer, Check
from .text_checks import list_text_checks

Limits: TypeAlias = Mapping[str, float]
Tokens: TypeAlias = Sequence[int]

PADDING = 3  # places before a row that is fed at once


class Recorded:
    """Recorded steps of a runtime, played back to the code that steps our own engine."""

    def __init__(self, tokens: Sequence[Sequence[int]], logits: Logits) -> None:
        self.tokens = tokens  # (B, T) that it chose
        self.logits = logits  # (T, B, V) by which it did
        self.step = 0

    def decode(self, tokens: Sequence[int]) -> Logits:
        """Return the logits (B, V) of the next step."""
        assert list(tokens) == [row[self.step] for row in self.tokens]  # both take the likeliest
        self.step += 1
        logits: Logits = self.logits[self.step]
        return logits


def list_decoder_checks(bundle: Bundle, artifact: Artifact, *, every_place: bool = False) -> list[Check]:
    """Return the checks of a decoder: PyTorch's tokens fed one by one, and greedy text of padded batches.

    With `every_place`, for runtimes that give the logits of all tokens, its tokens are also fed at once.
    """
    arrays, limits = load_golden(bundle)
    own = limits[artifact.precision]
    room = find_room(artifact)
    case_set = from_arrays(arrays)
    samples = [sample for sample in list_samples(case_set) if len(sample) <= room]
    (tokenizer,) = open_text_tokenizers(bundle)
    prompts = [sample.prompt for sample in samples]
    checks = [make_forced_check(samples, prompts, own)]
    if every_place:
        short = [sample for sample in samples if len(sample) + PADDING <= room]
        once = make_forced_check(short, [sample.prompt for sample in short], own, "at_once")
        checks.append(replace(once, case="PyTorch's tokens at once"))
    for batch in list_batches(case_set):
        fitting = [sample for sample in batch if len(sample) <= room]
        kept = fitting[: artifact.axis("batch").max]
        checks.append(
            make_greedy_check(kept, [sample.prompt for sample in kept], own, (tokenizer, tokenizer))
        )
    return checks + list_text_checks(bundle)


def list_translator_checks(bundle: Bundle, artifact: Artifact) -> list[Check]:
    """Return the checks of an encoder-decoder: PyTorch's targets fed one by one, and a padded batch."""
    arrays, limits = load_golden(bundle)
    own = limits[artifact.precision]
    samples = list_samples(from_arrays(arrays))
    sources = [sample.source for sample in samples]
    source, target = open_text_tokenizers(bundle)
    return [
        make_forced_check(samples, sources, own),
        make_greedy_check(samples, sources, own, (source, target)),
        *list_text_checks(bundle),
    ]


def make_forced_check(
    samples: Sequence[Sample], prompts: Sequence[Tokens], limits: Limits, kind: str = "force"
) -> Check:
    """Return the check of every prompt, or source, alone, continued by PyTorch's tokens."""

    def judge(answers: Sequence[Answer]) -> Outcome:
        parts = [
            (answer["logits"][list(sample.steps)], sample.logits)
            for answer, sample in zip(answers, samples, strict=True)
        ]
        errors = measure_steps(parts)
        return judge_outcome(measure_parts(parts), limits, errors=errors)

    questions = [
        {
            "kind": kind,
            "prompt": list(prompt),
            "continuation": list(sample.continuation),
            "padding": PADDING,  # of those that are fed at once
        }
        for sample, prompt in zip(samples, prompts, strict=True)
    ]
    return Check("PyTorch's tokens, batch 1", questions, judge)


def make_greedy_check(
    samples: Sequence[Sample],
    prompts: Sequence[Tokens],
    limits: Limits,
    tokenizers: tuple[Tokenizer, Tokenizer],
) -> Check:
    """Return the check of a padded batch whose tokens the runtime chooses itself.

    The tokenizers are those of prompts and of continuations.
    """
    reader, writer = tokenizers

    def judge(answers: Sequence[Answer]) -> Outcome:
        (answer,) = answers
        run = Recorded(answer["tokens"], answer["logits"])
        followed = follow(run, run.logits[0], samples, limits)
        texts = [reader.decode(prompt) for prompt in prompts]
        return judge_followed(followed, samples, texts, writer, limits)

    steps = min(len(sample.continuation) for sample in samples)
    question = {"kind": "greedy", "prompts": [list(prompt) for prompt in prompts], "steps": steps}
    return Check(f"greedy, batch {len(samples)}, padded", [question], judge)


def list_encoder_checks(bundle: Bundle, artifact: Artifact, names: Mapping[str, str]) -> list[Check]:
    """Return the checks of an encoder's outputs; the package's names of them are given by the bundle's."""
    arrays, limits = load_golden(bundle)
    case_set = from_arrays(arrays)
    by_name: dict[str, list[Case]] = {}
    for case in case_set.cases:
        if not case.name.startswith(RANDOM):
            by_name.setdefault(case.name, []).extend(case_set.fit(case, artifact))
    kept = replace(artifact, outputs=tuple(spec for spec in artifact.outputs if spec.name in names))
    checks = [
        make_encode_check(name, case_set, cases, kept, limits[artifact.precision], names)
        for name, cases in by_name.items()
        if cases
    ]
    return checks + list_text_checks(bundle)


def make_encode_check(
    name: str,
    case_set: CaseSet,
    cases: Sequence[Case],
    artifact: Artifact,
    limits: Limits,
    names: Mapping[str, str],
) -> Check:
    """Return the check of cases of one name."""

    def judge_answers(answers: Sequence[Answer]) -> Outcome:
        seen = []
        for answer, case in zip(answers, cases, strict=True):
            for row in range(len(case.rows)):
                outputs = {spec.name: answer["outputs"][names[spec.name]][row] for spec in artifact.outputs}
                seen.append(see_known(case_set, Location(case, 0, row), outputs, artifact))
        return judge(seen, case_set, list_own_measures(cases[0], artifact), limits)

    texts = [[case_set.texts[row.text] for row in case.rows] for case in cases]
    questions = [
        {
            "kind": "encode",
            "rows": [list(text.tokens) for text in batch],
            "segments": [list(text.segments or (0,) * len(text.tokens)) for text in batch],
            "outputs": [names[spec.name] for spec in artifact.outputs],
        }
        for batch in texts
    ]
    return Check(name, questions, judge_answers)


def list_own_measures(case: Case, artifact: Artifact) -> list[Measure]:
    """Return the measures of the outputs that a graph has."""
    names = {spec.name for spec in artifact.outputs}
    return [measure for measure in case.measures if names.issuperset(measure.outputs)]


def see_known(
    case_set: CaseSet, location: Location, outputs: Mapping[str, Logits], artifact: Artifact
) -> Seen:
    """Return a runtime's results of a row for the tokens whose results golden data has."""
    positions = list_positions(case_set, location.case.rows[location.row].text, artifact.outputs)
    known = {
        spec.name: outputs[spec.name][positions] if is_per_token(spec) else outputs[spec.name]
        for spec in artifact.outputs
    }
    return see(case_set, location, known, artifact.outputs)


def make_graph_check(bundle: Bundle, artifact: Artifact) -> Check:
    """Return the check of an encoder's own graph, run by the names of the bundle as one padded batch."""
    arrays, limits = load_golden(bundle)
    case_set = from_arrays(arrays)
    padded = next(case for case in case_set.cases if len(case.rows) > 1)
    case = case_set.fit(padded, artifact)[0]
    texts = [case_set.texts[row.text] for row in case.rows]
    width = max(len(text.tokens) for text in texts)
    places = [list_positions(case_set, row.text, artifact.outputs) for row in case.rows]
    ends = np.cumsum([len(own) for own in places])
    values = {
        "ids": [pad(text.tokens, width) for text in texts],
        "mask": [pad([1] * len(text.tokens), width) for text in texts],
        "segments": [pad(text.segments, width) for text in texts],
        "logit_rows": [row * width + t for row, own in enumerate(places) for t in own],
    }

    def judge_answers(answers: Sequence[Answer]) -> Outcome:
        (answer,) = answers
        seen = []
        for row, positions in enumerate(places):
            outputs = {}
            for spec in artifact.outputs:
                array = np.asarray(answer["outputs"][spec.name])
                if spec.axis_names()[0] == "rows":
                    outputs[spec.name] = np.split(array, ends)[row]
                else:
                    outputs[spec.name] = array[row][positions] if is_per_token(spec) else array[row]
            seen.append(see(case_set, Location(case, 0, row), outputs, artifact.outputs))
        return judge(seen, case_set, case.measures, limits[artifact.precision])

    inputs = {spec.name: values[spec.role] for spec in artifact.inputs}
    return Check(case.name, [{"kind": "run_graph", "inputs": inputs}], judge_answers)


def pad(values: Sequence[int], width: int) -> list[int]:
    """Return a row of a batch, padded on the right with 0."""
    return [*values, *[0] * (width - len(values))]
