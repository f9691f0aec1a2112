from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from planforge.exporter.checkpoints.tokenizers.files import build_tokenizer_json
from planforge.runtime.errors import InputError, TokenizerError
from planforge.runtime.text import tokenizer as tokenizer_module
from planforge.runtime.text.tokenizer import Tokenizer

from ...helpers.text import (
    END,
    KINDS,
    ODD_TEXTS,
    byte_alphabet,
    byte_level,
    changed,
    gpt2,
    load,
    metaspace,
    texts,
    tiny,
    wordpiece,
    words,
    write_gpt2,
)

fast = settings(deadline=None, max_examples=150)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Any:
    transformers = pytest.importorskip("transformers")
    folder = write_gpt2(tmp_path_factory.mktemp("gpt2"))
    return transformers.GPT2TokenizerFast.from_pretrained(str(folder))


@fast
@given(text=texts)
def test_gpt2_ids_are_those_of_transformers(reference: Any, text: str) -> None:
    ids = reference(text, add_special_tokens=False)["input_ids"]
    assert gpt2().encode(text, parse_special=True) == ids
    plain = reference(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    assert gpt2().encode(text) == plain


@fast
@given(ids=st.lists(st.integers(0, 50256)))
def test_gpt2_text_is_that_of_transformers(reference: Any, ids: list[int]) -> None:
    expected = reference.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert gpt2().decode(ids) == expected


def test_known_ids_of_gpt2() -> None:
    assert gpt2().encode("Hello world") == [15496, 995]
    assert gpt2().vocab_size == 50257
    assert gpt2().find_id(END) == 50256
    assert gpt2().find_id("no such token") is None
    assert gpt2().find_piece(262) == "Ġthe"
    assert gpt2().find_piece(50256) is None


@fast
@given(text=texts)
def test_any_text_survives_byte_for_byte(text: str) -> None:
    assert gpt2().decode(gpt2().encode(text)).encode() == text.encode()


@pytest.mark.parametrize("text", ODD_TEXTS)
def test_odd_texts_survive(text: str) -> None:
    assert gpt2().decode(gpt2().encode(text)) == text


def test_special_text_is_plain_text_unless_asked() -> None:
    text = f"a{END}b"
    assert gpt2().find_id(END) not in gpt2().encode(text)
    assert gpt2().decode(gpt2().encode(text)) == text
    assert gpt2().encode(text, parse_special=True) == [64, 50256, 65]
    assert gpt2().decode([64, 50256, 65]) == "ab"


@pytest.mark.parametrize("kind", KINDS)
@fast
@given(text=texts, extra=st.sampled_from(["</s>", "\uff1c/s\uff1e", "<eos>", "[CLS]", "<s>", END, ""]))
def test_no_text_becomes_a_special_token(kind: str, text: str, extra: str) -> None:
    allowed = {tiny(kind).find_id("<unk>"), tiny(kind).find_id("[UNK]"), None}
    for token_id in tiny(kind).encode(f"{text} {extra} {text}{extra}"):
        assert tiny(kind).find_piece(token_id) is not None or token_id in allowed


def test_unigram_and_word_level_spell_a_special_token_out() -> None:
    unigram = load(metaspace())
    word_level = load(words())
    assert unigram.decode(unigram.encode("a</s>a")) == "a</s>a"
    assert unigram.encode("a</s>", parse_special=True)[-1] == unigram.find_id("</s>")
    assert set(word_level.encode("<eos>")) == {word_level.find_id("[UNK]")}
    assert word_level.encode("hi zzz") == [2, 0]


def test_both_ways_of_encoding_from_many_threads() -> None:
    tokenizer = load(byte_level())
    wrong = []

    def work(parse_special: bool) -> None:
        for _ in range(200):
            if (256 in tokenizer.encode(END, parse_special)) != parse_special:
                wrong.append(parse_special)

    threads = [threading.Thread(target=work, args=(n % 2 == 0,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_saved_truncation_padding_and_dropout_are_off() -> None:
    raw = byte_level()
    raw.enable_truncation(2)
    raw.enable_padding(length=10)
    assert len(load(raw).encode("hello")) == 5
    raw = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")], dropout=0.5))
    assert [load(raw).encode("ab") for _ in range(20)] == [[2]] * 20


def test_no_special_tokens_are_added() -> None:
    raw = wordpiece()
    raw.post_processor = tokenizers.processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    assert load(raw).encode("hello") == [3, 4]


@pytest.mark.parametrize("text", ["\ud800", "a\udfff", "ok \ud83d\ude00"])
def test_lone_surrogates_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="lone surrogate"):
        tiny("byte_level").encode(text)


def test_only_str_is_text() -> None:
    with pytest.raises(InputError, match="text is bytes; it must be a str"):
        tiny("byte_level").encode(b"a")  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [-1, 50257, 2**70, 1.5, "a", None])
def test_ids_outside_the_vocabulary_are_refused(bad: Any) -> None:
    with pytest.raises(InputError, match="token id"):
        gpt2().decode([1, bad])
    with pytest.raises(InputError, match="token id"):
        gpt2().find_piece(bad)


def test_an_unassigned_id_within_the_vocabulary_is_nothing() -> None:
    model = json.loads(byte_level().to_str())["model"]
    model["vocab"]["far"] = 400
    tokenizer = Tokenizer(changed(byte_level(), model=model, added_tokens=[]))
    assert tokenizer.vocab_size == 401
    assert tokenizer.decode([tokenizer.encode("a")[0], 300]) == "a"
    assert tokenizer.find_piece(300) is None


def test_a_text_that_the_vocabulary_cannot_express() -> None:
    raw = tokenizers.Tokenizer(tokenizers.models.WordLevel({"hi": 0}, unk_token="[UNK]"))
    with pytest.raises(TokenizerError, match="Missing"):
        load(raw).encode("you")


CHARSMAP = {"type": "Precompiled", "precompiled_charsmap": "A"}  # makes the Rust code panic


MALFORMED = [b"", b"{", b"[]", b"{}", b"\xff\xfe", b'{"model": {"type": "BPE"}}', b"[" * 100_000]
MALFORMED.append(changed(byte_level(), normalizer=CHARSMAP))


@pytest.mark.parametrize("content", MALFORMED, ids=range(len(MALFORMED)))
def test_a_malformed_file_is_one_line_that_names_it(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    for read in (lambda: Tokenizer.from_file(path), lambda: build_tokenizer_json(tmp_path)):
        with pytest.raises(TokenizerError) as caught:
            read()
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)


def test_unreadable_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TokenizerError, match=r"nothing.json cannot be read: No such file"):
        Tokenizer.from_file(tmp_path / "nothing.json")
    with pytest.raises(TokenizerError, match="cannot be read"):
        Tokenizer.from_file(tmp_path)
    monkeypatch.setattr(tokenizer_module, "MAX_BYTES", 10)
    (tmp_path / "big.json").write_bytes(b" " * 11)
    with pytest.raises(TokenizerError, match="larger than"):
        Tokenizer.from_file(tmp_path / "big.json")


def test_a_saved_tokenizer_json_comes_first_and_reads_back_the_same(tmp_path: Path) -> None:
    raw = wordpiece()
    raw.enable_padding(length=9)
    raw.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "vocab.json").write_text("not looked at")
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"mask_token": "##l"}))
    first = build_tokenizer_json(tmp_path)
    assert Tokenizer(first).encode("hello world.") == [3, 4, 6, 7, 8]
    assert Tokenizer(first).find_piece(5) is None, "named as special by special_tokens_map.json"
    (tmp_path / "tokenizer.json").write_bytes(first)
    assert build_tokenizer_json(tmp_path) == first


def folder_of(path: Path, vocab: dict[str, int], merges: str = "", **files: Any) -> Path:
    (path / "vocab.json").write_text(json.dumps(vocab))
    (path / "merges.txt").write_text("#version: 0.2\n" + merges)
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


def test_byte_level_bpe_from_the_old_file_names(tmp_path: Path) -> None:
    folder_of(tmp_path, byte_alphabet() | {"ab": 256, END: 257}, "a b\r\n")
    (tmp_path / "vocab.json").rename(tmp_path / "encoder.json")
    (tmp_path / "merges.txt").rename(tmp_path / "vocab.bpe")
    tokenizer = Tokenizer(build_tokenizer_json(tmp_path))
    assert tokenizer.encode("ab") == [256]
    assert tokenizer.encode(END, parse_special=True) == [257]


def test_settings_come_from_tokenizer_config(tmp_path: Path) -> None:
    config = {
        "add_prefix_space": True,
        "eos_token": {"content": "<eos>"},
        "pad_token": "<pad>",
        "mask_token": "<not in the vocabulary>",
        "additional_special_tokens": ["<x>"],
    }
    vocab = byte_alphabet() | {END: 256, "<eos>": 257, "<x>": 258}
    folder_of(tmp_path, vocab, tokenizer_config=config, added_tokens={"<pad>": 259})
    tokenizer = Tokenizer(build_tokenizer_json(tmp_path))
    assert tokenizer.decode(tokenizer.encode("a")) == " a"
    assert [tokenizer.find_piece(index) for index in range(256, 260)] == [None] * 4
    assert tokenizer.vocab_size == 260


def test_added_tokens_keep_their_ids_or_are_refused(tmp_path: Path) -> None:
    added = {"257": {"content": "<b>", "special": True}, "256": {"content": "two words"}}
    folder_of(tmp_path, byte_alphabet(), tokenizer_config={"added_tokens_decoder": added})
    tokenizer = Tokenizer(build_tokenizer_json(tmp_path))
    assert tokenizer.encode("two words<b>", parse_special=True) == [256, 257]
    folder_of(tmp_path, byte_alphabet(), tokenizer_config={}, added_tokens={"<b>": 999})
    with pytest.raises(TokenizerError, match=r"added_tokens.json gives '<b>' the id 999"):
        build_tokenizer_json(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("vocab.json", "{", "not JSON"),
        ("vocab.json", "[" * 100_000, "not JSON"),
        ("vocab.json", "[]", "JSON object"),
        ("vocab.json", '{"a": "x"}', "ids must be integers"),
        ("vocab.json", '{"a": -1}', "ids must be integers"),
        ("vocab.json", '{"a": 1, "b": 1}', "the same id"),
        ("vocab.json", '{"a": 1}', "255 of 256 byte symbols are missing"),
        ("merges.txt", "a b\na b c\n", "line 2"),
        ("merges.txt", "a \n", "line 1"),
        ("merges.txt", "zz b\n", "out of vocabulary"),
        ("merges.txt", "é\udcff", "not UTF-8"),
        ("tokenizer_config.json", "{'a'", "not JSON"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"x": "y"}}', "must be integers"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"256": {}}}', "has no text"),
        ("special_tokens_map.json", "3", "JSON object"),
    ],
)
def test_a_malformed_folder_names_the_file(tmp_path: Path, name: str, content: str, reason: str) -> None:
    folder_of(tmp_path, byte_alphabet())
    (tmp_path / name).write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(TokenizerError, match=reason) as caught:
        build_tokenizer_json(tmp_path)
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text("{}")
    with pytest.raises(TokenizerError, match=r"neither tokenizer.json nor vocab.json with merges"):
        build_tokenizer_json(tmp_path)


def test_needs_no_framework() -> None:
    code = (
        "import sys, planforge.runtime.text.tokenizer, planforge.runtime.decoding.sampling;"
        "print(*sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "transformers", "onnx"} & set(run.stdout.split())


def count_turns(work: Callable[[], object]) -> int:
    """Return how often this thread got the interpreter while another one worked."""
    began = threading.Event()
    ended = threading.Event()

    def run() -> None:
        began.set()
        work()
        ended.set()

    worker = threading.Thread(target=run)
    worker.start()
    began.wait()
    turns = 0
    while not ended.is_set():
        turns += 1
        time.sleep(0.001)
    worker.join()
    return turns


@pytest.mark.parametrize("kind", ["text", "prompt", "batch"])
def test_a_long_text_lets_other_threads_run(kind: str) -> None:
    """A token of 4 kB makes a megabyte fit a context of 256, so that a server reads that much."""
    raw = byte_level()
    raw.add_tokens(["=" * 4096])
    tokenizer = load(raw)
    text = "=" * 4096 + "Once upon a time there was a big ark. " * 10_000
    work: dict[str, Callable[[], object]] = {
        "text": lambda: tokenizer.encode(text),
        "prompt": lambda: tokenizer.encode(text, parse_special=True),
        "batch": lambda: tokenizer.encode_batch([text]),
    }
    assert len(text) < 256 * 4096
    assert count_turns(work[kind]) >= 10


def test_many_ids_are_decoded_by_what_lets_other_threads_run(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = load(byte_level())
    ids = tokenizer.encode("Once upon a time there was a big ark. " * 100)
    expected = tokenizer._plain.decode(ids)
    plain = types.SimpleNamespace(decode_batch=tokenizer._plain.decode_batch)  # no `decode`, which holds them
    monkeypatch.setattr(tokenizer, "_plain", plain)
    assert tokenizer.decode(ids) == expected
