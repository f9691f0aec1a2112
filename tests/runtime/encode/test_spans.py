"""Tags and answers of random encoders: against transformers, and to the very character of the text."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import tokenizers
import transformers
from tokenizers import models, normalizers, pre_tokenizers, processors

from planforge.runtime import Answers, TextEncoder
from planforge.runtime.encode.results import Answer
from planforge.runtime.encode.spans import find_entities
from planforge.runtime.errors import ContextLengthError, InputError
from planforge.runtime.text.tokenizer import Tokenizer

from ...helpers.encoders import Case, opened, softmax
from ...helpers.models import WORDPIECES

TAGS = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]
TEXTS = [
    "hello paris, the world is not it!",
    "我在北京 and Zoé's naïve café 🙂 isn't Paris",
    "planforge forging forged worldly plans",
    "👨‍👩‍👧‍👦 hello 🇩🇪x world 👍🏽, 42 plans",
    "",
    "it is, is it not? - the plan, the forge, the world",
]
LONG = " ".join(itertools.islice(itertools.cycle(TEXTS), 24))
QUESTION = "is it Paris?"
CONTEXTS = [text for text in TEXTS if text] + ["De\u0301ja\u0300 vu 北\u0301京", " \t hello \n"]


@pytest.fixture(scope="module")
def tags(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    names = {"id2label": dict(enumerate(TAGS)), "label2id": {name: i for i, name in enumerate(TAGS)}}
    case = opened(tmp_path_factory.mktemp("tags"), "BertForTokenClassification", seed=25, **names)
    with case.model:
        yield case


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    case = opened(tmp_path_factory.mktemp("answers"), "BertForQuestionAnswering")
    with case.model:
        yield case


def test_tags_are_transformers(tags: Case) -> None:
    pipeline = tags.pipeline("token-classification", aggregation_strategy="first")
    expected = [pipeline(text) if text else [] for text in TEXTS]
    flat = [entity for entities in expected for entity in entities]
    assert {entity["entity_group"] for entity in flat} == {"PER", "LOC"}
    assert any(
        " " in text[e["start"] : e["end"]] for text, es in zip(TEXTS, expected, strict=True) for e in es
    )
    for text, result, entities in zip(TEXTS, tags.model.tag(TEXTS), expected, strict=True):
        assert len(result.entities) == len(entities) and result.dropped == 0
        for got, entity in zip(result.entities, entities, strict=True):
            assert (got.label, got.start, got.end) == (
                entity["entity_group"],
                entity["start"],
                entity["end"],
            )
            assert got.score == pytest.approx(entity["score"], abs=1e-5)
            assert got.text == text[got.start : got.end]
    assert len(tags.model.tag(TEXTS[1]).entities) > 1
    assert tags.model.tag([]) == []


def without_words(kind: str) -> tokenizers.Tokenizer:
    """A tokenizer whose pre-tokenizer tells no words apart, with special tokens as BERT's here."""
    pieces = [
        "▁",
        "▁hello",
        "▁par",
        "is",
        "▁the",
        "▁wor",
        "ld",
        "ed",
        "▁it",
        "▁Zo",
        *"abcdefghilnoprstuwxZP,!-",
    ]
    left = iter(pieces)
    names = [
        piece if piece.startswith("[") else next(left, f"unused{n}") for n, piece in enumerate(WORDPIECES)
    ]
    assert next(left, None) is None
    ids = {name: token for token, name in enumerate(names)}
    if kind == "gemma":
        merges = [(a, b) for a in names for b in names if a + b in ids]
        raw = tokenizers.Tokenizer(models.BPE(ids, merges, unk_token="[UNK]"))
        raw.normalizer = normalizers.Replace(" ", "▁")
        raw.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    else:
        scored = [(name, -1.0 / len(name)) for name in names]
        raw = tokenizers.Tokenizer(models.Unigram(scored, unk_id=ids["[UNK]"]))
        if kind == "metaspace":
            raw.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
        else:
            raw.normalizer = normalizers.Replace(" ", "▁")
    raw.add_special_tokens([name for name in names if name.startswith("[")])
    ends = [(name, ids[name]) for name in ("[CLS]", "[SEP]")]
    raw.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    return raw


@pytest.mark.parametrize("kind", ["gemma", "metaspace", "none"])
def test_where_a_tokenizer_knows_no_words_a_space_begins_one(tags: Case, kind: str) -> None:
    raw = without_words(kind)
    roles = {f"{role}_token": f"[{role.upper()}]" for role in ("pad", "unk", "cls", "sep")}
    reference = transformers.PreTrainedTokenizerFast(tokenizer_object=raw, **roles)
    pipeline = tags.pipeline("token-classification", tokenizer=reference, aggregation_strategy="first")
    model = TextEncoder(tags.model.encoder, Tokenizer(raw.to_str().encode()), tags.model.defaults)
    found = 0
    for text in TEXTS[:3] + TEXTS[5:]:
        with pytest.warns(UserWarning, match="does not support real words"):
            expected = [(one["entity_group"], one["start"], one["end"]) for one in pipeline(text)]
        got = model.tag(text).entities
        assert [(one.label, one.start, one.end) for one in got] == expected, text
        found += len(got)
    assert found > 4


def test_tags_of_a_long_text_come_from_where_a_word_has_most_context(tags: Case) -> None:
    encoding = tags.tokenizer(LONG, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    windows = [(start, ids, tags.logits(ids)["logits"]) for start, ids, _ in tags.windows(LONG, stride=20)]
    shares = []
    for token in range(len(encoding["input_ids"])):
        around = [min(token - start, start + len(ids) - 3 - token) for start, ids, _ in windows]
        start, _, logits = windows[int(np.argmax(around))]
        shares.append(softmax(logits[1 + token - start]))
    assert len(windows) > 5
    expected = find_entities(LONG, np.array(shares), encoding["offset_mapping"], encoding.word_ids(0), TAGS)
    got = tags.model.tag(LONG, stride=20)
    assert got.dropped == 0 and got.entities[-1].end > 0.9 * len(LONG)
    assert [(e.label, e.start, e.end) for e in got.entities] == [(e.label, e.start, e.end) for e in expected]
    assert [e.score for e in got.entities] == pytest.approx([e.score for e in expected], abs=1e-5)
    head = tags.model.tag(LONG, truncation="head")
    assert head.dropped == len(shares) - 62
    assert 0 < head.entities[-1].end <= encoding["offset_mapping"][61][1]
    tail = tags.model.tag(LONG, truncation="tail")
    assert tail.entities[0].start >= encoding["offset_mapping"][-62][0]


TEXT = "Zoé 🙂 de la Rue, 北京 too"
SPANS = [(0, 3), (4, 5), (6, 8), (9, 10), (10, 11), (12, 15), (15, 16), (17, 18), (18, 19), (20, 23)]
WORDS = [0, 1, 2, 3, 3, 4, 5, 6, 7, 8]


def entities(best: Sequence[str | None], labels: Sequence[str] = TAGS) -> list[tuple[str, str, Any]]:
    """`find_entities` the text above; the t-th token has its tag by 0.5 + t / 100, None was not seen."""
    shares = np.full((len(best), len(labels)), 0.01)
    for t, label in enumerate(best):
        shares[t] = np.nan if label is None else shares[t]
        if label is not None:
            shares[t, labels.index(label)] = 0.5 + t / 100
    found = find_entities(TEXT, shares, SPANS, WORDS, labels)
    assert all(entity.text == TEXT[entity.start : entity.end] for entity in found)
    return [(entity.label, entity.text, pytest.approx(entity.score)) for entity in found]


@pytest.mark.parametrize(
    ("best", "expected"),
    [
        ("O O O O O O O O O O", []),
        ("B-PER O O O O O O O O O", [("PER", "Zoé", 0.5)]),
        ("O O O O O O O O O I-LOC", [("LOC", "too", 0.59)]),  # an I- without a B- begins one
        ("B-PER I-PER I-PER O O O O O O O", [("PER", "Zoé 🙂 de", 0.51)]),
        ("B-PER B-PER I-PER O O O O O O O", [("PER", "Zoé", 0.5), ("PER", "🙂 de", 0.515)]),
        ("B-PER I-LOC I-LOC O O O O O O O", [("PER", "Zoé", 0.5), ("LOC", "🙂 de", 0.515)]),
        ("I-PER O I-PER O O O O O O O", [("PER", "Zoé", 0.5), ("PER", "de", 0.52)]),
        # The tag of a word's first token counts, and its score.
        ("O O O B-LOC O O O O O O", [("LOC", "la", 0.53)]),
        ("O O O B-LOC B-PER I-LOC O O O O", [("LOC", "la Rue", 0.54)]),
        ("O O O O B-LOC I-LOC O O O O", [("LOC", "Rue", 0.55)]),
        ("O O O O O O O B-LOC I-LOC O", [("LOC", "北京", 0.575)]),
        # What the model did not see ends an entity.
        ("B-PER - I-PER O O O O O O O", [("PER", "Zoé", 0.5), ("PER", "de", 0.52)]),
        ("B-PER I-PER - - - - - - - -", [("PER", "Zoé 🙂", 0.505)]),
        ("O O O - I-PER I-PER O O O O", [("PER", "Rue", 0.55)]),  # of "la" the first token was not seen
    ],
)
def test_entities_of(best: str, expected: list[tuple[str, str, float]]) -> None:
    assert entities([None if label == "-" else label for label in best.split()]) == expected


BIOES = ["O", *(f"{prefix}-{name}" for name in ("PER", "LOC") for prefix in "BIES")]
BILOU = [label.replace("E-", "L-").replace("S-", "U-") for label in BIOES]


@pytest.mark.parametrize("labels", [BIOES, BILOU])
@pytest.mark.parametrize(
    ("best", "expected"),
    [
        ("B-PER I-PER E-PER O O O O O O O", [("PER", "Zoé 🙂 de", 0.51)]),
        ("S-PER S-PER O S-LOC O O O O O O", [("PER", "Zoé", 0.5), ("PER", "🙂", 0.51), ("LOC", "la", 0.53)]),
        ("B-PER E-PER I-PER E-PER O O O O O O", [("PER", "Zoé 🙂", 0.505), ("PER", "de la", 0.525)]),
        ("B-PER E-LOC O E-PER O O O O O O", [("PER", "Zoé", 0.5), ("LOC", "🙂", 0.51), ("PER", "la", 0.53)]),
        ("O O O B-LOC O E-LOC E-LOC O O O", [("LOC", "la Rue", 0.54), ("LOC", ",", 0.56)]),
    ],
)
def test_labels_that_say_where_an_entity_ends(
    labels: list[str], best: str, expected: list[tuple[str, str, float]]
) -> None:
    if labels is BILOU:
        best = best.replace("E-", "L-").replace("S-", "U-")
    assert entities(best.split(), labels) == expected


def test_labels_without_prefixes_join_neighbours() -> None:
    labels = ["O", "NAME", "X-RAY", "S-CLASS"]
    best = ["NAME", "NAME", "O", "X-RAY", "O", "X-RAY", "NAME", "S-CLASS", "S-CLASS", "O"]
    expected = [
        ("NAME", "Zoé 🙂", 0.505),
        ("X-RAY", "la Rue", 0.54),
        ("NAME", ",", 0.56),
        ("S-CLASS", "北京", 0.575),
    ]
    assert entities(best, labels) == expected


def brute(
    case: Case, question: str, context: str, windows: Sequence[tuple[int, list[int], list[int]]], limit: int
) -> tuple[dict[tuple[int, int], float], float]:
    """Every stretch of the context with its best score over the windows, and the score of no answer."""
    offsets = case.tokenizer(context, add_special_tokens=False, return_offsets_mapping=True, verbose=False)[
        "offset_mapping"
    ]
    before = 2 + len(case.ids(question))
    scores: dict[tuple[int, int], float] = {}
    none = []
    for begin, ids, segments in windows:
        logits = case.logits(ids, segments)
        places = [0, *range(before, len(ids) - 1)]
        starts, ends = (softmax(logits[f"{end}_logits"][places]) for end in ("start", "end"))
        none.append(starts[0] * ends[0])
        for first in range(len(places) - 1):
            for last in range(first, min(first + limit, len(places) - 1)):
                span = (offsets[begin + first][0], offsets[begin + last][1])
                score = float(starts[1 + first] * ends[1 + last])
                scores[span] = max(score, scores.get(span, 0.0))
    return scores, float(min(none))


def check_answers(got: Answers, context: str, scores: dict[tuple[int, int], float], n_best: int) -> None:
    """The n best in order; each with exactly the text that its characters are."""
    expected = sorted(scores.values(), reverse=True)[:n_best]
    assert [answer.score for answer in got.answers] == pytest.approx(expected, abs=1e-6)
    for answer in got.answers:
        assert answer.text == context[answer.start : answer.end]
        assert scores[answer.start, answer.end] == pytest.approx(answer.score, abs=1e-6)
    assert len({(answer.start, answer.end) for answer in got.answers}) == len(expected)


@pytest.mark.parametrize(("n_best", "limit"), [(1, 30), (5, 30), (4, 2), (300, 3), (3, 1)])
def test_answers_are_the_best_stretches(answers: Case, n_best: int, limit: int) -> None:
    pairs = [(QUESTION, context) for context in CONTEXTS]
    results = answers.model.answer(pairs, n_best=n_best, max_answer_tokens=limit)
    best = []
    for context, got in zip(CONTEXTS, results, strict=True):
        scores, none = brute(answers, QUESTION, context, answers.windows(context, QUESTION), limit)
        check_answers(got, context, scores, n_best)
        assert got.no_answer_score == pytest.approx(none, abs=1e-6)
        assert got.dropped == 0
        best.append((got.answers[0].start, got.answers[0].end))
    assert len(set(best)) > 3
    alone = answers.model.answer(QUESTION, CONTEXTS[0], n_best=n_best, max_answer_tokens=limit)
    assert [a.text for a in alone.answers] == [a.text for a in results[0].answers]


def test_offsets_of_answers_in_odd_texts(answers: Case) -> None:
    words = answers.model.answer(QUESTION, CONTEXTS[1], n_best=400, max_answer_tokens=1)
    found = {(answer.start, answer.text) for answer in words.answers}
    assert {(0, "我"), (2, "北"), (11, "é"), (26, "🙂")} <= found
    decomposed = answers.model.answer(QUESTION, CONTEXTS[5], n_best=400, max_answer_tokens=1)
    assert {(0, "D"), (1, "e")} <= {(answer.start, answer.text[:1]) for answer in decomposed.answers}


def test_an_answer_in_the_last_part_of_a_long_context(answers: Case) -> None:
    late = 0
    for filler in ("the plan is it. ", "hello world, not it! ", "forge and forged - ", "我在北京 café "):
        context = filler * 30 + "Zoé forges a naïve 🙂 world"
        windows = answers.windows(context, QUESTION, stride=12)
        assert len(windows) > 3
        scores, none = brute(answers, QUESTION, context, windows, 30)
        got = answers.model.answer(QUESTION, context, n_best=5, stride=12)
        check_answers(got, context, scores, 5)
        # Among so many are stretches that two windows hold: the better score counts.
        many = answers.model.answer(QUESTION, context, n_best=300, stride=12)
        check_answers(many, context, scores, 300)
        assert got.no_answer_score == pytest.approx(none, abs=1e-6)
        assert got.dropped == 0
        head = answers.model.answer(QUESTION, context, truncation="head")
        assert head.dropped == len(answers.ids(context)) + len(answers.ids(QUESTION)) - 61
        if got.answers[0].end > 0.9 * len(context):
            late += 1
            assert head.answers[0].end < got.answers[0].start
    assert late > 0


def test_no_answer_can_be_best(answers: Case) -> None:
    empty = answers.model.answer(QUESTION, "")
    assert (empty.answers, empty.no_answer_score, empty.best) == ((), 1.0, None)
    answer = Answer("a", 0.25, 0, 1)
    assert Answers((answer,), 0.2).best is answer
    assert Answers((answer,), 0.25).best is None
    assert answers.model.answer([]) == []


def test_mistakes_with_spans_are_named(tags: Case, answers: Case) -> None:
    model: Any = answers.model  # so that a type checker lets mistakes pass
    tagger: Any = tags.model
    calls: list[tuple[str, Callable[[], Any]]] = [
        ("a pair of two texts is needed", lambda: model.answer("a")),
        ("give several pairs as a list of tuples", lambda: model.answer([("a", "b")], "c")),
        ("a pair of two texts must be", lambda: model.answer(["a"])),
        ("takes two texts", lambda: model.answer("a", 3)),
        ("give several texts", lambda: model.answer(3)),
        ("n_best=0 must be", lambda: model.answer("a", "b", n_best=0)),
        ("n_best=True must be", lambda: model.answer("a", "b", n_best=True)),
        ("max_answer_tokens=0 must be", lambda: model.answer("a", "b", max_answer_tokens=0)),
        ("tag needs the head token_classification; .* are question_answering", lambda: model.tag("a")),
        ("a text must be a str, not tuple", lambda: tagger.tag([("a", "b")])),
    ]
    for message, call in calls:
        with pytest.raises(InputError, match=message):
            call()
    question = "is " * 31
    assert model.answer(question[:-3], LONG).dropped == 0
    with pytest.raises(ContextLengthError, match=r"question or query\) has 31 tokens; .* it may have 30"):
        model.answer(question, LONG)
