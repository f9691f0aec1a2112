"""Requests of many threads to one encoder, or translator, get what each of them gets alone."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from planforge.runtime import (
    ClosedError,
    ContextLengthError,
    InputError,
    TextEncoder,
    Translator,
)
from planforge.runtime.scheduling.batched_model import BatchedModel

from ...helpers.patience import PATIENCE, wait_until
from ...helpers.results import TIGHT, assert_equal
from ...helpers.translation import SENTENCES

WORDS = "hello world the plan is it . a [MASK] friend"
TEXTS = [
    " ".join(WORDS.split()[start % 7 : start % 7 + 1 + start % 3] * (1 + start % 5)) for start in range(40)
]
MASKED = [f"{text} [MASK]" for text in TEXTS]
PAIRS = [(text, TEXTS[-1 - number]) for number, text in enumerate(TEXTS)]
LONG = "hello world, the plan is it. " * 30


@pytest.fixture(scope="module")
def model(head_bundle: Callable[[str], Path]) -> Iterator[TextEncoder]:
    with TextEncoder.load(head_bundle("pretrained")) as opened:
        yield opened


@pytest.fixture
def encoder(model: TextEncoder) -> Iterator[TextEncoder]:
    """The same model, to which no request was submitted yet."""
    fresh = TextEncoder(model.encoder, model.tokenizer, model.defaults)
    yield fresh
    fresh._batcher.close()


def run_together(submit: list[Callable[[], Future[Any]]]) -> list[Any]:
    """Submit each request in a thread of its own, all at once; return their results."""
    gate = threading.Barrier(len(submit))

    def wait_and_submit(one: Callable[[], Future[Any]]) -> Any:
        gate.wait()
        return one().result(PATIENCE)

    with ThreadPoolExecutor(len(submit)) as pool:
        return list(pool.map(wait_and_submit, submit))


def submits(model: Any, call: tuple[Any, ...], options: dict[str, Any]) -> Callable[[], Future[Any]]:
    return lambda: model.submit(*call, **options)


def count_batches(model: BatchedModel) -> list[float]:
    """Return a list that will have the number of requests of each turn."""
    batches: list[float] = []
    model.schedule(observe=lambda name, value: batches.append(value) if name == "batch" else None)
    return batches


class Held:
    """Holds a model's engine at its first turn, which is that of one request of this.

    Attributes:
        batches: the number of requests of each turn.
    """

    def __init__(self, model: TextEncoder, **options: Any) -> None:
        self.batches: list[float] = []
        self._may_go_on = threading.Event()
        model.schedule(observe=self._observe, **options)
        model.submit("embed", ["hello"])
        wait_until(lambda: bool(self.batches))

    def let(self) -> None:
        self._may_go_on.set()

    def let_when(self, holds: Callable[[], bool]) -> None:
        wait_until(holds)
        self.let()

    def _observe(self, name: str, value: float) -> None:
        if name == "batch":
            self.batches.append(value)
            assert self._may_go_on.wait(PATIENCE)


def test_many_tasks_of_many_threads_are_what_each_is_alone(encoder: TextEncoder) -> None:
    held = Held(encoder)
    calls: list[tuple[str, Any, dict[str, Any]]] = []
    for start in range(0, 40, 5):
        part = slice(start, start + 5)
        calls += [
            ("embed", TEXTS[part], {"pooling": "mean"}),
            ("embed", [*TEXTS[part], LONG], {"pooling": "max", "truncation": "windows", "prompt": "hello "}),
            ("features", TEXTS[part], {}),
            ("next_sentence", PAIRS[part], {}),
            ("fill_mask", MASKED[part], {"top_k": 2 + start % 2}),
        ]
    want = [list(encoder.iterate(task, texts, **options)) for task, texts, options in calls]  # type: ignore[call-overload]
    threading.Thread(
        target=lambda: held.let_when(lambda: encoder.count_requests() == (len(calls), 1))
    ).start()
    got = run_together([submits(encoder, call[:2], call[2] | {"client": call[0]}) for call in calls])
    assert_equal(got, want)
    assert max(held.batches) > 1  # some did run together
    wait_until(lambda: encoder.count_requests() == (0, 0))


@pytest.mark.parametrize(
    ("name", "task", "texts"),
    [
        ("classifier", "classify", [*TEXTS[:6], *PAIRS[:6]]),
        ("ranker", "rank", PAIRS[:12]),
        ("tagger", "tag", [*TEXTS[:6], LONG]),
        ("reader", "answer", [*PAIRS[:6], ("the plan", LONG)]),
    ],
)
def test_a_head_s_task(head_bundle: Callable[[str], Path], name: str, task: Any, texts: list[Any]) -> None:
    with TextEncoder.load(head_bundle(name)) as encoder:
        batches = count_batches(encoder)
        want = list(encoder.iterate(task, texts))
        requests = [submits(encoder, (task, texts[part : part + 3]), {}) for part in range(0, len(texts), 3)]
        got = [result for results in run_together(requests) for result in results]
    for number, result in enumerate(got):
        if task == "rank":  # its place in its own request
            assert result.index == number % 3
            object.__setattr__(result, "index", number)
    assert_equal(got, want)
    assert sum(batches) >= len(requests)


def test_requests_with_the_same_outputs_share_batches(encoder: TextEncoder) -> None:
    """Prompts, truncation and the like are no reason to run apart."""
    held = Held(encoder)
    options: list[dict[str, Any]] = [
        {"prompt": "a "},
        {"truncate_dim": 4},
        {"pooling": "max"},
        {"truncation": "tail"},
    ]
    futures = [encoder.submit("embed", ["world"], **each) for each in options]
    held.let()
    vectors = [future.result(PATIENCE)[0].vector for future in futures]
    assert held.batches == [1, 4]
    for vector, each in zip(vectors, options, strict=True):
        np.testing.assert_allclose(vector, encoder.embed("world", **each), atol=TIGHT)


def test_a_long_text_takes_turns_with_short_ones(encoder: TextEncoder) -> None:
    held = Held(encoder, turn_tokens=encoder.defaults.max_length)
    done: list[str] = []
    long = encoder.submit("embed", [LONG * 20], truncation="windows")
    short = encoder.submit("embed", ["world"])
    long.add_done_callback(lambda _: done.append("long"))
    short.add_done_callback(lambda _: done.append("short"))
    held.let()
    long.result(PATIENCE)
    assert done == ["short", "long"]


def test_what_is_wrong_is_raised_at_the_call(encoder: TextEncoder) -> None:
    submit: Any = encoder.submit
    calls: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (InputError, "task 'embedd' is not one of", lambda: submit("embedd", ["a"])),
        (InputError, "needs the head", lambda: submit("tag", ["a"])),
        (InputError, "unknown option 'pool'", lambda: submit("embed", ["a"], pool="mean")),
        (InputError, "progress=True does not go with submit", lambda: submit("embed", ["a"], progress=True)),
        (InputError, "give several texts", lambda: submit("embed", "a")),
        (InputError, "must be a str", lambda: submit("embed", ["a", 3])),
        (
            InputError,
            r"texts\[1\]: the text 'a' has no \[MASK\]",
            lambda: submit("fill_mask", ["[MASK]", "a"]),
        ),
        (ContextLengthError, r"texts\[1\]", lambda: submit("embed", ["a", LONG], truncation=None)),
        (InputError, "timeout", lambda: submit("embed", ["a"], timeout=0)),
    ]
    for error, message, call in calls:
        with pytest.raises(error, match=message):
            call()
    assert encoder.submit("embed", []).result() == []
    with pytest.raises(InputError, match="observe=3 must be a function"):
        encoder.schedule(observe=3)  # type: ignore[arg-type]


def test_dropped_tokens_are_told(model: TextEncoder, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "planforge"):
        (result,) = model.submit("embed", [LONG], truncation="head").result(PATIENCE)
    assert result.dropped > 0
    assert f"1 of 1 texts were longer than the {model.defaults.max_length} tokens" in caplog.text


def test_translations_of_many_threads_are_what_each_is_alone(marian_bundle: Path) -> None:
    with Translator.load(marian_bundle) as translator:
        batches = count_batches(translator)
        searches: list[dict[str, Any]] = [
            {"num_beams": 1},
            {"num_beams": 3, "n_best": 2},
            {"max_new_tokens": 4},
        ]
        calls = [(SENTENCES[n * 3 : n * 3 + 3], searches[n % 3]) for n in range(12)]
        want = [translator.translate(texts, **options) for texts, options in calls]
        got = run_together([submits(translator, (texts,), options) for texts, options in calls])
        for results, others in zip(got, want, strict=True):
            for result, other in zip(results, others, strict=True):
                assert [c.token_ids for c in result.candidates] == [c.token_ids for c in other.candidates]
                assert result.score == pytest.approx(other.score, abs=TIGHT)
                assert (result.text, result.finish_reason) == (other.text, other.finish_reason)
        assert max(batches) > 1
        assert translator.submit([]).result() == []
        submit: Any = translator.submit
        with pytest.raises(InputError, match=r"texts\[1\]: a text to translate is empty"):
            submit(["a", ""])
        with pytest.raises(InputError, match=r"on_token=.* does not go with submit; use translate or stream"):
            submit(["a"], on_token=print)
        with pytest.raises(ContextLengthError):
            submit(["hello " * 500])
    with pytest.raises(ClosedError):
        translator.submit(["a"])
