"""TextGenerator against transformers on the trained demo, and its manners."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planforge.exporter.checkpoints.source import DEMOS
from planforge.runtime import Generation, TextGenerator, load
from planforge.runtime.backends.ort_backend import OrtCpuBackend
from planforge.runtime.bundle.bundle import Bundle
from planforge.runtime.decoding.decoder import Decoder
from planforge.runtime.errors import ContextLengthError, InputError, MemoryLimitError

from ...helpers.generation import joined

PROMPTS = [
    "Now therefore",
    "And it came to pass, when the king of Israel heard these words, that he",
    "Then Jesus answered",
    "x",
    "Thou shalt not covet thy neighbour's house, 🙂 中文\n\n  nor",
]


@pytest.fixture(scope="module")
def model(demo_bundle: Path) -> Any:
    with load(demo_bundle) as generator:
        yield generator


@pytest.fixture(scope="module")
def reference() -> Any:
    return transformers.GPT2LMHeadModel.from_pretrained(DEMOS / "gpt2-demo").float().eval()


def transformers_greedy(
    reference: Any, model: TextGenerator, prompt: str, steps: int, **options: Any
) -> list[int]:
    ids = torch.tensor([model.tokenizer.encode(prompt)])
    mask = torch.ones_like(ids)
    out = reference.generate(ids, attention_mask=mask, max_new_tokens=steps, do_sample=False, **options)
    return out[0, ids.shape[1] :].tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_tokens_are_transformers(model: TextGenerator, reference: Any, prompt: str) -> None:
    answer = model.generate(prompt, max_new_tokens=40)
    assert list(answer.token_ids) == transformers_greedy(reference, model, prompt, 40)


def test_greedy_reference_varies(model: TextGenerator, reference: Any) -> None:
    texts = [transformers_greedy(reference, model, prompt, 40) for prompt in PROMPTS]
    assert len(set(texts[0])) >= 10
    assert len({tuple(text) for text in texts}) == len(PROMPTS)


def test_a_batch_of_unequal_prompts_equals_the_runs_one_by_one(model: TextGenerator) -> None:
    together = model.generate(PROMPTS, max_new_tokens=30)
    alone = [model.generate(prompt, max_new_tokens=30) for prompt in PROMPTS]
    for row, single in zip(together, alone, strict=True):
        assert row.token_ids == single.token_ids
        assert row.text == single.text
        np.testing.assert_allclose(row.logprobs, single.logprobs, atol=1e-4)


def decoder_of(bundle: Path, dialect: str) -> Decoder:
    opened = Bundle.open(bundle)
    artifact = opened.manifest.artifact(f"decoder.{dialect}.fp32")
    return Decoder(OrtCpuBackend().open(opened, artifact), artifact)


@pytest.mark.parametrize("dialect", ["portable", "inplace"])
def test_batch_logits_equal_single_logits(demo_bundle: Path, dialect: str) -> None:
    decoder = decoder_of(demo_bundle, dialect)
    prompts = [[5, 6, 7], [9] * 17, [11], list(range(40)), [3, 2]]
    together = decoder.start(5, 64)
    batch = [together.prefill(prompts), *(together.decode([20 + step] * 5) for step in range(8))]
    for row, prompt in enumerate(prompts):
        alone = decoder.start(1, 64)
        single = [alone.prefill([prompt]), *(alone.decode([20 + step]) for step in range(8))]
        for step, logits in enumerate(single):
            np.testing.assert_allclose(batch[step][row], logits[0], atol=1e-4)
    decoder.close()


def test_more_prompts_than_the_largest_batch_run_in_chunks(model: TextGenerator) -> None:
    prompts = [f"{PROMPTS[0]} {number}" for number in range(model.max_batch + 3)]
    answers = model.generate(prompts, max_new_tokens=5)
    assert [a.text for a in answers] == [model.generate(p, max_new_tokens=5).text for p in prompts]


def test_score_is_transformers_loss(model: TextGenerator, reference: Any) -> None:
    text = "In the beginning God created the heaven and the earth. " * 8
    score = model.score(text)
    ids = torch.tensor([list(score.token_ids)])
    with torch.no_grad():
        loss = reference(ids, labels=ids).loss.item()
    assert -score.total / len(score.logprobs) == pytest.approx(loss, abs=1e-4)
    assert score.perplexity == pytest.approx(np.exp(loss), rel=1e-3)
    assert model.count_tokens(text) == len(score.token_ids)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20))
def test_streamed_pieces_join_to_the_text(model: TextGenerator, prompt: str) -> None:
    options: dict[str, Any] = {"temperature": 1.5, "seed": 5, "max_new_tokens": 15}
    assert joined(model.stream(prompt, **options)) == model.generate(prompt, **options).text


def test_a_row_that_fills_its_context_does_not_stop_the_others(model: TextGenerator) -> None:
    prompts = ["the " * (model.max_length - 10), PROMPTS[0]]
    together = model.generate(prompts, max_new_tokens=30)
    assert [answer.finish_reason for answer in together] == ["context", "length"]
    for row, prompt in zip(together, prompts, strict=True):
        assert row.token_ids == model.generate(prompt, max_new_tokens=30).token_ids


@pytest.mark.parametrize("dialect", ["portable", "inplace"])
def test_rows_that_ended_do_not_grow(demo_bundle: Path, dialect: str) -> None:
    decoder = decoder_of(demo_bundle, dialect)
    context = decoder.artifact.axis("tokens").max
    run = decoder.start(2, context + 20 if dialect == "portable" else context)
    run.prefill([[7] * context, [5, 6]])  # the first row has no position left
    logits = [run.decode([3, 20 + step], active=[False, True]) for step in range(12)]
    alone = decoder.start(1, 64)
    alone.prefill([[5, 6]])
    for step, both in enumerate(logits):
        np.testing.assert_allclose(both[1], alone.decode([20 + step])[0], atol=1e-4)
    decoder.close()


def test_too_long_a_prompt_is_refused_or_cut(model: TextGenerator, reference: Any) -> None:
    prompt = "and the " * model.max_length
    with pytest.raises(ContextLengthError, match="truncation='tail'") as caught:
        model.generate(prompt)
    assert caught.value.limit == model.max_length - 1
    answer = model.generate(prompt, max_new_tokens=5, truncation="tail")
    tokens = model.tokenizer.encode(prompt)
    assert answer.prompt_tokens_cut == len(tokens) - (model.max_length - 5)
    kept = torch.tensor([tokens[answer.prompt_tokens_cut :]])
    expected = reference.generate(
        kept, attention_mask=torch.ones_like(kept), max_new_tokens=5, do_sample=False
    )
    assert list(answer.token_ids) == expected[0, kept.shape[1] :].tolist()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"prompt": ""}, "endoftext"),
        ({"prompt": [""]}, "prompt is empty"),
        ({"prompt": 3}, "prompt must be a text, a sequence of token ids, .* not int"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"max_new_tokens": True}, "max_new_tokens=True"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_k": 0}, "None disables it"),
        ({"top_p": 1.5}, "top_p"),
        ({"prompt": None}, "prompt must be .* not NoneType"),
        ({"prompt": iter(["a"])}, r"iterate\(\) takes any iterable"),
        ({"prompt": ["a", None]}, r"prompts\[1\]: a prompt must be a str or .* not NoneType"),
        ({"prompt": [1, -1]}, "token id -1, but the model's are 0 to"),
        ({"prompt": [1, 10**6]}, "token id 1000000"),
        ({"prompt": ["a", [1, True]]}, r"prompts\[1\]: .*integers, not bool"),
        ({"truncation": "right"}, "truncation='right' is not one of None, 'tail'"),
        ({"truncation": "head"}, "truncation"),
        ({"temprature": 3}, "unknown option 'temprature'; did you mean 'temperature'"),
        ({"logprobs": 5}, "logprobs=5 must be True or False"),
        ({"top_logprobs": -1}, "top_logprobs"),
        ({"on_token": 5}, "on_token"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"batch_size": 10**6}, "batch_size=1000000 is more than"),
        ({"progress": 5}, "progress"),
        ({"generation": "mine"}, "generation"),
        ({"logit_bias": {10**6: 1.0}}, "logit_bias names token 1000000"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"logit_bias": {1: float("nan")}}, r"logit_bias\[1\] is nan"),
        ({"logit_bias": {"a": 1.0}}, "a token of logit_bias is 'a'"),
        ({"logits_processor": 5}, "logits_processor"),
        ({"stop": ""}, "stop"),
    ],
)
def test_options_that_make_no_sense_are_named(
    model: TextGenerator, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(InputError, match=words):
        model.generate(**{"prompt": PROMPTS[0], **options})


def test_two_streams_take_turns(model: TextGenerator) -> None:
    expected = [[*map(str, model.stream(prompt, max_new_tokens=15))] for prompt in PROMPTS[:2]]
    one, two = (model.stream(prompt, max_new_tokens=15) for prompt in PROMPTS[:2])
    interleaved: list[list[str]] = [[], []]
    while len(interleaved[0]) < len(expected[0]) or len(interleaved[1]) < len(expected[1]):
        interleaved[0] += [str(chunk) for chunk in [next(one, None)] if chunk is not None]
        interleaved[1] += [str(chunk) for chunk in [next(two, None)] if chunk is not None]
    assert interleaved == expected


def test_the_cache_must_fit_the_memory_limit(demo_bundle: Path) -> None:
    with TextGenerator.load(demo_bundle, memory_limit=16_000_000) as model:
        assert isinstance(model.generate("a", max_new_tokens=2), Generation)
        budget = model.decoder.budget
        alone = model.decoder.count_bytes(1, 200)
        budget.limit = budget.weight_bytes + 2 * alone  # two rows at a time, not eight
        answers = model.generate(["a"] * 8, max_new_tokens=200, ignore_eos=True)
        assert {answer.token_ids for answer in answers} == {answers[0].token_ids}
        budget.limit = budget.weight_bytes + alone - 1
        with pytest.raises(MemoryLimitError, match=r"weights and .* for a cache of 1 x 200 tokens") as caught:
            model.generate(["a"] * 8, max_new_tokens=200, ignore_eos=True)
    assert caught.value.needed == caught.value.limit + 1


def test_load_checks_its_arguments(demo_bundle: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(InputError, match="backend='cuda'"):
        load(demo_bundle, backend="cuda")
    with pytest.raises(InputError, match=r"precision='int3'.*fp32"):
        load(demo_bundle, precision="int3")
    with pytest.raises(InputError, match="max_length=9999"):
        load(demo_bundle, max_length=9999)
    for name, value in [("threads", 0), ("threads", 10**5), ("threads", "2"), ("memory_limit", -5)]:
        with pytest.raises(InputError, match=f"{name}={value!r} must be an integer from 1 to"):
            load(demo_bundle, **{name: value})  # type: ignore[arg-type]
    with (
        caplog.at_level("INFO", "planforge"),
        TextGenerator.load(demo_bundle, max_length=32, threads=1) as model,
    ):
        assert model.generate("a " * 20, max_new_tokens=50).finish_reason == "context"
    assert "ort-cpu" in caplog.text


def test_fp16_runs_when_asked_for(demo_bundle: Path, model: TextGenerator) -> None:
    with TextGenerator.load(demo_bundle, precision="fp16") as half:
        assert half.artifact.precision == "fp16"
        logprobs = half.score("In the beginning God created the heaven").logprobs
    expected = model.score("In the beginning God created the heaven").logprobs
    np.testing.assert_allclose(logprobs, expected, atol=0.02)
    assert logprobs != expected
