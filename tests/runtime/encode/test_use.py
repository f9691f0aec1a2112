"""How TextEncoder is used: one text or many, streams, mistakes, threads, limits."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from planforge.runtime import TextEncoder, load
from planforge.runtime.errors import ClosedError, InputError, ManifestError, MemoryLimitError
from planforge.runtime.text.reading import READ_AHEAD, count_read_ahead, split_into_chunks

LONG = "The quick brown fox jumps over the lazy dog, while 我在北京 looks on. " * 30


@pytest.fixture(scope="module")
def model(minilm_bundle: Path) -> Iterator[TextEncoder]:
    encoder: TextEncoder
    with TextEncoder.load(minilm_bundle) as encoder:
        yield encoder


def test_one_text_gives_one_result_and_several_a_list(model: TextEncoder) -> None:
    assert model.embed("a").shape == (384,)
    assert model.embed(["a"]).shape == (1, 384)
    assert model.embed(("a", "b", "c")).shape == (3, 384)
    assert model.embed(iter(())).shape == (0, 384) and model.embed([]).dtype == np.float32
    assert model.features([]) == []
    assert list(model.iterate("embed", [])) == []
    assert model.features("a").tokens == ("[CLS]", "a", "[SEP]")
    for texts in (["a", "b"], iter("ab")):
        assert [f.tokens[1:-1] for f in model.features(texts)] == [("a",), ("b",)]


def test_a_stream_reads_no_more_ahead_than_it_says(model: TextEncoder) -> None:
    taken: list[int] = []

    def many() -> Iterator[str]:
        for number in range(4 * READ_AHEAD):
            taken.append(number)
            yield f"{number} " * (1 + number % 3)

    stream = model.iterate("embed", many())
    assert taken == []  # nothing is read before the first result is asked for
    first = [next(stream) for _ in range(READ_AHEAD)]
    assert READ_AHEAD == 1024 <= len(taken) <= READ_AHEAD + 1
    after = next(stream)
    assert len(taken) <= 2 * READ_AHEAD + 1
    for number, result in ((0, first[0]), (1, first[1]), (1001, first[1001]), (1024, after)):
        expected = model.embed(f"{number} " * (1 + number % 3))  # results are in the order of the texts
        np.testing.assert_allclose(result.vector, expected, atol=1e-5)
        assert first[5].vector @ expected < 0.99


@pytest.mark.parametrize(("batch_size", "most"), [(1, 1), (2, 16), (None, READ_AHEAD)])
def test_how_far_is_read_ahead_goes_with_the_batch_size(batch_size: int | None, most: int) -> None:
    assert count_read_ahead(batch_size) == most
    assert [len(chunk) for chunk in split_into_chunks(iter(["a"] * (most + 1)), most)] == [most, 1]


def test_progress_counts_finished_texts(model: TextEncoder) -> None:
    done: list[int] = []
    stream = model.iterate("features", ["a", LONG, "c"], progress=done.append)
    assert done == []
    list(stream)
    assert done == sorted(done) and done[-1] == 3


@pytest.mark.parametrize("texts", [5, None, b"ab", [b"ab"], ["a", None], [["a"]], [("a", "b")], [("a", 3)]])
@pytest.mark.parametrize("task", ["embed", "features"])
def test_what_is_no_text_is_refused(model: TextEncoder, task: str, texts: Any) -> None:
    anything: Any = model  # so that a type checker lets mistakes pass
    with pytest.raises(InputError, match="str"):
        getattr(anything, task)(texts)
    with pytest.raises(InputError, match="str"):
        list(anything.iterate(task, texts))


def test_unknown_options_name_those_there_are(minilm_bundle: Path) -> None:
    model: Any  # so that a type checker lets mistakes pass
    calls: list[tuple[str, Callable[[], Any]]] = [
        ("pooling='sum' is not one of 'cls', 'mean', 'max'", lambda: model.embed("a", pooling="sum")),
        ("'middle' is not one of None, 'head', 'tail'", lambda: model.embed("a", truncation="middle")),
        ("stride=-1 must be", lambda: model.features(LONG, stride=-1)),
        ("layers='first' is not one of 'embeddings', ", lambda: model.features("a", layers="first")),
        ("task 'translate' is not one of embed, embed_sparse, ", lambda: model.iterate("translate", ["a"])),
        (
            "give several texts, such as a list of str, not str",
            lambda: model.iterate("embed", "a"),
        ),
        ("lone surrogate", lambda: model.embed("a\ud800")),
        (
            "unknown option 'stribe'; did you mean 'stride'\\? There",
            lambda: model.embed("a", stribe=3),
        ),
        ("unknown option 'top_k'. There are: truncation, ", lambda: model.tag("a", top_k=3)),
        (
            "batch_size=0 must be an integer of at least 1, or left out",
            lambda: model.embed("a", batch_size=0),
        ),
        ("progress='yes' must be True", lambda: model.embed("a", progress="yes")),
        ("prompt=3 must be a str", lambda: model.embed("a", prompt=3)),
        ("leave parse_special=False out", lambda: model.fill_mask("a", parse_special=False)),
    ]
    with TextEncoder.load(minilm_bundle) as model:
        for message, call in calls:
            with pytest.raises(InputError, match=message):
                call()


def test_tasks_without_their_head_say_what_the_bundle_can_do(model: TextEncoder) -> None:
    assert model.heads == () and model.labels == ()
    calls: dict[str, Callable[[], Any]] = {
        "classify needs the head sequence_classification": lambda: model.classify("a"),
        "rank needs the head sequence_classification": lambda: model.rank("a", ["b"]),
        "next_sentence needs the head next_sentence": lambda: model.next_sentence("a", "b"),
        "fill_mask needs the head masked_lm": lambda: model.fill_mask("[MASK]"),
        "tag needs the head token_classification": lambda: model.tag("a"),
        "answer needs the head question_answering": lambda: model.answer("a", "b"),
    }
    for message, call in calls.items():
        with pytest.raises(InputError, match=f"{message}; this bundle's heads are none: it embeds texts"):
            call()


def test_threads_take_turns(model: TextEncoder) -> None:
    batches = [[f"{word} {n} " * n for n in range(1, 13)] for word in ("forge", "plan", "bread", "moon")]
    expected = [model.embed(texts) for texts in batches]
    assert np.abs(expected[0] - expected[1]).max(axis=1).min() > 0.01
    with ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            for got, alone in zip(pool.map(model.embed, batches), expected, strict=True):
                np.testing.assert_allclose(got, alone, atol=1e-6)


def test_a_closed_model_says_so(minilm_bundle: Path) -> None:
    with TextEncoder.load(minilm_bundle) as model:
        stream = model.iterate("embed", ["a"])
    model.close()
    calls: list[Callable[[], Any]] = [
        lambda: model.embed("a"),
        lambda: next(stream),
        lambda: model.features(["a"]),
    ]
    for call in calls:
        with pytest.raises(ClosedError):
            call()


def test_a_memory_limit_counts_weights_and_a_batch(minilm_bundle: Path) -> None:
    weights = sum(path.stat().st_size for path in minilm_bundle.glob("onnx/*.data"))
    assert weights > 80e6
    # A layer's results of a text of full length, 12 heads' scores, the vector that is returned, and hidden
    # states of seven layers, which the graph gives too.
    text = 4 * 256 * (3 * 1536 + 9 * 384 + 2 * 12 * 256 + 7 * 384) + 4 * 384
    limit = weights + text
    with TextEncoder.load(minilm_bundle, memory_limit=limit) as model:
        expected = model.embed([LONG] * 5)  # one at a time
    assert np.ptp(expected, axis=0).max() == 0
    with TextEncoder.load(minilm_bundle, memory_limit=limit - 1) as model:
        told = r"of weights and .* MB for 1 text of 256 tokens .*\. Texts of up to (\d+) tokens fit"
        with pytest.raises(MemoryLimitError, match=told) as caught:
            model.embed(LONG)
        found = re.search(told, str(caught.value))
        assert found is not None
        assert model.embed(LONG, max_tokens=int(found[1])).shape == (384,)
        with pytest.raises(MemoryLimitError):
            model.embed(LONG, max_tokens=int(found[1]) + 1)
    assert (caught.value.needed, caught.value.limit) == (limit, limit - 1)


def test_a_smaller_max_length_cuts_there(minilm_bundle: Path, model: TextEncoder) -> None:
    with TextEncoder.load(minilm_bundle, max_length=16) as short:
        (result,) = short.iterate("embed", [LONG])
        features = short.features(LONG, truncation="head")
        assert short.features(LONG).tokens == model.features(LONG).tokens
    assert len(features.tokens) == 16
    assert result.dropped == model.count_tokens(LONG) - 16
    np.testing.assert_allclose(result.vector, model.embed(LONG[: features.offsets[-2][1]]), atol=1e-5)
    for length in (7, 257, 16.0):
        with pytest.raises(InputError, match="max_length"):
            load(minilm_bundle, max_length=length)  # type: ignore[arg-type]


def test_what_one_text_loses_is_told_too(minilm_bundle: Path, caplog: pytest.LogCaptureFixture) -> None:
    with TextEncoder.load(minilm_bundle) as encoder:
        encoder.embed("word " * 400)
        assert "1 of 1 texts were longer than the 256 tokens" in caplog.text
        with pytest.raises(InputError, match=r"texts\[1500\] has a lone surrogate"):
            encoder.embed(["a"] * 1500 + ["\ud800"])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"labels": ["only", "two"]}, "3 classes, encoder.labels has 2"),
        ({"heads": ["question_answering"]}, "no output of the head 'question_answering'"),
        ({"max_length": 9999}, "max_length=9999 is not within"),
        ({"tokens": {"cls": 1}}, "must have cls and sep"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(
    head_bundle: Callable[[str], Path], tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    bundle = shutil.copytree(head_bundle("classifier"), tmp_path / "bundle")
    manifest = json.loads((bundle / "manifest.json").read_text())
    manifest["encoder"] |= changes
    (bundle / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ManifestError, match=words):
        load(bundle)
