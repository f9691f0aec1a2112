"""The check of a model that takes texts, by its answers to several texts at once."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from ...runtime import TextEncoder, Translator, load
from ...runtime.apps.check import answers as golden_answers
from ...runtime.apps.check.case_arrays import from_arrays
from ...runtime.apps.check.cases import find_room
from ...runtime.apps.check.divergence import list_samples
from ...runtime.apps.check.golden_texts import find_texts, read_texts
from ...runtime.apps.check.outcome import Outcome
from ...runtime.apps.check.selftest import load_golden
from ...runtime.apps.check.texts import open_text_tokenizers
from ...runtime.bundle.artifact import Artifact
from ...runtime.bundle.bundle import Bundle
from ...runtime.bundle.defaults import EncoderDefaults, GenerationDefaults
from ...runtime.encode.results import Result
from ...runtime.text.tokenizer import Tokenizer
from ..task_traits import TRAITS
from .check import Answer, Check, report

Item: TypeAlias = tuple[str, str | None]  # a text, or a pair

MAX_ITEMS = 16  # texts, or pairs, that are asked
QUERY = 16  # characters of the first text of a pair, which has to leave room for the second
ROUNDING = 1e-5  # of values that were computed in another batch


@dataclass(frozen=True)
class GivenAnswer:
    """The answer of a model to one text."""

    text: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class GivenAnswers:
    """Answers that are already known, in place of a model that `compare_generator` would ask."""

    tokenizer: Tokenizer
    artifact: Artifact
    defaults: GenerationDefaults
    answers: Mapping[str, GivenAnswer]  # by the text

    def generate(self, text: str, /, *, max_new_tokens: int, **options: Any) -> GivenAnswer:
        """Return the answer to a text, which was asked with the same limit."""
        del max_new_tokens, options
        return self.answers[text]


def list_answer_checks(bundle: Bundle, artifact: Artifact) -> list[Check]:
    """Return the check of a model's answers to texts, as programs ask for them.

    A generator's are compared with PyTorch's tokens; others with what the bundle answers in our runtime.
    """
    if TRAITS[bundle.manifest.task].continues_texts:
        return [make_generator_check(bundle, artifact)]
    return [make_answer_check(bundle, artifact)]


def make_generator_check(bundle: Bundle, artifact: Artifact) -> Check:
    """Return the check of greedy answers to golden prompts that are texts."""
    manifest = bundle.manifest
    assert manifest.generation is not None
    defaults = manifest.generation
    arrays, limits = load_golden(bundle)
    (tokenizer,) = open_text_tokenizers(bundle)
    counts = {}
    for sample in list_samples(from_arrays(arrays)):
        text = golden_answers.find_text(manifest, tokenizer, sample.prompt)
        if text and len(sample) <= find_room(artifact):
            counts[text] = len(sample.continuation)

    def judge(answers: Sequence[Answer]) -> Outcome:
        (answer,) = answers
        given = {
            text: GivenAnswer(result["TEXT"], tuple(result["TOKEN_IDS"]))
            for text, result in zip(counts, answer["results"], strict=True)
        }
        model = GivenAnswers(tokenizer, artifact, defaults, given)
        compared = golden_answers.compare_generator(model, manifest, arrays, limits)
        return report("texts", len(given), [failure for one in compared for failure in one.failures])

    options = [{"max_new_tokens": count} for count in counts.values()]
    question = {"kind": "answer", "items": [{"TEXT": text} for text in counts], "options": options}
    return Check("texts to texts, all at once", [question], judge)


def make_answer_check(bundle: Bundle, artifact: Artifact) -> Check:
    """Return the check of an encoder's or translator's answers to golden texts, or to pairs of them."""
    items = choose_items(bundle)

    def judge(answers: Sequence[Answer]) -> Outcome:
        (answer,) = answers
        with load(bundle.folder, backend="ort-cpu", precision=artifact.precision) as model:
            if isinstance(model, Translator):
                own = [model.translate(text).text for text, _ in items]
            else:
                assert isinstance(model, TextEncoder)
                own = ask_encoder(model, items)
        differences = [
            find_difference(read_result(result), json.loads(json.dumps(one)))
            for result, one in zip(answer["results"], own, strict=True)
        ]
        failures = [
            f"{item[0]!r:.60}: {difference}"
            for item, difference in zip(items, differences, strict=True)
            if difference
        ]
        return report("texts", len(items), failures)

    question = {
        "kind": "answer",
        "items": [{"TEXT": text} | ({} if pair is None else {"CONTEXT": pair}) for text, pair in items],
        "options": [{} for _ in items],
    }
    return Check("texts, all at once", [question], judge)


def choose_items(bundle: Bundle) -> list[Item]:
    """Return the golden texts to ask a model; pairs, or texts with a mask, for a head that reads those."""
    file = find_texts(bundle)
    if file is None:
        return []
    texts = [one.text for one in read_texts(file).sides[0] if one.text.strip()][:MAX_ITEMS]
    defaults = bundle.manifest.encoder
    if defaults is None:
        return [(text, None) for text in texts]
    head = find_answering_head(defaults)
    if head == "masked_lm":
        (tokenizer,) = open_text_tokenizers(bundle)
        mask = tokenizer.spell(defaults.tokens["mask"])
        return [(f"{mask} {text}", None) for text in texts]
    if head in ("question_answering", "next_sentence") or is_ranker(defaults):
        return [(other[:QUERY], text) for text, other in zip(texts, texts[1:] + texts[:1], strict=True)]
    return [(text, None) for text in texts]


def find_answering_head(defaults: EncoderDefaults) -> str | None:
    """Return the head that answers for an encoder; next_sentence only where there is no other head."""
    heads = [head for head in defaults.heads if head != "next_sentence"] or defaults.heads
    return heads[0] if heads else None


def is_ranker(defaults: EncoderDefaults) -> bool:
    """Tell whether an encoder gives a pair of texts one score."""
    return find_answering_head(defaults) == "sequence_classification" and len(defaults.labels) == 1


def ask_encoder(model: TextEncoder, items: Sequence[Item]) -> list[Any]:
    """Return our runtime's answers in JSON's terms, by the methods that belong to the heads."""
    texts = [text for text, _ in items]
    pairs = [(text, str(pair)) for text, pair in items]
    head = find_answering_head(model.defaults)
    if head is None:
        return [{"embedding": vector.tolist()} for vector in model.embed(texts)]
    if is_ranker(model.defaults):
        ranked = [model.rank(query, [text])[0] for query, text in pairs]
        return [{"text": one.text, "score": one.score, "dropped": one.dropped} for one in ranked]
    methods: Mapping[str, Callable[[], Sequence[Result]]] = {
        "sequence_classification": lambda: model.classify(texts),
        "token_classification": lambda: model.tag(texts),
        "masked_lm": lambda: model.fill_mask(texts),
        "question_answering": lambda: model.answer(pairs),
        "next_sentence": lambda: model.next_sentence(pairs),
    }
    return [answer.to_json() for answer in methods[head]()]


def read_result(outputs: Answer) -> Any:
    """Return a response's one output as plain JSON."""
    ((name, value),) = outputs.items()
    if name == "RESULT":
        return json.loads(value)
    if name == "EMBEDDING":
        return {"embedding": value.reshape(-1).tolist()}
    return value


def find_difference(got: Any, want: Any, place: str = "it") -> str:
    """Return where two JSON values differ by more than `ROUNDING`, or ""."""
    if isinstance(got, float) and isinstance(want, float | int):
        return "" if abs(got - want) < ROUNDING else f"{place} is {got!r}, here {want!r}"
    if isinstance(got, list) and isinstance(want, list) and len(got) == len(want):
        parts = {f"{place}[{i}]": (one, other) for i, (one, other) in enumerate(zip(got, want, strict=True))}
    elif isinstance(got, dict) and isinstance(want, dict) and got.keys() == want.keys():
        parts = {f"{place}.{key}": (got[key], want[key]) for key in got}
    else:
        return "" if got == want else f"{place} is {got!r:.200}, here {want!r:.200}"
    differences = (find_difference(one, other, name) for name, (one, other) in parts.items())
    return next(filter(None, differences), "")
