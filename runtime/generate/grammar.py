"""Grammars that answers follow, by llguidance, which nothing else of the runtime loads.

A grammar says at each step which tokens may come next. V vocabulary of the model.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeVar

import numpy as np

from ..decoding.candidates import Mask
from ..errors import BackendUnavailableError, InputError, SchemaError, suggest_install
from ..text.tokenizer import Tokenizer
from .grammar_tokens import GrammarTokens
from .json_schema import JSON_OPTIONS, find_fault
from .structure import Structure

if TYPE_CHECKING:
    import llguidance

T = TypeVar("T")
KEPT = 16  # compiled grammars of a model
# Work that llguidance may do before the first token. What real schemas of hundreds of patterns and formats
# need is half of it; its default is five times as much, and keeps 200 MB of one expression.
COMPILE_FUEL = 200_000
# Compiling goes down a grammar's rules by recursion, 4 kB for each, and one too few bytes end the process. A
# grammar of MAX_LENGTH characters has up to 19,000 rules. Memory that is not touched costs nothing.
#
# Python sets the size of stacks for all new threads of the process only. We set it while one thread starts;
# another that starts in the same moment reserves more address space, and no more memory. To limit grammars
# instead would refuse too many: usual stacks, of 8 MiB on Linux and 512 kB on macOS, hold chains of 1,800 and
# of 100 rules, or schemas whose references go 800 and 30 deep (llguidance 1.9).
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
        openers: where the answer begins a text, those tokens that add less to its beginning, of each those
            that add the same elsewhere.
        first: which of them may come first.
    """

    def __init__(
        self,
        matcher: llguidance.LLMatcher,
        *,
        option: str,
        ends: frozenset[int],
        known: int,
        vocabulary: int,
        openers: Mapping[int, list[int]],
        first: Sequence[int],
    ) -> None:
        self._matcher = matcher
        self._option = option
        self._ends = ends
        self._known = known
        self._vocabulary = vocabulary
        self._openers = openers  # none once a token was taken
        self._first = first

    @property
    def complete(self) -> bool:
        """Whether nothing may follow but the end of the text."""
        return self._matcher.is_stopped()

    def find_allowed(self) -> Mask:
        """Return which tokens may come next: (V,) booleans, of which one at least is True."""
        mask = np.zeros(self._vocabulary, np.bool_)
        mask[: self._known] = compute_mask(self._matcher, self._known)
        self._check()
        if self._openers:
            mask[[token for token in self._openers if token < self._known]] = False
            mask[self._first] = True
        if not mask.any():
            self._refuse("no token spells what must come")
        return mask

    def take(self, token: int) -> None:
        """Go on behind a token that was chosen."""
        if token in self._ends:
            return
        tokens = self._openers.get(token, [token])
        self._openers = {}
        if not self._matcher.consume_tokens(tokens):
            self._check()

    def find_forced(self) -> list[int]:
        """Return tokens for the text that must come next, if there is one; other tokens may spell it too.

        Where the answer begins a text there are none: the matcher knows what tokens add elsewhere.
        """
        return [] if self._openers else self._matcher.compute_ff_tokens()

    def count_allowed(self, tokens: Sequence[int]) -> int:
        """Return how many tokens may come next, one behind the other; where the answer begins a text none."""
        return 0 if self._openers else self._matcher.validate_tokens(list(tokens))

    def _check(self) -> None:
        if self._matcher.is_error():
            self._refuse(shorten(self._matcher.get_error()))

    def _refuse(self, reason: str) -> NoReturn:
        raise InputError(
            f"the answer cannot follow {self._option} any further: {reason}; simplify it",
            option=self._option,
        )


class Compiled(NamedTuple):
    """A compiled grammar, and which of `GrammarTokens.openers` may begin a text by it."""

    matcher: llguidance.LLMatcher
    first: list[int]


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
        self._tokens: GrammarTokens | None = None
        self._compiled: OrderedDict[Structure, Future[Compiled]] = OrderedDict()
        self._lock = threading.Lock()
        self._tokens_lock = threading.Lock()

    def start(self, structure: Structure, *, begins: bool = False) -> Grammar:
        """Return the beginning of a grammar, for an answer that begins a text or goes on with one.

        Raises:
            InputError: the grammar cannot be used; of a schema a `SchemaError`.
            BackendUnavailableError: llguidance is missing.
        """
        compiled = self._find(structure)
        return Grammar(
            compiled.matcher.deep_copy(),
            option=structure.name,
            ends=frozenset(self._eos),
            known=min(self._tokenizer.vocab_size, self._vocabulary),
            vocabulary=self._vocabulary,
            openers=self._load_tokens().openers if begins else {},
            first=compiled.first,
        )

    def has(self, structure: Structure) -> bool:
        """Return whether `start` has nothing to compile."""
        with self._lock:
            compiled = self._compiled.get(structure)
        return compiled is not None and compiled.done()

    def _find(self, structure: Structure) -> Compiled:
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

    def _compile(self, structure: Structure) -> Compiled:
        matcher = self._match(write_grammar(structure))
        if matcher.is_error():
            self._refuse(structure, matcher.get_error())
        known = min(self._tokenizer.vocab_size, self._vocabulary)
        allowed = compute_mask(matcher, known)  # kept for all answers
        openers = self._load_tokens().openers.items()
        first = [
            token for token, same in openers if token < known and matcher.validate_tokens(same) == len(same)
        ]
        if matcher.is_error() or matcher.is_stopped() or not (allowed.any() or first):
            raise make_error(structure, "allows no text")
        return Compiled(matcher, first)

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
        tokens = self._load_tokens()
        if not tokens.spells_all:
            grammar = forbid_forcing(grammar)
        limits = loaded.LLParserLimits(verbose_errors=False, initial_lexer_fuel=COMPILE_FUEL)
        matcher: llguidance.LLMatcher = loaded.LLMatcher(
            tokens.environment, grammar, log_level=0, limits=limits
        )
        return matcher

    def _load_tokens(self) -> GrammarTokens:
        with self._tokens_lock:
            if self._tokens is None:
                self._tokens = GrammarTokens(load_llguidance(), self._tokenizer, self._eos)
            return self._tokens


def compute_mask(matcher: llguidance.LLMatcher, count: int) -> Mask:
    """Return which of the first `count` tokens may come next."""
    bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    return np.unpackbits(bits, bitorder="little", count=count).astype(np.bool_)


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


def load_llguidance() -> Any:
    try:
        import llguidance
    except ModuleNotFoundError as error:
        raise BackendUnavailableError(
            f"json_schema, regex, grammar and choices need llguidance: {suggest_install('grammar')}"
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


def forbid_forcing(grammar: str) -> str:
    """Return a grammar that leaves it to the model how a text that must come is cut into tokens."""
    if grammar.startswith("{"):
        (part,) = json.loads(grammar)["grammars"]
        grammar = f"start: %json {json.dumps(part['json_schema'])}"
    return f'{grammar}\n%llguidance {{"no_forcing": true}}'


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
