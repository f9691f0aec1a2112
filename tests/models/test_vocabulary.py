"""A vocabulary that config.json, the tokenizer and the embedding do not agree on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from planforge.exporter.checkpoints.source import find_demo
from planforge.models.checkpoint import describe
from planforge.models.vocabulary import count_tokens

from ..helpers.llamas import tiny_llama
from ..helpers.models import edit_json, tiny_bert, tiny_gpt2, tiny_marian

RESIZE = (
    r"take the tokenizer .* or add the missing rows in transformers: model.resize_token_embeddings\(2048\)"
)


@pytest.mark.parametrize(
    ("rows", "size", "hint"),
    [
        (2048, 2000, "set vocab_size to 2048"),
        (2048, 4000, "set vocab_size to 2048"),
        (4000, 2048, "set vocab_size to 4000"),
        (2000, 2048, RESIZE),
        (2000, 1000, RESIZE),
    ],
)
def test_all_three_numbers_are_named(rows: int, size: int, hint: str, tmp_path: Path) -> None:
    """Of a tokenizer with 2048 tokens."""
    tiny_llama(tmp_path, "llama 2", vocab_size=rows)
    edit_json(tmp_path / "config.json", vocab_size=size)
    numbers = f"vocab_size is {size}, the embedding has {rows} rows, and tokenizer.json has 2048 tokens: "
    with pytest.raises(ValueError, match=numbers + hint):
        describe(tmp_path)


@pytest.mark.parametrize(("write", "rows"), [(tiny_gpt2, 96), (tiny_bert, 96), (tiny_marian, 60)])
def test_every_family_is_checked(write: Any, rows: int, tmp_path: Path) -> None:
    write(tmp_path)
    edit_json(tmp_path / "config.json", vocab_size=90)
    with pytest.raises(ValueError, match=f"vocab_size is 90, the embedding has {rows} rows: set vocab_size"):
        describe(tmp_path)


def test_tokens_are_counted_as_tokenizers_counts_them(tmp_path: Path) -> None:
    file = Path(shutil.copy(find_demo("gpt2-demo") / "tokenizer.json", tmp_path))
    assert count_tokens(file) == 2048
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.add_special_tokens(["<new>"])
    tokenizer.save(str(file))
    assert count_tokens(file) == tokenizer.get_vocab_size() == 2049
    pieces = {"model": {"type": "Unigram", "vocab": [["a", -1.0], ["b", -2.0]]}}
    file.write_text(json.dumps(pieces), encoding="utf-8")
    assert count_tokens(file) == 2
    file.write_text("{", encoding="utf-8")
    assert count_tokens(file) is None
    assert count_tokens(tmp_path / "none.json") is None
