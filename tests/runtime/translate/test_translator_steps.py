"""A translation step by step: streams that are cancelled, on_token, and repetition_penalty."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from planforge.runtime import Chunk, InputError, Translator
from planforge.runtime.backends.ort_program import OrtProgram

from ...helpers.patience import PATIENCE
from ...helpers.translation import SENTENCES, Reference


@pytest.fixture(scope="module")
def model(marian_bundle: Path) -> Iterator[Translator]:
    with Translator.load(marian_bundle) as opened:
        yield opened


@pytest.fixture(scope="module")
def reference(marian_bundle: Path) -> Reference:
    return Reference.of(marian_bundle.parent / "marian")


@pytest.fixture(scope="module")
def long_texts(model: Translator) -> list[str]:
    """Texts whose greedy translations take many steps, of unequal number."""
    lengths = {text: len(model.translate(text, num_beams=1).token_ids) for text in SENTENCES[:40]}
    found = sorted(lengths, key=lambda text: -lengths[text])[:5]
    assert min(lengths[text] for text in found) > 3
    return found


def calls_of(model: Translator, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that names each run of the encoder and the decoder from now on."""
    calls: list[str] = []
    for name, program in (("encoder", model.encoder.program), ("decoder", model.decoder.program)):
        assert isinstance(program, OrtProgram)
        execute = program.execute

        def noted(*arguments: Any, name: str = name, execute: Any = execute) -> Any:
            calls.append(name)
            return execute(*arguments)

        monkeypatch.setattr(program, "execute", noted)
    return calls


def test_a_stream_that_is_cancelled_first_runs_nothing(
    model: Translator, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = calls_of(model, monkeypatch)
    stream = model.stream(SENTENCES[8])
    stream.cancel()
    (last,) = stream
    assert (last.text, last.token_ids, last.finish_reason) == ("", (), "cancelled")
    assert not calls


def test_a_cancelled_stream_takes_no_further_step(
    model: Translator, long_texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = model.translate(long_texts[0], num_beams=1)
    calls = calls_of(model, monkeypatch)
    stream = model.stream(long_texts[0])
    first = [next(stream), next(stream)]
    stream.cancel()
    (last,) = stream
    assert calls == ["encoder", "decoder", "decoder"]
    assert (last.token_ids, last.finish_reason, last.usage.completion_tokens) == ((), "cancelled", 2)
    assert tuple(token for chunk in first for token in chunk.token_ids) == whole.token_ids[:2]


@pytest.mark.parametrize("num_beams", [1, 3])
def test_a_submitted_request_that_is_cancelled_takes_no_further_step(
    model: Translator, long_texts: list[str], monkeypatch: pytest.MonkeyPatch, num_beams: int
) -> None:
    """What runs beside it goes on to its end, and is what it is alone."""
    calls = calls_of(model, monkeypatch)
    (alone,) = model.translate(long_texts[:1], num_beams=num_beams)
    steps_alone = calls.count("decoder")
    calls.clear()
    program: Any = model.decoder.program
    execute = program.execute
    entered = {1: threading.Event(), 3: threading.Event()}  # steps at which the engine is held
    may_go_on = {1: threading.Event(), 3: threading.Event()}

    def hold(*arguments: Any) -> Any:
        step = calls.count("decoder") + 1
        if step in entered:
            entered[step].set()
            assert may_go_on[step].wait(PATIENCE)
        return execute(*arguments)

    monkeypatch.setattr(program, "execute", hold)
    first = model.submit(long_texts[2:], num_beams=num_beams)
    assert entered[1].wait(PATIENCE)
    stays, leaves = (model.submit([text], num_beams=num_beams) for text in long_texts[:2])
    assert first.cancel()
    may_go_on[1].set()
    assert entered[3].wait(PATIENCE)  # the second step of the turn that both share
    assert leaves.cancel()
    may_go_on[3].set()
    (result,) = stays.result(PATIENCE)
    assert result.token_ids == alone.token_ids
    assert result.score == pytest.approx(alone.score, abs=1e-5)
    assert calls == ["encoder", "decoder", "encoder", *["decoder"] * steps_alone]


def test_on_token_gets_each_texts_chunks(model: Translator, long_texts: list[str]) -> None:
    texts = [*long_texts, *SENTENCES[:3]]
    told: list[list[Chunk]] = [[] for _ in texts]
    found = model.translate(
        texts, num_beams=1, batch_size=3, on_token=lambda chunk: told[chunk.index].append(chunk)
    )
    for text, result, chunks in zip(texts, found, told, strict=True):
        streamed = list(model.stream(text))
        assert [(c.text, c.token_ids, c.usage) for c in chunks] == [
            (c.text, c.token_ids, c.usage) for c in streamed
        ]
        assert "".join(map(str, chunks)) == result.text
        assert [c.finish_reason for c in chunks] == [None] * (len(chunks) - 1) + [result.finish_reason]


def test_on_token_ends_one_text(model: Translator, long_texts: list[str]) -> None:
    texts = long_texts[:3]
    whole = model.translate(texts, num_beams=1)
    calls: list[int] = []

    def end_the_second(chunk: Chunk) -> bool:
        calls.append(chunk.index)
        return chunk.index == 1 and chunk.usage.completion_tokens == 2

    found = model.translate(texts, num_beams=1, on_token=end_the_second)
    assert [r.finish_reason for r in found] == [whole[0].finish_reason, "cancelled", whole[2].finish_reason]
    assert found[1].token_ids == whole[1].token_ids[:2]
    assert calls.count(1) == 2
    assert [found[0].token_ids, found[2].token_ids] == [whole[0].token_ids, whole[2].token_ids]
    last = list(model.stream(texts[1], on_token=lambda chunk: True))
    assert [chunk.finish_reason for chunk in last] == ["cancelled"]
    assert last[0].token_ids == whole[1].token_ids[:1]


def test_on_token_is_refused_with_beams(model: Translator) -> None:
    with pytest.raises(InputError, match="on_token cannot be used with num_beams=3"):
        model.translate("hello", num_beams=3, on_token=lambda chunk: None)
    with pytest.raises(InputError, match="on_token=3 must be a function"):
        model.translate("hello", num_beams=1, on_token=3)  # type: ignore[call-overload]


@pytest.mark.parametrize("options", [{"num_beams": 1}, {"num_beams": 4}], ids=str)
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("penalty", [0.7, 1.6])
def test_repetition_penalty_as_in_transformers(
    model: Translator,
    reference: Reference,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    renormalize: bool,
    penalty: float,
) -> None:
    monkeypatch.setattr(model, "defaults", replace(model.defaults, renormalize=renormalize))
    texts = SENTENCES[:12]
    found = model.translate(texts, repetition_penalty=penalty, **options)
    assert [r.token_ids for r in found] != [r.token_ids for r in model.translate(texts, **options)]
    for text, result in zip(texts, found, strict=True):
        ((ids, score), *_) = reference.generate(
            text, repetition_penalty=penalty, renormalize_logits=renormalize, **options
        )
        assert result.token_ids == ids
        if score is not None:
            np.testing.assert_allclose(result.score, score, atol=1e-4)
