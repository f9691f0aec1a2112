"""Zero-shot classification and logits: transformers' zero-shot-classification pipeline is the reference."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from planforge.runtime import AsyncTextEncoder, TextEncoder
from planforge.runtime.errors import InputError

from ...helpers.cli import error_line, planforge
from ...helpers.encoders import Case, opened
from ...helpers.models import edit_json
from ...helpers.serving import running_server

TEXTS = ["hello world", "the plan is not it!", "Is it Paris? " * 30, "forge"]
LABELS = ["paris", "the plan", "hello world, it is forged"]
TEMPLATE = "it is not {}: {}"
ORDERS = {  # of a published model's classes
    "roberta-large-mnli": ["CONTRADICTION", "NEUTRAL", "ENTAILMENT"],
    "nli-deberta": ["contradiction", "entailment", "neutral"],
    "DeBERTa-mnli-fever": ["entailment", "neutral", "contradiction"],
}
TWO = ["entailment", "not_entailment"]


def name_classes(names: list[str]) -> dict[str, Any]:
    return {
        "id2label": {str(number): name for number, name in enumerate(names)},
        "label2id": {name: number for number, name in enumerate(names)},
    }


@pytest.fixture(scope="module", params=ORDERS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    folder = tmp_path_factory.mktemp("nli")
    case = opened(folder, "BertForSequenceClassification", seed=3, **name_classes(ORDERS[request.param]))
    with case.model:
        yield case


def ask(case: Case, text: str, labels: list[str], **options: Any) -> dict[str, float]:
    """The pipeline's probabilities by label; it cuts the text, and no hypothesis, at the model's length."""
    case.tokenizer.model_max_length = 64
    answer = case.pipeline("zero-shot-classification")(text, candidate_labels=labels, **options)
    return dict(zip(answer["labels"], answer["scores"], strict=True))


@pytest.mark.parametrize("labels", [LABELS, LABELS[:1]], ids=["several", "one"])
@pytest.mark.parametrize(
    "options", [{}, {"multi_label": True}, {"hypothesis_template": "so it is {}"}], ids=str
)
def test_probabilities_are_those_of_the_pipeline(case: Case, labels: list[str], options: Any) -> None:
    found = case.model.classify(TEXTS, candidate_labels=labels, **options)
    for text, one in zip(TEXTS, found, strict=True):
        expected = ask(case, text, labels, **options)
        assert one.probabilities == pytest.approx(expected, abs=1e-5)
        assert [*one.probabilities] == labels
        assert (one.label, one.score) == (
            max(expected, key=expected.__getitem__),
            one.probabilities[one.label],
        )
    assert [one.dropped > 0 for one in found] == [False, False, True, False]
    spread = [max(one.probabilities.values()) - min(one.probabilities.values()) for one in found]
    assert len(labels) == 1 or max(spread) > 0.01


def test_every_way_of_asking_gives_the_same(case: Case) -> None:
    options: dict[str, Any] = {"candidate_labels": LABELS, "logits": True}
    alone = case.model.classify(TEXTS[0], **options)
    expected = case.model.classify(TEXTS, **options)
    for name in ("probabilities", "logits"):
        assert getattr(alone, name) == pytest.approx(getattr(expected[0], name), abs=1e-5)
    submitted = case.model.submit("classify", TEXTS, **options).result()
    streamed = list(case.model.iterate("classify", TEXTS, **options))

    async def ask_there() -> Any:
        return await AsyncTextEncoder(case.model).classify(TEXTS, **options)

    for found in (submitted, streamed, asyncio.run(ask_there())):
        for one, other in zip(found, expected, strict=True):
            assert one.probabilities == pytest.approx(other.probabilities, abs=1e-5)
            assert one.label == other.label


@pytest.mark.parametrize("problem_type", ["single_label_classification", "multi_label_classification"])
def test_logits_are_the_models(case: Case, tmp_path: Path, problem_type: str) -> None:
    model = case.with_config(tmp_path / "other", problem_type=problem_type)
    pairs: list[str | tuple[str, str]] = [(TEXTS[0], TEXTS[1]), TEXTS[3]]
    pipeline = case.pipeline("text-classification", top_k=None, function_to_apply="none")
    for item, one in zip(pairs, model.classify(pairs, logits=True), strict=True):
        given = item if isinstance(item, str) else {"text": item[0], "text_pair": item[1]}
        row = pipeline([given])[0]
        assert one.logits == pytest.approx({entry["label"]: entry["score"] for entry in row}, abs=1e-5)
    assert model.classify(TEXTS[3]).logits == {}


def test_two_classes_and_a_regression(tmp_path: Path) -> None:
    """Of two classes the other one contradicts; without one that entails there is nothing to ask."""
    case = opened(tmp_path / "two", "BertForSequenceClassification", seed=3, **name_classes(TWO))
    with case.model:
        found = case.model.classify(TEXTS[0], candidate_labels=LABELS, multi_label=True)
        assert found.probabilities == pytest.approx(ask(case, TEXTS[0], LABELS, multi_label=True), abs=1e-5)
        other = case.with_config(tmp_path / "other", **name_classes(["sad", "glad"]))
        with pytest.raises(
            InputError, match="a label that begins with 'entail'; this one has the labels 'sad', 'glad'"
        ):
            other.classify(TEXTS[0], candidate_labels=LABELS)
    one = opened(tmp_path / "one", "BertForSequenceClassification", seed=3, **name_classes(["entailment"]))
    with one.model:
        number = one.model.classify(TEXTS[0], logits=True)
        assert number.logits == {"entailment": number.score} and number.probabilities == {}
        with pytest.raises(InputError, match="needs a natural language inference model"):
            one.model.classify(TEXTS[0], candidate_labels=LABELS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"candidate_labels": []}, r"candidate_labels=\[\] must be a list of texts"),
        ({"candidate_labels": "a, b"}, "must be a list of texts, such as"),
        ({"candidate_labels": ["a", ""]}, "must be a list of texts"),
        ({"candidate_labels": ["a", "b", "a"]}, r"has \['a'\] more than once"),
        ({"candidate_labels": ["a"], "hypothesis_template": "it is"}, r"must be a text with \{\} where"),
        ({"candidate_labels": ["a"], "multi_label": 1}, "multi_label=1 must be True or False"),
        (
            {"candidate_labels": ["a"], "truncation": "windows"},
            "'windows' cannot be used with candidate_labels",
        ),
        ({"multi_label": True}, "multi_label needs candidate_labels"),
        ({"hypothesis_template": "{}"}, "hypothesis_template needs candidate_labels"),
        ({"logits": "yes"}, "logits='yes' must be True or False"),
    ],
    ids=str,
)
def test_wrong_options_are_named(case: Case, options: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        case.model.classify(TEXTS[0], **options)


def test_a_pair_has_no_place_for_a_label(case: Case) -> None:
    with pytest.raises(InputError):
        case.model.classify([(TEXTS[0], TEXTS[1])], candidate_labels=LABELS)


@pytest.fixture(scope="module")
def bundle(head_bundle: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle with the classes of a model of natural language inference."""
    folder = Path(shutil.copytree(head_bundle("classifier"), tmp_path_factory.mktemp("served") / "nli"))
    encoder = json.loads((folder / "manifest.json").read_text())["encoder"]
    edit_json(folder / "manifest.json", encoder=encoder | {"labels": ORDERS["roberta-large-mnli"]})
    return folder


def test_the_route_gives_what_python_gives(bundle: Path) -> None:
    with TextEncoder.load(bundle) as model, running_server({"nli": model}) as server:
        options: dict[str, Any] = {"candidate_labels": LABELS, "multi_label": True, "logits": True}
        data = server.ask("/v1/classify", input=TEXTS[:2], **options)["data"]
        for one, other in zip(data, model.classify(TEXTS[:2], **options), strict=True):
            assert one["probabilities"] == pytest.approx(other.probabilities, abs=1e-6)
            assert one["logits"] == pytest.approx(other.logits, abs=1e-5)
            assert one["label"] == other.label
        plain = server.ask("/v1/classify", input=TEXTS[0], logits=True)["data"][0]
        assert plain["logits"] == pytest.approx(model.classify(TEXTS[0], logits=True).logits, abs=1e-5)
        assert server.ask("/v1/classify", input=TEXTS[0])["data"][0]["logits"] == {}
        for body, param in (
            ({"candidate_labels": []}, "candidate_labels"),
            ({"candidate_labels": ["a", "a"]}, "candidate_labels"),
            ({"candidate_labels": ["a"], "hypothesis_template": "x"}, "hypothesis_template"),
            ({"candidate_labels": [str(n) for n in range(200)], "input": ["a"] * 11}, "input"),
        ):
            refused = server.post("/v1/classify", **{"input": "a", **body})
            assert refused.status_code == 400 and refused.json()["error"]["param"] == param


def test_the_command_gives_what_python_gives(bundle: Path) -> None:
    words = [word for label in LABELS for word in ("--candidate-labels", label)]
    shown = planforge("run", bundle, TEXTS[0], *words, "--multi-label", "--logits", "--json").stdout
    with TextEncoder.load(bundle) as model:
        meant = model.classify(TEXTS[0], candidate_labels=LABELS, multi_label=True, logits=True)
    found = json.loads(shown)
    assert found["probabilities"] == pytest.approx(meant.probabilities, abs=1e-6)
    assert found["logits"] == pytest.approx(meant.logits, abs=1e-5)
    assert np.ptp([*meant.logits.values()]) > 1e-3


@pytest.mark.parametrize("switch", [[], ["--multi-label"]], ids=str)
def test_the_command_prints_every_label_the_best_first(bundle: Path, switch: list[str]) -> None:
    words = [word for label in LABELS for word in ("--candidate-labels", label)]
    shown = planforge("run", bundle, *TEXTS[:2], *words, *switch).stdout
    with TextEncoder.load(bundle) as model:
        meant = model.classify(TEXTS[:2], candidate_labels=LABELS, multi_label=bool(switch))
    for block, one in zip(shown.strip().split("\n\n"), meant, strict=True):
        found = [line.split("\t") for line in block.splitlines()]
        assert {label for label, _ in found} == set(LABELS) and found[0][0] == one.label
        assert [float(score) for _, score in found] == pytest.approx(
            sorted(one.probabilities.values(), reverse=True), abs=1e-4
        )


def test_several_labels_in_one_are_refused(bundle: Path) -> None:
    line = error_line("run", bundle, "a", "--candidate-labels", "great,dull")
    assert line.endswith("--candidate-labels 'great,dull' is one label; repeat the option for each label")
    both = ("--candidate-labels", "great, if long", "--candidate-labels", "dull")
    assert planforge("run", bundle, "a", *both).returncode == 0


@pytest.mark.parametrize("head", ["pretrained", "tagger"])
def test_a_model_that_is_no_classifier_says_what_labels_need(
    head_bundle: Callable[[str], Path], head: str
) -> None:
    folder = head_bundle(head)
    needs = (
        "candidate_labels needs a natural language inference model, with a label that begins with 'entail'"
    )
    with (
        TextEncoder.load(folder) as model,
        pytest.raises(InputError, match=f"^{needs}; this one is not a classifier$"),
    ):
        model.classify("a", candidate_labels=LABELS)
    line = error_line("run", folder, "a", "--candidate-labels", "good")
    assert needs.replace("candidate_labels", "--candidate-labels") in line
