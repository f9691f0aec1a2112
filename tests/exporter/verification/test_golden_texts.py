"""Golden texts are what transformers and tokenizers give, and an export that reads otherwise is refused."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers

from planforge.exporter import export
from planforge.exporter.checkpoints.checkpoint import Checkpoint
from planforge.exporter.checkpoints.source import resolve_source
from planforge.exporter.checkpoints.tokenizers import files
from planforge.exporter.errors import VerificationError
from planforge.exporter.verification import golden_texts
from planforge.runtime.apps.check.differences import describe_differences
from planforge.runtime.apps.check.golden_texts import GoldenTexts, find_texts, read_texts
from planforge.runtime.apps.check.texts import make_fixed_time
from planforge.runtime.bundle.bundle import Bundle
from planforge.runtime.text.chat import Chat

from ...helpers.marian import load_marian_reference
from ...helpers.models import edit_json


def texts_of(bundle: Path) -> GoldenTexts:
    file = find_texts(Bundle.open(bundle))
    assert file is not None
    return read_texts(file)


def test_what_the_exporter_made_of_other_files_is_held_against_transformers(marian_bundle: Path) -> None:
    golden = texts_of(marian_bundle)
    assert golden.reference == f"transformers {transformers.__version__}"
    reference = load_marian_reference(marian_bundle.parent / "marian")
    source, target = golden.sides
    for text in source:
        assert reference(text.text, add_special_tokens=False).input_ids == list(text.ids)
    for text in target:
        assert reference(text_target=text.text, add_special_tokens=False).input_ids == list(text.ids)
        assert reference.decode(text.ids, skip_special_tokens=True) == text.decoded
    assert all(reference(one.text).input_ids == list(one.ids) for one in golden.inputs)
    assert len(golden.inputs) > 30


def test_a_checkpoints_own_tokenizer_is_read_by_transformers(llama_demo_bundle: Path) -> None:
    golden = texts_of(llama_demo_bundle)
    assert golden.reference == f"transformers {transformers.__version__}"
    folder = resolve_source("llama-demo").folder
    reference: Any = transformers.AutoTokenizer.from_pretrained(folder)
    (side,) = golden.sides
    for text in side:
        assert reference(text.text, add_special_tokens=False)["input_ids"] == list(text.ids)
    added = [token.content for token in reference.added_tokens_decoder.values()]
    assert added and all(any(f"In{token}side" in text.text for text in side) for token in added)
    # Each part of the vocabulary is seen.
    seen = {token_id * 16 // reference.vocab_size for text in side for token_id in text.ids}
    assert seen >= set(range(16))


def test_without_transformers_tokenizers_gives_the_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    checkpoint = Checkpoint(resolve_source("llama-demo"))
    theirs = golden_texts.load_transformers_tokenizer(checkpoint.folder)
    assert theirs is None
    (reference,) = golden_texts.make_references(checkpoint, theirs)
    assert reference.name == f"tokenizers {tokenizers.__version__}"
    plain: Any = tokenizers.Tokenizer.from_file(str(checkpoint.folder / "tokenizer.json"))
    text = "Begin, <|im_start|>in the middle."
    assert reference.encode(text) == plain.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("name", ["CodeLlamaTokenizer", "T5TokenizerFast", "PreTrainedTokenizerFast"])
def test_without_transformers_a_class_with_unknown_rules_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody would compare the texts with those of the class; PreTrainedTokenizerFast has no rules."""
    folder = shutil.copytree(resolve_source("llama-demo").folder, tmp_path / "checkpoint")
    edit_json(folder / "tokenizer_config.json", tokenizer_class=name)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    checkpoint = Checkpoint(resolve_source(str(folder)))
    if name.startswith("PreTrained"):
        assert golden_texts.make_references(checkpoint, None)
        return
    with pytest.raises(VerificationError, match=f"class {name}, which can .*planforge.export"):
        golden_texts.make_references(checkpoint, None)


def test_an_export_whose_ids_are_not_those_of_transformers_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a tokenizer class whose rules the exporter does not know."""
    folder = tmp_path / "checkpoint"
    shutil.copytree(resolve_source("bert-demo").folder, folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"do_lower_case": False}))
    with monkeypatch.context() as patch:
        patch.setattr(files, "choose_class", lambda *_: None)
        with pytest.raises(VerificationError) as caught:
            export(folder, tmp_path / "bundle", target=["cpu"])
    assert re.search(r"token \d+ of .* is .*; transformers [\d.]+ gives", str(caught.value))
    assert "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)" in str(caught.value)


def test_chats_are_those_of_transformers(llama_demo_bundle: Path) -> None:
    golden = texts_of(llama_demo_bundle)
    assert golden.chat_reference == f"transformers {transformers.__version__}"
    reference: Any = transformers.AutoTokenizer.from_pretrained(resolve_source("llama-demo").folder)
    for chat in golden.chats:
        messages = list(chat.messages)
        rendered = reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert rendered == chat.rendered
    assert len(golden.chats) >= 5


def test_a_template_that_asks_for_the_time_is_told_the_same_on_every_day(llama_demo_bundle: Path) -> None:
    template = (
        "{% macro day() %}{{ strftime_now('%d %b %Y') }}{% endmacro %}{{ day() }} {{ strftime_now('%H') }}"
    )
    chat = Chat.of(Bundle.open(llama_demo_bundle))
    assert chat is not None
    messages = [{"role": "user", "content": "x"}]
    fixed = replace(chat, template=template, clock=make_fixed_time)
    assert fixed.render(messages) == "03 Feb 2026 16"
    reference: Any = transformers.AutoTokenizer.from_pretrained(resolve_source("llama-demo").folder)
    reference.chat_template = template
    assert golden_texts.render_there(reference, messages, []) == "03 Feb 2026 16"


def test_a_template_that_refuses_is_kept_as_that(llama_demo_bundle: Path) -> None:
    reference: Any = transformers.AutoTokenizer.from_pretrained(resolve_source("llama-demo").folder)
    reference.chat_template = "{{ raise_exception('no') }}"
    messages = [{"role": "user", "content": "x"}]
    assert golden_texts.render_there(reference, messages, []) is None
    chat = Chat.of(Bundle.open(llama_demo_bundle))
    assert chat is not None
    assert golden_texts.render_here(replace(chat, template=reference.chat_template), messages, []) is None


def test_an_export_whose_runtime_renders_otherwise_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(golden_texts, "render_there", lambda *_: "<|im_start|>user\nSomething else")
    with pytest.raises(VerificationError) as caught:
        export("llama-demo", tmp_path / "bundle", target=["cpu"])
    assert "the runtime does not read the checkpoint's texts:" in str(caught.value)
    assert "chats: the chat that ends with 'Who are you?' is from character" in str(caught.value)
    assert not (tmp_path / "bundle").exists()


def test_differences_are_told_by_their_paths() -> None:
    got = {"a": {"b": [1, 2], "c": True}, "only here": 1, "long": [*range(20)]}
    expected = {"a": {"b": [1, 3], "c": 1}, "only there": 2, "long": [*range(19), 5]}
    assert describe_differences(got, got, "it was") == []
    assert describe_differences(got, expected, "it was") == [
        "a.b is [1, 2], it was [1, 3]",
        "a.c is true, it was 1",
        "only there is missing, it was 2",
        "and 2 more like it",
    ]
    assert describe_differences([{"a": 1}], [{"a": 2}], "it was") == ["[0].a is 1, it was 2"]
