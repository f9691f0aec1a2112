"""Classes, scores and words of random encoders against transformers' and sentence-transformers' own tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentence_transformers

from planforge.runtime.errors import ContextLengthError, InputError

from ...helpers.encoders import Case, opened, sigmoid, softmax

TEXTS = [
    "hello world",
    "the plan is not it!",
    "",
    "Is it Paris, and not 我在北京?",
    "forge the plan, - don't forge worlds. 🙂",
    "Zoé's naïve café",
    "planning forged planer worldly",
]
PAIRS = [(text, other) for text in TEXTS[:4] for other in TEXTS[3:]]
LONG = "hello world, the plan is it. " * 12 + "paris forged 北京 and not the world! " * 10
NAMES = ["sad", "neither", "glad"]


@pytest.fixture(scope="module")
def classes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    """Three classes."""
    names = {"id2label": dict(enumerate(NAMES)), "label2id": {name: i for i, name in enumerate(NAMES)}}
    case = opened(tmp_path_factory.mktemp("classes"), "BertForSequenceClassification", seed=3, **names)
    with case.model:
        yield case


@pytest.fixture(scope="module")
def scores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    """One number: a regression, or a cross-encoder. DistilBERT has no segments."""
    folder = tmp_path_factory.mktemp("scores")
    case = opened(folder, "DistilBertForSequenceClassification", seed=11, num_labels=1)
    with case.model:
        yield case


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    """The two heads that BERT was trained with."""
    case = opened(tmp_path_factory.mktemp("words"), "BertForPreTraining")
    with case.model:
        yield case


def expected_classes(case: Case, items: list[Any], **options: Any) -> list[dict[str, float]]:
    """transformers' probabilities by label."""
    pipeline = case.pipeline("text-classification", top_k=None, **options)
    inputs = [item if isinstance(item, str) else {"text": item[0], "text_pair": item[1]} for item in items]
    rows = [pipeline([one])[0] for one in inputs]
    return [{entry["label"]: entry["score"] for entry in row} for row in rows]


@pytest.mark.parametrize("items", [TEXTS, PAIRS], ids=["texts", "pairs"])
def test_classes_are_transformers(classes: Case, items: list[Any]) -> None:
    expected = expected_classes(classes, items)
    best = [max(row, key=row.__getitem__) for row in expected]
    assert len(set(best)) > 1 and np.std([row["glad"] for row in expected]) > 0.05
    got = classes.model.classify(items)
    assert len(got) == len(items)
    for result, row, label in zip(got, expected, best, strict=True):
        assert [*result.probabilities] == NAMES
        assert result.probabilities == pytest.approx(row, abs=1e-5)
        assert (result.label, result.score) == (label, result.probabilities[label])
        assert result.dropped == 0
    item = (items[1],) if isinstance(items[1], str) else items[1]
    assert classes.model.classify(*item).probabilities == pytest.approx(expected[1], abs=1e-5)


def test_a_pair_is_not_its_texts_joined_nor_turned_round(classes: Case) -> None:
    model, (first, second) = classes.model, PAIRS[0]
    pair = model.classify(first, second).probabilities["glad"]
    for other in ((second, first), (f"{first} [SEP] {second}",)):
        assert abs(model.classify(*other, parse_special=True).probabilities["glad"] - pair) > 0.005


def test_several_labels_at_once(classes: Case, tmp_path: Path) -> None:
    kind = "multi_label_classification"
    model = classes.with_config(tmp_path / "several", problem_type=kind)
    expected = expected_classes(classes, [*TEXTS, *PAIRS], function_to_apply="sigmoid")
    assert max(abs(sum(row.values()) - 1) for row in expected) > 0.1
    for result, row in zip(model.classify([*TEXTS, *PAIRS]), expected, strict=True):
        assert result.probabilities == pytest.approx(row, abs=1e-5)
        assert result.label == max(row, key=row.__getitem__)


def test_a_regression_of_several_numbers_has_each_by_its_name(classes: Case, tmp_path: Path) -> None:
    model = classes.with_config(tmp_path / "numbers", problem_type="regression")
    expected = expected_classes(classes, [*TEXTS, *PAIRS], function_to_apply="none")
    for result, row in zip(model.classify([*TEXTS, *PAIRS]), expected, strict=True):
        assert result.probabilities == pytest.approx(row, abs=1e-5)
        assert len(set(result.probabilities.values())) == len(row)


def test_a_regression_is_the_number_itself(scores: Case, tmp_path: Path) -> None:
    model = scores.with_config(tmp_path / "regression", problem_type="regression", id2label={"0": "stars"})
    expected = expected_classes(scores, [*TEXTS, *PAIRS], function_to_apply="none")
    numbers = [next(iter(row.values())) for row in expected]
    assert np.std(numbers) > 0.1 and min(numbers) < 0
    for result, number in zip(model.classify([*TEXTS, *PAIRS]), numbers, strict=True):
        assert (result.label, result.probabilities) == ("stars", {})
        assert result.score == pytest.approx(number, abs=1e-5)
    assert scores.model.labels == ("LABEL_0",)  # and where config.json says nothing of the problem
    assert scores.model.classify(TEXTS[0]).score == pytest.approx(numbers[0], abs=1e-5)


def test_classes_of_a_long_text(classes: Case) -> None:
    cut = expected_classes(classes, [LONG], truncation=True, max_length=64)
    got = classes.model.classify(LONG)
    assert got.probabilities == pytest.approx(cut[0], abs=1e-5)
    assert got.dropped == len(classes.ids(LONG)) - 62 > 100
    windows = classes.windows(LONG, stride=9)
    shares = [softmax(classes.logits(ids)["logits"]) for _, ids, _ in windows]
    assert len(shares) > 3 and np.ptp(shares, axis=0).max() > 0.05
    whole = classes.model.classify(LONG, truncation="windows", stride=9)
    assert [*whole.probabilities.values()] == pytest.approx(np.mean(shares, axis=0), abs=1e-5)
    assert whole.dropped == 0


def test_a_long_pair_is_cut_like_transformers(classes: Case) -> None:
    options = {"truncation": "longest_first", "max_length": 64}
    pairs = [(LONG, TEXTS[1]), (TEXTS[1], LONG), (LONG[:90], LONG)]
    got = classes.model.classify(pairs)
    for result, row in zip(got, expected_classes(classes, pairs, **options), strict=True):
        assert result.probabilities == pytest.approx(row, abs=1e-5)
        assert result.dropped > 0
    windows = classes.windows(LONG, before=TEXTS[1])
    shares = [softmax(classes.logits(ids, segments)["logits"]) for _, ids, segments in windows]
    result = classes.model.classify(TEXTS[1], LONG, truncation="windows")
    assert [*result.probabilities.values()] == pytest.approx(np.mean(shares, axis=0), abs=1e-5)


@pytest.mark.parametrize("activation", [None, "torch.nn.modules.linear.Identity"])
def test_rank_is_sentence_transformers(scores: Case, tmp_path: Path, activation: str | None) -> None:
    folder = tmp_path / "cross"
    settings = {} if activation is None else {"sentence_transformers": {"activation_fn": activation}}
    model = scores.with_config(folder, **settings)
    cross = sentence_transformers.CrossEncoder(str(folder), device="cpu")
    texts = [*TEXTS, LONG, TEXTS[0]]
    expected = cross.rank("the world?", texts, show_progress_bar=False)
    values = [row["score"] for row in expected]
    assert np.ptp(values) > 0.05 and (activation is None) == all(0 < value < 1 for value in values)
    got = model.rank("the world?", texts)
    assert [result.score for result in got] == pytest.approx(values, abs=1e-5)
    assert sorted(result.index for result in got) == [*range(len(texts))]
    assert [result.index for result in got] == [row["corpus_id"] for row in expected]
    assert all(result.text == texts[result.index] for result in got)
    assert model.rank("the world?", iter(texts), top_k=2) == got[:2]
    assert model.rank("the world?", []) == []
    streamed = list(model.iterate("rank", [("the world?", text) for text in texts]))
    assert [result.index for result in streamed] == [*range(len(texts))]  # in the order of the pairs


def test_of_a_long_texts_windows_the_best_counts(scores: Case) -> None:
    firsts = set()
    for filler in ("the plan is it. ", "hello world, not it! ", "forge and forged - ", "我在北京 café "):
        text = TEXTS[4] * 3 + filler * 30 + TEXTS[0]
        windows = scores.windows(text, before="the world?")
        numbers = [sigmoid(scores.logits(ids)["logits"])[0] for _, ids, _ in windows]
        firsts.add(numbers[0] == max(numbers))
        assert len(numbers) > 3 and np.ptp(numbers) > 0.02
        (best,) = scores.model.rank("the world?", [text], truncation="windows")
        assert best.score == pytest.approx(max(numbers), abs=1e-5)
        assert best.dropped == 0 < scores.model.rank("the world?", [text])[0].dropped
    assert firsts == {True, False}  # the best window is the first one of some texts, not of others


def test_next_sentence_is_transformers(words: Case) -> None:
    reference = words.reference_as("BertForNextSentencePrediction")
    expected = []
    for first, second in PAIRS:
        encoding = words.tokenizer([first], [second])
        logits = words.logits(encoding["input_ids"][0], encoding["token_type_ids"][0], reference)
        expected.append(softmax(logits["logits"])[0])
    assert min(expected) < 0.5 < max(expected) and np.std(expected) > 0.05
    got = words.model.next_sentence(PAIRS)
    assert [result.probability for result in got] == pytest.approx(expected, abs=1e-5)
    assert [result.is_next for result in got] == [share > 0.5 for share in expected]
    assert words.model.next_sentence(*PAIRS[3]).probability == pytest.approx(expected[3], abs=1e-5)


MASKED = [
    "hello [MASK]!",
    "the [MASK] is not [MASK], 北京 [MASK]",
    "[MASK]",
    "Zoé [MASK][MASK] 🙂 forge[MASK]ing",
]


def test_filled_words_are_transformers(words: Case) -> None:
    pipeline = words.pipeline("fill-mask", model=words.reference_as("BertForMaskedLM"), top_k=7)
    rows = [pipeline(text) for text in MASKED]
    expected = [row if isinstance(row[0], list) else [row] for row in rows]  # of one mask: no list of lists
    firsts = [places[0][0]["token"] for places in expected]
    assert len(set(firsts)) > 2
    got = words.model.fill_mask(MASKED, top_k=7)
    for result, places in zip(got, expected, strict=True):
        assert len(result.masks) == len(places)
        for fills, place in zip(result.masks, places, strict=True):
            assert [fill.token_id for fill in fills] == [entry["token"] for entry in place]
            assert [fill.score for fill in fills] == pytest.approx([e["score"] for e in place], abs=1e-5)
            spelled = words.tokenizer.convert_ids_to_tokens([fill.token_id for fill in fills])
            assert [fill.token for fill in fills] == spelled
    assert [len(fills) for fills in words.model.fill_mask(MASKED[1]).masks] == [5, 5, 5]


def test_masks_of_a_long_text_are_read_where_they_have_most_context(words: Case) -> None:
    text = f"[MASK] {LONG} [MASK] hello [MASK] {LONG} paris [MASK]"
    reference = words.reference_as("BertForMaskedLM")
    windows = words.windows(text)
    expected = []
    for token in [t for t, i in enumerate(words.ids(text)) if i == words.tokenizer.mask_token_id]:
        around = [min(token - start, start + len(ids) - 3 - token) for start, ids, _ in windows]
        start, ids, _ = windows[int(np.argmax(around))]
        shares = softmax(words.logits(ids, None, reference)["logits"][1 + token - start])
        expected.append([(int(i), shares[i]) for i in np.argsort(-shares)[:3]])
    assert len(windows) > 6 and len({places[0][0] for places in expected}) > 1
    got = words.model.fill_mask(text, top_k=3)
    for fills, places in zip(got.masks, expected, strict=True):
        assert [fill.token_id for fill in fills] == [token for token, _ in places]
        assert [fill.score for fill in fills] == pytest.approx([share for _, share in places], abs=1e-5)
    assert got.dropped == 0
    head = words.model.fill_mask(text, truncation="head")
    assert len(head.masks) == 1 and head.dropped == len(words.ids(text)) - 62


def test_mistakes_with_heads_are_named(classes: Case, scores: Case, words: Case) -> None:
    fills: Any = words.model  # so that a type checker lets mistakes pass
    picks: Any = classes.model
    ranks: Any = scores.model
    assert fills.heads == ("masked_lm", "next_sentence")
    heads = "this bundle's heads are masked_lm, next_sentence"
    calls: list[tuple[str, Callable[[], Any]]] = [
        (f"classify needs the head sequence_classification; {heads}", lambda: fills.classify("a")),
        (f"answer needs the head question_answering; {heads}", lambda: fills.answer("a", "b")),
        ("fill_mask needs the head masked_lm", lambda: picks.iterate("fill_mask", [])),
        (r"a single score; this model has the labels .*'neither'", lambda: picks.rank("a", ["b"])),
        ("pair of two texts", lambda: picks.classify([("a",)])),
        ("pair of two texts", lambda: picks.classify(["a", 3])),
        ("pair of two texts", lambda: picks.iterate("classify", [("a", "b", "c")]).__next__()),
        ("pair of two texts", lambda: fills.next_sentence(["a"])),
        ("give several texts", lambda: ranks.rank("query", "text")),
        ("a text must be a str, not int", lambda: ranks.rank("query", [3])),
        ("top_k=0 must be", lambda: ranks.rank("a", ["b"], top_k=0)),
        ("top_k=0 must be an integer from 1 to 93", lambda: fills.fill_mask("[MASK]", top_k=0)),
        ("top_k=94 must be", lambda: fills.fill_mask("[MASK]", top_k=94)),
        (r"'no mask' has no \[MASK\] to fill", lambda: fills.fill_mask(["[MASK]", "no mask"])),
        ("a text must be a str, not tuple", lambda: fills.fill_mask([("a", "b")])),
        (
            "hidden states of layers .1.,.*--outputs hidden_states",
            lambda: fills.features("a", layers="second_to_last"),
        ),
        ("needs four layers, this model has 2", lambda: fills.features("a", layers="sum_last_four")),
    ]
    for message, call in calls:
        with pytest.raises(InputError, match=message):
            call()
    with pytest.raises(ContextLengthError, match=r"has .* tokens; with truncation='windows'"):
        picks.classify(LONG, "a", truncation="windows")


def test_nothing_in_nothing_out(classes: Case, words: Case) -> None:
    assert classes.model.classify([]) == []
    assert words.model.next_sentence([]) == [] == words.model.fill_mask(iter(()))
