from __future__ import annotations

import functools
import importlib
import json
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st

from planforge.exporter.checkpoints.tokenizers.marian import build_marian_tokenizers, read_marian_vocabulary
from planforge.exporter.errors import CheckpointError
from planforge.runtime.errors import InputError, TokenizerError
from planforge.runtime.text.piece_tokenizer import PIECES, Charsmap, PieceTokenizer, open_tokenizer
from planforge.runtime.text.tokenizer import read

from ...helpers.marian import (
    AWKWARD,
    CODES,
    ENGLISH,
    load_marian_reference,
    pieces_of,
    spm,
    write_marian_tokenizer,
)
from ...helpers.text import texts, tiny

# The references: MarianTokenizer, and SentencePiece below it.
pytest.importorskip("transformers")
pytest.importorskip("sentencepiece")

fast = settings(deadline=None, max_examples=100)


@dataclass(frozen=True)
class Case:
    """A checkpoint's tokenizers: ours of both sides, and the reference."""

    source: PieceTokenizer
    target: PieceTokenizer
    reference: Any
    pieces: tuple[str, ...]

    def check(self, text: str, **options: bool) -> None:
        kept = {"add_special_tokens": False, "split_special_tokens": not options.get("parse_special")}
        assert self.source.encode(text, **options) == self.reference(text, **kept)["input_ids"]
        ids = self.target.encode(text, **options)
        assert ids == self.reference(text_target=text, **kept)["input_ids"]
        self.check_ids(ids)

    def check_ids(self, ids: list[int]) -> None:
        expected = self.reference.decode(ids, skip_special_tokens=True)
        for ours in (self.source, self.target):
            stream = ours.stream()
            parts = [stream.push(token) for token in ids]
            assert "".join(parts) + stream.finish() == ours.decode(ids) == expected


KINDS: dict[str, dict[str, Any]] = {
    "nmt_nfkc": {"rules": "nmt_nfkc"},
    "identity": {"rules": "identity"},
    "no codes": {"rules": "nmt_nfkc_cf", "codes": ()},
    "spaces kept": {"rules": "nfkc", "trainer": {"remove_extra_whitespaces": False}},
    "no prefix": {"rules": "nmt_nfkc", "trainer": {"add_dummy_prefix": False}},
    "other names": {
        "rules": "nmt_nfkc",
        "extra": ["<end>", "<sep>", "<s>"],
        "config": {
            "eos_token": {"content": "<end>", "__type": "AddedToken"},
            "additional_special_tokens": ["<sep>"],
        },
    },
}


@functools.cache
def case(kind: str) -> Case:
    options = dict(KINDS[kind])
    trainer = {"normalization_rule_name": options["rules"], **options.pop("trainer", {})}
    source = spm("source", **trainer)
    target = spm("target", **trainer)
    extra = [
        *options.pop("extra", ()),
        "日本",
        "語",
        "日本語",
        "▁日",
    ]  # no pieces: unknown runs that are entries
    with tempfile.TemporaryDirectory() as name:
        size = write_marian_tokenizer(Path(name), source=source, target=target, extra=extra, **options)
        reference = load_marian_reference(Path(name))
        ours = [PieceTokenizer(data, "tokenizer.json", size) for data in build_marian_tokenizers(Path(name))]
    return Case(ours[0], ours[1], reference, pieces_of(source) + pieces_of(target))


@pytest.mark.parametrize("kind", KINDS)
def test_ids_and_texts_are_those_of_transformers(kind: str) -> None:
    for text in AWKWARD:
        case(kind).check(text)
        case(kind).check(text, parse_special=True)


def of_pieces(kind: str) -> st.SearchStrategy[str]:
    parts = [
        *case(kind).pieces,
        " ",
        "  ",
        "▁",
        "\u0301",
        "日",
        "\x00",
        "</s>",
        "<pad>",
        "<s>",
        "<end>",
        "ﬁ",
        "１",
    ]
    return st.lists(st.sampled_from(parts)).map("".join)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("parse_special", [False, True])
@fast
@given(data=st.data())
def test_any_text_is_that_of_transformers(kind: str, parse_special: bool, data: st.DataObject) -> None:
    text = data.draw(st.one_of(texts, of_pieces(kind)))
    case(kind).check("x" + text.replace(">>", "> >"), parse_special=parse_special)


@pytest.mark.parametrize("kind", KINDS)
@fast
@given(data=st.data())
def test_any_ids_decode_and_stream_as_transformers_decodes_them(kind: str, data: st.DataObject) -> None:
    size = case(kind).source.vocab_size
    assert size == case(kind).reference.vocab_size
    case(kind).check_ids(data.draw(st.lists(st.integers(0, size - 1), max_size=20)))


@fast
@example(".")
@example("ee")
@given(unit=st.text("aeimnst.-!▁ ", min_size=1, max_size=3))
def test_rows_of_equal_letters_are_cut_at_the_same_places(unit: str) -> None:
    """Many ways of cutting them have the same score: the rounding of the sums decides."""
    for length in (7, 30, 100):
        case("nmt_nfkc").check(unit * length)
        case("identity").check(unit * length)


def test_the_reference_varies_and_the_two_sides_differ() -> None:
    both = case("nmt_nfkc")
    ids = both.source.encode("The quick brown fox jumps over the lazy dog")
    assert len(set(ids)) > 10
    assert both.source.find_id("<unk>") not in ids
    assert both.target.encode("Der schnelle braune Fuchs") != both.source.encode("Der schnelle braune Fuchs")
    assert both.source.encode("Ｔｈｅ") == both.source.encode("The")
    assert case("identity").source.encode("Ｔｈｅ") != case("identity").source.encode("The")


def test_a_piece_that_the_vocabulary_lacks_is_unknown() -> None:
    both = case("nmt_nfkc")
    lacking = [piece for piece in both.pieces if both.source.find_id(piece) is None and piece[0] == "▁"]
    assert len(lacking) > 2
    unknown = both.source.find_id("<unk>")
    assert [unknown] in [both.source.encode(piece[1:]) for piece in lacking if len(piece) > 1]
    assert both.source.vocab_size == len(both.reference.encoder)


def test_an_unknown_run_that_is_an_entry_has_its_id() -> None:
    ours = case("nmt_nfkc").source
    assert ours.encode("日本語")[-1] == ours.find_id("日本語")
    assert ours.find_id("日本語") in ours.encode("the 日本語 the")
    assert ours.encode("日日")[-1] == ours.find_id("<unk>")


def test_language_codes() -> None:
    ours = case("nmt_nfkc").source
    assert ours.language_codes == tuple(sorted(CODES))
    assert case("no codes").source.language_codes == ()
    assert ours.encode(">>fr<< the") == [ours.find_id(">>fr<<"), *ours.encode("the")]
    assert ours.decode(ours.encode(">>fr<< the dog")) == ">>fr<< the dog"


@pytest.mark.parametrize("code", [">>xx<<", ">><<", ">>>de<<", ">> de<<", ">>DE<<", ">>a\nb<<"])
def test_an_unknown_language_code_is_named_with_those_that_there_are(code: str) -> None:
    ours = case("nmt_nfkc").source
    expected = f"begins with {re.escape(repr(code))}.* language codes: >>de<<, >>fr<<, >>zh_Hant<<;.*space"
    with pytest.raises(InputError, match=expected):
        ours.encode(f"{code} text")
    assert ours.encode(f" {code} text")
    case("no codes").check(f"{code} text")


def test_only_twenty_codes_are_listed(tmp_path: Path) -> None:
    size = write_marian_tokenizer(tmp_path, codes=[f">>l{n:02}<<" for n in range(30)])
    ours = PieceTokenizer(build_marian_tokenizers(tmp_path)[0], "tokenizer.json", size)
    with pytest.raises(InputError, match=r">>l18<<, >>l19<<, \.\.\.; to"):
        ours.encode(">>xx<<")


def test_special_text_is_plain_text_unless_asked() -> None:
    ours = case("nmt_nfkc").source
    special = {ours.find_id(name) for name in ("</s>", "<pad>")}
    assert not special & set(ours.encode("a</s>b <pad>"))
    a = ours.encode("a")
    b = ours.encode("b")
    assert ours.encode("a</s>b", parse_special=True) == [*a, ours.find_id("</s>"), *b]


def test_an_unknown_run_never_becomes_a_special_token(tmp_path: Path) -> None:
    """Where transformers would end the sentence for a user's text."""
    size = write_marian_tokenizer(tmp_path, extra=["日本"], config={"eos_token": "日本"})
    ours = PieceTokenizer(build_marian_tokenizers(tmp_path)[0], "tokenizer.json", size)
    assert load_marian_reference(tmp_path)("日本", split_special_tokens=True)["input_ids"][
        -2
    ] == ours.find_id("日本")
    assert ours.encode("日本")[-1] == ours.find_id("<unk>")


def test_spellings_are_for_people_and_pieces_for_programs() -> None:
    ours = case("nmt_nfkc").target
    ids = [ours.find_id(text) for text in ("▁der", "▁the", "</s>", ">>de<<")]
    assert None not in ids
    known = [token for token in ids if token is not None]
    assert ours.spell_all(known) == [" der", " the", "</s>", ">>de<<"]
    assert list(map(ours.spell, known)) == ["▁der", "▁the", "</s>", ">>de<<"]
    assert list(map(ours.find_piece, known)) == ["▁der", "▁the", None, ">>de<<"]
    assert ours.find_id("no such entry") is None


def test_bad_arguments_are_refused() -> None:
    ours = case("nmt_nfkc").source
    with pytest.raises(InputError, match="text is bytes; it must be a str"):
        ours.encode(b"a")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="lone surrogate"):
        ours.encode("a\udc80")
    with pytest.raises(InputError, match="does not record where tokens are in the text; use encode"):
        ours.encode_batch(["a"])
    for method in (ours.decode, ours.spell_all):
        with pytest.raises(InputError, match=f"token id {ours.vocab_size} is not in the vocabulary"):
            method([ours.vocab_size])


def test_the_models_vocabulary_may_be_larger_and_not_smaller(tmp_path: Path) -> None:
    size = write_marian_tokenizer(tmp_path)
    data = build_marian_tokenizers(tmp_path)[0]
    larger = PieceTokenizer(data, "tokenizer.json", size + 8)
    assert larger.vocab_size == size + 8
    assert larger.decode([size + 7]) == larger.spell(size) == ""
    assert larger.encode("The dog") == PieceTokenizer(data, "tokenizer.json", size).encode("The dog")
    with pytest.raises(
        TokenizerError, match=f"has {size} tokens, but the model {size - 1}; use the tokenizer"
    ):
        PieceTokenizer(data, "tokenizer.json", size - 1)


def test_another_kind_of_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"here\.json is not a tokenizer of pieces"):
        PieceTokenizer(tiny("words")._plain.to_str().encode(), "here.json", 50257)
    with pytest.raises(TokenizerError, match=r"here\.json is unusable"):
        PieceTokenizer(b"{}", "here.json", 1)
    missing = tmp_path / "tokenizer.json"
    with pytest.raises(TokenizerError, match=f"^{re.escape(str(missing))} cannot be read: No such file"):
        open_tokenizer(read(missing), str(missing), PIECES, 1)
    for data in (b"", b"\4\0\0\0", b"\3\0\0\0abcd", b"\0\0\0\0abcd"):
        with pytest.raises(ValueError, match="charsmap"):
            Charsmap(data)


def test_tokenizers_reads_the_file_and_cuts_ordinary_text_alike() -> None:
    ours = case("identity").source
    plain = tokenizers.Tokenizer.from_str(ours._plain.to_str())
    known = [text for text in ENGLISH.split() if ours.find_id("<unk>") not in ours.encode(text)]
    assert len(known) > 30
    for text in known:
        assert plain.encode(text).ids == ours.encode(text)


def changed_spm(change: str) -> bytes:
    """source.spm with one thing about it changed."""
    proto = importlib.import_module("sentencepiece.sentencepiece_model_pb2")
    model = proto.ModelProto.FromString(spm("source"))
    exec(change, {"model": model})
    data: bytes = model.SerializeToString()
    return data


UNSUPPORTED = {
    "model.trainer_spec.model_type = 2": "has the model type BPE; only plain unigram models",
    "model.trainer_spec.model_type = 4": "has the model type char",
    "model.trainer_spec.byte_fallback = True": "has byte fallback",
    "model.trainer_spec.treat_whitespace_as_suffix = True": "has spaces at the ends of pieces",
    "model.normalizer_spec.escape_whitespaces = False": "has spaces that are not escaped",
    "model.denormalizer_spec.precompiled_charsmap = b'x'": "has a denormalizer",
    "model.pieces[9].type = 4": "has user-defined symbols",
    "model.pieces[9].type = 6": "has byte fallback",
    "model.pieces[9].piece = '\\U0010ffffx'": "has pieces that begin with",
    "model.normalizer_spec.precompiled_charsmap = b'abcdef'": "is not a SentencePiece model: a charsmap",
    "model.pieces[9].piece = ''": "a piece is empty, or there twice",
    "model.pieces[9].piece = model.pieces[8].piece": "a piece is empty, or there twice",
    "model.pieces[9].score = float('nan')": "one without a score",
    "del model.pieces[:]": "no ordinary piece",
    "model.pieces[9].piece = '</s>'; model.pieces[2].piece = '<e>'": "special token and an ordinary piece",
}


@pytest.mark.parametrize("change", UNSUPPORTED)
def test_what_a_model_has_that_is_not_supported_is_named(tmp_path: Path, change: str) -> None:
    write_marian_tokenizer(tmp_path)
    (tmp_path / "source.spm").write_bytes(changed_spm(change))
    with pytest.raises(CheckpointError, match=f"source.spm.*{UNSUPPORTED[change]}"):
        build_marian_tokenizers(tmp_path)


def test_unused_pieces_are_not_cut_into(tmp_path: Path) -> None:
    source = changed_spm("for piece in model.pieces[20:60]: piece.type = 5")
    size = write_marian_tokenizer(tmp_path, source=source)
    ours, other = (PieceTokenizer(data, "x", size) for data in build_marian_tokenizers(tmp_path))
    both = Case(ours, other, load_marian_reference(tmp_path), ())
    for text in AWKWARD:
        both.check(text)


@pytest.mark.parametrize("name", ["source.spm", "target.spm"])
def test_a_damaged_model_is_refused_or_read_never_anything_else(tmp_path: Path, name: str) -> None:
    write_marian_tokenizer(tmp_path, rules="identity")
    data = (tmp_path / name).read_bytes()
    damaged = [data[: len(data) // 2], data[:-1], b"not a model", b"\xff" * 40, b"", data[1:]]
    for content in damaged:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(CheckpointError, match=f"{name} is not a SentencePiece model: .*; take the file"):
            build_marian_tokenizers(tmp_path)
    for at in range(0, len(data), 31):
        (tmp_path / name).write_bytes(data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :])
        try:
            build_marian_tokenizers(tmp_path)
        except CheckpointError as error:
            assert name in str(error)


def vocab_with(**changes: Any) -> str:
    return json.dumps({"</s>": 0, "<unk>": 1, "a": 2, "<pad>": 3} | changes)


FILES = {
    ("vocab.json", "{"): "vocab.json is not JSON",
    ("vocab.json", "[1]"): "vocab.json must hold a JSON object",
    ("vocab.json", vocab_with(a="2")): "id is not an integer",
    ("vocab.json", vocab_with(a=True)): "id is not an integer",
    ("vocab.json", vocab_with(a=4)): "ids of 4 tokens must be 0 to 3, each once",
    ("vocab.json", vocab_with(a=3)): "each once",
    ("vocab.json", vocab_with(a=-1)): "each once",
    ("vocab.json", '{"a": 0}'): "has no '</s>', which every MarianMT model needs",
    ("vocab.json", '{"</s>": 0, "<pad>": 1}'): "has no '<unk>'",
    ("vocab.json", '{"</s>": 0, "<unk>": 1}'): "has no '<pad>'",
    ("vocab.json", vocab_with(**{"\U0010ffffx": 4})): "'.U0010ffffx' begins with a character",
    ("tokenizer_config.json", "{"): "tokenizer_config.json is not JSON",
    ("tokenizer_config.json", '{"unk_token": "[?]"}'): r"vocab.json has no '\[\?\]'",
    ("tokenizer_config.json", '{"separate_vocabs": true}'): "target_vocab.json cannot be read: No such file",
    ("tokenizer_config.json", '{"sp_model_kwargs": {"alpha": 1}}'): "sp_model_kwargs has .* not supported",
    ("tokenizer_config.json", '{"added_tokens_decoder": [1]}'): "must be an object of objects",
    (
        "tokenizer_config.json",
        '{"added_tokens_decoder": {"9999": {"content": "X"}}}',
    ): "adds 'X' as token 9999",
}


@pytest.mark.parametrize(("file", "message"), FILES.items(), ids=map(str, range(len(FILES))))
def test_a_damaged_file_is_named(tmp_path: Path, file: tuple[str, str], message: str) -> None:
    write_marian_tokenizer(tmp_path)
    (tmp_path / file[0]).write_text(file[1])
    with pytest.raises(CheckpointError, match=message):
        build_marian_tokenizers(tmp_path)


@pytest.mark.parametrize("name", ["source.spm", "target.spm", "vocab.json"])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    write_marian_tokenizer(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(CheckpointError, match=f"{name} cannot be read: No such file"):
        build_marian_tokenizers(tmp_path)


def test_saved_again_by_transformers_it_is_the_same(tmp_path: Path) -> None:
    write_marian_tokenizer(tmp_path)
    saved = tmp_path / "saved"
    load_marian_reference(tmp_path).save_pretrained(str(saved))
    assert build_marian_tokenizers(saved) == build_marian_tokenizers(tmp_path)
    assert list(read_marian_vocabulary(saved / "vocab.json")) == list(
        json.loads((tmp_path / "vocab.json").read_text())
    )
