"""Prompt lookup: the answers are those without, in fewer steps; and what both it and prompt reuse refuse."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planforge.runtime import Generation, TextGenerator, load
from planforge.runtime.backends.ort_backend import OrtCpuBackend
from planforge.runtime.bundle.bundle import Bundle
from planforge.runtime.decoding.decoder import Decoder
from planforge.runtime.decoding.dynamic_cache import MASKED_COLUMNS, DynamicCache
from planforge.runtime.decoding.speculative import MAX_DRAFTS, SIZES, PromptLookup
from planforge.runtime.errors import InputError

from ...helpers.decoder_graph import CONTEXT, Given, Returned, V, artifact, assert_close, expected, portable
from ...helpers.fake_program import FakeProgram
from ...helpers.generation import (
    DIALECTS,
    LOOKUP,
    REUSE,
    assert_same,
    assert_same_but_for_ties,
    dialects,
    generator,
    joined,
    margin_where_they_part,
    options,
    prompts,
    start,
    thorough,
)


@pytest.mark.parametrize(
    ("history", "draft"),
    [
        ([], []),
        ([1], []),
        ([1, 2, 3], []),
        ([1, 1], []),  # one token is no match
        ([5, 1, 2, 3, 4, 1, 2], [3, 4]),  # as long as the match
        ([1, 2, 3, 8, 1, 2, 4, 9, 1, 2], [4, 9]),  # the latest occurrence
        ([7, 1, 2, 3, 9, 8, 1, 2, 4, 9, 7, 1, 2], [3, 9, 8]),  # but a longer one first
        ([6, 6, 6], [6, 6]),  # a run goes on
        ([1, 2, 1, 2, 1], [2, 1, 2]),  # and so does a loop
        ([*range(40), *range(20)], [*range(20, 36)]),
    ],
)
def test_a_draft_is_what_followed_the_same_tokens_before(history: list[int], draft: list[int]) -> None:
    assert PromptLookup(history).draft(100) == draft
    assert PromptLookup(history).draft(1) == draft[:1]
    assert PromptLookup(history).draft(0) == []


def found_by_search(history: Sequence[int]) -> list[int]:
    """A draft as its docstring says it, found the long way."""
    for size in SIZES:
        for begin in range(len(history) - size - 1, -1, -1):
            if history[begin : begin + size] == history[len(history) - size :]:
                behind = begin + size
                length = size
                while (
                    length < min(behind, MAX_DRAFTS) and history[behind - 1 - length] == history[-1 - length]
                ):
                    length += 1
                extended = list(history)
                for _ in range(length):
                    extended.append(extended[behind + len(extended) - len(history)])
                return extended[len(history) :]
    return []


@thorough
@given(st.lists(st.integers(0, 3), max_size=40))
def test_an_index_that_grows_finds_what_a_search_finds(tokens: list[int]) -> None:
    history: list[int] = []
    lookup = PromptLookup(history)
    for token in tokens:
        history.append(token)
        assert lookup.draft(100) == found_by_search(history)


def test_a_draft_that_failed_asks_for_a_longer_match_until_one_is_right() -> None:
    history = [5, 1, 2, 3, 4, 1, 2]
    lookup = PromptLookup(history)
    assert lookup.draft(10) == [3, 4]
    lookup.update(accepted=0)
    assert lookup.draft(10) == []
    history.append(3)
    assert lookup.draft(10) == [4, 1, 2]
    lookup.update(accepted=1)
    history += [9, 5, 1]
    assert lookup.draft(10) == [2, 3]


@thorough
@given(dialect=dialects, data=st.data())
def test_a_truncated_cache_goes_on_as_if_the_rest_had_never_been(dialect: str, data: st.DataObject) -> None:
    run = start(dialect, 1)
    held: list[int] = []
    for _ in range(data.draw(st.integers(1, 12))):
        most = min(CONTEXT - len(held), 20)
        more = data.draw(st.lists(st.integers(0, V - 1), min_size=min(1, most), max_size=most))
        if more:
            held += more
            logits = np.concatenate(list(run.extend(more, chunk=data.draw(st.integers(1, 20)))))
            assert_close(logits, expected(held)[-len(more) :])
        length = data.draw(st.integers(0, len(held) + 2))
        run.truncate(length)
        held = held[:length]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_truncating_a_batch_keeps_the_first_tokens_of_every_row(dialect: str) -> None:
    rows = [[1, 2, 3, 4, 5], [6], [7, 8, 9]]
    run = start(dialect, 3)
    run.prefill(rows)
    run.decode([1, 2, 3])
    run.truncate(2)
    logits = run.decode([4, 5, 6])
    kept = [[1, 2, 4], [6, 2, 5], [7, 8, 6]]
    assert_close(logits, np.stack([expected(row)[-1] for row in kept]))


def test_a_growing_cache_masks_what_it_forgets_and_moves_together_rarely() -> None:
    widths: list[int] = []

    def watch(given: Given) -> Returned:
        widths.append(given["attention_mask"].shape[1])
        return portable(given)

    cache = DynamicCache(FakeProgram(watch), artifact("portable"), 1, CONTEXT)
    ids = np.arange(10)[None]
    cache.step(ids, np.ones_like(ids, bool), np.array([9]))
    for _ in range(5):
        cache.step(ids, np.ones_like(ids, bool), np.array([9]))
        cache.truncate(10)
    assert widths == [10, 20, 30, 40, 50, 20]  # 40 masked columns are more than MASKED_COLUMNS
    assert 30 <= MASKED_COLUMNS < 40
    assert (cache.columns, cache.forgotten) == (20, 10)


@thorough
@given(dialect=dialects, prompt=prompts, options=options, eos=st.integers(-1, V - 1))
def test_every_answer_is_the_one_without_lookup(
    dialect: str, prompt: str, options: dict[str, Any], eos: int
) -> None:
    model, steps = generator(dialect, eos=(eos,) * (eos >= 0))
    options["seed"] = 3  # draws only where an option asks for them
    plain = model.generate(prompt, **options)
    plain_steps = len(steps.fed)
    steps.fed.clear()
    found = model.generate(prompt, **LOOKUP, **options)
    assert_same(found, plain)
    assert plain_steps == len(plain.token_ids)
    # A step gives its right drafts and a token of its own, which only a draft that ends the answer lacks.
    saved = plain_steps - len(steps.fed)
    ended = found.accepted_tokens > 0 and plain.finish_reason in ("eos", "stop")
    assert saved in (found.accepted_tokens, found.accepted_tokens - ended)
    chunks = list(model.stream(prompt, **LOOKUP, **options))
    plainly = list(model.stream(prompt, **options))
    assert joined(chunks) == joined(plainly)
    for name in ("token_ids", "logprobs"):
        values, wanted = ([x for chunk in way for x in getattr(chunk, name)] for way in (chunks, plainly))
        np.testing.assert_allclose(values, wanted, rtol=0, atol=1e-4)
    assert chunks[-1].finish_reason == plainly[-1].finish_reason
    assert chunks[-1].usage == plainly[-1].usage
    assert joined(chunks) == plain.text


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize(
    ("options", "eos", "reason", "text"),
    [
        ({}, (6,), "eos", "efg"),
        ({"stop": ["gh"]}, (), "stop", "ef"),
        ({"stop": ["hijk"]}, (6,), "eos", "efg"),
        ({"max_new_tokens": 3}, (), "length", "efg"),
        ({"max_new_tokens": 60}, (), "context", "efghijkabcdefghijkabc"),
    ],
)
def test_an_answer_ends_inside_a_draft_as_it_ends_without(
    dialect: str, options: dict[str, Any], eos: tuple[int, ...], reason: str, text: str
) -> None:
    prompt = "abcdefghijkabcd"
    model, steps = generator(dialect, counts=True, eos=eos, max_length=len(prompt) + 21)
    plain = model.generate(prompt, **options)
    assert (plain.text, plain.finish_reason) == (text, reason)
    steps.fed.clear()
    found = model.generate(prompt, **options, **LOOKUP)
    assert_same(found, plain)
    # The prompt, and once or twice a step of the newest token with what followed it at first.
    assert steps.fed[1][:3] == [4, 5, 6][: len(steps.fed[1])]
    assert len(steps.fed) <= (5 if reason == "context" else 3)
    assert found.accepted_tokens == len(found.token_ids) - len(steps.fed) + (reason in ("eos", "stop"))
    assert found.drafted_tokens == sum(len(fed) - 1 for fed in steps.fed[1:])


@pytest.mark.parametrize("dialect", DIALECTS)
def test_wrong_drafts_are_taken_back(dialect: str) -> None:
    model, steps = generator(dialect, counts=True)
    found = model.generate("defdabcabd", max_new_tokens=12, **LOOKUP)  # what followed "de" was no "fg"
    assert found.text == "efghijkabcde"
    assert found.drafted_tokens > found.accepted_tokens > 0
    assert steps.fed[1][:3] == [4, 5, 3]


def test_sampling_takes_the_draws_it_takes_without_lookup() -> None:
    model, _ = generator("inplace")
    drawn: dict[str, Any] = {"temperature": 1.0, "top_k": 3, "seed": 5, "max_new_tokens": 48}
    plain = model.generate("abab", **drawn)
    found = model.generate("abab", **drawn, **LOOKUP)
    assert_same(found, plain)
    assert found.drafted_tokens > found.accepted_tokens > 0
    assert plain.token_ids != model.generate("abab", **{**drawn, "seed": 6}).token_ids


@pytest.mark.parametrize("how", [LOOKUP, REUSE, {**LOOKUP, **REUSE}])
def test_several_prompts_run_one_by_one_with_the_answers_of_a_batch(how: dict[str, Any]) -> None:
    prompts = ["abcabc", "kkk", "abcabd", "h" * 30, "abcabc"]
    drawn: dict[str, Any] = {"temperature": 9.0, "seed": 1, "max_new_tokens": 20}
    batch = generator("inplace")[0].generate(prompts, **drawn)
    model, steps = generator("inplace")
    found = model.generate(prompts, **how, **drawn)
    for one, want in zip(found, batch, strict=True):
        assert_same(one, want)
    assert batch[0].token_ids != batch[4].token_ids  # a row has draws of its own
    assert len(steps.fed) >= len(prompts)
    assert model.generate([], **how) == []


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"speculative": "ngram"}, r"speculative='ngram' is not one of None, 'prompt-lookup'"),
        ({"speculative": True}, "speculative=True"),
        ({"speculative": []}, r"speculative=\[\]"),
        ({"reuse_prompt": 1}, "reuse_prompt=1 must be True or False"),
        ({"reuse": True}, r"unknown option 'reuse'.* There are: .*speculative, reuse_prompt"),
        ({"sampling": None}, r"unknown option 'sampling'"),
    ],
)
def test_options_that_make_no_sense_are_named(given: dict[str, Any], words: str) -> None:
    model, steps = generator("inplace")
    for call in (model.generate, model.stream):
        with pytest.raises(InputError, match=words):
            call("abc", **given)
    assert not steps.fed


def test_one_bad_prompt_of_several_fails_before_anything_runs() -> None:
    model, steps = generator("inplace")
    for how in (LOOKUP, {}):
        with pytest.raises(InputError, match="prompt is empty"):
            model.generate(["abc"] * 20 + [""], **how)
    assert not steps.fed


# The trained demo


@pytest.fixture(scope="module")
def model(demo_bundle: Path) -> Any:
    with load(demo_bundle, threads=1) as generator:
        yield generator


BEGINNINGS = [
    *("And the", "Then said", "Now when", "In those days", "Thus saith", "For the", "Blessed be"),
    *("And it came to pass that", "Behold, behold, behold,", "12 And he, and he"),
]
NAMES = ["LORD", "king", "Jesus", "children of Israel", "priest", "Moses", "earth", "x", "house of", "city;"]
HUNDRED = [f"{beginning} {name}" for beginning in BEGINNINGS for name in NAMES]


def test_the_greedy_tokens_of_a_hundred_prompts_are_those_without_lookup(model: TextGenerator) -> None:
    plain = [model.generate(prompt, max_new_tokens=24) for prompt in HUNDRED]
    found = [model.generate(prompt, max_new_tokens=24, **LOOKUP) for prompt in HUNDRED]
    assert len(set(HUNDRED)) == 100
    assert len({answer.token_ids for answer in plain}) > 50
    for prompt, one, other in zip(HUNDRED, found, plain, strict=True):
        assert_same_but_for_ties(model, prompt, one, other)
    assert sum(one.token_ids == other.token_ids for one, other in zip(found, plain, strict=True)) >= 99
    accepted = sum(one.accepted_tokens for one in found)
    drafted = sum(one.drafted_tokens for one in found)
    assert drafted > accepted > 200  # some were right and some were not


@pytest.mark.parametrize(("precision", "same"), [("int8", 95), ("int4", 80)])
def test_quantized_models_answer_alike_with_lookup_but_for_ties(
    whole_bundle: Path, precision: str, same: int
) -> None:
    """Rows of a product are rounded alike however many there are, but sums may be added in another order.

    So logits move a little with the number of tokens in a pass, the more the coarser the weights.
    """
    with TextGenerator.load(whole_bundle, precision=precision, threads=1) as small:
        plain = [small.generate(prompt, max_new_tokens=24) for prompt in HUNDRED]
        found = [small.generate(prompt, max_new_tokens=24, **LOOKUP) for prompt in HUNDRED]
        apart = [
            margin_where_they_part(small, *both)
            for both in zip(HUNDRED, found, plain, strict=True)
            if both[1].token_ids != both[2].token_ids
        ]
    assert len({answer.token_ids for answer in plain}) > 50
    assert sum(answer.accepted_tokens for answer in found) > 200
    assert len(apart) <= 100 - same
    assert all(margin < 0.05 for margin in apart)


def test_every_dialect_answers_alike_with_lookup_and_reuse(demo_bundle: Path, model: TextGenerator) -> None:
    opened = Bundle.open(demo_bundle)
    long = " ".join(HUNDRED[::5])
    graphs = [graph for graph in opened.manifest.artifacts if graph.precision == "fp32"]
    assert len(graphs) >= 2
    for graph in graphs:
        with TextGenerator(
            Decoder(OrtCpuBackend(threads=1).open(opened, graph), graph),
            model.tokenizer,
            model.defaults,
            max_length=model.max_length,
        ) as other:
            for prompt in HUNDRED[::9]:
                plain = other.generate(prompt, max_new_tokens=24)
                found = other.generate(prompt, max_new_tokens=24, **LOOKUP, **REUSE)
                assert_same_but_for_ties(other, prompt, found, plain)
            plain = other.generate(long, max_new_tokens=30)
            first = other.generate(long, max_new_tokens=30, **REUSE)
            second = other.generate(long, max_new_tokens=30, **REUSE)
            for found in (first, second):
                assert_same_but_for_ties(other, long, found, plain)
            assert second.prompt_tokens_reused == other.count_tokens(long) - 1


def test_a_stop_string_and_a_stream_with_lookup(model: TextGenerator) -> None:
    prompt = HUNDRED[-1]
    full = model.generate(prompt, max_new_tokens=40).text
    stop = full[25:30]
    answer = model.generate(prompt, max_new_tokens=40, stop=stop, **LOOKUP)
    assert (answer.finish_reason, answer.text) == ("stop", full[: full.index(stop)])
    chunks = list(model.stream(prompt, max_new_tokens=40, **LOOKUP))
    assert joined(chunks) == full
    assert max(len(chunk.token_ids) for chunk in chunks) > 1  # a chunk for each step
    assert sum(len(chunk.token_ids) for chunk in chunks) == chunks[-1].usage.completion_tokens == 40


def test_threads_that_look_up_and_reuse_get_their_own_answers(model: TextGenerator) -> None:
    prompts = HUNDRED[::20]
    plain = [model.generate(prompt, max_new_tokens=12) for prompt in prompts]
    found: dict[tuple[int, int], Generation] = {}

    def work(thread: int) -> None:
        for number in range(len(prompts)):
            index = (number + thread) % len(prompts)
            found[thread, index] = model.generate(prompts[index], max_new_tokens=12, **LOOKUP, **REUSE)

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3 * len(prompts)
    for (_, index), answer in found.items():
        assert_same_but_for_ties(model, prompts[index], answer, plain[index])
