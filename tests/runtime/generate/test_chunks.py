"""Chunks, streams, callbacks, token ids and the rest of what a call gives beside its text."""

from __future__ import annotations

import gc
import pickle
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from planforge.exporter.checkpoints.source import DEMOS
from planforge.runtime import Chunk, Generation, TextGenerator, Usage, load
from planforge.runtime.decoding import candidates
from planforge.runtime.decoding.chunk import TopLogprob
from planforge.runtime.errors import ClosedError, ContextLengthError, InputError

from ...helpers.decoder_graph import CONTEXT
from ...helpers.generation import DIALECTS, LOOKUP, REUSE, TOKENIZER, generator, joined

WAYS: list[dict[str, Any]] = [{}, LOOKUP, REUSE]


@pytest.fixture(scope="module")
def model(demo_bundle: Path) -> Any:
    with load(demo_bundle, threads=1) as opened:
        yield opened


@pytest.mark.parametrize("how", WAYS)
def test_chunks_together_are_the_generation(how: dict[str, Any]) -> None:
    wanted = generator("inplace")[0].generate("abcabc", max_new_tokens=15, top_logprobs=2)
    chunks = list(generator("inplace")[0].stream("abcabc", max_new_tokens=15, top_logprobs=2, **how))
    assert joined(chunks) == wanted.text
    assert [token for chunk in chunks for token in chunk.token_ids] == list(wanted.token_ids)
    np.testing.assert_allclose([p for c in chunks for p in c.logprobs], wanted.logprobs, atol=1e-4)
    places = [place for chunk in chunks for place in chunk.top_logprobs]
    assert [[top.token_id for top in place] for place in places] == [
        [top.token_id for top in place] for place in wanted.top_logprobs
    ]
    assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].finish_reason == wanted.finish_reason == "length"
    for chunk in chunks:
        assert chunk.usage.prompt_tokens == 6 and chunk.index == 0
    assert chunks[-1].usage == wanted.usage == Usage(prompt_tokens=6, completion_tokens=15)
    assert wanted.usage.total_tokens == 21


def test_a_chunk_prints_as_its_text_and_the_last_one_says_why() -> None:
    model, _ = generator("inplace", counts=True)
    chunks = list(model.stream("abc", max_new_tokens=9, stop="fgh"))
    assert [str(chunk) for chunk in chunks] == ["d", "e", "", "", ""]  # what may begin "fgh" waits
    assert [chunk.token_ids for chunk in chunks] == [(3,), (4,), (5,), (6,), (7,)]
    assert [chunk.finish_reason for chunk in chunks] == [None, None, None, None, "stop"]
    assert f"{chunks[0]}" == "d"


def test_a_cancelled_stream_ends_before_its_next_step_with_what_was_held_back() -> None:
    model, steps = generator("inplace", counts=True)
    stream = model.stream("abc", max_new_tokens=9, stop="fgh")
    assert [str(next(stream)) for _ in range(3)] == ["d", "e", ""]
    fed = len(steps.fed)
    stream.cancel()
    last = next(stream)
    assert (last.text, last.token_ids, last.finish_reason) == ("f", (), "cancelled")
    assert last.usage.completion_tokens == 3
    assert list(stream) == [] and len(steps.fed) == fed
    stream.cancel()
    stream.close()


def test_a_stream_may_be_cancelled_before_it_begins_and_by_another_thread() -> None:
    model, steps = generator("inplace", counts=True)
    stream = model.stream("abc")
    stream.cancel()
    assert [chunk.finish_reason for chunk in stream] == ["cancelled"] and steps.fed == []
    stream = model.stream("abc", max_new_tokens=50)
    next(stream)
    thread = threading.Thread(target=stream.cancel)
    thread.start()
    thread.join()
    assert [chunk.finish_reason for chunk in stream] == ["cancelled"]


@pytest.mark.parametrize("how", WAYS)
def test_on_token_sees_each_step_of_each_row_and_may_end_it(how: dict[str, Any]) -> None:
    model, _ = generator("inplace", counts=True)
    seen: list[Chunk] = []

    def watch(chunk: Chunk) -> bool:
        seen.append(chunk)
        return chunk.index == 1 and chunk.usage.completion_tokens == 2

    answers = model.generate(["ab", "ef"], max_new_tokens=4, on_token=watch, **how)
    assert [answer.finish_reason for answer in answers] == ["length", "cancelled"]
    assert [answer.text for answer in answers] == ["cdef", "gh"]
    for number, answer in enumerate(answers):
        own = [chunk for chunk in seen if chunk.index == number]
        assert joined(own) == answer.text
        assert [token for chunk in own for token in chunk.token_ids] == list(answer.token_ids)
    assert len([chunk for chunk in seen if chunk.index == 1]) == 2  # none after it said True


def test_on_token_of_a_stream_and_text_that_was_held_back() -> None:
    model, _ = generator("inplace", counts=True)
    how: dict[str, Any] = {"max_new_tokens": 9, "stop": "ef"}
    chunks = list(model.stream("abc", on_token=lambda chunk: 4 in chunk.token_ids, **how))
    assert [(chunk.text, chunk.finish_reason) for chunk in chunks] == [("d", None), ("e", "cancelled")]
    answer = model.generate("abc", on_token=lambda chunk: 4 in chunk.token_ids, **how)
    assert (answer.text, answer.finish_reason) == ("de", "cancelled")
    assert model.generate("abc", on_token=lambda chunk: None, **how).finish_reason == "stop"


def test_an_error_of_on_token_is_the_callers() -> None:
    model, _ = generator("inplace")
    with pytest.raises(ZeroDivisionError):
        model.generate("abc", on_token=lambda chunk: bool(1 / 0))
    assert model.generate("abc", max_new_tokens=2).token_ids


@pytest.mark.parametrize("how", WAYS)
def test_without_logprobs_none_are_computed(how: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = generator("inplace")
    wanted = model.generate("abc", max_new_tokens=8)

    def fail(*_: Any) -> None:
        raise AssertionError("computed")

    monkeypatch.setattr(candidates, "compute_logprob", fail)
    found = model.generate("abc", max_new_tokens=8, logprobs=False, **how)
    assert (found.token_ids, found.logprobs, found.top_logprobs) == (wanted.token_ids, (), ())
    with pytest.raises(AssertionError, match="computed"):
        model.generate("abc", max_new_tokens=8)


def test_top_logprobs_are_those_of_torch(model: TextGenerator) -> None:
    prompt = "And it came to pass"
    answer = model.generate(prompt, max_new_tokens=6, top_logprobs=5, temperature=2.0, seed=1)
    reference = transformers.GPT2LMHeadModel.from_pretrained(DEMOS / "gpt2-demo").float().eval()
    ids = model.tokenizer.encode(prompt)
    with torch.no_grad():
        logits = reference(torch.tensor([[*ids, *answer.token_ids]])).logits[0]
    logprobs = logits.log_softmax(-1)[len(ids) - 1 : -1]  # of the model, whatever the temperature is
    np.testing.assert_allclose(answer.logprobs, logprobs[range(6), list(answer.token_ids)], atol=1e-4)
    wanted = logprobs.topk(5)
    assert [[top.token_id for top in place] for place in answer.top_logprobs] == wanted.indices.tolist()
    found = [[top.logprob for top in place] for place in answer.top_logprobs]
    np.testing.assert_allclose(found, wanted.values.numpy(), atol=1e-4)
    for place, token, logprob in zip(answer.top_logprobs, answer.token_ids, answer.logprobs, strict=True):
        assert all(top.logprob == logprob for top in place if top.token_id == token)
        assert [top.text for top in place] == [model.tokenizer.decode([top.token_id]) for top in place]
    assert len(model.generate(prompt, max_new_tokens=1, top_logprobs=10**6).top_logprobs[0]) > 1000


def count_objects() -> int:
    return sum(isinstance(one, TopLogprob) for one in gc.get_objects())


def test_top_logprobs_become_objects_when_they_are_read(model: TextGenerator) -> None:
    """The garbage collector would look at hundreds of thousands of them again and again."""
    before = count_objects()
    answer = model.generate("And it came", max_new_tokens=6, top_logprobs=5)
    assert count_objects() == before
    places = tuple(answer.top_logprobs)
    assert len(places) == 6 and answer.top_logprobs == places and answer.top_logprobs[1:3] == places[1:3]
    assert {answer.top_logprobs: 1}[places] == 1
    assert sum([answer.top_logprobs], ()) == places and answer.top_logprobs + places == places + places
    assert model.generate("And it came", max_new_tokens=1).top_logprobs == ()
    copied = pickle.loads(pickle.dumps(answer))
    assert copied.top_logprobs == places and type(copied.top_logprobs) is tuple


def test_ignore_eos_goes_on() -> None:
    model, _ = generator("inplace", counts=True, eos=(4,))
    assert model.generate("abc", max_new_tokens=5).finish_reason == "eos"
    answer = model.generate("abc", max_new_tokens=5, ignore_eos=True)
    assert (answer.token_ids, answer.finish_reason) == ((3, 4, 5, 6, 7), "length")
    chunks = list(model.stream("abc", max_new_tokens=5, ignore_eos=True))
    assert [len(chunk.token_ids) for chunk in chunks] == [1] * 5


def test_token_ids_get_no_special_tokens_put_before_them() -> None:
    model, steps = generator("inplace", prefix=(0,))
    model.generate("bc", max_new_tokens=1)
    model.generate([1, 2], max_new_tokens=1)
    assert steps.fed == [[0, 1, 2], [1, 2]]


# Several prompts


def test_iterate_gives_what_generate_gives_and_reads_a_batch_ahead() -> None:
    prompts = ["abc", "de", "fgh", "ab", "k", "cab", "jj"]
    how: dict[str, Any] = {"max_new_tokens": 5, "temperature": 2.0, "seed": 3}
    wanted = generator("inplace")[0].generate(prompts, **how)
    read: list[str] = []
    model, _ = generator("inplace")
    answers = model.iterate((read.append(p) or p for p in prompts), batch_size=2, **how)  # type: ignore[func-returns-value]
    assert read == []
    found = []
    for number, answer in enumerate(answers):
        found.append(answer)
        assert len(read) <= number + 2
    assert [a.token_ids for a in found] == [a.token_ids for a in wanted]
    assert list(model.iterate([])) == []


def test_batch_size_and_progress() -> None:
    model, steps = generator("inplace", counts=True)
    prompts = ["abc", "de", "fgh", "ab", "k"]
    done: list[int] = []
    wanted = [answer.text for answer in model.generate(prompts, max_new_tokens=3, progress=done.append)]
    assert done == [5] and len(steps.fed) == 3
    done.clear()
    answers = model.generate(prompts, max_new_tokens=3, batch_size=2, progress=done.append)
    assert [answer.text for answer in answers] == wanted
    assert done == [2, 4, 5] and len(steps.fed) == 3 + 9
    done.clear()
    assert [
        a.text for a in model.iterate(prompts, max_new_tokens=3, batch_size=3, progress=done.append)
    ] == wanted
    assert done == [3, 5]


def test_a_bad_prompt_is_named_by_its_number_after_the_answers_before_it() -> None:
    model, _ = generator("inplace", counts=True)
    answers = model.iterate(["a", "b", "", "c"], max_new_tokens=1)
    assert [next(answers).text, next(answers).text] == ["b", "c"]
    with pytest.raises(InputError, match=r"^prompts\[2\]: the prompt is empty"):
        next(answers)
    with pytest.raises(ContextLengthError, match=r"^prompts\[1\]: the prompt has") as caught:
        model.generate(["a", "a" * CONTEXT])
    assert (caught.value.tokens, caught.value.limit) == (CONTEXT, CONTEXT - 1)
    for several in ("abc", None, 3):
        with pytest.raises(InputError, match="iterate takes several prompts"):
            model.iterate(several)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="unknown option"):
        model.iterate(["a"], max_tokens=5)  # type: ignore[call-arg]


# Too long a prompt


@pytest.mark.parametrize("most", [1, 8, CONTEXT // 2, CONTEXT, 1000])
def test_prompts_around_the_contexts_border_get_as_many_new_tokens(most: int) -> None:
    room = min(most, CONTEXT // 2)
    for length in (CONTEXT - room, CONTEXT - room + 1, CONTEXT - 1, CONTEXT, CONTEXT + 1, 3 * CONTEXT):
        model, steps = generator("inplace", counts=True)
        prompt = [number % 11 for number in range(length)]
        answer = model.generate(prompt, max_new_tokens=most, truncation="tail")
        assert len(answer.token_ids) == room, length
        assert answer.prompt_tokens_cut == max(0, length - (CONTEXT - room))
        assert steps.fed[0] == prompt[answer.prompt_tokens_cut :]
        assert answer.usage.prompt_tokens == len(steps.fed[0])


def test_a_prompt_that_is_cut_keeps_the_special_tokens_that_begin_it() -> None:
    model, steps = generator("inplace", prefix=(0,))
    answer = model.generate("b" * (CONTEXT - 2) + "c", max_new_tokens=8, truncation="tail")
    (fed,) = [fed for fed in steps.fed if len(fed) > 1]
    assert fed == [0] + [1] * (CONTEXT - 10) + [2]
    assert (answer.prompt_tokens_cut, len(answer.token_ids)) == (8, 8)


# After close()


@pytest.mark.parametrize("dialect", DIALECTS)
def test_after_close_nothing_reaches_the_engine(dialect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, steps = generator(dialect)
    run = model.decoder.start(2, 8)
    unpulled = model.stream("abc")
    running = model.stream("abc", **REUSE)
    answers = model.iterate(["abc"])
    next(running)
    model.close()
    model.close()
    steps.fed.clear()
    touched: list[str] = []
    for name in ("allocate", "free_memory", "run"):
        monkeypatch.setattr(model.decoder.program, name, lambda *_, name=name: touched.append(name))
    uses: list[Any] = [
        lambda: next(unpulled),
        lambda: next(running),
        lambda: next(answers),
        lambda: model.score("abc"),
        lambda: model.generate("abc"),
        lambda: model.stream("abc"),
        lambda: model.iterate(["abc"]),
        lambda: model.decoder.start(1, 8),
        lambda: run.prefill([[1], [2]]),
        lambda: run.copy_rows([(0, 1)]),
    ]
    for use in uses:
        with pytest.raises(ClosedError, match="closed"):
            use()
    assert touched == [] and steps.fed == []


def test_a_closed_stream_of_a_closed_model_is_quiet() -> None:
    model, _ = generator("inplace")
    stream = model.stream("abc", **REUSE)
    next(stream)
    model.close()
    stream.close()
    assert list(stream) == []


# What a model says of itself


def test_a_generations_json_has_its_usage() -> None:
    answer = generator("inplace")[0].generate("abc", max_new_tokens=2, top_logprobs=1)
    assert isinstance(answer, Generation)
    found: Any = answer.to_json()
    assert found["usage"] == {"prompt_tokens": 3, "completion_tokens": 2}
    assert len(found["top_logprobs"]) == 2
    assert TOKENIZER.decode([found["top_logprobs"][0][0]["token_id"]]) == found["top_logprobs"][0][0]["text"]
