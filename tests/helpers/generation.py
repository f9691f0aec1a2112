"""Generators over the model of test_runtime_decoder, which record what they were fed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import tokenizers
from hypothesis import settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from planforge.runtime import Chunk, Generation, TextGenerator
from planforge.runtime.bundle.defaults import GenerationDefaults
from planforge.runtime.decoding.decoder import Decoder, DecoderRun
from planforge.runtime.errors import BackendError
from planforge.runtime.memory_budget import MemoryBudget
from planforge.runtime.text.chat import Chat
from planforge.runtime.text.tokenizer import Tokenizer

from .decoder_graph import CONTEXT, Given, Returned, V, artifact, inplace, portable
from .fake_program import FakeProgram

LOOKUP: dict[str, Any] = {"speculative": "prompt-lookup"}
REUSE: dict[str, Any] = {"reuse_prompt": True}
GRAPHS: dict[str, Callable[[Given], Returned]] = {"portable": portable, "inplace": inplace, "ort": inplace}
DIALECTS = tuple(GRAPHS)
LETTERS = "abcdefghijk"  # the tokens 0 to V - 1
dialects = st.sampled_from(DIALECTS)
thorough = settings(deadline=None, max_examples=80)


def letters() -> Tokenizer:
    raw = tokenizers.Tokenizer(models.BPE({letter: token for token, letter in enumerate(LETTERS)}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    return Tokenizer(raw.to_str().encode())


TOKENIZER = letters()


def start(dialect: str, batch: int) -> DecoderRun:
    return Decoder(FakeProgram(GRAPHS[dialect]), artifact(dialect)).start(batch, CONTEXT)


class Steps:
    """The model of test_runtime_decoder, or one that counts on (a, b, c, ..., k, a), and what it was fed."""

    def __init__(self, dialect: str, counts: bool = False) -> None:
        self.graph = GRAPHS[dialect]
        self.counts = counts
        self.fed: list[list[int]] = []
        self.fails = False

    def __call__(self, given: Given) -> Returned:
        if self.fails:
            raise BackendError("planted")
        self.fed.append(given["input_ids"][0].tolist())  # of a batch the first row
        results = self.graph(given)
        if self.counts:
            following = (given["input_ids"].reshape(-1)[given["logit_rows"]] + 1) % V
            results["logits"] = np.eye(V, dtype=np.float32)[following]
        return results


def generator(
    dialect: str,
    counts: bool = False,
    eos: tuple[int, ...] = (),
    prefix: tuple[int, ...] = (),
    max_length: int = CONTEXT,
    memory_limit: int | None = None,
    chat: Chat | None = None,
    tokenizer: Tokenizer = TOKENIZER,
) -> tuple[TextGenerator, Steps]:
    steps = Steps(dialect, counts)
    decoder = Decoder(FakeProgram(steps), artifact(dialect), MemoryBudget(memory_limit))
    defaults = GenerationDefaults(eos=eos, prefix=prefix, max_length=max_length)
    model = TextGenerator(decoder, tokenizer, defaults, chat=chat, max_length=max_length)
    return model, steps


def joined(chunks: Iterable[Chunk]) -> str:
    return "".join(map(str, chunks))


def assert_same(got: Generation, want: Generation) -> None:
    assert (got.text, got.token_ids, got.finish_reason) == (want.text, want.token_ids, want.finish_reason)
    np.testing.assert_allclose(got.logprobs, want.logprobs, rtol=0, atol=1e-4)


def assert_same_but_for_ties(model: TextGenerator, prompt: str, found: Generation, plain: Generation) -> None:
    """The same tokens, up to where the plain run's two likeliest are equal to within rounding."""
    if found.token_ids != plain.token_ids:
        assert margin_where_they_part(model, prompt, found, plain) < 1e-4, prompt
    else:
        assert_same(found, plain)


def margin_where_they_part(model: TextGenerator, prompt: str, found: Generation, plain: Generation) -> float:
    """By how much the model prefers its likeliest token to the next where two answers differ first."""
    pairs = zip(found.token_ids, plain.token_ids, strict=False)
    at = next(place for place, (a, b) in enumerate(pairs) if a != b)
    run = model.decoder.start(1, model.max_length)
    logits = run.prefill([[*model.tokenizer.encode(prompt), *plain.token_ids[:at]]])[0]
    second, first = np.sort(logits)[-2:]
    return float(first - second)


options = st.fixed_dictionaries(
    {"max_new_tokens": st.integers(1, 40)},
    optional={
        "repetition_penalty": st.sampled_from([0.8, 1.2, 2.0]),
        "temperature": st.sampled_from([0.5, 3.0]),
        "top_k": st.integers(1, 5),
        "stop": st.lists(st.text("abk", min_size=1, max_size=3), max_size=2),
    },
)
prompts = st.text(LETTERS[:4], min_size=1, max_size=40)
