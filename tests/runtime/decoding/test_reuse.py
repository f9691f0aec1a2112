"""Prompt reuse: the answers are those without, in shorter steps."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planforge.runtime import Generation
from planforge.runtime.decoding.cache_shapes import count_cache_bytes
from planforge.runtime.errors import BackendError, ClosedError, MemoryLimitError

from ...helpers.decoder_graph import CONTEXT, artifact
from ...helpers.generation import DIALECTS, LOOKUP, REUSE, assert_same, dialects, generator, prompts, thorough
from ...helpers.patience import PATIENCE, MemoryWaits


@thorough
@given(
    dialect=dialects,
    calls=st.lists(st.tuples(prompts, st.integers(0, 8), st.integers(1, 25), st.booleans()), max_size=6),
)
def test_answers_that_reuse_a_prompt_are_those_without(
    dialect: str, calls: list[tuple[str, int, int, bool]]
) -> None:
    model, steps = generator(dialect)
    before: Generation | None = None
    prompt = ""
    for text, keep, most, lookup in calls:
        held = prompt + (before.text if before else "")
        prompt = (held[: len(held) * keep // 8] + text)[: CONTEXT - 1]
        how = {**REUSE, **(LOOKUP if lookup else {}), "max_new_tokens": most}
        steps.fed.clear()
        found = model.generate(prompt, **how)
        shared = next((n for n, (a, b) in enumerate(zip(held[:-1], prompt, strict=False)) if a != b), None)
        common = min(len(held[:-1]), len(prompt)) if shared is None else shared
        assert found.prompt_tokens_reused == min(common, len(prompt) - 1)
        assert len(steps.fed[0]) == len(prompt) - found.prompt_tokens_reused
        assert_same(found, generator(dialect)[0].generate(prompt, max_new_tokens=most))
        before = found


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_chat_that_grows_computes_only_what_is_new(dialect: str) -> None:
    model, steps = generator(dialect)
    chat = "abcabcab"
    for turn in range(4):
        steps.fed.clear()
        answer = model.generate(chat, max_new_tokens=6, **REUSE, **LOOKUP)
        new = len(chat) if turn == 0 else 1 + len("kj")  # the last token of an answer was never fed
        assert (len(steps.fed[0]), answer.prompt_tokens_reused) == (new, len(chat) - new)
        chat += answer.text + "kj"
    model.forget_prompt()
    assert model.generate(chat, max_new_tokens=1, **REUSE).prompt_tokens_reused == 0


def test_nothing_is_kept_or_reused_unless_asked_for() -> None:
    model, _ = generator("inplace")
    model.generate("abcdef", max_new_tokens=3)
    model.generate("abcdef", max_new_tokens=3, **LOOKUP)
    assert model.generate("abcdef", max_new_tokens=3, **REUSE).prompt_tokens_reused == 0
    assert model.generate("abcdef", max_new_tokens=3).prompt_tokens_reused == 0
    assert model.generate("abcdef", max_new_tokens=3, **LOOKUP).prompt_tokens_reused == 0
    assert model.generate("abcdef", max_new_tokens=3, **REUSE).prompt_tokens_reused == 5


@pytest.mark.parametrize("how", [REUSE, {**REUSE, **LOOKUP}])
def test_an_abandoned_stream_leaves_what_it_computed(how: dict[str, Any]) -> None:
    model, _ = generator("portable", counts=True)
    pieces = model.stream("abcabc", **how)
    assert [next(pieces).text, next(pieces).text] == ["d", "e"]
    # While it runs nobody else has its cache.
    assert model.generate("abcabcde", max_new_tokens=1, **REUSE).prompt_tokens_reused == 0
    pieces.close()
    answer = model.generate("abcabcdef", max_new_tokens=4, **REUSE)
    assert (answer.text, answer.prompt_tokens_reused) == ("ghij", 7)


def test_a_run_that_failed_is_not_kept() -> None:
    model, steps = generator("inplace")
    model.generate("abcdef", max_new_tokens=3, **REUSE)
    steps.fails = True
    with pytest.raises(BackendError, match="planted"):
        model.generate("abcdef", max_new_tokens=3, **REUSE)
    steps.fails = False
    assert model.generate("abcdef", max_new_tokens=3, **REUSE).prompt_tokens_reused == 0


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_kept_cache_counts_and_gives_way(dialect: str) -> None:
    whole = count_cache_bytes(artifact(dialect), 1, CONTEXT)
    small, _ = generator(dialect, memory_limit=whole - 1)
    assert small.generate("abc", max_new_tokens=2).token_ids
    with pytest.raises(MemoryLimitError, match=f"1 x {CONTEXT} tokens"):
        small.generate("abc", max_new_tokens=2, **REUSE)
    model, _ = generator(dialect, memory_limit=whole + 1)
    model.generate("abcdef", max_new_tokens=2, **REUSE)
    assert model.generate("abcdef", max_new_tokens=2, **REUSE).prompt_tokens_reused == 5  # not counted twice
    model.generate(["abcdef", "abc"], max_new_tokens=2)
    assert model.generate("abcdef", max_new_tokens=2, **REUSE).prompt_tokens_reused == 0
    roomy, _ = generator(dialect, memory_limit=3 * whole)
    roomy.generate("abcdef", max_new_tokens=2, **REUSE)
    roomy.generate(["abcdef", "abc"], max_new_tokens=2)
    assert roomy.generate("abcdef", max_new_tokens=2, **REUSE).prompt_tokens_reused == 5


def test_a_call_that_waits_gets_what_another_keeps_when_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = MemoryWaits(monkeypatch)
    model, _ = generator("inplace", memory_limit=count_cache_bytes(artifact("inplace"), 1, CONTEXT))
    running = model.stream("abcabc", **REUSE)
    next(running)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(model.generate, "abc", max_new_tokens=2)
        try:
            waits.wait()
            assert not waiting.done()
            running.close()
            assert len(waiting.result(timeout=PATIENCE).token_ids) == 2
        finally:
            model.close()


def test_a_kept_cache_belongs_to_the_thread_that_takes_it_over() -> None:
    model, _ = generator("inplace", memory_limit=count_cache_bytes(artifact("inplace"), 1, CONTEXT))
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: model.generate("abcabc", max_new_tokens=2, **REUSE)).result(timeout=PATIENCE)
    running = model.stream("abcabc", **REUSE)
    next(running)
    assert model.decoder.budget.count_held() > 0
    closing = threading.Timer(PATIENCE, model.close)  # a thread that waits for itself must not hang the tests
    closing.start()
    try:
        with pytest.raises(MemoryLimitError, match="an unfinished call of this thread"):
            model.generate("abc", max_new_tokens=2)
    finally:
        closing.cancel()
    running.close()
    assert model.generate("abc", max_new_tokens=2).token_ids


def test_a_closed_model_keeps_nothing() -> None:
    model, _ = generator("inplace", memory_limit=2**30)
    pieces = model.stream("abcabc", **REUSE)
    next(pieces)
    model.generate("abc", max_new_tokens=2, **REUSE)
    assert model.decoder.budget.count_held() > 0
    model.close()
    pieces.close()
    assert model.decoder.budget.count_held() == 0
    with pytest.raises(ClosedError):
        model.generate("abc", **REUSE)
