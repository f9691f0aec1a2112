"""TextEncoder on all-MiniLM-L6-v2: embeddings and features against their references."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentence_transformers
import torch
import transformers

from planforge.exporter.checkpoints.source import find_demo
from planforge.runtime import TextEncoder
from planforge.runtime.backends.backend import Array
from planforge.runtime.encode.encoder import Encoder
from planforge.runtime.encode.pooling import merge_windows
from planforge.runtime.errors import InputError

LONG = (
    "The quick brown fox jumps over the lazy dog, while 我在北京 and a naïve café looks on. " * 12
    + "In 1969 two men walked on the moon. " * 16
    + "Bake the bread for forty minutes, then let it cool down. " * 18
)
TEXTS = [
    "The quick brown fox jumps over the lazy dog.",
    "",
    "?!… – «»,,, ;;",
    "Déjà vu, naïve café; Crème brûlée",
    "De\u0301ja\u0300 vu, nai\u0308ve cafe\u0301 et plus encore",
    "我在Berlin住了3年,東京タワー",
    "👨‍👩‍👧‍👦 and 👍🏽! 🇩🇪x",
    " \t one\r\ntwo \u00a0 three ",
    "שלום עולם مرحبا",
    "x" * 300,
    LONG,
]
POOLED: dict[Any, Any] = {
    "cls": lambda states: states[0],
    "lasttoken": lambda states: states[-1],
    "max": lambda states: states.max(0),
    "mean": lambda states: states.mean(0),
}


@pytest.fixture(scope="module")
def model(minilm_bundle: Path) -> Iterator[TextEncoder]:
    encoder: TextEncoder
    with TextEncoder.load(minilm_bundle) as encoder:
        yield encoder


@pytest.fixture(scope="module")
def sbert() -> Any:
    return sentence_transformers.SentenceTransformer(str(find_demo("bert-demo")), device="cpu")


@pytest.fixture(scope="module")
def bert() -> Any:
    return transformers.BertModel.from_pretrained(find_demo("bert-demo")).float().eval()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return transformers.BertTokenizer.from_pretrained(find_demo("bert-demo"))


def encoded(sbert: Any, texts: list[str], **options: Any) -> Array:
    vectors: Array = sbert.encode(texts, show_progress_bar=False, **options)
    return vectors


def with_defaults(model: TextEncoder, **changes: Any) -> TextEncoder:
    return TextEncoder(model.encoder, model.tokenizer, dataclasses.replace(model.defaults, **changes))


def states_of(bert: Any, ids: list[int]) -> list[Array]:
    """transformers' hidden states (T, E) of one sequence, from the embeddings to the last layer."""
    return cached_states(bert, tuple(ids))


@functools.cache
def cached_states(bert: Any, ids: tuple[int, ...]) -> list[Array]:
    with torch.inference_mode():
        states = bert(torch.tensor([ids]), output_hidden_states=True).hidden_states
    return [state[0].numpy() for state in states]


def windows_of(tokenizer: Any, text: str, stride: int) -> list[tuple[int, list[int]]]:
    """Windows of 254 tokens, each with where it starts; the last one ends where the text does."""
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    starts = [*range(0, len(ids) - 254, 254 - stride), len(ids) - 254]
    cls = tokenizer.cls_token_id
    sep = tokenizer.sep_token_id
    return [(start, [cls, *ids[start : start + 254], sep]) for start in starts]


def test_embeddings_are_sentence_transformers(model: TextEncoder, sbert: Any) -> None:
    expected = encoded(sbert, TEXTS)
    cosines = expected @ expected.T
    assert cosines[~np.eye(len(TEXTS), dtype=bool)].max() < 0.95  # they differ from text to text
    got = model.embed(TEXTS)
    assert got.shape == (len(TEXTS), 384) and got.dtype == np.float32
    np.testing.assert_allclose(got, expected, atol=1e-5)
    assert (got * expected).sum(1).min() >= 0.99999
    for text, row in zip(TEXTS, expected, strict=True):
        alone = model.embed(text)
        assert alone.shape == (384,)
        np.testing.assert_allclose(alone, row, atol=1e-5)


def test_a_text_of_a_megabyte_is_cut_like_sentence_transformers(model: TextEncoder, sbert: Any) -> None:
    sentence = "Ein naïver Text, 我在北京, der nie endet. "
    times = 2**20 // 40
    text = sentence * times
    assert len(text.encode()) > 2**20
    (result,) = model.iterate("embed", [text])
    np.testing.assert_allclose(result.vector, encoded(sbert, [text])[0], atol=1e-5)
    assert result.dropped == times * (model.count_tokens(sentence) - 2) - 254 > 200_000


def test_special_tokens_in_a_text_are_text_unless_asked_for(model: TextEncoder, sbert: Any) -> None:
    text = "the first [SEP] and the second"
    plain = model.embed(text)
    parsed = model.embed(text, parse_special=True)
    np.testing.assert_allclose(parsed, encoded(sbert, [text])[0], atol=1e-5)
    assert plain @ parsed < 0.999
    assert model.count_tokens(text) == model.count_tokens(text, parse_special=True) + 2


@pytest.mark.parametrize("normalize", [True, False, None])
@pytest.mark.parametrize("pooling", POOLED)
def test_pooling_of_the_last_hidden_state(
    model: TextEncoder, bert: Any, tokenizer: Any, pooling: Any, normalize: bool | None
) -> None:
    got = model.embed(TEXTS[:6], pooling=pooling, normalize=normalize)  # of unequal length: padded
    for text, vector in zip(TEXTS, got, strict=False):
        states = states_of(bert, tokenizer(text)["input_ids"])[-1]
        expected = POOLED[pooling](states)
        length = np.linalg.norm(expected)
        assert length > 2
        np.testing.assert_allclose(vector, expected if normalize is False else expected / length, atol=1e-5)


def test_unnormalized_embeddings_without_a_pooling(model: TextEncoder) -> None:
    np.testing.assert_allclose(
        model.embed(TEXTS, normalize=False), model.embed(TEXTS, pooling="mean", normalize=False), atol=1e-6
    )
    several = with_defaults(model, pooling="cls+mean")
    assert several.embed("a").shape == (384,)
    with pytest.raises(
        InputError, match="normalize=False needs pooling too: one of cls, mean, max, lasttoken"
    ):
        several.embed("a", normalize=False)


@pytest.mark.parametrize(("truncation", "kept"), [("tail", range(-254, 0)), ("head+tail", None)])
def test_other_truncations(
    model: TextEncoder, bert: Any, tokenizer: Any, truncation: Any, kept: range | None
) -> None:
    cls, *ids, sep = tokenizer(LONG, verbose=False)["input_ids"]
    assert 500 < len(ids) <= 800  # so 128 / 510 of the room is the head's
    chosen = [*ids[:63], *ids[63 - 254 :]] if kept is None else [ids[i] for i in kept]
    expected = states_of(bert, [cls, *chosen, sep])[-1].mean(0)
    expected /= np.linalg.norm(expected)
    np.testing.assert_allclose(model.embed(LONG, truncation=truncation), expected, atol=1e-5)
    assert np.abs(model.embed(LONG) - expected).max() > 0.01


@pytest.mark.parametrize("pooling", [None, *POOLED])
def test_windows_are_merged(model: TextEncoder, bert: Any, tokenizer: Any, pooling: Any) -> None:
    states = [states_of(bert, ids)[-1] for _, ids in windows_of(tokenizer, LONG, stride=20)]
    assert len(states) == 3
    if pooling is None:  # the mean of the windows' embeddings, as sentence-transformers would give them
        vectors = [state.mean(0) / np.linalg.norm(state.mean(0)) for state in states]
    else:
        vectors = [POOLED[pooling](state) for state in states]
    expected = np.max(vectors, axis=0) if pooling == "max" else np.mean(vectors, axis=0)
    expected = expected / np.linalg.norm(expected)
    options: dict[str, Any] = {"truncation": "windows", "stride": 20, "pooling": pooling}
    (result,) = model.iterate("embed", [LONG], **options)
    assert result.dropped == 0
    np.testing.assert_allclose(result.vector, expected, atol=1e-5)
    assert np.abs(model.embed(LONG, pooling=pooling) - expected).max() > 0.01
    short = model.embed(TEXTS[0], pooling=pooling)  # one window
    np.testing.assert_allclose(model.embed(TEXTS[0], **options), short, atol=1e-6)


def test_windows_of_unequal_length_count_by_their_tokens() -> None:
    vectors = [np.array([1, 0], np.float32), np.array([4, 3], np.float32)]
    assert merge_windows(vectors, [1, 2], "mean").tolist() == [3, 2]
    assert merge_windows(vectors, [2, 1], "cls").tolist() == [2, 1]
    assert merge_windows([vectors[1], np.array([0, 9], np.float32)], [2, 1], "max").tolist() == [4, 9]
    assert merge_windows(vectors, [1, 2], "mean").dtype == np.float32


def test_the_log_says_what_was_dropped(model: TextEncoder, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "planforge")
    model.embed(TEXTS[:-1])
    model.embed(LONG, truncation="windows")
    assert not caplog.records
    model.embed([*TEXTS, LONG])
    dropped = 2 * (model.count_tokens(LONG) - 256)
    (record,) = caplog.records
    assert record.getMessage() == (
        f"2 of 12 texts were longer than the 256 tokens that this model takes, and {dropped} tokens were"
        " dropped (truncation='head'); truncation='windows' keeps all"
    )


def test_prompts_are_sentence_transformers(model: TextEncoder, caplog: pytest.LogCaptureFixture) -> None:
    prompts = {"query": "search for the answer: ", "document": "title: none | text: "}
    folder = str(find_demo("bert-demo"))
    sbert = sentence_transformers.SentenceTransformer(
        folder, device="cpu", prompts=prompts, default_prompt_name="document"
    )
    prompted = with_defaults(model, prompts=prompts, default_prompt="document")
    for name in (None, "query", "document"):
        expected = encoded(sbert, TEXTS[:7], prompt_name=name)
        np.testing.assert_allclose(prompted.embed(TEXTS[:7], prompt_name=name), expected, atol=1e-5)
        assert np.abs(expected - model.embed(TEXTS[:7])).max(axis=1).min() > 0.01
    for text in ("", "find: ", "search for the answer: "):
        expected = encoded(sbert, TEXTS[:7], prompt=text, prompt_name="query")  # the text has precedence
        np.testing.assert_allclose(
            prompted.embed(TEXTS[:7], prompt=text, prompt_name="query"), expected, atol=1e-5
        )
        np.testing.assert_allclose(prompted.embed(TEXTS[:7], prompt=text), expected, atol=1e-5)
    assert "prompt_name='query' is not used" in caplog.text
    with pytest.raises(InputError, match=r"prompt_name='doc' is not one of .*'query', 'document'"):
        prompted.embed("a", prompt_name="doc")
    with pytest.raises(InputError, match="prompts: none"):
        model.embed("a", prompt_name="query")


@pytest.mark.parametrize("width", [1, 128, 384])
def test_fewer_numbers_are_sentence_transformers(model: TextEncoder, sbert: Any, width: int) -> None:
    expected = encoded(sbert, TEXTS, truncate_dim=width, normalize_embeddings=True)
    got = model.embed(TEXTS, truncate_dim=width)
    assert got.shape == (len(TEXTS), width)
    np.testing.assert_allclose(got, expected, atol=1e-5)
    raw = encoded(sentence_transformers.SentenceTransformer(modules=[*sbert][:2]), TEXTS, truncate_dim=width)
    np.testing.assert_allclose(model.embed(TEXTS, truncate_dim=width, normalize=False), raw, atol=1e-5)
    assert model.embed([], truncate_dim=width).shape == (0, width)
    assert next(model.iterate("embed", TEXTS, truncate_dim=width)).vector.shape == (width,)


@pytest.mark.parametrize("width", [0, 385, True, 2.0, "8"])
def test_a_width_that_the_vector_lacks_is_refused(model: TextEncoder, width: Any) -> None:
    with pytest.raises(InputError, match=f"truncate_dim={width!r} must be .* from 1 to 384"):
        model.embed("a", truncate_dim=width)


@pytest.mark.parametrize(
    "layers", ["embeddings", "second_to_last", "last", "sum_last_four", "concat_last_four", "sum_all"]
)
def test_features_are_transformers_hidden_states(
    model: TextEncoder, bert: Any, tokenizer: Any, layers: Any
) -> None:
    texts = ["", *TEXTS[3:7]]
    for text, got in zip(texts, model.features(texts, layers=layers), strict=True):
        reference = tokenizer(text, return_offsets_mapping=True)
        states = states_of(bert, reference["input_ids"])
        assert len(states) == 7
        expected = {
            "embeddings": states[0],
            "second_to_last": states[5],
            "last": states[6],
            "sum_last_four": states[3] + states[4] + states[5] + states[6],
            "concat_last_four": np.concatenate(states[3:], axis=1),
            "sum_all": sum(states[1:]),
        }[layers]
        np.testing.assert_allclose(got.vectors, expected, atol=5e-5)
        assert got.tokens == tuple(tokenizer.convert_ids_to_tokens(reference["input_ids"]))
        assert got.offsets == tuple(reference["offset_mapping"])
        assert got.dropped == 0


def test_features_of_a_long_text_keep_every_token(model: TextEncoder, bert: Any, tokenizer: Any) -> None:
    reference = tokenizer(LONG, return_offsets_mapping=True, verbose=False)
    windows = [(s, states_of(bert, ids)[-1]) for s, ids in windows_of(tokenizer, LONG, stride=64)]
    expected = [windows[0][1][0]]
    for token in range(len(reference["input_ids"]) - 2):
        around = [min(token - start, start + 253 - token) for start, _ in windows]
        best = int(np.argmax(around))
        expected.append(windows[best][1][1 + token - windows[best][0]])
    expected.append(windows[-1][1][-1])
    got = model.features(LONG)
    assert got.tokens == tuple(tokenizer.convert_ids_to_tokens(reference["input_ids"]))
    assert got.offsets == tuple(reference["offset_mapping"])
    np.testing.assert_allclose(got.vectors, np.stack(expected), atol=5e-5)
    head = model.features(LONG, truncation="head")
    assert len(head.tokens) == 256 == len(head.vectors)
    assert head.dropped == len(got.tokens) - 256 > 0


def test_features_of_layers_that_the_bundle_lacks(model: TextEncoder) -> None:
    artifact = model.artifact
    kept = tuple(o for o in artifact.outputs if o.role in ("hidden.2", "hidden.5", "hidden.6"))
    bare = dataclasses.replace(artifact, outputs=kept)
    program = Encoder(model.encoder.program, bare, model.encoder.pad)
    encoder = TextEncoder(program, model.tokenizer, model.defaults)
    np.testing.assert_array_equal(encoder.features("a b").vectors, model.features("a b").vectors)
    assert encoder.features("a b", layers="second_to_last").vectors.shape == (4, 384)
    with pytest.raises(InputError, match=r"layers \[1, 3, 4\].*export it again with --outputs hidden_states"):
        encoder.features("a b", layers="sum_all")
