"""Reads texts and pairs for an encoder: prompts, special tokens, lengths, and what expands a query."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeAlias, TypeVar, cast

from ..backends.backend import Array
from ..bundle.defaults import EncoderDefaults, SpecialTokens
from ..bundle.role_defaults import DOCUMENT, INPUT_TYPES, QUERY, Expansion
from ..errors import InputError
from ..option_checks import check_choice
from ..options import PromptOptions, ScoreOptions, Truncation
from ..progress import Progress
from ..text.long_text import FittedText, Piece, fit
from ..text.reading import Item, check_each, check_pair, check_text, name_item
from ..text.tokenizer import Encoding, Tokenizer
from .pair_writer import PairWriter
from .results import Result

log = logging.getLogger("planforge")

R = TypeVar("R", bound=Result)


@dataclass(frozen=True)
class TokenizeOptions:
    """How texts become sequences, and how those run: the options that all tasks share."""

    truncation: Truncation
    max_tokens: int  # of a sequence
    stride: int | None
    parse_special: bool
    batch_size: int  # the most sequences that run together
    read_ahead: int  # the most texts that are read before the first of them is done
    progress: Progress


Outputs: TypeAlias = list[list[Array]]  # of each piece of a request, an array per role


@dataclass(frozen=True)
class PieceInput:
    """One sequence for the encoder; `rows` are the positions whose masked-word logits are wanted, or None."""

    piece: Piece
    rows: list[int] | None

    def __len__(self) -> int:
        return len(self.piece)


@dataclass(frozen=True)
class TextRequest:
    """One text, or a pair, as the encoder gets it; `number` is its index in the call.

    `rows` are, of each piece, the positions whose masked-word logits are wanted; no other task has any.
    `first` and `second` are kept for tasks that need them: they take 100 bytes for each token.
    """

    number: int
    item: tuple[str, str | None]
    first: Encoding | None
    second: Encoding | None
    fitted: FittedText
    rows: Sequence[list[int]] = ()

    @property
    def encoding(self) -> Encoding:
        """The tokens of the text that the results are about: the second of a pair."""
        encoding = self.first if self.item[1] is None else self.second
        assert encoding is not None  # the task needs it
        return encoding


@dataclass(frozen=True)
class Task(Generic[R]):
    """What one call wants: its texts, which outputs its results are made of, and how."""

    items: Iterator[Item]
    roles: tuple[str, ...]
    finish: Callable[[TextRequest, Outputs], R]
    reading: TokenizeOptions
    find_rows: Callable[[TextRequest], list[list[int]]] | None = None
    needs_tokens: bool = True  # whether results are made of the texts' tokens and places
    prompt: str = ""  # the checkpoint's own, before each text; its special tokens are read as such
    seconds: Sequence[list[int]] | None = None  # tokens of what each text is paired with, one after another
    unpooled: int | None = None  # tokens of a prompt that are no part of a text's vector; None without one
    expansion: Expansion | None = None  # of each text
    is_queries: bool = False  # whether the encoder of queries reads them
    writer: PairWriter | None = None  # of pairs that a chat template writes


# Names of prompts that stand before texts of an input type, the first that a checkpoint has.
PROMPT_NAMES = {QUERY: ("query",), DOCUMENT: ("document", "passage", "corpus")}


def read_input_type(options: PromptOptions) -> str | None:
    """Return what the texts are, a query or a document, if the caller says so."""
    input_type = options.get("input_type")
    check_choice("input_type", input_type, (None, *INPUT_TYPES))
    return input_type


class RequestReader:
    """Makes requests of texts, for a model with some tokenizer and defaults."""

    def __init__(self, tokenizer: Tokenizer, defaults: EncoderDefaults) -> None:
        self.tokenizer = tokenizer
        self.defaults = defaults

    def make_requests(self, done: int, items: Sequence[Item], task: Task[R]) -> list[TextRequest]:
        """Tokenize texts and pairs, of which `done` came before, and fit them to the model."""
        if task.writer is not None:
            return [self.write_pair(number, item, task.writer) for number, item in enumerate(items, done)]
        pairs = [(item, None) if isinstance(item, str) else item for item in items]
        reading = task.reading
        special = reading.parse_special
        firsts = self.encode_firsts([first for first, _ in pairs], task, done)
        given = [second for _, second in pairs if second is not None]
        seconds = iter(self.tokenizer.encode_batch(given, special, done) if given else [])
        requests = []
        for number, (pair, (ids, first)) in enumerate(zip(pairs, firsts, strict=True), done):
            second = None if pair[1] is None else next(seconds)
            with name_item(f"texts[{number}]"):
                if task.seconds is None:
                    other = None if second is None else second.ids
                    fitted = self.fit_text(ids, other, reading, task.is_queries)
                else:
                    each = [self.fit_text(ids, one, reading) for one in task.seconds]
                    pieces = tuple(piece for one in each for piece in one.pieces)
                    fitted = FittedText(pieces, max(one.dropped for one in each))
                if task.unpooled is not None:
                    pieces = tuple(piece.leave_out_prompt(task.unpooled) for piece in fitted.pieces)
                    fitted = replace(fitted, pieces=pieces)
                if (more := task.expansion) is not None:
                    expanded = [piece.expand(more.length, more.token, more.attend) for piece in fitted.pieces]
                    fitted = replace(fitted, pieces=tuple(expanded))
                request = TextRequest(number, pair, first, second, fitted)
                if task.find_rows is not None:
                    request = replace(request, rows=task.find_rows(request))
            if not task.needs_tokens:
                request = replace(request, first=None, second=None)
            requests.append(request)
        return requests

    def write_pair(self, number: int, item: Item, writer: PairWriter) -> TextRequest:
        """Return the request of a pair that a chat template writes."""
        query, document = check_pair(item)
        with name_item(f"texts[{number}]"):
            return TextRequest(number, (query, document), None, None, writer.read(query, document))

    def fit_text(
        self, first: list[int], second: list[int] | None, reading: TokenizeOptions, is_queries: bool = False
    ) -> FittedText:
        """Fit a text's tokens, or a pair's, to the model."""
        roles = self.defaults.roles
        is_plain = is_queries and roles.plain_queries
        special_tokens = self.defaults.make_special_tokens(is_pair=second is not None)
        if is_plain:
            special_tokens = SpecialTokens()
        if (roles.reads_empty or is_plain) and not first and second is None:
            padding = Piece([self.defaults.padding], [0], range(0), None, prefix=0, unseen=1)
            return FittedText((padding,), 0)
        return fit(
            first,
            second,
            max_length=reading.max_tokens,
            special_tokens=special_tokens,
            truncation=reading.truncation,
            stride=reading.stride,
        )

    def encode_firsts(
        self, texts: Sequence[str], task: Task[R], done: int
    ) -> list[tuple[list[int], Encoding | None]]:
        """Return the ids of each text, and where they come from unless a prompt stands before them."""
        special = task.reading.parse_special
        if task.prompt and not special:
            return [(ids, None) for ids in self.tokenizer.encode_prompted(task.prompt, texts, done)]
        texts = [task.prompt + text for text in texts]
        return [(one.ids, one) for one in self.tokenizer.encode_batch(texts, special, done)]

    def make_text_task(
        self,
        texts: Iterable[str],
        roles: tuple[str, ...],
        finish: Callable[[TextRequest, Outputs], R],
        reading: TokenizeOptions,
        options: PromptOptions,
    ) -> Task[R]:
        """Return the task whose results are made of some outputs, of texts behind a prompt."""
        input_type = read_input_type(options)
        own = self.defaults.roles
        prompt = options.get("prompt")
        before = self.find_prompt(options.get("prompt_name"), prompt, input_type)
        is_own = prompt is None  # the checkpoint's; what a caller gives is a text like others
        checked = check_each(texts, check_text)
        if not is_own:
            checked = (before + text for text in checked)
        limit = own.limit_length(input_type)
        if limit is not None:
            reading = replace(reading, max_tokens=min(reading.max_tokens, limit))
        self.check_prompt(before, is_own, reading)
        return Task(
            checked,
            roles,
            finish,
            reading,
            needs_tokens=False,
            prompt=before if is_own else "",
            unpooled=self.count_unpooled(before, is_own or reading.parse_special),
            expansion=own.expansion if input_type == QUERY else None,
            is_queries=input_type == QUERY and own.own_graph,
        )

    def make_pair_task(
        self,
        pairs: Iterator[tuple[str, str]],
        roles: tuple[str, ...],
        finish: Callable[[TextRequest, Outputs], R],
        reading: TokenizeOptions,
        options: ScoreOptions,
    ) -> Task[R]:
        """Return the task whose results are made of pairs, of which the first stands behind a prompt."""
        prompt = options.get("prompt")
        before = self.find_prompt(options.get("prompt_name"), prompt)
        is_own = prompt is None  # the checkpoint's; what a caller gives is a text like others
        writer = None
        if (templates := self.defaults.pairs) is not None:
            if templates.prompted is None and (prompt or options.get("prompt_name")):
                raise InputError(
                    "this model's chat template has no place for a prompt; leave it out", option="prompt"
                )
            template = (before and templates.prompted) or templates.plain
            kept = (reading.parse_special, reading.max_tokens, reading.truncation)
            writer = PairWriter(template, self.tokenizer, before, is_own, *kept)
        elif not is_own:
            pairs = ((before + first, second) for first, second in pairs)
        return Task(
            pairs,
            roles,
            finish,
            reading,
            needs_tokens=False,
            prompt=before if is_own else "",
            writer=writer,
        )

    def check_prompt(self, prompt: str, is_own: bool, reading: TokenizeOptions) -> None:
        """Refuse a prompt behind which no text would be read, where texts are cut at their end."""
        if not prompt or reading.truncation not in (None, "head"):
            return
        count = len(self.tokenizer.encode(prompt, parse_special=is_own or reading.parse_special))
        special = self.defaults.make_special_tokens()
        room = reading.max_tokens - len(special.prefix) - len(special.suffix)
        if count >= room:
            raise InputError(
                f"the prompt has {count} tokens, and there is room for {room}: no text would be read;"
                " give a shorter one",
                option="prompt",
            )

    def count_unpooled(self, prompt: str, parse_special: bool) -> int | None:
        """Return how many tokens of a prompt are no part of a vector, None where all are.

        As sentence-transformers counts them: of the prompt alone, without a special token at the end.
        """
        if self.defaults.include_prompt or not prompt:
            return None
        ids = self.tokenizer.encode(prompt, parse_special=parse_special)
        if self.defaults.make_special_tokens().suffix or not ids:
            return len(ids)
        return len(ids) - self.tokenizer.is_special(ids[-1])

    def find_prompt(self, name: str | None, prompt: str | None, input_type: str | None = None) -> str:
        """Return what to put before each text; as in sentence-transformers, prompt takes precedence."""
        if prompt is not None:
            if not isinstance(prompt, str):
                raise InputError(f"prompt={prompt!r:.80} must be a str, which is put before each text")
            if name is not None:
                log.warning("prompt_name=%r is not used: prompt takes precedence over it", name)
            return prompt
        prompts = self.defaults.prompts
        if name is None:
            of_type = (one for one in PROMPT_NAMES.get(str(input_type), ()) if one in prompts)
            name = next(of_type, self.defaults.default_prompt)
        if name is None:
            return ""
        if name not in prompts:
            known = ", ".join(map(repr, prompts)) or "none"
            raise InputError(
                f"prompt_name={name!r} is not one of this model's prompts: {known}; prompt= takes a text",
                option="prompt_name",
            )
        return prompts[name]

    def read_text(self, text: str, input_type: str | None) -> Piece:
        """Return the sequence that one text of a type becomes, whichever task embeds it."""
        options: PromptOptions = {"input_type": cast(Any, input_type)}
        reading = self.make_usual_reading()
        task: Task[Result] = self.make_text_task([text], (), lambda *_: Result(), reading, options)
        (request,) = self.make_requests(0, [text], task)
        return request.fitted.pieces[0]

    def read_pair(self, query: str, document: str, prompt: str | None) -> Piece:
        """Return the sequence that a pair becomes, behind a prompt or the checkpoint's own."""
        pair = (query, document)
        reading = self.make_usual_reading()
        task: Task[Result] = self.make_pair_task(
            iter([pair]), (), lambda *_: Result(), reading, {"prompt": prompt}
        )
        (request,) = self.make_requests(0, [pair], task)
        return request.fitted.pieces[0]

    def make_usual_reading(self) -> TokenizeOptions:
        """Return how a text is read where no option is given."""
        return TokenizeOptions("head", self.defaults.max_length, None, False, 1, 1, Progress(False))

    def find_weighted(self, piece: Piece) -> list[int]:
        """Return the places of a text's tokens whose weights count: not those of what stands around it."""
        if not piece.prefix:
            return list(range(len(piece)))
        return [place for place, token in enumerate(piece.ids) if not self.tokenizer.is_special(token)]

    def find_counted(self, ids: Sequence[int], input_type: str | None) -> list[int]:
        """Return the places of a text's tokens whose vectors count, where each token has one."""
        roles = self.defaults.roles
        skipped = set(roles.skipped if (input_type or DOCUMENT) in roles.skipped_of else ())
        kept = set(roles.kept if input_type != QUERY else ())
        return [
            place for place, token in enumerate(ids) if token not in skipped and (not kept or token in kept)
        ]
