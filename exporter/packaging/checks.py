"""What a package's runtime is asked, and how its answers are held to PyTorch's golden data.

B batch, T steps, V vocabulary
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from ...runtime.apps.check import encoders, translations
from ...runtime.apps.check.case import from_arrays
from ...runtime.apps.check.cases import find_room
from ...runtime.apps.check.divergence import (
    Continued,
    follow,
    judge_followed,
    list_batches,
    list_samples,
    measure_parts,
    measure_steps,
)
from ...runtime.apps.check.metrics import Logits, Outcome, judge_outcome
from ...runtime.apps.check.selftest import load_golden
from ...runtime.apps.check.texts import open_text_tokenizers
from ...runtime.bundle.artifact import Artifact
from ...runtime.bundle.bundle import Bundle
from ...runtime.text.tokenizer import Tokenizer
from .check import Answer, Check
from .text_checks import list_text_checks

Limits: TypeAlias = Mapping[str, float]
Tokens: TypeAlias = Sequence[int]

PADDING = 3  # places before a row that is fed at once


class Recorded:
    """Steps that a runtime has made, played back to what steps an engine of ours."""

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
    *samples, _ = translations.from_arrays(arrays).samples  # the last is as long as it may be
    sources = [sample.source for sample in samples]
    source, target = open_text_tokenizers(bundle)
    return [
        make_forced_check(samples, sources, own),
        make_greedy_check(samples, sources, own, (source, target)),
        *list_text_checks(bundle),
    ]


def make_forced_check(
    samples: Sequence[Continued], prompts: Sequence[Tokens], limits: Limits, kind: str = "force"
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
    samples: Sequence[Continued],
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
    """Return the checks of an encoder's outputs, by the bundle's names those of the package."""
    arrays, limits = load_golden(bundle)
    golden = encoders.from_arrays(arrays)
    own = limits[artifact.precision]
    kept = replace(artifact, outputs=tuple(spec for spec in artifact.outputs if spec.name in names))
    *texts, single, full = golden.samples
    batch = [*texts, single][-min(encoders.MAX_BATCH, artifact.axis("batch").max) :]
    batches = {
        "one by one": [[sample] for sample in (*texts, single)],
        f"batch of {len(batch)}, padded": [batch],
        f"{len(full)} tokens": [[full]],
    }
    kind = golden.problem_type
    checks = [make_encode_check(case, parts, kept, own, names, kind) for case, parts in batches.items()]
    return checks + list_text_checks(bundle)


def make_encode_check(
    case: str,
    batches: Sequence[Sequence[encoders.Sample]],
    artifact: Artifact,
    limits: Limits,
    names: Mapping[str, str],
    problem_type: str | None,
) -> Check:
    """Return the check of batches of sequences."""

    def judge(answers: Sequence[Answer]) -> Outcome:
        got = []
        for answer, batch in zip(answers, batches, strict=True):
            for row, sample in enumerate(batch):
                got.append(
                    {
                        spec.name: choose_known(answer["outputs"][names[spec.name]][row], spec, sample)
                        for spec in artifact.outputs
                    }
                )
        samples = [sample for batch in batches for sample in batch]
        return encoders.compare_outputs(got, samples, artifact, limits, problem_type)

    questions = [
        {
            "kind": "encode",
            "rows": [list(sample.piece.ids) for sample in batch],
            "segments": [list(sample.piece.segments) for sample in batch],
            "outputs": [names[spec.name] for spec in artifact.outputs],
        }
        for batch in batches
    ]
    return Check(case, questions, judge)


def make_graph_check(bundle: Bundle, artifact: Artifact) -> Check:
    """Return the check of an encoder's own graph, run by the names of the bundle as one padded batch."""
    arrays, limits = load_golden(bundle)
    golden = encoders.from_arrays(arrays)
    *texts, single, _ = golden.samples
    batch = [*texts, single][-min(encoders.MAX_BATCH, artifact.axis("batch").max) :]
    width = max(map(len, batch))
    rows = [[place * width + t for t in sample.positions] for place, sample in enumerate(batch)]
    values = {
        "ids": [pad(sample.piece.ids, width) for sample in batch],
        "mask": [pad([1] * len(sample), width) for sample in batch],
        "segments": [pad(sample.piece.segments, width) for sample in batch],
        "logit_rows": [row for own in rows for row in own],
    }
    begins = [sum(map(len, rows[:place])) for place in range(len(batch))]

    def judge(answers: Sequence[Answer]) -> Outcome:
        (answer,) = answers
        got = []
        for place, sample in enumerate(batch):
            own = {}
            for spec in artifact.outputs:
                array = answer["outputs"][spec.name]
                if spec.axis_names()[0] == "rows":
                    own[spec.name] = array[begins[place] : begins[place] + len(rows[place])]
                else:
                    own[spec.name] = choose_known(array[place], spec, sample)
            got.append(own)
        own_limits = limits[artifact.precision]
        return encoders.compare_outputs(got, batch, artifact, own_limits, golden.problem_type)

    inputs = {spec.name: values[spec.role] for spec in artifact.inputs}
    return Check(f"graph, batch of {len(batch)}, padded", [{"kind": "run_graph", "inputs": inputs}], judge)


def pad(values: Sequence[int], width: int) -> list[int]:
    """Return a row of a batch, padded on the right with 0."""
    return [*values, *[0] * (width - len(values))]


def choose_known(array: Logits, spec: Any, sample: encoders.Sample) -> Logits:
    """Return the results of the tokens that golden data has; all of what is no result per token."""
    return array[list(sample.positions)] if encoders.is_per_token(spec) else array
