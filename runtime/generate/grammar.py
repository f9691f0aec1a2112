"""Grammars that answers follow, by llguidance, which nothing else of the runtime loads.

A grammar says at each step which tokens may come next. V vocabulary of the model.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import tokenizers

from ..decoding.candidates import Mask
from ..errors import BackendUnavailableError, InputError, SchemaError
from ..text.tokenizer import Tokenizer
from .json_schema import JSON_OPTIONS, find_fault
from .structure import Structure

if TYPE_CHECKING:
    import llguidance

T = TypeVar("T")
HIDDEN = "\ufdd1"  # Unicode keeps it from being a character of any text
KEPT = 16  # compiled grammars of a model
# Work that llguidance may do before the first token. What real schemas of hundreds of patterns and formats
# need is half of it; its default is five times as much, and keeps 200 MB of one expression.
COMPILE_FUEL = 200_000
# Compiling goes down a grammar's rules by recursion, 4 kB for each, and one too few bytes end the process. A
# grammar of MAX_LENGTH characters has up to 19,000 rules. Memory that is not touched costs nothing.
STACK_BYTES = 256 * 2**20
STACK_LOCK = threading.Lock()  # held while new threads have such a stack


class Grammar:
    """Where one answer is in its grammar.

    Args:
        matcher: llguidance's.
        option: the one that says what the answer is.
        ends: tokens that end the answer.
        known: how many tokens spell something.
        vocabulary: how many tokens the model has.
    """

    def __init__(
        self,
        matcher: llguidance.LLMatcher,
        *,
        option: str,
        ends: frozenset[int],
        known: int,
        vocabulary: int,
    ) -> None:
        self._matcher = matcher
        self._option = option
        self._ends = ends
        self._known = known
        self._vocabulary = vocabulary

    @property
    def complete(self) -> bool:
        """Whether nothing may follow but the end of the text."""
        return self._matcher.is_stopped()

    def find_allowed(self) -> Mask:
        """Return which tokens may come next: (V,) booleans, of which one at least is True."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        mask = np.zeros(self._vocabulary, np.bool_)
        mask[: self._known] = np.unpackbits(bits, bitorder="little", count=self._known)
        return mask

    def take(self, token: int) -> None:
        """Go on behind a token that was chosen."""
        if token in self._ends:
            return
        if not self._matcher.consume_token(token):
            self._check()

    def find_forced(self) -> list[int]:
        """Return tokens for the text that must come next, if there is one; other tokens may spell it too."""
        return self._matcher.compute_ff_tokens()

    def count_allowed(self, tokens: Sequence[int]) -> int:
        """Return how many tokens may come next, one behind the other."""
        return self._matcher.validate_tokens(list(tokens))

    def _check(self) -> None:
        if self._matcher.is_error():
            reason = shorten(self._matcher.get_error())
            raise InputError(
                f"the answer can follow its {self._option} no further: {reason}; make it simpler",
                option=self._option,
            )


class Grammars:
    """Compiles grammars for the tokens of one model, and keeps those used last; safe to use from threads.

    Who waits for a grammar delays nobody who needs another one.

    Args:
        tokenizer: the model's.
        eos: tokens that end an answer.
        vocabulary: how many tokens the model has; its tokenizer may have fewer.
    """

    def __init__(self, tokenizer: Tokenizer, eos: Sequence[int], vocabulary: int) -> None:
        self._tokenizer = tokenizer
        self._eos = [token for token in eos if token < tokenizer.vocab_size]
        self._vocabulary = vocabulary
        self._tokens: llguidance.LLTokenizer | None = None
        self._compiled: OrderedDict[Structure, Future[llguidance.LLMatcher]] = OrderedDict()
        self._lock = threading.Lock()
        self._tokens_lock = threading.Lock()

    def start(self, structure: Structure) -> Grammar:
        """Return the beginning of a grammar.

        Raises:
            InputError: the grammar cannot be used; of a schema a `SchemaError`.
            BackendUnavailableError: llguidance is missing.
        """
        return Grammar(
            self._find(structure).deep_copy(),
            option=structure.name,
            ends=frozenset(self._eos),
            known=min(self._tokenizer.vocab_size, self._vocabulary),
            vocabulary=self._vocabulary,
        )

    def has(self, structure: Structure) -> bool:
        """Return whether `start` has nothing to compile."""
        with self._lock:
            compiled = self._compiled.get(structure)
        return compiled is not None and compiled.done()

    def _find(self, structure: Structure) -> llguidance.LLMatcher:
        """Return a compiled grammar, when it is there; one that fails is tried anew at the next time."""
        with self._lock:
            compiled = self._compiled.get(structure)
            if compiled is None:
                compiled = run_with_deep_stack(partial(self._compile, structure))
                self._compiled[structure] = compiled
            self._compiled.move_to_end(structure)
            if len(self._compiled) > KEPT:
                self._compiled.popitem(last=False)
        try:
            return compiled.result()
        except BaseException:
            with self._lock:
                if self._compiled.get(structure) is compiled:
                    del self._compiled[structure]
            raise

    def _compile(self, structure: Structure) -> llguidance.LLMatcher:
        matcher = self._match(write_grammar(structure))
        if matcher.is_error():
            self._refuse(structure, matcher.get_error())
        matcher.compute_bitmask()  # kept for all answers
        if matcher.is_error() or matcher.is_stopped():
            raise make_error(structure, "allows no text")
        return matcher

    def _refuse(self, structure: Structure, error: str) -> None:
        reason = shorten(error)
        if structure.kind != "json_schema":
            raise make_error(structure, f"cannot be used: {reason}")
        path = find_fault(
            json.loads(structure.text), lambda schema: self._match(write_schema_grammar(schema)).get_error()
        )
        place = f" at {path}" if path else ""
        raise make_error(structure, f"cannot be enforced{place}: {reason}", path)

    def _match(self, grammar: str) -> llguidance.LLMatcher:
        loaded = load_llguidance()
        with self._tokens_lock:
            if self._tokens is None:
                self._tokens = loaded.LLTokenizer(*self._write_tokens())
        limits = loaded.LLParserLimits(verbose_errors=False, initial_lexer_fuel=COMPILE_FUEL)
        matcher: llguidance.LLMatcher = loaded.LLMatcher(self._tokens, grammar, log_level=0, limits=limits)
        return matcher

    def _write_tokens(self) -> tuple[str, None, Sequence[int]]:
        """Return a tokenizer.json and its end tokens; where the model has none, with one made up."""
        text = hide_special_tokens(self._tokenizer.write_json(), self._tokenizer.special_tokens)
        if self._eos:
            return text, None, self._eos
        tokens = tokenizers.Tokenizer.from_str(text)
        tokens.add_special_tokens([HIDDEN])
        return tokens.to_str(), None, [tokens.get_vocab()[HIDDEN]]


def run_with_deep_stack(function: Callable[[], T]) -> Future[T]:
    """Run a function in a thread of its own that may recurse deeply; return its result to come."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    with STACK_LOCK:
        usual = threading.stack_size(STACK_BYTES)
        try:
            threading.Thread(target=run, name="planforge-grammar", daemon=True).start()
        finally:
            threading.stack_size(usual)
    return future


def hide_special_tokens(text: str, special_tokens: Sequence[str]) -> str:
    """Return a tokenizer.json whose special tokens no text spells.

    llguidance takes the special token where a text must come next that spells it.
    """
    content = json.loads(text)
    hidden = {token: HIDDEN + token for token in special_tokens}
    for token in content["added_tokens"]:
        token["content"] = hidden.get(token["content"], token["content"])
    model = content["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {hidden.get(token, token): index for token, index in model["vocab"].items()}
    else:  # Unigram's
        model["vocab"] = [[hidden.get(token, token), score] for token, score in model["vocab"]]
    if model.get("unk_token") is not None:
        model["unk_token"] = hidden.get(model["unk_token"], model["unk_token"])
    content["post_processor"] = None
    return json.dumps(content)


def load_llguidance() -> Any:
    try:
        import llguidance
    except ModuleNotFoundError as error:
        raise BackendUnavailableError(
            "json_schema, regex, grammar and choices need llguidance: pip install 'planforge[grammar]'"
        ) from error
    return llguidance


def write_grammar(structure: Structure) -> str:
    """Return a structure in llguidance's own form."""
    loaded = load_llguidance()
    text = structure.text
    if structure.kind == "json_schema":
        return write_schema_grammar(json.loads(structure.text))
    if structure.kind == "regex":
        text = f"start: /{loaded.regex_to_lark(structure.text, use_ascii='d')}/"
    elif structure.kind == "choices":
        text = f"start: {' | '.join(map(json.dumps, json.loads(structure.text)))}"
    grammar: str = loaded.LLMatcher.grammar_from_lark(text)
    return grammar


def write_schema_grammar(schema: dict[str, Any]) -> str:
    grammar: str = load_llguidance().LLMatcher.grammar_from_json_schema(schema, overrides=JSON_OPTIONS)
    return grammar


def shorten(error: str) -> str:
    """Return what llguidance says of a grammar, in one line, with the place in the grammar."""
    regex = re.search(r"parse error:\n    (.*)\n( *)\^+\nerror: (.*)", error)
    if regex:
        spelled, before, reason = regex.groups()
        return f"{reason}, at character {len(before) - 3} of {spelled:.80}"
    line = error.partition("\n")[0]
    place = re.match(r"(?:at )?(\d+)\((\d+)\): ", line)
    if place:
        return f"line {place[1]}, character {place[2]}: {line[place.end() :]}"
    return line


def make_error(structure: Structure, reason: str, path: str = "") -> InputError:
    message = f"{structure.name} {reason}"
    if structure.kind == "json_schema":
        return SchemaError(message, path=path, option=structure.name)
    return InputError(message, option=structure.name)
