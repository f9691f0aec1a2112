"""Special tokens beyond a model's vocabulary are left out of a bundle; any other is an error."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors

from planforge.exporter import export
from planforge.exporter.checkpoints.source import find_demo
from planforge.exporter.checkpoints.tokenizers.unknown_tokens import remove_unknown_tokens
from planforge.exporter.errors import CheckpointError
from planforge.runtime import TextGenerator

WORDS = {"<unk>": 0, "a": 1, "b": 2}


def bytes_of(model: models.Model, *special: str, plain: tuple[str, ...] = ()) -> bytes:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_tokens([AddedToken(text) for text in plain])
    tokenizer.add_special_tokens([AddedToken(text) for text in special])
    return bytes(tokenizer.to_str(), "utf-8")


@pytest.mark.parametrize(
    "model",
    [
        models.WordLevel(WORDS, unk_token="<unk>"),
        models.WordLevel({**WORDS, "<mask>": 3}, unk_token="<unk>"),  # as BART's vocab.json has it
        models.BPE(WORDS, [], unk_token="<unk>"),
        models.Unigram([("<unk>", 0.0), ("a", -1.0), ("b", -2.0), ("<mask>", 0.0)], unk_id=0),
    ],
)
def test_a_special_token_without_an_embedding_is_left_out(
    model: models.Model, caplog: pytest.LogCaptureFixture
) -> None:
    data = bytes_of(model, "<mask>")
    changed = Tokenizer.from_buffer(remove_unknown_tokens(data, 3, "it"))
    assert changed.get_vocab() == WORDS
    assert changed.encode("a b").ids == Tokenizer.from_buffer(data).encode("a b").ids == [1, 2]
    assert "the tokenizer of it has <mask>, which the model's vocabulary lacks" in caplog.text
    assert remove_unknown_tokens(data, 4, "it") == data


def test_of_many_a_few_are_named(caplog: pytest.LogCaptureFixture) -> None:
    many = bytes_of(models.WordLevel(WORDS, unk_token="<unk>"), *(f"<extra_{i}>" for i in range(10, 20)))
    remove_unknown_tokens(many, 3, "it")
    assert "has <extra_10>, <extra_11>, <extra_12>, <extra_13>, <extra_14> and 5 more, which" in caplog.text


@pytest.mark.parametrize("text", ["</s>", "<｜begin｜>"])
def test_tokens_that_texts_can_have_stay(text: str) -> None:
    plain = bytes_of(models.WordLevel(WORDS, unk_token="<unk>"), plain=("word",))
    assert remove_unknown_tokens(plain, 3, "it") == plain
    tokenizer = Tokenizer.from_buffer(bytes_of(models.WordLevel(WORDS, unk_token="<unk>"), text))
    tokenizer.post_processor = processors.TemplateProcessing(f"$A {text}", special_tokens=[(text, 3)])
    around = bytes(tokenizer.to_str(), "utf-8")
    assert remove_unknown_tokens(around, 3, "it") == around


def test_what_stands_for_unknown_words_stays() -> None:
    word = bytes_of(models.WordLevel({"a": 0, "b": 1, "<unk>": 2}, unk_token="<unk>"), "<unk>")
    pieces = bytes_of(models.Unigram([("a", -1.0), ("b", -2.0), ("<unk>", 0.0)], unk_id=2), "<unk>")
    for data in (word, pieces):
        assert remove_unknown_tokens(data, 2, "it") == data


def test_files_without_added_tokens_and_with_holes_are_read() -> None:
    plain = json.loads(bytes_of(models.WordLevel(WORDS, unk_token="<unk>")))
    del plain["added_tokens"]
    data = json.dumps(plain).encode()
    assert remove_unknown_tokens(data, 2, "it") == data
    holes = bytes_of(models.WordLevel({"<unk>": 0, "a": 1, "<mask>": 7}, unk_token="<unk>"), "<mask>")
    assert Tokenizer.from_buffer(remove_unknown_tokens(holes, 5, "it")).get_vocab() == {"<unk>": 0, "a": 1}


def test_a_model_whose_tokenizer_got_a_pad_token_is_exported(tmp_path: Path) -> None:
    checkpoint = Path(shutil.copytree(find_demo("gpt2-demo"), tmp_path / "checkpoint"))
    file = checkpoint / "tokenizer.json"
    original = file.read_bytes()
    tokenizer = Tokenizer.from_buffer(original)
    tokenizer.add_special_tokens(["[PAD]"])
    tokenizer.save(str(file))
    export(checkpoint, tmp_path / "bundle", precision=["fp32"], target=["cpu"])
    kept = TextGenerator.load(tmp_path / "bundle").tokenizer
    assert kept.vocab_size == Tokenizer.from_buffer(original).get_vocab_size()
    assert kept.find_id("[PAD]") is None
    tokenizer.add_tokens(["forsooth"])
    tokenizer.save(str(file))
    with pytest.raises(CheckpointError, match=r"tokenizer\.json has \d+ tokens, but config\.json's"):
        export(checkpoint, tmp_path / "other", precision=["fp32"], target=["cpu"])
