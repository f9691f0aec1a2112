"""MarianMT whose languages have a vocabulary each, against MarianTokenizer and MarianMTModel."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from planforge.exporter import export
from planforge.exporter.checkpoints.tokenizers.marian import build_marian_tokenizers
from planforge.exporter.errors import CheckpointError
from planforge.runtime import Translator
from planforge.runtime.text.piece_tokenizer import PIECES, open_tokenizer

from ...helpers.marian import (
    AWKWARD,
    CODES,
    ENGLISH,
    load_marian_reference,
    pieces_of,
    spm,
    write_marian_tokenizer,
)
from ...helpers.models import random_marian

FILES = {"source": "vocab.json", "target": "target_vocab.json"}


def write_separate(folder: Path, further: int = 40) -> tuple[int, int]:
    """Write tokenizers with two vocabularies, of which the target's is larger; return how many have."""
    folder.mkdir(parents=True, exist_ok=True)
    write_marian_tokenizer(folder, config={"separate_vocabs": True})
    counts = []
    for side, name in FILES.items():
        pieces = sorted(pieces_of(spm(side, normalization_rule_name="nmt_nfkc")), reverse=side == "target")
        kept = [piece for number, piece in enumerate(pieces) if number % 25 != 7]
        more = [f"{side}{number}" for number in range(further if side == "target" else 3)]
        tokens = ["</s>", "<unk>", *kept, *CODES, *more, "<pad>"]
        (folder / name).write_text(json.dumps({token: index for index, token in enumerate(tokens)}))
        counts.append(len(tokens))
    return counts[0], counts[1]


def test_ids_and_texts_are_those_of_marian_tokenizer(tmp_path: Path) -> None:
    sizes = write_separate(tmp_path)
    reference = load_marian_reference(tmp_path)
    assert reference.separate_vocabs
    source, target = (
        open_tokenizer(data, side, PIECES, size)
        for data, side, size in zip(build_marian_tokenizers(tmp_path), FILES, sizes, strict=True)
    )
    # It numbers special tokens by the source's vocabulary, in the target's texts too.
    mistaken = set(reference.added_tokens_decoder) - {0, 1}
    assert mistaken == {sizes[0] - 1}
    for text in AWKWARD:
        for special in (False, True):
            kept = {"add_special_tokens": False, "split_special_tokens": not special}
            assert source.encode(text, special) == reference(text, **kept)["input_ids"], text
            expected = reference(text_target=text, **kept)["input_ids"]
            if mistaken.isdisjoint(expected):
                assert target.encode(text, special) == expected, text
    draw = random.Random(0)
    known = [index for index in range(sizes[1]) if index not in mistaken and index != sizes[1] - 1]
    for _ in range(300):
        ids = draw.choices(known, k=draw.randint(0, 12))
        assert target.decode(ids) == reference.decode(ids, skip_special_tokens=True)
    assert target.decode([sizes[1] - 1]) == ""  # its own padding


def test_an_export_translates_as_transformers(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    source_size, target_size = write_separate(folder)
    model: Any = random_marian(
        3,
        vocab_size=source_size,
        decoder_vocab_size=target_size,
        share_encoder_decoder_embeddings=False,
        tie_word_embeddings=False,
        pad_token_id=source_size - 1,
        decoder_start_token_id=target_size - 1,
    )
    model.generation_config.bad_words_ids = [[target_size - 1], [source_size - 1]]
    model.generation_config.max_length = 12
    model.save_pretrained(folder)
    export(folder, tmp_path / "bundle", precision=["fp32"], target=["cpu"])
    reference = load_marian_reference(folder)
    texts = [line for line in ENGLISH.split("\n") if line]
    with Translator.load(tmp_path / "bundle") as translator:
        for text in texts:
            ids = reference(text, return_tensors="pt")["input_ids"]
            with torch.inference_mode():
                (found,) = model.generate(ids, num_beams=1, do_sample=False)
            expected = reference.decode(found[1:], skip_special_tokens=True)
            assert expected and translator.translate(text, num_beams=1).text == expected


def test_a_second_vocabulary_that_no_setting_names_is_refused(tmp_path: Path) -> None:
    """What following the advice of earlier versions has left behind."""
    write_separate(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / "config.json").write_text(json.dumps({"share_encoder_decoder_embeddings": False}))
    with pytest.raises(
        CheckpointError, match=r"target_vocab.json exists, but .* separate_vocabs, .* Set separate"
    ):
        build_marian_tokenizers(tmp_path)


def test_options_of_sentencepiece_that_change_nothing_are_read(tmp_path: Path) -> None:
    write_marian_tokenizer(tmp_path)
    plain = build_marian_tokenizers(tmp_path)
    options = {"enable_sampling": False, "nbest_size": -1, "alpha": 0.1}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"sp_model_kwargs": options}))
    assert build_marian_tokenizers(tmp_path) == plain
    reference = load_marian_reference(tmp_path)
    assert len({tuple(reference(ENGLISH)["input_ids"]) for _ in range(5)}) == 1
