"""Tags and answers of random encoders: against transformers, and to the very character of the text."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tokenizers
import transformers
from tokenizers import models, normalizers, pre_tokenizers, trainers
from transformers.pipelines.token_classification import AggregationStrategy

from planforge.runtime import Answers
from planforge.runtime.encode.results import Answer
from planforge.runtime.encode.spans import find_entities
from planforge.runtime.errors import ContextLengthError, InputError

from ...helpers.encoders import Case, opened, softmax

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


def test_labels_without_prefixes_join_neighbours() -> None:
    labels = ["O", "NAME", "X-RAY"]
    best = ["NAME", "NAME", "O", "X-RAY", "O", "X-RAY", "NAME", "O", "O", "O"]
    expected = [("NAME", "Zoé 🙂", 0.505), ("X-RAY", "la Rue", 0.54), ("NAME", ",", 0.56)]
    assert entities(best, labels) == expected


def test_labels_of_bioes_and_bilou_say_where_an_entity_ends() -> None:
    """As the schemes are defined: S is one word, E the last of several."""
    for single, last in ("SE", "UL"):
        labels = [
            "O",
            *(f"{prefix}-{name}" for prefix in ("B", "I", last, single) for name in ("PER", "LOC")),
        ]
        best = f"{single}-PER {single}-PER B-LOC I-LOC O {last}-LOC I-LOC B-PER {last}-PER I-PER".split()
        expected = [
            ("PER", "Zoé", 0.5),
            ("PER", "🙂", 0.51),
            ("LOC", "de la Rue", pytest.approx(np.mean([0.52, 0.53, 0.55]))),
            ("LOC", ",", 0.56),
            ("PER", "北京", 0.575),
            ("PER", "too", 0.59),
        ]
        assert entities(best, labels) == expected
    plain = ["O", "E-ON", "COMPANY"]
    assert entities(["E-ON", *["O"] * 9], plain) == [("E-ON", "Zoé", 0.5)]


TAGGED = "John met Zoë in São Paulo, and  Ann (of New York) sang."


def load_word_tokenizers() -> dict[str, Any]:
    """transformers' tokenizers of kinds whose words are not words, or have spaces."""
    sample = [TAGGED, "John met Ann in New York, and sang of Paris"] * 3
    gemma: Any = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    gemma.normalizer = normalizers.Replace(" ", "▁")
    gemma.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    unigram: Any = tokenizers.Tokenizer(models.Unigram())
    unigram.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    trained: Any = {
        "gemma": (gemma, trainers.BpeTrainer(vocab_size=70, special_tokens=["<unk>"], show_progress=False)),
        "unigram": (
            unigram,
            trainers.UnigramTrainer(
                vocab_size=50, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False
            ),
        ),
    }
    found = {}
    for name, (tokenizer, trainer) in trained.items():
        words = (
            pre_tokenizers.Metaspace() if name == "unigram" else pre_tokenizers.Split("▁", "merged_with_next")
        )
        own = tokenizer.pre_tokenizer
        tokenizer.pre_tokenizer = words
        tokenizer.train_from_iterator(sample, trainer)
        tokenizer.pre_tokenizer = own
        found[name] = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")
    return found


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kind", ["gemma", "unigram"])
def test_words_begin_behind_spaces_where_the_tokenizer_has_no_words(kind: str, seed: int) -> None:
    tokenizer = load_word_tokenizers()[kind]
    encoding = tokenizer(TAGGED, add_special_tokens=False, return_offsets_mapping=True)
    words = encoding.word_ids(0)
    assert len(set(words)) == 1  # all the text is one word
    ids = np.array(encoding["input_ids"])
    logits = np.random.default_rng(seed).normal(size=(len(ids), len(TAGS))) * 2
    shares = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    pipeline: Any = object.__new__(transformers.TokenClassificationPipeline)
    pipeline.tokenizer = tokenizer
    pipeline.model = SimpleNamespace(config=SimpleNamespace(id2label=dict(enumerate(TAGS))))
    first = AggregationStrategy.FIRST
    offsets = encoding["offset_mapping"]
    with pytest.warns(UserWarning, match="does not support real words"):
        tokens = pipeline.gather_pre_entities(TAGGED, ids, shares, offsets, np.zeros(len(ids)), first)
    expected: list[tuple[str, str, Any]] = [
        (e["entity_group"], TAGGED[e["start"] : e["end"]].strip(), pytest.approx(e["score"]))
        for e in pipeline.aggregate(tokens, first)
        if e["entity_group"] != "O"
    ]
    found = find_entities(TAGGED, shares, offsets, words, TAGS)
    got: list[tuple[str, str, Any]] = [(e.label, e.text, e.score) for e in found]
    assert got == [one for one in expected if one[1]]
    assert len(found) > 2
    assert all(entity.text == TAGGED[entity.start : entity.end] for entity in found)


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
        ("several pairs are a list of tuples", lambda: model.answer([("a", "b")], "c")),
        ("pair of two texts", lambda: model.answer(["a"])),
        ("pair of two texts", lambda: model.answer("a", 3)),
        ("several texts are needed", lambda: model.answer(3)),
        ("n_best=0 must be", lambda: model.answer("a", "b", n_best=0)),
        ("n_best=True must be", lambda: model.answer("a", "b", n_best=True)),
        ("max_answer_tokens=0 must be", lambda: model.answer("a", "b", max_answer_tokens=0)),
        ("tag needs the head token_classification; .* are question_answering", lambda: model.tag("a")),
        ("classify needs the head .* are token_classification", lambda: tagger.classify("a")),
        ("a text must be a str, not tuple", lambda: tagger.tag([("a", "b")])),
    ]
    for message, call in calls:
        with pytest.raises(InputError, match=message):
            call()
    question = "is " * 31
    assert model.answer(question[:-3], LONG).dropped == 0
    with pytest.raises(ContextLengthError, match=r"question or query\) has 31 tokens; .* it may have 30"):
        model.answer(question, LONG)
    with pytest.raises(InputError, match="could be a pair or two texts"):
        tagger.tag((TEXTS[0], TEXTS[1]))
