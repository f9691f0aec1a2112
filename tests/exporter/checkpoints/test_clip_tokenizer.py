"""CLIP's tokenizer, read from a checkpoint's files as transformers' CLIPTokenizer reads them."""

from __future__ import annotations

import functools
import json
import random
import tempfile
import unicodedata
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers
from hypothesis import given
from tokenizers import Regex, decoders, normalizers, pre_tokenizers, processors

from planforge.exporter import export
from planforge.exporter.checkpoints.tokenizers.classes import (
    CLASSES,
    CLIP_WORDS,
    Flags,
    Framing,
    Token,
    cut_clip,
    set_bpe,
)
from planforge.exporter.checkpoints.tokenizers.files import build_tokenizer_json, find_special_tokens
from planforge.exporter.errors import VerificationError
from planforge.exporter.verification.golden_samples import TEXTS
from planforge.runtime.errors import TokenizerError
from planforge.runtime.text.piece_tokenizer import PLAIN, open_tokenizer
from planforge.runtime.text.tokenizer import Tokenizer

from ...helpers.clip_tokenizer import (
    END,
    START,
    train,
    write_class_alone,
    write_converted,
    write_letters,
    write_published,
    write_saved,
)
from ...helpers.models import edit_json, tiny_bert
from ...helpers.text import ODD_TEXTS, texts

LONG = "a photo of a cat, 4k, " * 20  # more than the 77 tokens that the model reads
SAMPLES = [
    *TEXTS,
    *ODD_TEXTS,
    LONG,
    "hello! World!!",
    f"{END} a{START}b {END}",
    "<|ENDOFTEXT|>a<|StartOfText|> b <|endoftext|",
    "IT'S theirs, they'RE, 2024",
    "</w> a</w> < / w >",
    "\x1fabc\x1f \x1d",
    "\u1e9e \u0130 \u0131 \u03a3\u03c2 \ufb01 \u2126",
]
ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
Write = Callable[[Path], None]
LAYOUTS: dict[str, Write] = {
    "published": write_published,
    "published-2": functools.partial(write_published, pad="!"),
    "fast-class": functools.partial(
        write_published, tokenizer_class="CLIPTokenizerFast", do_lower_case=False, trim_offsets=True
    ),
    "class-alone": write_class_alone,
    "letters": write_letters,  # other symbols are unknown, which is the end of the text
    "saved": write_saved,
    "saved-2": functools.partial(write_saved, pad="!"),
    "converted": write_converted,
    "converted-2": functools.partial(write_converted, pad="!"),
    # The class counts, whatever the file says.
    "other-rules": functools.partial(write_converted, normalizer=None, decoder=None, post_processor=None),
}


def load(folder: Path) -> tuple[bytes, Any]:
    """What the exporter makes of a folder, and transformers' tokenizer."""
    reference = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    assert type(reference) is transformers.CLIPTokenizer
    return build_tokenizer_json(folder), reference


def decode(reference: Any, ids: list[int]) -> str:
    text: str = reference.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return text


@pytest.mark.parametrize("layout", LAYOUTS)
def test_texts_are_read_as_transformers_reads_them(layout: str, tmp_path: Path) -> None:
    LAYOUTS[layout](tmp_path)
    data, reference = load(tmp_path)
    ours = open_tokenizer(data, "tokenizer.json", PLAIN, len(train()[0]))
    framing = tokenizers.Tokenizer.from_buffer(data)
    for text in SAMPLES:
        ids = reference(text, add_special_tokens=False)["input_ids"]
        assert ours.encode(text, parse_special=True) == ids, text
        assert ours.decode(ids) == decode(reference, ids), text
        plain = reference(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        assert ours.encode(text) == plain, text
        framed = framing.encode(text)
        assert framed.ids == reference(text)["input_ids"], text
        assert framed.offsets == reference(text, return_offsets_mapping=True)["offset_mapping"], text
    assert framing.encode("a b", "c d").ids == reference("a b", "c d")["input_ids"]
    roles = {role: getattr(reference, f"{role}_token_id") for role in ROLES}
    expected = {role: token for role, token in roles.items() if token is not None}
    assert find_special_tokens(tmp_path, ours) == expected
    assert ours.spell(expected["pad"]) == ("!" if layout.endswith("-2") else END)


def test_the_rules_of_clip(tmp_path: Path) -> None:
    write_published(tmp_path)
    ours = Tokenizer(build_tokenizer_json(tmp_path))
    assert ours.spell_all(ours.encode("2024")) == ["2</w>", "0</w>", "2</w>", "4</w>"]
    assert ours.encode("In The\t\n  BEGINNING") == ours.encode("in the beginning")
    decomposed = unicodedata.normalize("NFD", "Größe café")
    assert decomposed != "Größe café"
    assert ours.encode(decomposed) == ours.encode("größe café")
    assert ours.decode(ours.encode("It's  CAFÉ!")) == "it 's café !"
    assert len(ours.encode(LONG)) > 77
    assert ours.encode("") == []
    assert not ours.is_special(ours.encode(END)[-1])


def test_any_ids_are_decoded_as_transformers_decodes_them(tmp_path: Path) -> None:
    write_published(tmp_path)
    data, reference = load(tmp_path)
    ours = Tokenizer(data)
    generator = random.Random(0)
    for size in (512, len(train()[0])):  # symbols of bytes alone, and all tokens
        for _ in range(300):
            ids = generator.choices(range(size), k=generator.randint(1, 12))
            assert ours.decode(ids) == decode(reference, ids), ours.spell_all(ids)


@functools.cache
def published() -> tuple[Tokenizer, Any]:
    with tempfile.TemporaryDirectory() as folder:
        write_published(Path(folder))
        data, reference = load(Path(folder))
    return Tokenizer(data), reference


@given(texts)
def test_any_text_is_read_as_transformers_reads_it(text: str) -> None:
    ours, reference = published()
    ids = reference(text, add_special_tokens=False)["input_ids"]
    assert ours.encode(text, parse_special=True) == ids
    assert ours.decode(ids) == decode(reference, ids)


def test_a_checkpoint_of_clip_needs_no_named_class(tmp_path: Path) -> None:
    write_published(tmp_path, tokenizer_class=...)
    (tmp_path / "config.json").write_text('{"model_type": "clip"}')
    data, reference = load(tmp_path)
    for text in SAMPLES:
        assert Tokenizer(data).encode(text, parse_special=True) == reference(text)["input_ids"][1:-1], text


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({}, 'put "tokenizer_class": "CLIPTokenizer" into tokenizer_config.json'),
        ({"model_type": "clip_text_model"}, "model_type 'clip_text_model' has no usual one"),
    ],
)
def test_what_transformers_cannot_read_is_refused(config: dict[str, str], named: str, tmp_path: Path) -> None:
    """Read by GPT-2's rules the ids would be others."""
    write_published(tmp_path, tokenizer_class=...)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="Couldn't instantiate"):
        transformers.AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    with pytest.raises(TokenizerError, match=named):
        build_tokenizer_json(tmp_path)


@pytest.mark.parametrize("missing", ["\u0100", "\u0100</w>"])
def test_a_vocabulary_that_cannot_spell_every_byte_is_refused(missing: str, tmp_path: Path) -> None:
    """Its words would become the end of the text."""
    write_published(tmp_path)
    edit_json(tmp_path / "vocab.json", **{missing: ...})
    with pytest.raises(TokenizerError, match=r"vocab\.json: .* 1 of 512 byte symbols are missing"):
        build_tokenizer_json(tmp_path)


# What an export finds of a rule that is not CLIP's


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An encoder that reads texts with CLIP's tokenizer."""
    folder = tmp_path_factory.mktemp("checkpoint")
    tiny_bert(folder, vocab_size=len(train()[0]))
    write_published(folder, cls_token=START, sep_token=END)
    return folder


def change_normalizer(*steps: Any) -> Callable[[tokenizers.Tokenizer, Flags], None]:
    def cut(tokenizer: tokenizers.Tokenizer, flags: Flags) -> None:
        cut_clip(tokenizer, flags)
        tokenizer.normalizer = normalizers.Sequence([normalizers.Replace(Regex(r"\s+"), " "), *steps])

    return cut


def change_words(words: str) -> Callable[[tokenizers.Tokenizer, Flags], None]:
    def cut(tokenizer: tokenizers.Tokenizer, flags: Flags) -> None:
        assert words != CLIP_WORDS
        cut_clip(tokenizer, flags)
        split = pre_tokenizers.Split(Regex(words), behavior="removed", invert=True)
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])

    return cut


def leave_word_ends(tokenizer: tokenizers.Tokenizer, flags: Flags) -> None:
    cut_clip(tokenizer, flags)
    tokenizer.decoder = decoders.ByteLevel()


def frame_nothing(tokenizer: tokenizers.Tokenizer, bos: Token, eos: Token, flags: Flags) -> None:
    tokenizer.post_processor = processors.TemplateProcessing("$A", "$A $B:1", [])


def frame_without_end(tokenizer: tokenizers.Tokenizer, bos: Token, eos: Token, flags: Flags) -> None:
    tokenizer.post_processor = processors.TemplateProcessing(
        f"{bos[0]} $A", f"{bos[0]} $A {eos[0]} {eos[0]} $B:1", [bos, eos]
    )


def frame_pairs_as_bert(tokenizer: tokenizers.Tokenizer, bos: Token, eos: Token, flags: Flags) -> None:
    first, last = bos[0], eos[0]
    tokenizer.post_processor = processors.TemplateProcessing(
        f"{first} $A {last}", f"{first} $A {last} $B:1 {last}:1", [bos, eos]
    )


IDS = r"texts to ids: token \d+ of .* is .*; transformers [\d.]+ gives"
FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "no lower case": ({"cut": change_normalizer(normalizers.NFC())}, IDS),
    "no NFC": ({"cut": change_normalizer(normalizers.Lowercase())}, IDS),
    "numbers whole": ({"cut": change_words(CLIP_WORDS.replace(r"[\p{N}]", r"[\p{N}]+"))}, IDS),
    "no contractions": ({"cut": change_words(r"[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+")}, IDS),
    "no ends of words": ({"fields": set_bpe}, IDS),
    "ends of words in texts": (
        {"cut": leave_word_ends},
        r"ids to texts: .*</w>.*; transformers [\d.]+ gives",
    ),
    "no frame": (
        {"framing": Framing("bos", "eos", frame_nothing)},
        r"texts as the model reads them: token 0 of .*; transformers [\d.]+ gives \d+ \('<.startoftext.>'\)",
    ),
    "pairs as BERT's": (
        {"framing": Framing("bos", "eos", frame_pairs_as_bert)},
        r"texts as the model reads them: .*Who sells food",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_an_export_by_other_rules_is_refused(
    fault: str, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes, told = FAULTS[fault]
    monkeypatch.setitem(CLASSES, "CLIP", replace(CLASSES["CLIP"], **changes))
    with pytest.raises(VerificationError, match=told):
        export(checkpoint, tmp_path / "bundle", target=["cpu"])


def test_an_export_without_an_end_is_refused(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    framing = Framing("bos", "eos", frame_without_end)
    monkeypatch.setitem(CLASSES, "CLIP", replace(CLASSES["CLIP"], framing=framing))
    with pytest.raises(VerificationError, match=r"'NASA LAUNCHED A ROCKET' has 5 tokens; .* gives 6"):
        export(checkpoint, tmp_path / "bundle", target=["cpu"])


def test_an_export_by_clips_rules_is_not(checkpoint: Path, tmp_path: Path) -> None:
    export(checkpoint, tmp_path / "bundle", target=["cpu"])
