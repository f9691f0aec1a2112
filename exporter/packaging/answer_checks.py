"""The check of a model that takes texts, as programs ask it: what it answers to several at once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from ...runtime import Translation, load
from ...runtime.bundle.artifact import Artifact
from ...runtime.bundle.bundle import Bundle
from ...runtime.diagnostics.golden import answers as golden_answers
from ...runtime.diagnostics.golden import decoders
from ...runtime.diagnostics.golden.cases import find_room
from ...runtime.diagnostics.golden.texts import find_texts, open_text_tokenizers, read_texts
from ...runtime.diagnostics.metrics import Outcome
from ...runtime.diagnostics.selftest import load_golden
from .check import Answer, Check
from .triton import choose_method

ANSWERED = 16  # texts
MOST = 3  # texts that are told of a failure
ROUNDING = 1e-5  # of numbers that were computed in another batch


def list_answer_checks(bundle: Bundle, artifact: Artifact) -> list[Check]:
    """Return the check of a model's answers to texts, as programs ask for them.

    A generator's are held to PyTorch's tokens; others to what the bundle answers here, in our runtime.
    """
    if bundle.manifest.task == "text-generation":
        return [make_generator_check(bundle, artifact)]
    return [make_answer_check(bundle, artifact)]


def make_generator_check(bundle: Bundle, artifact: Artifact) -> Check:
    """Return the check of greedy answers to golden prompts that are texts."""
    manifest = bundle.manifest
    arrays, limits = load_golden(bundle)
    (tokenizer,) = open_text_tokenizers(bundle)
    counts = {}
    for sample in decoders.from_arrays(arrays).samples:
        text = golden_answers.find_text(manifest, tokenizer, sample.prompt)
        if text and len(sample) <= find_room(artifact):
            counts[text] = len(sample.continuation)

    def judge(answers: Sequence[Answer]) -> Outcome:
        (answer,) = answers
        given = {
            text: SimpleNamespace(text=result["TEXT"], token_ids=tuple(result["TOKEN_IDS"]))
            for text, result in zip(counts, answer["results"], strict=True)
        }
        answering: Any = SimpleNamespace(
            tokenizer=tokenizer,
            artifact=artifact,
            defaults=manifest.generation,
            generate=lambda text, max_new_tokens: given[text],
        )
        compared = golden_answers.compare_generator(answering, manifest, arrays, limits)
        failures = tuple(failure for one in compared for failure in one.failures)
        return Outcome({"texts": len(given)}, {}, failures)

    options = [{"max_new_tokens": count} for count in counts.values()]
    question = {"kind": "answer", "texts": list(counts), "options": options}
    return Check("texts to texts, all at once", [question], judge)


def make_answer_check(bundle: Bundle, artifact: Artifact) -> Check:
    """Return the check of an encoder's or translator's answers to golden texts."""
    file = find_texts(bundle)
    texts = [] if file is None else [t.text for t in read_texts(file).sides[0] if t.text.strip()]
    method = choose_method(bundle)
    texts = texts[:ANSWERED]

    def judge(answers: Sequence[Answer]) -> Outcome:
        (answer,) = answers
        with load(bundle.folder, backend="ort-cpu", precision=artifact.precision) as model:
            own = [getattr(model, method)(text) for text in texts]
        rows = [
            (text, read_result(result), describe(one))
            for text, result, one in zip(texts, answer["results"], own, strict=True)
        ]
        failures = [
            f"{text!r:.60} gives {got!r:.80}, here {want!r:.80}"
            for text, got, want in rows
            if not is_close(got, want)
        ]
        return Outcome({"texts": len(rows), "differ": len(failures)}, {}, tuple(failures[:MOST]))

    question = {"kind": "answer", "texts": texts, "options": [{} for _ in texts]}
    return Check("texts, all at once", [question], judge)


def read_result(outputs: Answer) -> Any:
    """Return a response's one output as plain JSON."""
    (value,) = outputs.values()
    return (
        json.loads(value)
        if "RESULT" in outputs
        else value.reshape(-1).tolist()
        if "EMBEDDING" in outputs
        else value
    )


def describe(result: Any) -> Any:
    """Return a result of our runtime in the same form."""
    if isinstance(result, np.ndarray):
        return result.tolist()
    return result.text if isinstance(result, Translation) else json.loads(json.dumps(result.to_json()))


def is_close(one: Any, other: Any) -> bool:
    """Tell whether two JSON values are the same but for numbers that differ by less than `ROUNDING`."""
    if isinstance(one, float) and isinstance(other, float | int):
        return abs(one - other) < ROUNDING
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(is_close, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(is_close(one[key], other[key]) for key in one)
    return bool(one == other)
