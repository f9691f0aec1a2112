"""What generation_config.json says of tokens and lengths: answers are those of transformers' generate."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from planforge.exporter import export
from planforge.exporter.checkpoints.generation_config import Settings, read_decoder_defaults
from planforge.exporter.errors import CheckpointError
from planforge.runtime import TextGenerator
from planforge.runtime.bundle.defaults import GenerationDefaults
from planforge.runtime.decoding.history import TokenHistory
from planforge.runtime.decoding.sampling import process
from planforge.runtime.errors import ContextLengthError, InputError, ManifestError
from planforge.runtime.generate.request import read_checkpoint_options, resolve_request

from ...conftest import Once
from ...helpers.llamas import tiny_llama
from ...helpers.models import edit_json, tiny_gpt2
from ...helpers.paths import DEMOS

V = 12
TOKENIZER = DEMOS / "gpt2-demo" / "tokenizer.json"
PROMPTS = ([5, 17, 9], [80, 3, 41, 7, 900])
FAMILIES = ["gpt2", "llama"]


def defaults_of(config: dict[str, Any], vocab_size: int = V) -> GenerationDefaults:
    """What an export keeps of a file, after the way through the manifest's JSON."""
    found = read_decoder_defaults(Settings(config, "generation_config.json", vocab_size), 64)
    return GenerationDefaults.from_json(json.loads(json.dumps(asdict(found))))


def draw_config(random: np.random.Generator) -> dict[str, Any]:
    def tokens(least: int = 1, most: int = 3) -> list[int]:
        found: list[int] = random.integers(
            0, 4, random.integers(least, most + 1)
        ).tolist()  # few: they repeat
        return found

    config: dict[str, Any] = {
        "eos_token_id": sorted(set(tokens())),
        "bad_words_ids": [tokens() for _ in range(3)],
        "suppress_tokens": tokens(),
        "begin_suppress_tokens": tokens(),
        "sequence_bias": [[tokens(), float(random.normal(0, 4))] for _ in range(4)],
        "exponential_decay_length_penalty": [int(random.integers(0, 3)), float(random.uniform(0.5, 2))],
        "repetition_penalty": float(random.uniform(0.7, 2)),
        "no_repeat_ngram_size": int(random.integers(1, 4)),
        random.choice(["min_length", "min_new_tokens"]): int(random.integers(1, 6)),
    }
    if random.random() < 0.5:
        config |= {"do_sample": True, "top_k": 6, "temperature": 0.7}
    kept = {name for name in config if random.random() < 0.6}
    if "exponential_decay_length_penalty" in kept:
        kept.add("eos_token_id")  # transformers fails without
    return {name: config[name] for name in config if name in kept}


@pytest.fixture(scope="module")
def chain() -> Any:
    """The processors of transformers for a configuration, a prompt's length and scores."""
    model: Any = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=V, n_positions=64, n_embd=8, n_layer=1, n_head=1)
    )

    def run(config: dict[str, Any], prompt: int, tokens: list[int], scores: Any) -> Any:
        model.generation_config = transformers.GenerationConfig(**config)
        filled, _ = model._prepare_generation_config(None)
        model._prepare_special_tokens(filled, False, device=torch.device("cpu"))
        processors = model._get_logits_processor(filled, input_ids_seq_length=prompt, device="cpu")
        return processors(torch.tensor([tokens]), torch.from_numpy(scores.copy())).numpy()

    return run


def test_processors_are_those_of_transformers(chain: Any) -> None:
    random = np.random.default_rng(46)
    seen: set[str] = set()
    for _ in range(400):
        config = draw_config(random)
        defaults = defaults_of(config)
        request = resolve_request({"generation": "checkpoint"}, read_checkpoint_options(defaults))
        sampling = request.bind(defaults.eos).sampling
        prompt = int(random.integers(1, 4))
        tokens = random.integers(0, 4, prompt + random.integers(0, 6)).tolist()
        history = TokenHistory(tokens[:prompt])
        history.extend(tokens[prompt:])
        scores = random.normal(0, 3, (1, V)).astype(np.float32)
        try:
            found = process(scores, [history], sampling)
        except InputError as error:
            assert "leaves no token" in str(error), config
            assert np.isneginf(chain(config, prompt, tokens, scores)).all()
            continue
        wanted = chain(config, prompt, tokens, scores)
        np.testing.assert_array_equal(found > -np.inf, wanted > -np.inf, err_msg=str(config))
        np.testing.assert_allclose(found, wanted, rtol=1e-5, err_msg=str(config))
        seen |= set(config)
    assert len(seen) == 13


def make_checkpoint(family: str, folder: Path) -> None:
    if family == "llama":
        tiny_llama(folder, "llama 2")
    else:
        tiny_gpt2(folder, vocab_size=2048, initializer_range=0.5)
    (folder / "generation_config.json").write_text("{}")
    (folder / "tokenizer.json").write_bytes(TOKENIZER.read_bytes())


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, once: Callable[[str], Once]) -> Path:
    """A random checkpoint, and beside it "bundle"."""
    with once(f"token-rules-{request.param}") as (folder, first):
        if first:
            make_checkpoint(request.param, folder / "checkpoint")
            export(folder / "checkpoint", folder / "bundle", precision=["fp32"], target="cpu", verify=False)
    return folder


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder / "checkpoint")
    model.tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(TOKENIZER))
    return model.eval()


@pytest.fixture
def ask(folder: Path, reference: Any) -> Iterator[Callable[..., list[list[int]]]]:
    """What transformers answers to each prompt alone by a generation_config.json."""

    def answer(config: dict[str, Any], **given: Any) -> list[list[int]]:
        reference.generation_config = transformers.GenerationConfig(**config, pad_token_id=0)
        found = []
        for prompt in PROMPTS:
            ids = torch.tensor([prompt])
            mask = torch.ones_like(ids)
            out = reference.generate(ids, attention_mask=mask, tokenizer=reference.tokenizer, **given)
            found.append(out[0, len(prompt) :].tolist())
        return found

    yield answer


@pytest.fixture
def open_with(folder: Path) -> Iterator[Callable[[dict[str, Any]], TextGenerator]]:
    """The bundle's model, with what an export keeps of a generation_config.json."""
    opened: list[TextGenerator] = []
    with TextGenerator.load(folder / "bundle") as own:

        def load(config: dict[str, Any]) -> TextGenerator:
            defaults = defaults_of(config, 2048)
            model = TextGenerator(own.decoder, own.tokenizer, defaults, max_length=own.max_length)
            opened.append(model)
            return model

        yield load
        for model in opened:
            model._submissions.close()


def answer_in_all_ways(model: TextGenerator) -> Iterator[list[list[int]]]:
    """Answer the prompts by each way that there is, by the checkpoint's settings."""
    how: dict[str, Any] = {"generation": "checkpoint"}
    prompts = [list(prompt) for prompt in PROMPTS]
    yield [list(one.token_ids) for one in model.generate(prompts, **how)]
    yield [list(model.generate(prompt, **how).token_ids) for prompt in prompts]
    if model.defaults.num_beams > 1:
        return
    yield [[token for chunk in model.stream(p, **how) for token in chunk.token_ids] for p in prompts]
    pendings = [model.submit_answers(prompt, 2, **how) for prompt in prompts]
    for number in range(2):
        yield [list(answers[number].result().token_ids) for answers in pendings]
    for way in ({"reuse_prompt": True}, {"speculative": "prompt-lookup"}):
        yield [list(model.generate(prompt, **how, **way).token_ids) for prompt in prompts]


def likely(ask: Any, count: int) -> list[int]:
    """The first tokens of the plain answer to the first prompt."""
    found: list[int] = ask({}, max_new_tokens=count)[0]
    return found


def list_configs(first: list[int]) -> dict[str, dict[str, Any]]:
    """Settings that change the plain answer, which begins with some tokens."""
    a, b, c, d, *_ = first
    end = {"eos_token_id": c, "max_new_tokens": 9}
    return {
        "max_length": {"max_length": 9},
        "suppress_tokens": {"suppress_tokens": [a, c], "max_new_tokens": 8},
        "begin_suppress_tokens": {"begin_suppress_tokens": [a], "max_new_tokens": 8},
        "bad_words_ids": {"bad_words_ids": [[b], [a, d], [a, b]], "max_new_tokens": 8},
        "min_new_tokens": {**end, "min_new_tokens": 5},
        "min_length": {**end, "min_length": 7},
        "sequence_bias": {"sequence_bias": [[[a, b], -50.0], [[d], 3.5], [[a], 0.5]], "max_new_tokens": 8},
        "decay": {
            **end,
            "eos_token_id": 7,
            "exponential_decay_length_penalty": [2, 1.9],
            "max_new_tokens": 30,
        },
        "all": {**end, "suppress_tokens": [a], "min_new_tokens": 3, "sequence_bias": [[[d], 2.0]]},
    }


NAMES = list(list_configs([0, 1, 2, 3]))


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("name", NAMES)
def test_answers_are_those_of_transformers(name: str, beams: int, ask: Any, open_with: Any) -> None:
    plain = likely(ask, 9)
    config = list_configs(plain)[name] | ({"num_beams": beams} if beams > 1 else {})
    wanted = ask(config)
    assert wanted[0] != plain  # else the setting would show nothing
    for found in answer_in_all_ways(open_with(config)):
        assert found == wanted


def test_stop_strings_end_where_those_of_transformers_do(ask: Any, open_with: Any, reference: Any) -> None:
    plain = likely(ask, 12)
    text = reference.tokenizer.decode(plain[5])
    config = {"stop_strings": [text, "never there"], "max_new_tokens": 12}
    wanted = ask(config)
    assert len(wanted[0]) < 12
    for found in answer_in_all_ways(open_with(config)):
        assert found == wanted


def test_what_is_given_overrides_the_checkpoint(ask: Any, open_with: Any) -> None:
    config = {"max_length": 9, "min_length": 8, "stop_strings": ["x"]}
    model = open_with(config)
    (wanted, _) = ask(config, max_new_tokens=15, stop_strings=["no such text"])
    given: dict[str, Any] = {"max_new_tokens": 15, "stop": None}
    assert list(model.generate(list(PROMPTS[0]), generation="checkpoint", **given).token_ids) == wanted
    end = wanted[1]
    model = open_with({"eos_token_id": end})
    (wanted, _) = ask({"eos_token_id": end}, max_new_tokens=15, min_new_tokens=6)
    found = model.generate(list(PROMPTS[0]), max_new_tokens=15, min_new_tokens=6)
    assert list(found.token_ids) == wanted and len(wanted) > 5


@pytest.mark.parametrize("beams", [{}, {"num_beams": 3}])
def test_a_prompt_as_long_as_max_length_is_refused(beams: dict[str, int], open_with: Any, ask: Any) -> None:
    model = open_with({"max_length": 5, **beams})
    with pytest.raises(ValueError, match=r"Input length of input_ids is 5, but `max_length` is set to 5"):
        ask({"max_length": 5, **beams})
    with pytest.raises(ContextLengthError, match=r"max_length is 5 \(max_new_tokens overrides it\)"):
        model.generate(list(PROMPTS[1]), generation="checkpoint")
    short = model.generate(list(PROMPTS[0]), generation="checkpoint")
    assert (len(short.token_ids), short.finish_reason) == (2, "length")
    full = open_with({"max_length": 5000, **beams}).generate(list(PROMPTS[0]), generation="checkpoint")
    assert (len(full.token_ids), full.finish_reason) == (61, "context")
    cut = model.generate(list(PROMPTS[1]), generation="checkpoint", truncation="tail")
    assert (cut.usage.prompt_tokens, cut.usage.completion_tokens, cut.prompt_tokens_cut) == (3, 2, 2)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"bad_words_ids": [3]}, r"bad_words_ids has 3, not a list of token ids"),
        ({"bad_words_ids": [[]]}, r"bad_words_ids has \[\]"),
        ({"suppress_tokens": ["x"]}, "suppress_tokens is"),
        ({"sequence_bias": [[[3], "x"]]}, r"sequence_bias has \[\[3\], 'x'\], not \[\[token ids\], bias\]"),
        ({"sequence_bias": [[[3], float("-inf")]]}, "sequence_bias is -inf, expected a finite number"),
        ({"exponential_decay_length_penalty": [3]}, r"is \[3\], not \[start, factor\]"),
        ({"exponential_decay_length_penalty": [3, -1.0]}, "expected a finite factor over 0"),
        ({"stop_strings": [3]}, r"stop_strings is \[3\], not a list of strings"),
        ({"max_length": 1}, "max_length is 1; it counts the prompt too"),
    ],
)
def test_bad_settings_are_named(config: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        defaults_of(config)


def test_rules_of_a_manifest_are_checked() -> None:
    base = asdict(GenerationDefaults())
    with pytest.raises(ManifestError, match=r"bad_words\[0\] must be int"):
        GenerationDefaults.from_json({**base, "rules": {"bad_words": [["x"]]}})
    bad = GenerationDefaults.from_json({**base, "rules": {"suppress_tokens": [-1]}})
    with pytest.raises(InputError, match="a token of the rules is -1"):
        read_checkpoint_options(bad)


def test_beams_leave_stop_strings_out(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "planforge"):
        found = defaults_of({"num_beams": 2, "stop_strings": ["x"]})
    assert found.stop == ()
    assert "sets stop_strings=['x'], which is ignored" in caplog.text


def test_a_chat_ends_at_max_length(folder: Path, tmp_path: Path) -> None:
    """A whole export keeps it, and a chat obeys it."""
    copy = tmp_path / "checkpoint"
    copy.mkdir()
    for file in (folder / "checkpoint").iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    (copy / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    edit_json(copy / "generation_config.json", max_length=12, suppress_tokens=[3])
    export(copy, tmp_path / "bundle", precision=["fp32"], target="cpu", verify="quick")
    with TextGenerator.load(tmp_path / "bundle") as model:
        answer = model.chat([{"role": "user", "content": "In the beginning"}])
        assert answer.usage.prompt_tokens + answer.usage.completion_tokens == 12
        assert model.generate("In the beginning").usage.completion_tokens > 12
