"""Translations of a bundle against transformers' own."""

from __future__ import annotations

import dataclasses
import itertools
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from planforge.exporter.checkpoints.source import find_demo
from planforge.models import PaddedAttention, SourceAttention, Transformer, load_model
from planforge.runtime import Translator, load
from planforge.runtime.errors import (
    ClosedError,
    ContextLengthError,
    InputError,
    IntegrityError,
    ManifestError,
    MemoryLimitError,
)
from planforge.runtime.text.tokenizer import Tokenizer
from planforge.runtime.translate.sources import SourceReader

from ...helpers.models import edit_json
from ...helpers.translation import SENTENCES, SHORT_AWKWARD, Reference


@pytest.fixture(scope="module")
def model(marian_bundle: Path) -> Iterator[Translator]:
    with Translator.load(marian_bundle) as opened:
        yield opened


@pytest.fixture(scope="module")
def reference(marian_bundle: Path) -> Reference:
    return Reference.of(marian_bundle.parent / "marian")


@pytest.mark.parametrize(("num_beams", "length_penalty"), [(1, None), (4, 0.4), (4, 1.0), (4, 2.0)], ids=str)
def test_fifty_sources_as_in_transformers(
    model: Translator, reference: Reference, num_beams: int, length_penalty: float | None
) -> None:
    options: dict[str, Any] = {
        "num_beams": num_beams,
        **({} if length_penalty is None else {"length_penalty": length_penalty}),
    }
    wanted = {text: reference.generate(text, **options)[0] for text in SENTENCES}
    differing = {ids: text for text, (ids, _) in wanted.items()}  # one text for each translation
    texts = list(differing.values())[:50]
    assert len(texts) == 50
    assert len({len(wanted[text][0]) for text in texts}) >= 5  # they end at unequal steps
    assert max(len(set(wanted[text][0])) for text in texts) >= 5
    results = model.translate(texts, **options)  # padded batches of unequal sources
    assert [result.token_ids for result in results] == [wanted[text][0] for text in texts]
    for result, (ids, score) in zip(results, map(wanted.__getitem__, texts), strict=True):
        assert result.text == reference.tokenizer.decode(list(ids), skip_special_tokens=True)
        assert score is None or abs(result.score - score) < 1e-4
        assert result.finish_reason == "eos"  # forced at full length


@pytest.mark.parametrize(
    "options",
    [
        {"length_penalty": 0.4, "early_stopping": True},
        {"length_penalty": 2.0, "early_stopping": "never"},
        {"length_penalty": -0.5, "no_repeat_ngram_size": 2},
        {"length_penalty": 0.0, "min_new_tokens": 6},
    ],
)
def test_options_as_in_transformers(model: Translator, reference: Reference, options: dict[str, Any]) -> None:
    texts = SENTENCES[:12]
    results = model.translate(texts, num_beams=4, n_best=3, **options)
    usual = model.translate(texts, num_beams=4, n_best=3)
    assert [r.candidates for r in results] != [r.candidates for r in usual]
    for text, result in zip(texts, results, strict=True):
        wanted = reference.generate(text, num_beams=4, num_return_sequences=3, **options)
        assert [c.token_ids for c in result.candidates] == [ids for ids, _ in wanted]
        scores = [score or 0.0 for _, score in wanted]
        np.testing.assert_allclose([c.score for c in result.candidates], scores, atol=1e-4)
        assert (result.text, result.score) == (result.candidates[0].text, result.candidates[0].score)


def test_awkward_texts_as_in_transformers(model: Translator, reference: Reference) -> None:
    texts = [text for text in SHORT_AWKWARD if len(reference.tokenizer(text).input_ids) > 1]
    results = model.translate(texts, parse_special=True)
    assert [r.token_ids for r in results] == [reference.generate(text)[0][0] for text in texts]


def test_one_many_and_a_stream_are_the_same(model: Translator) -> None:
    texts = SENTENCES[:10]
    alone = [model.translate(text, num_beams=3) for text in texts]
    together = model.translate(texts, num_beams=3)
    assert [r.token_ids for r in alone] == [r.token_ids for r in together]
    assert np.allclose([r.score for r in alone], [r.score for r in together], atol=1e-5)
    assert model.translate([]) == []


def test_an_endless_iterator_is_read_as_needed(model: Translator) -> None:
    done: list[int] = []
    results = model.iterate(itertools.cycle(SENTENCES[:3]), max_new_tokens=2, progress=done.append)
    first = list(itertools.islice(results, 5))
    assert [r.text for r in first[:2]] == [r.text for r in first[3:]]
    assert done == sorted(done)


@pytest.mark.parametrize("text", [SENTENCES[8], SENTENCES[3], SENTENCES[17]])
def test_the_stream_is_greedy_translation(model: Translator, text: str) -> None:
    chunks = list(model.stream(text))
    whole = model.translate(text, num_beams=1)
    assert "".join(map(str, chunks)) == whole.text
    assert tuple(token for chunk in chunks for token in chunk.token_ids) == whole.token_ids
    assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + [whole.finish_reason]
    assert [chunk.usage.completion_tokens for chunk in chunks] == [*range(1, len(chunks) + 1)]
    assert {chunk.usage.prompt_tokens for chunk in chunks} == {model.count_tokens(text)}
    with pytest.raises(InputError, match="stream needs num_beams=1, not 2"):
        model.stream(text, num_beams=2)


def test_language_codes_are_kept_whole(model: Translator, reference: Reference) -> None:
    assert model.languages == (">>de<<", ">>fr<<", ">>zh_Hant<<")
    text = ">>fr<< Where is the station?"
    assert model.translate(text).token_ids == reference.generate(text)[0][0]
    assert model.translate(text).token_ids != model.translate(">>de<< Where is the station?").token_ids
    with pytest.raises(InputError, match=">>it<<"):
        model.translate(">>it<< Where is the station?")


def test_attention_is_that_of_pytorch(dates_bundle: Path) -> None:
    """Whose attention is compared with transformers' by tests/models/test_marian.py."""
    with Translator.load(dates_bundle) as model:
        found = model.align("the 3rd of May, 1998")
        texts = ["July 9 2007", "the 3rd of May, 1998"]
        submitted = model.submit(texts, alignment=True, num_beams=2).result(60)
        alone = [model.align(text, num_beams=2) for text in texts]
        assert "alignment" not in submitted[0].to_json()
        assert model.translate(texts)[0].alignment is None
    for result, alignment in zip(submitted, alone, strict=True):
        assert result.alignment is not None
        assert (result.alignment.source, result.alignment.target) == (alignment.source, alignment.target)
        np.testing.assert_allclose(result.alignment.weights, alignment.weights, atol=1e-5)
    assert "".join(found.source) == "the 3rd of may, 1998</s>"
    assert "".join(found.target) == "1998-05-03</s>"
    folder = find_demo("transformer-demo")
    reference = load_model(folder)
    assert isinstance(reference, Transformer)
    ids = [
        [Tokenizer.from_file(folder / f"tokenizer.{side}.json").find_id(token) for token in tokens]
        for side, tokens in (("source", found.source), ("target", ("<pad>", *found.target[:-1])))
    ]
    source_ids, target_ids = (torch.tensor([row]) for row in ids)
    memory = reference.encode(source_ids, PaddedAttention(torch.ones_like(source_ids)))
    keys_values = reference.decoder.keys_values(memory)  # type: ignore[operator]
    source = SourceAttention(keys_values, torch.ones_like(source_ids))
    reference.step(target_ids, source)
    wanted = torch.cat(list(source.weights.values()))  # (L, H, T, S)
    np.testing.assert_allclose(found.weights, wanted.numpy(), atol=1e-5)


def test_attention_needs_its_export(model: Translator) -> None:
    for ask in (model.align, lambda text: model.submit([text], alignment=True)):
        with pytest.raises(InputError, match="--outputs cross_attentions"):
            ask("hello")
    with pytest.raises(InputError, match="alignment=1 must be True or False"):
        model.submit(["hello"], alignment=1)  # type: ignore[arg-type]


def test_fp16_runs_too(dates_bundle: Path) -> None:
    texts = {"the 3rd of May, 1998": "1998-05-03", "21.12.2012": "2012-12-21", "1 Jan 68": "2068-01-01"}
    with Translator.load(dates_bundle, precision="fp16") as half, Translator.load(dates_bundle) as full:
        assert half.artifact.id == "decoder.portable.fp16"
        found = half.translate(list(texts), num_beams=4)
        wanted = full.translate(list(texts), num_beams=4)
    assert [result.text for result in found] == list(texts.values())
    np.testing.assert_allclose([r.score for r in found], [r.score for r in wanted], atol=0.01)


@pytest.mark.parametrize("dialect", ["portable", "inplace"])
def test_other_dialects_run_too(dialect: str, marian_bundle: Path, model: Translator, tmp_path: Path) -> None:
    """The graphs for other consumers, on ONNX Runtime; `model` runs `ort`."""
    assert model.artifact.id == "decoder.ort.fp32"
    texts = SENTENCES[:12]
    wanted = model.translate(texts, num_beams=4, n_best=4)
    bundle = Path(shutil.copytree(marian_bundle, tmp_path / "bundle"))
    artifacts = json.loads((bundle / "manifest.json").read_text(encoding="utf-8"))["artifacts"]
    kept = [a for a in artifacts if a["graph"] == "encoder" or a["dialect"] == dialect]
    edit_json(bundle / "manifest.json", artifacts=kept, plans=[])
    with Translator.load(bundle, precision="fp32") as other:
        assert other.artifact.id == f"decoder.{dialect}.fp32"
        found = other.translate(texts, num_beams=4, n_best=4)
    for a, b in zip(wanted, found, strict=True):
        assert [c.token_ids for c in a.candidates] == [c.token_ids for c in b.candidates]
        np.testing.assert_allclose(
            [c.score for c in a.candidates], [c.score for c in b.candidates], atol=1e-4
        )


def test_long_texts_are_cut_as_in_transformers(model: Translator, reference: Reference) -> None:
    text = "Where is the station? " * 40
    ids = reference.tokenizer(text).input_ids[:-1]
    limit = model.max_length
    assert len(ids) > limit
    done: list[int] = []
    head, short = model.translate([text, "hello"], truncation="head", progress=done.append)
    cut = reference.tokenizer.decode(ids[: limit - 1])
    assert reference.tokenizer(cut).input_ids[:-1] == ids[: limit - 1]
    assert head.token_ids == reference.generate(cut)[0][0]
    assert (head.dropped, short.dropped, done[-1]) == (len(ids) - limit + 1, 0, 2)
    code = ">>fr<< "
    code_id, *rest, end = reference.tokenizer(code + text).input_ids
    options: dict[str, Any] = {"limit": limit, "parse_special": False}
    reader = SourceReader(model.source_tokenizer, model.defaults, truncation="tail", **options)
    kept = reader.read(code + text)
    assert kept.tokens == [code_id, *rest[2 - limit :], end]  # the language stays, and the end of the text
    tail = model.translate(code + text, truncation="tail")
    assert tail.dropped == kept.dropped == len(rest) - limit + 2
    assert "".join(map(str, model.stream(code + text, truncation="tail", max_new_tokens=3))) in tail.text


def test_the_first_translation_is_there_after_the_first_batch(model: Translator) -> None:
    done: list[int] = []
    texts = [sentence for sentence in SENTENCES if sentence.strip()][:60]
    results = model.iterate(texts, batch_size=4, progress=done.append, max_new_tokens=3)
    first = next(results)
    assert len(done) == 1 and done[0] <= 4
    found = [first, *results]
    assert done == sorted(set(done)) and done[-1] == len(texts) and len(done) >= 15
    alone = model.translate(texts[17], max_new_tokens=3)
    assert (found[17].text, found[17].token_ids) == (alone.text, alone.token_ids)


def test_what_is_no_text_is_refused(model: Translator) -> None:
    anything: Any = model  # so that a type checker lets mistakes pass
    for wrong in (None, 3, ("a", "b")):
        for method in (anything.translate, anything.iterate):
            with pytest.raises(InputError, match=r"give several texts|a tuple of two texts"):
                method(wrong)
        with pytest.raises(InputError, match="a text must be a str"):
            anything.stream(wrong)
    with pytest.raises(InputError, match="unknown option 'batch_size'"):
        anything.stream("a", batch_size=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 65}, "num_beams=65 is more than the 64 rows that this bundle allows"),
        ({"n_best": "a"}, "n_best is 'a'"),
        ({"n_best": 3, "num_beams": 2}, "n_best is 3; it must be at most num_beams"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"max_new_tokens": 1000}, "max_new_tokens=1000 must be at most 64"),
        ({"no_repeat_ngram_size": 0}, "no_repeat_ngram_size is 0"),
        (
            {"temperature": 0.7},
            r"unknown option 'temperature'\. There are: num_beams, .*, progress",
        ),
        ({"num_beam": 2}, r"unknown option 'num_beam'; did you mean 'num_beams'\? There are: "),
        ({"truncation": "windows"}, "truncation='windows' is not one of None, 'head', 'tail'"),
        ({"batch_size": 0}, "batch_size=0 must be an integer"),
        ({"batch_size": 65}, r"batch_size=65 is more than the \d+ rows"),
        ({"progress": 3}, "progress=3 must be True"),
    ],
)
def test_bad_options(model: Translator, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        model.translate("hello", **options)


def test_bad_texts(model: Translator) -> None:
    for empty in ("", "   "):
        with pytest.raises(InputError, match=r"texts\[1\]: a text to translate is empty"):
            model.translate(["hello", empty])
    with pytest.raises(ContextLengthError, match=r"texts\[2\]: a text of 4000000 characters is longer than"):
        model.translate(["a", "b", "long" * 1_000_000])
    with pytest.raises(ContextLengthError, match=r"has \d+ tokens.* reads 64") as found:
        model.translate("hello there, my friend, " * 40)
    assert found.value.limit == 64 < found.value.tokens
    with pytest.raises(InputError, match="a text must be a str, not int"):
        model.translate([3])  # type: ignore[list-item]
    with pytest.raises(InputError, match="surrogate"):
        model.translate("\ud800")


def test_sources_of_one_token_and_of_all_that_fit(model: Translator, reference: Reference) -> None:
    texts = ["a", "e " * 200]
    while model.count_tokens(texts[1]) > 64:
        texts[1] = texts[1][:-2]
    assert [model.count_tokens(text) for text in texts][1] >= 63
    results = model.translate(texts, num_beams=4)
    assert [r.token_ids for r in results] == [reference.generate(t, num_beams=4)[0][0] for t in texts]


def test_limits_of_memory_and_length(marian_bundle: Path) -> None:
    texts = SENTENCES[:20]
    with Translator.load(marian_bundle) as model:
        wanted = [result.token_ids for result in model.translate(texts)]
        row = model.decoder.count_bytes(1, 64) + model.encoder.count_context_bytes(1, 64)
        limit = model.decoder.budget.weight_bytes + row  # a row at a time, not eight
        short = model.decoder.budget.weight_bytes + model.decoder.count_bytes(1, 16)
    with Translator.load(marian_bundle, memory_limit=limit) as model:
        assert [result.token_ids for result in model.translate(texts)] == wanted
        with pytest.raises(MemoryLimitError, match=r"MB of weights and .* for a cache of 64 x 40 tokens"):
            model.translate("hello", num_beams=64, max_new_tokens=40)
    with Translator.load(marian_bundle, memory_limit=short) as model, pytest.raises(MemoryLimitError):
        model.stream("hello", max_new_tokens=64)
    with Translator.load(marian_bundle, max_length=8) as model:
        with pytest.raises(ContextLengthError, match="reads 8"):
            model.translate("Where is the nearest station?")
        assert len(model.translate("a").token_ids) <= 8


def test_closed(marian_bundle: Path) -> None:
    model = Translator.load(marian_bundle)
    model.close()
    model.close()
    with pytest.raises(ClosedError):
        model.translate("hello")
    with pytest.raises(ClosedError):
        model.stream("hello")


def test_graphs_of_different_exports_are_refused(
    marian_bundle: Path, dates_bundle: Path, tmp_path: Path
) -> None:
    bundle = Path(shutil.copytree(marian_bundle, tmp_path / "bundle"))
    mine = next((bundle / "onnx").glob("encoder.ort.fp32-*"))
    original = mine.read_bytes()
    mine.write_bytes(original.replace(b"encoder.layers.0", b"encoder.layers.1"))
    with pytest.raises(IntegrityError, match="or belongs to another export"):
        load(bundle)
    mine.write_bytes(original)

    manifest = json.loads((bundle / "manifest.json").read_text(encoding="utf-8"))
    encoder, *others = manifest["artifacts"]
    assert encoder["id"] == "encoder.ort.fp32"
    (data,) = encoder["data"]
    shutil.copy(bundle / data, bundle / "onnx" / "another.data")
    files = {**manifest["files"], "onnx/another.data": manifest["files"][data]}
    edit_json(
        bundle / "manifest.json",
        files=files,
        artifacts=[{**encoder, "data": ["onnx/another.data"]}, *others],
    )
    with pytest.raises(ManifestError, match="come from different exports: their weights are onnx/another"):
        load(bundle)

    theirs = json.loads((dates_bundle / "manifest.json").read_text(encoding="utf-8"))["artifacts"][0]
    disguised = {**theirs, "file": encoder["file"], "data": encoder["data"]}
    edit_json(bundle / "manifest.json", artifacts=[disguised, *others])
    with pytest.raises(ManifestError, match="do not belong together"):
        load(bundle)


def test_results_are_plain_data(model: Translator) -> None:
    result = model.translate(SENTENCES[8], num_beams=2, n_best=2)
    value = json.loads(json.dumps(result.to_json()))
    assert [*value, "alignment"] == [field.name for field in dataclasses.fields(result)]
    assert [c["text"] for c in value["candidates"]] == [c.text for c in result.candidates]
    assert result.timings.tokens_per_s > 0
