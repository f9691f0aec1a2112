"""A checkpoint's prompt may spell special tokens, the texts behind it may not."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import transformers
from sentence_transformers import SentenceTransformer
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from planforge.exporter import export
from planforge.runtime import TextEncoder
from planforge.runtime.text.tokenizer import Tokenizer

from ...helpers.models import tiny_bert, write_mean_pooling, write_wordpiece

MARK = "[MASK]"
PROMPTS = {"query": f"{MARK} plan {MARK}: ", "open": f"{MARK} [", "plain": "hello: "}
TEXTS = ["hello world", " the plan", "is it not? 42", "a"]
HOSTILE = [f"hello {MARK} world", f"{MARK}", "SEP] world", "[CLS] [SEP] the plan"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prompted") / "checkpoint"
    write_wordpiece(folder)
    tiny_bert(folder)
    write_mean_pooling(folder)
    settings = {"prompts": PROMPTS, "default_prompt_name": "query"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> Iterator[TextEncoder]:
    export(folder, folder.parent / "bundle", precision=["fp32"], target=["cpu"])
    with TextEncoder.load(folder.parent / "bundle") as opened:
        yield opened


@pytest.mark.parametrize("name", [None, *PROMPTS])
def test_a_prompts_special_tokens_are_those_of_sentence_transformers(
    folder: Path, model: TextEncoder, name: str | None
) -> None:
    reference = SentenceTransformer(str(folder), device="cpu")
    expected = reference.encode(TEXTS, prompt_name=name)
    assert np.allclose(model.embed(TEXTS, prompt_name=name), expected, atol=1e-5)
    futures = model.submit("embed", TEXTS, prompt_name=name).result()
    assert np.allclose([one.vector for one in futures], expected, atol=1e-5)
    everything = reference.encode(HOSTILE, prompt_name=name)
    assert np.allclose(model.embed(HOSTILE, prompt_name=name, parse_special=True), everything, atol=1e-5)


def test_what_a_text_spells_is_no_special_token(folder: Path, model: TextEncoder) -> None:
    reference: Any = transformers.AutoTokenizer.from_pretrained(folder)
    for name, prompt in PROMPTS.items():
        before = reference(prompt, add_special_tokens=False)["input_ids"]
        for text in HOSTILE:
            (ids,) = model.tokenizer.encode_prompted(prompt, [text])
            own = before.count(reference.mask_token_id)
            assert ids[: len(before) - (name == "open")] == before[: len(before) - (name == "open")]
            assert [token for token in ids if token in (2, 3, 4)] == [4] * own, (name, text)
    vectors = model.embed([HOSTILE[0], HOSTILE[0].replace(MARK, "[ mask ]")])
    assert np.allclose(vectors[0], vectors[1], atol=1e-6)  # the same letters, read as such


def test_a_callers_prompt_is_a_text(folder: Path, model: TextEncoder) -> None:
    given = model.embed("hello", prompt=f"{MARK} ")
    assert np.allclose(given, model.embed(f"{MARK} hello", prompt=""), atol=1e-6)
    parsed = model.embed("hello", prompt=f"{MARK} ", parse_special=True)
    expected = SentenceTransformer(str(folder), device="cpu").encode("hello", prompt=f"{MARK} ")
    assert np.allclose(parsed, expected, atol=1e-5)
    assert not np.allclose(parsed, given, atol=1e-3)


def build_pieces(scheme: str) -> Any:
    words = ["<unk>", "<q>", "</q>", "▁", *"abcqd<>/ ", "▁a", "▁b", "ab"]
    built: Any = tokenizers.Tokenizer(models.Unigram([(w, -float(i)) for i, w in enumerate(words)], unk_id=0))
    built.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    built.decoder = decoders.Metaspace(prepend_scheme=scheme)
    return built


def build_bytes(scheme: str) -> Any:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: index for index, symbol in enumerate([*alphabet, "<q>", "</q>"])}
    built: Any = tokenizers.Tokenizer(models.BPE(vocab, []))
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=scheme == "always")
    return built


@pytest.mark.parametrize("flags", [{}, {"lstrip": True}, {"rstrip": True}, {"single_word": True}], ids=str)
@pytest.mark.parametrize("scheme", ["always", "first", "never"])
@pytest.mark.parametrize("build", [build_pieces, build_bytes])
def test_ids_behind_any_prompt(build: Any, scheme: str, flags: dict[str, bool]) -> None:
    """Texts that spell nothing are read as tokenizers reads the whole; others add no special token."""
    raw = build(scheme)
    raw.add_special_tokens([AddedToken(text, normalized=False, **flags) for text in ("<q>", "</q>")])
    tokenizer = Tokenizer(raw.to_str().encode())
    special = {raw.token_to_id(text) for text in ("<q>", "</q>")}
    draw = random.Random(0)
    parts = ["<q>", "</q>", "<", "q>", "a", "b", " ", "  ", "/q>", "z"]
    for _ in range(400):
        prompt = "".join(draw.choices(parts, k=draw.randint(0, 4)))
        text = "".join(draw.choices(parts, k=draw.randint(0, 4)))
        (ids,) = tokenizer.encode_prompted(prompt, [text])
        whole = raw.encode(prompt + text, add_special_tokens=False).ids
        alone = raw.encode(prompt, add_special_tokens=False).ids
        counts = [[token for token in some if token in special] for some in (ids, whole, alone)]
        if counts[1] == counts[2]:
            assert ids == whole, (prompt, text)
        if not flags.get("single_word"):  # of which a neighbour decides whether it is one
            assert counts[0] == counts[2], (prompt, text)
