"""Beam search for decoders: token ids and scores are those of transformers' `generate`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from planforge.exporter import export
from planforge.runtime import Generation, TextGenerator
from planforge.runtime.decoding.cache_shapes import count_cache_bytes
from planforge.runtime.errors import ContextLengthError, InputError, MemoryLimitError

from ...conftest import Once
from ...helpers.beams import search_beams
from ...helpers.decoder_graph import Given, Returned, artifact
from ...helpers.generation import DIALECTS, generator
from ...helpers.models import tiny_gpt2
from ...helpers.paths import DEMOS
from ...helpers.plans import only

DEMO = DEMOS / "gpt2-demo"
GRAPHS = ["decoder.ort.fp32", "decoder.portable.fp32"]
PROMPTS = ["In the beginning", "And", "Now therefore he said unto them, Go ye up"]
NEW = 10
OPTIONS: list[dict[str, Any]] = [
    {"num_beams": 2},
    {"num_beams": 4, "n_best": 4},
    {"num_beams": 4, "n_best": 2, "early_stopping": True},
    {"num_beams": 3, "n_best": 3, "early_stopping": "never", "length_penalty": 2.0},
    {"num_beams": 3, "n_best": 3, "early_stopping": "never", "length_penalty": -1.0},
    {"num_beams": 3, "n_best": 3, "length_penalty": 0.0},
    {"num_beams": 3, "n_best": 2, "no_repeat_ngram_size": 2},
    {"num_beams": 3, "n_best": 2, "repetition_penalty": 1.4},
    {"num_beams": 2, "n_best": 2, "ignore_eos": True},
]


@pytest.fixture(scope="module")
def tiny(once: Callable[[str], Once]) -> Path:
    """A random GPT-2 whose outputs vary, and beside it "bundle". Some of its likely tokens end an answer."""
    with once("beams-gpt2") as (folder, first):
        if first:
            model = tiny_gpt2(folder / "checkpoint", vocab_size=2048, n_positions=64, initializer_range=0.5)
            model.generation_config.eos_token_id = likely_tokens(model)
            model.generation_config.update(do_sample=True, temperature=0.6, top_p=0.9, max_new_tokens=7)
            model.generation_config.save_pretrained(folder / "checkpoint")
            tokenizer = (DEMO / "tokenizer.json").read_bytes()
            (folder / "checkpoint" / "tokenizer.json").write_bytes(tokenizer)
            how: dict[str, Any] = {"precision": ["fp32"], "target": ["cpu", "portable"], "verify": False}
            export(folder / "checkpoint", folder / "bundle", **how)
    return folder


def likely_tokens(model: Any) -> list[int]:
    """Return tokens that beams come to, so that they end some answers before others."""
    out = model.generate(
        torch.tensor([[3, 17, 1000]]), num_beams=4, num_return_sequences=4, max_new_tokens=6, pad_token_id=0
    )
    return sorted({int(token) for token in out[:2, 5]})


@pytest.fixture(scope="module", params=GRAPHS)
def pair(request: pytest.FixtureRequest, tiny: Path, tmp_path_factory: Any) -> Iterator[tuple[Any, Any]]:
    """The bundle's graph of each dialect, and the checkpoint in transformers."""
    folder = only(tiny / "bundle", tmp_path_factory.mktemp("beams") / "only", request.param)
    reference = transformers.AutoModelForCausalLM.from_pretrained(tiny / "checkpoint", dtype=torch.float32)
    with TextGenerator.load(folder) as model:
        yield model, reference


def assert_as_transformers(reference: Any, prompt: list[int], answer: Generation, options: Any) -> None:
    wanted = search_beams(reference, prompt, **options)
    assert [candidate.token_ids for candidate in answer.candidates] == [ids for ids, _ in wanted]
    scores = [candidate.score for candidate in answer.candidates]
    np.testing.assert_allclose(scores, [score for _, score in wanted], rtol=2e-5, atol=2e-5)
    best = answer.candidates[0]
    assert (answer.token_ids, answer.score, answer.text) == (best.token_ids, best.score, best.text)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_tokens_and_scores_are_those_of_transformers(pair: Any, options: dict[str, Any]) -> None:
    model, reference = pair
    prompts = [model.tokenizer.encode(text) for text in PROMPTS]
    options = {"max_new_tokens": NEW, **options}
    answers = model.generate(PROMPTS, **options)  # a padded batch
    for prompt, answer in zip(prompts, answers, strict=True):
        assert_as_transformers(reference, prompt, answer, options)
        assert answer.usage.completion_tokens == len(answer.token_ids)
    alone = model.generate(PROMPTS[1], **options)
    assert alone.token_ids == answers[1].token_ids and alone.score == pytest.approx(answers[1].score, 1e-4)


def test_the_bundle_keeps_how_the_checkpoint_samples(pair: Any) -> None:
    """With transformers' own top_k where the checkpoint names none; by default a call is greedy."""
    model, _ = pair
    prompt = PROMPTS[0]
    named: dict[str, Any] = {"temperature": 0.6, "top_p": 0.9, "top_k": 50, "max_new_tokens": 7, "seed": 4}
    drawn = model.generate(prompt, generation="checkpoint", seed=4)
    assert drawn.token_ids == model.generate(prompt, **named).token_ids
    plain = model.generate(prompt, max_new_tokens=7)
    assert plain.token_ids == model.generate(prompt, max_new_tokens=7, temperature=0).token_ids


def test_the_cases_end_in_more_than_one_way(pair: Any) -> None:
    """Otherwise lengths and early ends would show nothing."""
    model, _ = pair
    found = [model.generate(PROMPTS, max_new_tokens=NEW, **options) for options in OPTIONS]
    candidates = [candidate for answers in found for answer in answers for candidate in answer.candidates]
    assert {candidate.finish_reason for candidate in candidates} == {"eos", "length"}
    assert len({candidate.token_ids for candidate in candidates}) >= 20


def test_logprobs_are_the_models_own(pair: Any) -> None:
    model, _ = pair
    for options in ({"num_beams": 3}, {"num_beams": 3, "repetition_penalty": 1.4}):
        answer = model.generate(PROMPTS[0], max_new_tokens=NEW, **options)
        prompt = model.tokenizer.encode(PROMPTS[0])
        wanted = model.score([*prompt, *answer.token_ids]).logprobs[len(prompt) - 1 :]
        np.testing.assert_allclose(answer.logprobs, wanted, atol=1e-4)
    assert model.generate(PROMPTS[0], num_beams=2, max_new_tokens=2, logprobs=False).logprobs == ()


def test_the_context_ends_beams_of_a_long_prompt_alone(pair: Any) -> None:
    model, reference = pair
    long = (model.tokenizer.encode("and he said unto them, " * 20))[:59]
    answers = model.generate([long, [7, 8]], num_beams=3, max_new_tokens=20, ignore_eos=True)
    assert [answer.finish_reason for answer in answers] == ["context", "length"]
    assert_as_transformers(
        reference, long, answers[0], {"num_beams": 3, "max_new_tokens": 5, "ignore_eos": True}
    )


@pytest.mark.parametrize("graph", GRAPHS)
def test_trained_weights(demo_bundle: Path, graph: str, tmp_path: Path) -> None:
    reference: Any = transformers.AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    options: dict[str, Any] = {"num_beams": 4, "n_best": 3, "max_new_tokens": 12}
    with TextGenerator.load(only(demo_bundle, tmp_path / "only", graph)) as model:
        answers = model.generate(PROMPTS, **options)
        for text, answer in zip(PROMPTS, answers, strict=True):
            assert_as_transformers(reference, model.tokenizer.encode(text), answer, options)


@pytest.mark.parametrize("graph", GRAPHS)
def test_an_imported_llama(
    exported: Path, imported: Callable[[str], Path], graph: str, tmp_path: Path
) -> None:
    reference: Any = transformers.AutoModelForCausalLM.from_pretrained(
        exported / "llama", dtype=torch.float32
    )
    options: dict[str, Any] = {"num_beams": 4, "n_best": 2, "max_new_tokens": 12}
    with TextGenerator.load(only(imported("llama"), tmp_path / "only", graph)) as model:
        answers = model.generate(PROMPTS, **options)
        for text, answer in zip(PROMPTS, answers, strict=True):
            prompt = [*model.defaults.prefix, *model.tokenizer.encode(text)]
            assert_as_transformers(reference, prompt, answer, options)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_prompt_is_taken_in_once(dialect: str) -> None:
    model, steps = generator(dialect)
    shapes: list[tuple[int, ...]] = []
    graph = steps.graph

    def recording(given: Given) -> Returned:
        shapes.append(given["input_ids"].shape)
        return graph(given)

    steps.graph = recording
    model.generate(["abcd", "bc"], num_beams=3, max_new_tokens=3)
    assert shapes == [(2, 4), (6, 1), (6, 1)]


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("options", [{}, {"early_stopping": True}, {"repetition_penalty": 2.0}], ids=str)
def test_a_padded_batch_gives_what_each_prompt_gives_alone(dialect: str, options: dict[str, Any]) -> None:
    """In every dialect, over a model whose logits depend on all that its cache holds."""
    model, _ = generator(dialect, eos=(1, 4))
    other, _ = generator("inplace", eos=(1, 4))
    prompts = ["abcdefgh", "k", "cab", "ggggggggggggg", "bd"]
    how: dict[str, Any] = {"num_beams": 4, "n_best": 4, "max_new_tokens": 8, **options}
    for prompt, answer in zip(prompts, model.generate(prompts, **how), strict=True):
        alone = other.generate(prompt, **how)
        assert [c.token_ids for c in answer.candidates] == [c.token_ids for c in alone.candidates]
        scores = [[c.score for c in a.candidates] for a in (answer, alone)]
        np.testing.assert_allclose(scores[0], scores[1], atol=1e-4)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"temperature": 0.7}, r"^temperature=0\.7 does not go with num_beams=2; .* or give temperature=0"),
        ({"top_k": 5}, "^top_k=5 does not go with num_beams=2"),
        ({"top_p": 0.5}, r"^top_p=0\.5 does"),
        ({"min_p": 0.5}, r"^min_p=0\.5 does"),
        ({"seed": 0}, "^seed=0 does"),
        ({"stop": "a"}, "^stop='a' does"),
        ({"logit_bias": {1: 1.0}}, "^logit_bias="),
        ({"speculative": "prompt-lookup"}, "^speculative='prompt-lookup' does"),
        ({"reuse_prompt": True}, "^reuse_prompt=True does"),
        ({"top_logprobs": 2}, "^top_logprobs=2 does"),
        ({"on_token": print}, "^on_token="),
        ({"n_best": 3}, "n_best is 3; it must be at most num_beams, 2"),
        ({"num_beams": 1000}, r"num_beams=1000 is more than the \d+ rows that this bundle allows"),
    ],
)
def test_what_does_not_go_with_beams_is_named(options: dict[str, Any], words: str) -> None:
    model, steps = generator("inplace")
    with pytest.raises(InputError, match=words):
        model.generate("abc", **{"num_beams": 2, **options})
    assert not steps.fed


def test_beams_do_not_stream() -> None:
    model, _ = generator("inplace")
    with pytest.raises(InputError, match="num_beams=2 cannot stream"):
        model.stream("abc", num_beams=2)
    assert model.generate("abc", num_beams=2, temperature=0, top_k=5, max_new_tokens=2).score is not None
    assert model.generate("abc", max_new_tokens=2).candidates == ()


@pytest.mark.parametrize(("short", "batches"), [(0, [2, 6, 6, 6]), (1, [1, 3, 3, 3, 1, 3, 3, 3])])
def test_the_memory_limit_counts_all_beams(short: int, batches: list[int]) -> None:
    """Two prompts run together where all their beams fit, else one after the other."""
    alone = count_cache_bytes(artifact("inplace"), 3, 3 + 4 - 1)
    limit = 2 * alone - short
    model, steps = generator("inplace", memory_limit=limit)
    held: list[int] = []
    ran: list[int] = []
    graph = steps.graph

    def recording(given: Given) -> Returned:
        held.append(model.decoder.budget.count_held())
        ran.append(len(given["input_ids"]))
        return graph(given)

    steps.graph = recording
    found = model.generate(["abc", "cab"], num_beams=3, max_new_tokens=4)
    free, _ = generator("inplace")
    expected = free.generate(["abc", "cab"], num_beams=3, max_new_tokens=4)
    assert [answer.token_ids for answer in found] == [answer.token_ids for answer in expected]
    assert ran == batches
    assert set(held) == {alone if short else 2 * alone}
    assert model.decoder.budget.count_held() == 0


def test_beams_that_do_not_fit_are_refused_before_anything_runs() -> None:
    limit = count_cache_bytes(artifact("inplace"), 3, 3 + 4 - 1) - 1
    model, steps = generator("inplace", memory_limit=limit)
    with pytest.raises(MemoryLimitError, match=r"for a cache of 3 x 6 tokens .*; memory_limit is"):
        model.generate(["a", "abc"], num_beams=3, max_new_tokens=4)
    assert not steps.fed
    assert len(model.generate(["abc", "a"], num_beams=2, max_new_tokens=4)) == 2


def test_too_long_a_prompt_is_refused_as_without_beams() -> None:
    model, _ = generator("inplace", max_length=8)
    with pytest.raises(ContextLengthError):
        model.generate("abcdefgh", num_beams=2)
    assert isinstance(model, TextGenerator)
