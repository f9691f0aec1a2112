"""Grammars over the tokens of several kinds of tokenizers."""

from __future__ import annotations

import json
import re
import threading
from typing import Any

import numpy as np
import pytest
import tokenizers

from planforge.runtime.errors import InputError
from planforge.runtime.generate.grammar import Grammars
from planforge.runtime.generate.structure import MAX_LENGTH, Structure
from planforge.runtime.text.tokenizer import Tokenizer

from ...helpers.chat import byte_level, prefixing
from ...helpers.generation import TOKENIZER
from ...helpers.patience import PATIENCE
from ...helpers.text import byte_fallback, tiny


@pytest.mark.parametrize("tokenizer", ["letters", "byte_level", "prefixing"])
@pytest.mark.parametrize("eos", [(), (3, 5)])
def test_grammars_know_the_tokens_of_each_kind_of_tokenizer(tokenizer: str, eos: tuple[int, ...]) -> None:
    kinds = {"byte_level": byte_level, "prefixing": prefixing}
    ours = Tokenizer(kinds[tokenizer]().to_str().encode()) if tokenizer in kinds else TOKENIZER
    vocabulary = ours.vocab_size + 40  # rows of a model that stand for nothing
    generator = np.random.default_rng(0)
    for regex in ("[abc]{4,9}", "a (b|é|i)+a", "(?s).{3,5}"):
        if tokenizer == "letters" and "é" in regex:
            continue
        grammar = Grammars(ours, eos, vocabulary).start(Structure("regex", regex))
        tokens: list[int] = []
        while not grammar.complete:
            mask = grammar.find_allowed()
            assert mask.shape == (vocabulary,) and not mask[ours.vocab_size :].any()
            tokens.append(int(generator.choice(np.flatnonzero(mask))))
            grammar.take(tokens[-1])
            if tokens[-1] in eos:
                break
        text = ours.decode([token for token in tokens if token not in eos])
        assert re.fullmatch(regex, text.replace("\r", "\n")), (regex, text)


def spaces() -> tokenizers.Tokenizer:
    """Llama's kind, with a token for two spaces, which begins a text with one."""
    written = json.loads(byte_fallback().to_str())
    for piece in ("▁▁", "▁a"):
        written["model"]["vocab"][piece] = len(written["model"]["vocab"])
        written["model"]["merges"].append(list(piece))
    return tokenizers.Tokenizer.from_str(json.dumps(written))


@pytest.mark.parametrize("begins", [True, False])
@pytest.mark.parametrize("kind", ["byte_level", "prefixing", "spaces", "metaspace", "wordpiece"])
def test_guesses_are_tokens_that_may_come(kind: str, begins: bool) -> None:
    """What a guess is checked by says so: the mask of each step."""
    kinds = {"byte_level": byte_level, "prefixing": prefixing, "spaces": spaces}
    ours = Tokenizer(kinds[kind]().to_str().encode()) if kind in kinds else tiny(kind)
    grammars = Grammars(ours, (), ours.vocab_size)
    guessed = 0
    for regex in ("ab", " ab", "  ab ab", "(a| ab)b?", " a", "  b"):
        try:
            grammar = grammars.start(Structure("regex", regex), begins=begins)
        except InputError:
            continue  # the vocabulary does not spell it
        while not grammar.complete:
            try:
                mask = grammar.find_allowed()
            except InputError:
                break
            allowed = np.flatnonzero(mask).tolist()
            forced = grammar.find_forced()
            guessed += len(forced)
            assert set(forced[:1]) <= set(allowed), (regex, forced)
            for token in range(0 if forced else ours.vocab_size):
                assert not grammar.count_allowed([token]) or token in allowed
            grammar.take(forced[0] if forced else allowed[0])
    assert guessed or kind in ("metaspace", "wordpiece")  # which do not spell all texts


def test_a_vocabulary_that_cannot_spell_a_text_is_told_so() -> None:
    """BERT's kind has no word " x", nor letters to make it of; the first BPE's tokens depend on the next."""
    grammars = Grammars(tiny("wordpiece"), (), tiny("wordpiece").vocab_size)
    with pytest.raises(InputError, match="regex allows no text"):
        grammars.start(Structure("regex", " x"))
    grammar = grammars.start(Structure("regex", " hex"))
    grammar.take(tiny("wordpiece").find_id("he") or 0)
    with pytest.raises(InputError, match="regex any further: no token spells what must come"):
        grammar.find_allowed()
    with pytest.raises(InputError, match="need a tokenizer whose tokens always decode to the same text"):
        Grammars(tiny("word_ends"), (), 7).start(Structure("regex", "ab"))


def test_a_grammar_is_compiled_once_and_few_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("planforge.runtime.generate.grammar.KEPT", 2)
    grammars = Grammars(TOKENIZER, (), TOKENIZER.vocab_size)
    compiled: list[str] = []
    compile_one = grammars._compile

    def count(structure: Structure) -> Any:
        compiled.append(structure.text)
        return compile_one(structure)

    monkeypatch.setattr(grammars, "_compile", count)
    for regex in "aabacbca":
        grammars.start(Structure("regex", regex)).take(TOKENIZER.encode(regex)[0])
    assert "".join(compiled) == "abcba"


def test_a_slow_grammar_delays_no_other_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who asks for the same one meanwhile waits for it too; one that fails is tried again."""
    grammars = Grammars(TOKENIZER, (), TOKENIZER.vocab_size)
    go_on = threading.Event()
    compiled: list[str] = []
    compile_one = grammars._compile

    def compile_slowly(structure: Structure) -> Any:
        compiled.append(structure.text)
        assert structure.text != "aab" or go_on.wait(PATIENCE)
        return compile_one(structure)

    monkeypatch.setattr(grammars, "_compile", compile_slowly)
    waiting = [threading.Thread(target=lambda: grammars.start(Structure("regex", "aab"))) for _ in range(2)]
    for thread in waiting:
        thread.start()
    grammars.start(Structure("regex", "ba"))
    assert all(thread.is_alive() for thread in waiting)
    go_on.set()
    for thread in waiting:
        thread.join(PATIENCE)
    assert sorted(compiled) == ["aab", "ba"]
    for _ in range(2):
        with pytest.raises(InputError, match="regex cannot be used"):
            grammars.start(Structure("regex", "(?=a)"))
    assert compiled.count("(?=a)") == 2


def test_a_long_chain_of_rules_ends_no_process() -> None:
    """llguidance goes down the chain by recursion."""
    rules = [f"{name(number)}:{name(number + 1)}?" for number in range(14_000)]
    text = "\n".join(["start:a", *rules, f'{name(14_000)}:"b"'])
    assert MAX_LENGTH * 0.7 < len(text) < MAX_LENGTH
    grammar = Grammars(TOKENIZER, (), TOKENIZER.vocab_size).start(Structure("grammar", text))
    assert grammar.find_allowed()[TOKENIZER.encode("b")[0]]


def name(number: int) -> str:
    """Return the short name of a rule."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    text = letters[number % 26]
    while number := number // 26:
        text += letters[number % 26]
    return text
