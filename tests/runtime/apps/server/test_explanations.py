"""/v1/explanations gives what `explain` gives, and refuses by their names what it cannot do."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from planforge.runtime import load
from planforge.runtime.apps.explain import METHODS, explain
from planforge.runtime.apps.server import explanations
from planforge.runtime.apps.server.readers import Job

from ....helpers.patience import wait_until
from ....helpers.serving import Address, running_server
from .test_refusals import read_error

PATH = "/v1/explanations"
PROMPT = "In the beginning God created the"
DATE = "the 3rd of May, 1998"
BUNDLES = {"gpt": "gpt2-demo", "labels": "classifier", "dates": "transformer-demo"}
Named = dict[str, Any]


@pytest.fixture(scope="module")
def models(explained: Callable[[str], Path], head_bundle: Callable[[str], Path]) -> Iterator[Named]:
    """A model of each kind that explains itself, and one that cannot."""
    bundles = {name: explained(bundle) / "bundle" for name, bundle in BUNDLES.items()}
    bundles["tagger"] = head_bundle("tagger")
    with ExitStack() as stack:
        models: Named = {name: load(bundle, precision="fp32") for name, bundle in bundles.items()}
        for model in models.values():
            stack.callback(model.close)
        yield models


@pytest.fixture(scope="module")
def server(models: Named) -> Iterator[Address]:
    with running_server(models) as address:
        yield address


# A model, and what the route and `explain` are asked alike.
SAME: list[tuple[str, str, dict[str, Any]]] = [
    ("gpt", PROMPT, {"max_new_tokens": 3}),
    ("gpt", PROMPT, {"answer": " heavens and", "watch": [" sea", " earth"], "methods": ["lens", "gradient"]}),
    (
        "gpt",
        PROMPT,
        {"answer": " earth", "methods": list(METHODS), "factors": 2, "objective": "probability"},
    ),
    ("labels", "one small film", {}),
    ("labels", "one small film", {"answer": "LABEL_2"}),
    ("labels", "one small film", {"pair": "a great man"}),
    ("dates", DATE, {}),
    ("dates", DATE, {"answer": "1998-05", "watch": ["7"]}),
]


@pytest.mark.parametrize(("name", "text", "asked"), SAME)
def test_it_is_what_the_model_explains(
    name: str, text: str, asked: dict[str, Any], server: Address, models: Named
) -> None:
    answer = server.ask(PATH, model=name, input=text, **asked)
    expected = json.loads(json.dumps(explain(models[name], text, **asked).to_json()))
    assert expected["targets"] and (expected["saliency"] or expected["lens"])
    assert answer.pop("model") == name != expected.pop("model")
    assert answer == expected


def test_a_label_alone_is_explained(server: Address) -> None:
    answer = server.ask(PATH, model="labels", input="one small film", answer="LABEL_2")
    assert [target["text"] for target in answer["targets"]] == ["LABEL_2"]
    whole = server.ask(PATH, model="labels", input="one small film")
    place = [target["text"] for target in whole["targets"]].index("LABEL_2")
    assert answer["saliency"]["gradient_norm"] == [whole["saliency"]["gradient_norm"][place]]


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "an unknown method": ({"methods": ["gradients"]}, "methods[0]", '"gradient"'),
    "no method": ({"methods": []}, "methods", "at least 1"),
    "an unknown objective": ({"objective": "loss"}, "objective", '"probability"'),
    "a word of several tokens": ({"watch": ["Mesopotamia"]}, "watch", "The space before a word belongs"),
    "too many words": ({"watch": [" a"] * 17}, "watch", "16"),
    "an empty answer": ({"answer": ""}, "answer", "empty"),
    "an empty text": ({"input": ""}, "input", "empty"),
    "a second text": ({"pair": "b"}, "pair", "two texts"),
    "too many groups": ({"methods": ["neurons"], "factors": 60}, "factors", "from 1 to the text's"),
    "too long an answer": ({"max_new_tokens": 65}, "max_new_tokens", "64"),
    "an unknown label": ({"model": "labels", "answer": "happy"}, "answer", "LABEL_0, LABEL_1, LABEL_2"),
    "words that labels have no place for": ({"model": "labels", "watch": [" a"]}, "watch", "write text"),
    "a length of labels": ({"model": "labels", "max_new_tokens": 3}, "max_new_tokens", "write text"),
    "a second text to translate": ({"model": "dates", "pair": "b"}, "pair", "two texts"),
    "a length of a translation": ({"model": "dates", "max_new_tokens": 3}, "max_new_tokens", "generators"),
    "an empty translation": ({"model": "dates", "answer": ""}, "answer", "empty"),
    "nothing to translate": ({"model": "dates", "input": ""}, "input", "empty"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_explained_is_refused_by_its_name(kind: str, server: Address) -> None:
    asked, param, words = REFUSED[kind]
    error = read_error(server.post(PATH, **{"model": "gpt", "input": "3 May", **asked}), 400)
    assert (error["param"], error["code"]) == (param, "invalid_value")
    assert words in error["message"]


TOO_LONG: dict[str, tuple[dict[str, Any], str, str]] = {
    "for the server": ({"model": "gpt", "input": "word " * 600}, "input", "at most 512"),
    "for the context": ({"model": "gpt", "input": "word " * 300}, "input", "reads at most 255"),
    "with its answer": (
        {"model": "gpt", "input": "word " * 100, "answer": " a" * 200},
        "answer",
        "holds 256",
    ),
    "an answer for the server": ({"model": "gpt", "input": "a", "answer": " a" * 600}, "input", "most 512"),
    "for the encoder": ({"model": "labels", "input": "a " * 100}, "input", "the model takes"),
    "a pair for the server": ({"model": "labels", "input": "a", "pair": "a " * 600}, "input", "most 512"),
    "for the translator": ({"model": "dates", "input": "3" * 100}, "input", "reads at most 64"),
    "a translation": (
        {"model": "dates", "input": DATE, "answer": "1" * 65},
        "answer",
        "generates at most 64",
    ),
}


@pytest.mark.parametrize("kind", TOO_LONG)
def test_too_many_tokens(kind: str, server: Address) -> None:
    asked, param, words = TOO_LONG[kind]
    error = read_error(server.post(PATH, **asked), 400)
    assert (error["param"], error["code"]) == (param, "context_length_exceeded")
    assert words in error["message"]
    assert "truncation" not in error["message"]  # which this route has not


def test_the_longest_translation_is_explained(server: Address) -> None:
    answer = server.ask(PATH, model="dates", input=DATE, answer="1" * 64, methods=["lens", "attention"])
    assert len(answer["targets"]) == 64


@pytest.mark.parametrize(("name", "text"), [("gpt", PROMPT), ("dates", DATE)])
def test_tokens_are_those_that_there_are(
    name: str, text: str, server: Address, models: Named, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A translation may be as long as the model writes, which would be too long for any text of Marian's."""
    asked = {"max_new_tokens": 4} if name == "gpt" else {}
    explained = server.ask(PATH, model=name, input=text, **asked)["targets"]
    tokens = models[name].count_tokens(text) + len(explained)
    monkeypatch.setattr(explanations, "MAX_TOKENS", tokens)
    assert server.ask(PATH, model=name, input=text, **asked)["targets"] == explained
    monkeypatch.setattr(explanations, "MAX_TOKENS", tokens - 1)
    error = read_error(server.post(PATH, model=name, input=text, **asked), 400)
    assert f"have {tokens} tokens" in error["message"]


def test_a_model_without_the_graphs_says_what_it_can(server: Address) -> None:
    error = read_error(server.post(PATH, model="tagger", input="a"), 400)
    assert (error["param"], error["code"]) == ("model", "wrong_model")
    assert "does not support 'explanations'; it supports: " in error["message"]
    assert "tags" in error["message"].partition("it supports: ")[2]
    told = {one["id"]: one["capabilities"] for one in server.client.get("/v1/models").json()["data"]}
    able = [name for name, capabilities in told.items() if "explanations" in capabilities]
    assert able == list(BUNDLES)
    error = read_error(server.post(PATH, input="a"), 400)
    assert error["message"].endswith("'gpt', 'labels', 'dates'")


def test_a_deadline_ends_an_explanation(server: Address, monkeypatch: pytest.MonkeyPatch) -> None:
    """Amid its targets, the third of which waits until the time is over; the next one has its turn."""
    steps: list[Job[Any]] = []
    check = Job.check

    def check_when_late(job: Job[Any]) -> None:
        steps.append(job)
        if len(steps) == 3:
            wait_until(lambda: job._error is not None)
        check(job)

    asked = {"model": "gpt", "input": PROMPT, "methods": ["integrated_gradients"], "max_new_tokens": 64}
    with monkeypatch.context() as patch:
        patch.setattr(Job, "check", check_when_late)
        late = server.post(PATH, **asked, timeout=0.5)
        assert late.status_code == 504, late.text
        after = server.post(PATH, model="gpt", input=PROMPT, answer=" earth", methods=["gradient"])
    assert after.status_code == 200
    assert sum(job is steps[0] for job in steps) <= 3


def test_on_step_ends_the_work(models: Named) -> None:
    class EnoughError(Exception):
        pass

    steps = []

    def stop() -> None:
        steps.append(1)
        if len(steps) == 3:
            raise EnoughError

    for name, texts in (("gpt", (PROMPT, " heavens and the")), ("dates", (DATE,))):
        for method in ("gradient", "integrated_gradients", "occlusion"):
            steps.clear()
            with pytest.raises(EnoughError):
                explain(models[name], *texts, methods=[method], on_step=stop)
