"""What `explain` gives, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planforge.runtime.apps.explain import METHODS, explain, gradients
from planforge.runtime.errors import ClosedError, ContextLengthError, InputError, MemoryLimitError

from ....helpers.explained import open_model
from ....helpers.patience import PATIENCE, MemoryWaits

PROMPT = "In the beginning God created the"
TEXTS: dict[str, tuple[dict[str, Any], str]] = {
    "gpt2-demo": ({"text": PROMPT, "answer": " heavens and"}, "generation"),
    "classifier": ({"text": "one small film"}, "classification"),
    "ranker": ({"text": "film", "pair": "a great man"}, "ranking"),
    "vectors": ({"text": "A film.", "pair": "A movie."}, "similarity"),
    "modernbert": ({"text": "one small film", "pair": "a great man"}, "similarity"),
    "transformer-demo": ({"text": "3 may 1998"}, "translation"),
}


@pytest.mark.parametrize("name", TEXTS)
def test_every_method_of_every_kind(explained: Callable[[str], Path], name: str) -> None:
    texts, kind = TEXTS[name]
    with open_model(explained(name) / "bundle") as model:
        result: Any = explain(model, **texts, methods=METHODS, factors=2)
    assert result.kind == kind
    assert result.to_json()["other"] == (texts["pair"] if kind == "similarity" else None)
    A = len(result.targets)
    T = len(result.tokens)
    assert set(result.saliency) == {
        "gradient_norm",
        "gradient_x_input",
        "integrated_gradients",
        "occlusion",
    }
    for rows in result.saliency.values():
        assert rows.shape == (A, T)
    read = ~np.isnan(result.saliency["gradient_norm"])
    assert np.allclose(np.nansum(result.saliency["gradient_norm"], axis=1), 1, atol=1e-5)
    assert (read == ~np.isnan(result.saliency["integrated_gradients"])).all()
    if kind in ("generation", "translation"):
        for number, target in enumerate(result.targets):
            assert result.tokens[target.token].text == target.text
            assert read[number, : target.token].all() and not read[number, target.token :].any()
            assert abs(sum(one.probability for one in target.likeliest)) <= 1 + 1e-6
            assert list(target.likeliest) == sorted(target.likeliest, key=lambda one: -one.probability)
    else:
        assert read.all()
    assert result.lens.ranks.shape[1] == A
    assert (result.lens.ranks >= 1).all()
    for attention in result.attention.values():
        assert attention.weights.shape[2:] == (len(attention.queries), len(attention.keys))
        sums = attention.weights.sum(-1)
        assert (sums < 1 + 1e-5).all()  # less where a token that is not shown is looked at
    assert result.neurons.activations.shape == (2, T)
    json.dumps(result.to_json(), allow_nan=False)


@pytest.mark.parametrize("name", TEXTS)
def test_each_method_alone(explained: Callable[[str], Path], name: str) -> None:
    with open_model(explained(name) / "bundle") as model:
        results = {
            method: explain(model, **TEXTS[name][0], methods=[method], factors=2) for method in METHODS
        }
    for method, result in results.items():
        assert bool(result.saliency) == (method in ("gradient", "integrated_gradients", "occlusion"))
        assert (result.lens is not None) == (method == "lens")
        assert bool(result.attention) == (method == "attention")
        assert (result.neurons is not None) == (method == "neurons")


def test_the_answer_is_the_models_own_unless_it_is_given(gpt2: Any) -> None:
    own: Any = explain(gpt2, PROMPT, max_new_tokens=3)
    assert "".join(target.text for target in own.targets) == gpt2.generate(PROMPT, max_new_tokens=3).text
    assert (own.lens.ranks[-1] == 1).all()  # the greedy token is the likeliest after the last layer
    theirs = explain(gpt2, PROMPT, " sea")
    assert [token.text for token in theirs.tokens if token.part == "answer"] == [" sea"]
    by_ids = explain(gpt2, [token.id for token in theirs.tokens[:-1]], [theirs.tokens[-1].id])
    assert np.array_equal(by_ids.saliency["gradient_norm"], theirs.saliency["gradient_norm"], equal_nan=True)
    text = "".join(token.text for token in theirs.tokens[:-1])
    assert text == PROMPT
    assert all(PROMPT[token.start : token.end] == token.text for token in theirs.tokens[:-1])


def test_tokens_of_a_text_are_its_characters(explained: Callable[[str], Path]) -> None:
    text = "Great FILMS, Zoë!"
    with open_model(explained("vectors") / "bundle") as model:
        result: Any = explain(model, text, pair="a movie", methods=["gradient"])
    own = [token for token in result.tokens if token.part == "text"]
    assert "".join(token.text for token in own) == text
    assert [token.text for token in result.tokens if token.part == "special"] == ["[CLS]", "[SEP]"]


def test_watched_words_have_ranks_of_their_own(gpt2: Any) -> None:
    result: Any = explain(gpt2, PROMPT, " heavens and", watch=[" earth", " and"])
    earth, others = result.lens.watched
    assert earth.text == " earth" and earth.ranks.shape == result.lens.ranks.shape
    last = [target.text for target in result.targets].index(" and")
    assert np.array_equal(others.ranks[:, last], result.lens.ranks[:, last])


def test_occlusion_is_the_fall_of_the_log_probability(gpt2: Any) -> None:
    result = explain(gpt2, PROMPT, " earth", methods=["occlusion"])
    ids = [token.id for token in result.tokens]
    whole = gpt2.score(ids).logprobs[-1]
    for place in range(len(ids) - 1):
        without = gpt2.score([*ids[:place], *ids[place + 1 :]]).logprobs[-1]
        assert result.saliency["occlusion"][0, place] == pytest.approx(whole - without, abs=1e-5)


def test_occlusion_of_a_translation(explained: Callable[[str], Path]) -> None:
    """A character's fall, by the public method: what a text without it gets."""
    with open_model(explained("transformer-demo") / "bundle") as model:
        text = "3 may 1998"
        result: Any = explain(model, text, methods=["occlusion"])
        translation = [target.text for target in result.targets]
        for place in (3, len(text) - 1):  # a space that begins a text would be dropped
            other: Any = explain(
                model, text[:place] + text[place + 1 :], "".join(translation[:-1]), methods=["occlusion"]
            )
            falls = [
                np.log(target.probability) - np.log(without.probability)
                for target, without in zip(result.targets[:-1], other.targets, strict=True)
            ]
            own = result.saliency["occlusion"][:-1, place]
            assert own == pytest.approx(np.array(falls), abs=1e-3)


def test_a_bundle_without_graphs_can_occlude(whole_bundle: Path) -> None:
    """In int8, by the graph that answers."""
    with open_model(whole_bundle, precision="int8") as model:
        result: Any = explain(model, PROMPT, " earth")
        assert set(result.saliency) == {"occlusion"}
        assert result.lens is None and not result.attention
        with pytest.raises(
            InputError, match=r"export it again: `planforge export gpt2-demo .* --outputs explain"
        ):
            explain(model, PROMPT, " earth", methods=["lens"])
        whole = model.score([token.id for token in result.tokens]).logprobs[-1]
        assert result.targets[0].probability == pytest.approx(np.exp(whole))


def test_no_torch_is_loaded(explained: Callable[[str], Path], tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    code = f"""
import sys
from planforge.runtime import load
from planforge.runtime.apps.explain import explain
with load({str(explained("gpt2-demo") / "bundle")!r}) as model:
    explain(model, "In the beginning", max_new_tokens=2).to_html({str(page)!r})
print([name for name in ("torch", "onnx", "transformers", "sklearn") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    assert "beginning" in page.read_text() or "ning" in page.read_text()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"methods": ["gradients"]}, "did you mean 'gradient'"),
        ({"objective": "loss"}, "objective='loss' is not one of logit, probability"),
        ({"watch": ["Mesopotamia"]}, "watch takes words of one token"),
        ({"watch": [" a"] * 17}, "at most 16"),
        ({"factors": 0, "methods": ["neurons"]}, "factors=0 must be"),
        ({"factors": 60, "methods": ["neurons"]}, "factors=60 must be from 1 to the text's"),
        ({"answer": ""}, "the answer is empty"),
        ({"answer": [5000]}, "5000"),
        ({"prompt": ""}, "the prompt is empty"),
        ({"methods": [3]}, "method 3 is not one of"),
        ({"methods": ["gradient"], "watch": [" earth"]}, "watch needs the method lens"),
    ],
)
def test_choices_that_cannot_be(gpt2: Any, options: dict[str, Any], words: str) -> None:
    options = {"prompt": PROMPT, "answer": " earth", **options}
    with pytest.raises(InputError, match=words):
        explain(gpt2, options.pop("prompt"), options.pop("answer"), **options)


def test_what_an_encoder_refuses(
    explained: Callable[[str], Path], head_bundle: Callable[[str], Path]
) -> None:
    with (
        open_model(explained("classifier") / "bundle") as model,
        pytest.raises(InputError, match="is not one of"),
    ):
        explain(model, "a film", "no such label")
    with open_model(explained("vectors") / "bundle") as model:
        with pytest.raises(InputError, match="pair=TEXT"):
            explain(model, "a film")
        with pytest.raises(InputError, match="the pair is empty"):
            explain(model, "a film", pair="")
        with pytest.raises(InputError, match="the text is empty"):
            explain(model, "", pair="a film")
        with pytest.raises(ContextLengthError, match="the pair has 102 tokens"):
            explain(model, "a film", pair="a " * 100)
        with pytest.raises(InputError, match="has no labels"):
            explain(model, "a film", "good", pair="a movie")
    with open_model(head_bundle("tagger")) as model, pytest.raises(InputError, match="token_classification"):
        explain(model, "a film")


@pytest.mark.parametrize(
    ("translation", "words"),
    [
        ("", "is empty"),
        ([], "is empty"),
        ([99999], "is not from 0 to"),
        ([5] * 2000, "2000 tokens"),
        (5, "must be"),
    ],
)
def test_translations_that_cannot_be(explained: Callable[[str], Path], translation: Any, words: str) -> None:
    bundle = explained("transformer-demo") / "bundle"
    with open_model(bundle) as model, pytest.raises(InputError, match=words):
        explain(model, "3 may 1998", translation)


def test_a_page_that_cannot_be_written(gpt2: Any, tmp_path: Path) -> None:
    result = explain(gpt2, PROMPT, " earth", methods=["gradient"])
    for path in (tmp_path, tmp_path / "no" / "page.html"):
        with pytest.raises(InputError, match="cannot be written"):
            result.to_html(path)
    assert not list(tmp_path.iterdir())


def test_too_long_and_closed(explained: Callable[[str], Path]) -> None:
    with open_model(explained("gpt2-demo") / "bundle") as model:
        with pytest.raises(ContextLengthError, match="the context holds 256"):
            explain(model, [5] * 255, [5] * 2)
        with pytest.raises(ContextLengthError, match="the model takes 255"):
            explain(model, [5] * 300)
        explain(model, [5] * 3, [5])
    with (
        open_model(explained("transformer-demo") / "bundle") as model,
        pytest.raises(ContextLengthError, match="Explain a shorter one"),
    ):
        explain(model, "3" * 100)
    with open_model(explained("gpt2-demo") / "bundle") as model:
        pass
    with pytest.raises(ClosedError):
        explain(model, [5] * 3, [5])


def test_points_are_taken_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of long texts, with the same result: the integral of squares is the squares."""
    sizes: list[int] = []

    def square(given: Any) -> Any:
        sizes.append(given[0].shape[0] * given[0].shape[1])
        return [2 * given[0]], (given[0] ** 2).sum((1, 2))

    embeddings = np.random.default_rng(0).standard_normal((20, 3)).astype(np.float32)
    for most in (1024, 45, 5):
        sizes.clear()
        monkeypatch.setattr(gradients, "MAX_TOKENS", most)
        integral = gradients.integrate(square, [embeddings])
        assert integral.contributions == pytest.approx((embeddings**2).sum(1), rel=1e-5)
        assert max(sizes) == {1024: 160, 45: 40, 5: 20}[most]


def test_who_waits_for_memory_is_told_of_the_close(
    explained: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another call has all of it; closing does not wait for it either."""
    waits = MemoryWaits(monkeypatch)
    errors: list[Exception] = []
    model = open_model(explained("gpt2-demo") / "bundle", memory_limit=150_000_000)
    budget = model.decoder.budget
    held = budget.hold(budget.count_available(), "a test")

    def explain_one() -> None:
        try:
            explain(model, PROMPT, " earth", methods=["gradient"])
        except ClosedError as error:
            errors.append(error)

    waiting = threading.Thread(target=explain_one)
    waiting.start()
    waits.wait()
    assert waiting.is_alive()
    model.close()
    waiting.join(PATIENCE)
    assert not waiting.is_alive() and len(errors) == 1
    held.release()


def test_a_memory_limit_counts_what_explains(explained: Callable[[str], Path]) -> None:
    """Its weights, which are given back, and what a gradient takes."""
    bundle = explained("gpt2-demo") / "bundle"
    with (
        open_model(bundle, memory_limit=20_000_000) as model,
        pytest.raises(MemoryLimitError, match="weights of explanations"),
    ):
        explain(model, PROMPT, " earth")
    with open_model(bundle, memory_limit=150_000_000) as model:
        free = model.decoder.budget.count_available()
        explain(model, PROMPT, " earth")
        assert model.decoder.budget.count_available() == free
        with pytest.raises(MemoryLimitError, match="Explain a shorter text"):
            explain(model, [5] * 250, [6], methods=["integrated_gradients"])
        explain(model, PROMPT, " earth")


@settings(max_examples=15, deadline=None)
@given(ids=st.lists(st.integers(0, 2047), min_size=2, max_size=12), data=st.data())
def test_any_tokens(gpt2: Any, ids: list[int], data: st.DataObject) -> None:
    """Shares sum to 1, no later token counts, and JSON has every number."""
    begin = data.draw(st.integers(1, len(ids) - 1))
    result = explain(gpt2, ids[:begin], ids[begin:])
    for number, row in enumerate(result.saliency["gradient_norm"]):
        assert np.isnan(row[begin + number :]).all()
        assert row[: begin + number].sum() == pytest.approx(1, abs=1e-4)
    json.dumps(result.to_json(), allow_nan=False)


def test_a_picture(gpt2: Any, tmp_path: Path) -> None:
    result = explain(gpt2, PROMPT, " heavens and the")
    for method in (None, "gradient_x_input"):
        figure = result.plot(method)
        figure.savefig(tmp_path / "picture.png")
        labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
        assert labels == [target.text for target in result.targets]
    with pytest.raises(InputError, match="is not one of gradient_norm"):
        result.plot("occlusion")
