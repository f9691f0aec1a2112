"""What stands around texts: what a checkpoint's tokenizer puts there, and nothing where it puts nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import transformers
from sentence_transformers import SentenceTransformer
from tokenizers import processors

from planforge.exporter import export
from planforge.exporter.checkpoints.checkpoint import Checkpoint
from planforge.exporter.checkpoints.source import resolve_source
from planforge.runtime import InputError, TextEncoder
from planforge.runtime.text.long_text import fit

from ...helpers.models import tiny_bert, write_mean_pooling, write_wordpiece

TEXTS = ["hello world and paris", "the plan is not it", "a", "Hello, WORLD! " * 3]
PAIR = ("hello world", "the plan")
SINGLE = "[CLS] $A [SEP]"
TWO = "[CLS] $A [SEP] $B:1 [SEP]:1"


def write_folder(folder: Path, single: str = "", pair: str = "") -> Path:
    """A tiny BERT whose tokenizer.json puts this around texts."""
    write_wordpiece(folder)
    tiny_bert(folder)
    own: Any = transformers.BertTokenizer.from_pretrained(folder).backend_tokenizer
    (folder / "vocab.txt").unlink()
    content = json.loads(own.to_str()) | {"post_processor": None}
    built: Any = tokenizers.Tokenizer.from_str(json.dumps(content))
    if single:
        ids = [(name, built.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
        built.post_processor = processors.TemplateProcessing(single, pair or None, ids)
    built.save(str(folder / "tokenizer.json"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def forget_special_tokens(folder: Path) -> None:
    """Leave the tokenizer of a folder no special token but [UNK]; the others are words that no text has."""
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    for name in ("[CLS]", "[SEP]", "[PAD]", "[MASK]"):
        number = vocabulary.pop(name)
        vocabulary[f"gone{number}"] = number
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] == "[UNK]"]
    file.write_text(json.dumps(content))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "[UNK]", "model_max_length": 64}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


@pytest.mark.parametrize(
    ("single", "pair", "framed"),
    [
        ("", "", "none"),
        (SINGLE, "", "single"),
        (SINGLE, TWO, "all"),
        ("[CLS] $A", "", "own"),
        ("$A [SEP]", "", "own"),
        (SINGLE, "[CLS] $A $B:1 [SEP]:1", "own"),
        (SINGLE, "$A [SEP] $B:1", "own"),
        ("[SEP] $A [CLS]", "", "own"),
    ],
)
def test_frames_are_those_of_transformers(tmp_path: Path, single: str, pair: str, framed: str) -> None:
    reference: Any = transformers.AutoTokenizer.from_pretrained(write_folder(tmp_path, single, pair))
    checkpoint = Checkpoint(resolve_source(str(tmp_path)))
    defaults = checkpoint.encoder
    assert defaults is not None and defaults.framed == framed
    options: dict[str, Any] = {"max_length": 64, "truncation": None}
    (tokenizer,) = checkpoint.tokenizers
    first, second = (tokenizer.encode(text) for text in PAIR)
    (alone,) = fit(first, None, special_tokens=defaults.make_special_tokens(), **options).pieces
    assert alone.ids == reference(PAIR[0])["input_ids"]
    (both,) = fit(first, second, special_tokens=defaults.make_special_tokens(is_pair=True), **options).pieces
    assert both.ids == reference(*PAIR)["input_ids"]
    start, body = both.body
    assert both.ids[start : start + len(body)] == second


@pytest.mark.parametrize(
    "settings",
    [
        {"tokenizer_class": "PreTrainedTokenizerFast"},
        {"tokenizer_class": "BertTokenizer"},
        {"tokenizer_class": "BertTokenizer", "model_input_names": ["input_ids", "attention_mask"]},
        {"model_input_names": ["input_ids", "token_type_ids", "attention_mask"]},
    ],
    ids=str,
)
@pytest.mark.parametrize("pair", [TWO, "[CLS] $A [SEP] $B [SEP]"])
def test_the_second_text_has_the_segments_of_transformers(
    tmp_path: Path, settings: dict[str, Any], pair: str
) -> None:
    write_folder(tmp_path, SINGLE, pair)
    written = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(written | settings))
    expected = transformers.AutoTokenizer.from_pretrained(tmp_path)(*PAIR)
    checkpoint = Checkpoint(resolve_source(str(tmp_path)))
    assert checkpoint.encoder is not None
    special_tokens = checkpoint.encoder.make_special_tokens(is_pair=True)
    first, second = (checkpoint.tokenizers[0].encode(text) for text in PAIR)
    (both,) = fit(first, second, max_length=64, truncation=None, special_tokens=special_tokens).pieces
    assert both.ids == expected["input_ids"]
    assert both.segments == expected.get("token_type_ids", [0] * len(both.ids))  # no ids are zeros


def test_an_encoder_needs_no_special_tokens_at_all(tmp_path: Path) -> None:
    """Not even to pad with; sentence-transformers does, so transformers alone is the reference."""
    folder = write_folder(tmp_path / "checkpoint")
    write_mean_pooling(folder)
    forget_special_tokens(folder)
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    reference = transformers.AutoModel.from_pretrained(folder).eval()
    with torch.no_grad():
        states = [reference(torch.tensor([tokenizer(text)["input_ids"]])).last_hidden_state for text in TEXTS]
    export(folder, tmp_path / "bundle", precision=["fp32"], target=["cpu"])
    with TextEncoder.load(tmp_path / "bundle") as model:
        assert model.defaults.tokens == {}
        assert np.allclose(model.embed(TEXTS), [state[0].mean(0).numpy() for state in states], atol=1e-5)


def test_vectors_without_special_tokens_are_those_of_sentence_transformers(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "checkpoint")
    write_mean_pooling(folder)
    reference = SentenceTransformer(str(folder), device="cpu")
    export(folder, tmp_path / "bundle", precision=["fp32"], target=["cpu"])
    with TextEncoder.load(tmp_path / "bundle") as model:
        assert np.allclose(model.embed(TEXTS), reference.encode(TEXTS), atol=1e-5)
        assert model.embed([]).shape == (0, 32)
        ids = reference.tokenizer(TEXTS[0])["input_ids"]
        assert model.count_tokens(TEXTS[0]) == len(ids)
        features = model.features(TEXTS[0])
        assert list(features.tokens) == reference.tokenizer.convert_ids_to_tokens(ids)
        assert len(features.offsets) == len(features.vectors) == len(ids)
        with pytest.raises(InputError, match=r"texts\[1\]: the text is empty"):
            model.embed(["a", ""])
