"""Results of an encoder come as their batches are computed; pairs, and texts that are too long."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from planforge.runtime import ContextLengthError, InputError, TextEncoder
from planforge.runtime.encode.encoder import Encoder
from planforge.runtime.text.reading import READ_AHEAD

from ...helpers.encoders import Case, opened

LONG = "hello world, the plan is it. " * 30


@pytest.fixture(scope="module")
def classes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    case = opened(tmp_path_factory.mktemp("classes"), "BertForSequenceClassification", seed=3, num_labels=3)
    with case.model:
        yield case


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    case = opened(tmp_path_factory.mktemp("words"), "BertForPreTraining")
    with case.model:
        yield case


class CountedProgram:
    """Counts the rows of each batch that the engine runs."""

    def __init__(self, program: Any) -> None:
        self.program = program
        self.rows: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.program, name)

    def run(self, inputs: Any, buffers: Any, outputs: Any = None) -> Any:
        self.rows.append(len(inputs["input_ids"]))
        return self.program.run(inputs, buffers, outputs)


def counted(model: TextEncoder) -> tuple[TextEncoder, CountedProgram]:
    """The same model on an engine that counts."""
    program: Any = CountedProgram(model.encoder.program)
    encoder = Encoder(program, model.encoder.artifact, model.encoder.pad)
    return TextEncoder(encoder, model.tokenizer, model.defaults), program


def texts_of_many_lengths(count: int) -> list[str]:
    lengths = np.random.default_rng(7).integers(1, 40, count)
    return ["hello " * int(length) for length in lengths]


def test_the_first_result_is_there_after_the_first_batch(classes: Case) -> None:
    model, program = counted(classes.model)
    texts = texts_of_many_lengths(READ_AHEAD)
    done: list[int] = []
    results = model.iterate("classify", texts, progress=done.append)
    first = next(results)
    assert len(program.rows) == 1
    assert done == [program.rows[0]] and done[0] <= 64
    assert first.probabilities == pytest.approx(classes.model.classify(texts[0]).probabilities, abs=1e-5)
    rest = list(results)
    assert len(rest) == READ_AHEAD - 1
    assert done == np.cumsum(program.rows).tolist()  # progress is reported after each batch
    assert len(program.rows) > 20
    for place in (1, 17, 500, READ_AHEAD - 1):  # in the order of the texts
        expected = classes.model.classify(texts[place]).probabilities
        assert rest[place - 1].probabilities == pytest.approx(expected, abs=1e-5)


def test_a_result_waits_for_its_last_window_only(classes: Case) -> None:
    model, program = counted(classes.model)
    done: list[int] = []
    options: dict[str, Any] = {"truncation": "windows", "progress": done.append, "batch_size": 1}
    results = model.iterate("classify", [LONG, *["hello"] * 4, LONG], **options)
    long = next(results)
    windows = sum(program.rows)
    assert windows >= 5 and done[-1] == 1  # the short texts have yet to run
    rest = list(results)
    assert done == [1, 2, 3, 4, 5, 6]
    assert sum(program.rows) == 2 * windows + 4
    expected = classes.model.classify(LONG, truncation="windows").probabilities
    for result in (long, rest[-1]):
        assert result.probabilities == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("size", [1, 3])
def test_no_more_texts_run_together_than_asked_for(classes: Case, size: int) -> None:
    model, program = counted(classes.model)
    texts = texts_of_many_lengths(10)
    found = model.classify(texts, batch_size=size)
    assert max(program.rows) == size and sum(program.rows) == 10
    for result, expected in zip(found, classes.model.classify(texts), strict=True):
        assert result.probabilities == pytest.approx(expected.probabilities, abs=1e-5)
    with pytest.raises(InputError, match="batch_size=1000 is more than the"):
        model.classify(texts, batch_size=1000)


def test_truncation_none_refuses_what_is_too_long(classes: Case) -> None:
    model, program = counted(classes.model)
    assert model.classify(["hello"], truncation=None)[0].dropped == 0
    tokens = len(classes.ids(LONG))
    with pytest.raises(ContextLengthError, match=rf"texts\[1\]: the text has {tokens + 2} tokens") as caught:
        model.classify(["hello", LONG], truncation=None)
    assert (caught.value.tokens, caught.value.limit) == (tokens + 2, 64)
    with pytest.raises(ContextLengthError, match=rf"the two texts have {tokens + 4} tokens"):
        model.classify("hello", LONG, truncation=None)
    assert len(program.rows) == 1  # nothing of a refused call has run
    assert model.classify(LONG).dropped == tokens - 62  # unless asked for, a task does what it did


def test_two_texts_in_a_tuple_are_refused_everywhere(classes: Case, words: Case) -> None:
    pair = ("hello", "world")
    picks: Any = classes.model  # so that a type checker lets mistakes pass
    fills: Any = words.model
    calls: list[tuple[str, Callable[[], Any]]] = [
        (r"classify\(text, pair=other\) or \[\(text, other\)\]; two texts", lambda: picks.classify(pair)),
        (r"classify\(text, pair=other\) or", lambda: picks.iterate("classify", pair)),
        (r"next_sentence\(text, other\) or", lambda: fills.next_sentence(pair)),
        (r"two texts; two texts: \[a, b\]", lambda: fills.embed(pair)),
        (r"two texts; two texts: \[a, b\]", lambda: fills.features(pair)),
        (r"two texts; two texts: \[a, b\]", lambda: fills.fill_mask(("[MASK]", "[MASK]"))),
        ("a pair of two texts is needed: next_sentence", lambda: fills.next_sentence("a")),
        (r"next_sentence\(text, other\) takes two texts", lambda: fills.next_sentence("a", ["b"])),
        (r"classify\(text, pair=other\) takes two texts", lambda: picks.classify(["a"], "b")),
        ("not NoneType", lambda: picks.classify(None)),
        ("not NoneType", lambda: fills.next_sentence(None)),
        ("not NoneType", lambda: fills.fill_mask(None)),
        ("a text must be a str, and a pair .*, not None", lambda: picks.classify([None])),
    ]
    for message, call in calls:
        with pytest.raises(InputError, match=message):
            call()
