"""Runs an encoder's task over texts: reads some ahead, runs them in batches, yields results in order."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeAlias, TypeVar

from ..backends.backend import Array
from ..bundle.defaults import EncoderDefaults
from ..option_checks import check_batch_size, check_choice, check_options, check_whole
from ..options import EncoderOptions, Truncation
from ..progress import Progress
from ..text.long_text import TRUNCATIONS, FittedText, Piece, fit
from ..text.reading import Item, count_read_ahead, name_item, run_in_chunks
from ..text.tokenizer import Encoding, Tokenizer
from .encoder import Encoder
from .results import Result

log = logging.getLogger("planforge")

MIN_TOKENS = 8  # of a sequence: room for special tokens, and some of each text

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


class Collector(Generic[R]):
    """Makes results of a task of the outputs of its requests' pieces, which come in any order."""

    def __init__(self, task: Task[R], requests: Sequence[TextRequest]) -> None:
        self.task = task
        self.requests = requests
        self.pieces = [
            (place, number)
            for place, request in enumerate(requests)
            for number in range(len(request.fitted.pieces))
        ]
        self._outputs: list[dict[int, list[Array]]] = [{} for _ in requests]  # until all of a text are there

    def list_inputs(self) -> list[PieceInput]:
        """Return what the encoder gets, piece by piece."""
        inputs = []
        for place, number in self.pieces:
            request = self.requests[place]
            rows = request.rows[number] if self.task.find_rows is not None else None
            inputs.append(PieceInput(request.fitted.pieces[number], rows))
        return inputs

    def add(self, index: int, arrays: list[Array]) -> tuple[int, R] | None:
        """Take the outputs of a piece; return its text's number and result where it was the last one."""
        place, number = self.pieces[index]
        request = self.requests[place]
        outputs = self._outputs[place]
        outputs[number] = arrays
        if len(outputs) < len(request.fitted.pieces):
            return None
        self._outputs[place] = {}
        return request.number, self.task.finish(request, [outputs[n] for n in sorted(outputs)])


class RequestRunner:
    """Runs an encoder's tasks: what all of them have in common."""

    def __init__(self, encoder: Encoder, tokenizer: Tokenizer, defaults: EncoderDefaults) -> None:
        self.encoder = encoder
        self.tokenizer = tokenizer
        self.defaults = defaults

    def read_options(self, options: EncoderOptions, known: type, truncation: Truncation) -> TokenizeOptions:
        """Check a call's options; `truncation` is what the task does unless told otherwise."""
        check_options(options, known)
        truncation = options.get("truncation", truncation)
        check_choice("truncation", truncation, (None, *TRUNCATIONS))
        stride = options.get("stride")
        check_whole("stride", stride, 0, optional=True)
        max_tokens = options.get("max_tokens")
        check_whole("max_tokens", max_tokens, MIN_TOKENS, optional=True)
        longest = self.defaults.max_length
        return TokenizeOptions(
            truncation=truncation,
            max_tokens=longest if max_tokens is None else min(max_tokens, longest),
            stride=stride,
            parse_special=options.get("parse_special", False),
            batch_size=check_batch_size(options.get("batch_size"), self.encoder.max_batch),
            read_ahead=count_read_ahead(options.get("batch_size")),
            progress=Progress(options.get("progress", False)),
        )

    def run_task(self, task: Task[R]) -> Iterator[R]:
        """Yield the results of a task over its items, in their order; say at the end what was dropped."""

        def run_chunk(done: int, chunk: Sequence[Item]) -> Iterator[dict[int, R]]:
            collector = Collector(task, self.make_requests(done, chunk, task))
            for outputs in self.run_pieces(collector.list_inputs(), task.roles, task.reading.batch_size):
                added = [collector.add(index, arrays) for index, arrays in outputs.items()]
                yield dict(result for result in added if result is not None)

        done = 0
        shortened = 0
        dropped = 0
        for result in run_in_chunks(task.items, task.reading.read_ahead, task.reading.progress, run_chunk):
            yield result
            done += 1
            shortened += result.dropped > 0
            dropped += result.dropped
        self.report_dropped(done, shortened, dropped, task.reading.truncation)

    def run_pieces(
        self, inputs: Sequence[PieceInput], roles: Sequence[str], batch_size: int
    ) -> Iterator[dict[int, list[Array]]]:
        """Yield after each batch its pieces' outputs by index; all inputs have rows, or none."""
        rows = [one.rows for one in inputs if one.rows is not None]
        yield from self.encoder.run_batches([one.piece for one in inputs], roles, rows or None, batch_size)

    def report_dropped(self, done: int, shortened: int, dropped: int, truncation: Truncation) -> None:
        """Say in the log how many tokens were left out of how many texts."""
        if dropped:
            log.warning(
                "%d of %d texts were longer than the %d tokens that this model takes, and %d tokens were"
                " dropped (truncation=%r); truncation='windows' keeps all",
                shortened,
                done,
                self.defaults.max_length,
                dropped,
                truncation,
            )

    def make_requests(self, done: int, items: Sequence[Item], task: Task[R]) -> list[TextRequest]:
        """Tokenize texts and pairs, of which `done` came before, and fit them to the model."""
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
                    fitted = self.fit_text(ids, None if second is None else second.ids, reading)
                else:
                    each = [self.fit_text(ids, one, reading) for one in task.seconds]
                    pieces = tuple(piece for one in each for piece in one.pieces)
                    fitted = FittedText(pieces, max(one.dropped for one in each))
                if task.unpooled is not None:
                    pieces = tuple(piece.leave_out_prompt(task.unpooled) for piece in fitted.pieces)
                    fitted = replace(fitted, pieces=pieces)
                request = TextRequest(number, pair, first, second, fitted)
                if task.find_rows is not None:
                    request = replace(request, rows=task.find_rows(request))
            if not task.needs_tokens:
                request = replace(request, first=None, second=None)
            requests.append(request)
        return requests

    def fit_text(self, first: list[int], second: list[int] | None, reading: TokenizeOptions) -> FittedText:
        """Fit a text's tokens, or a pair's, to the model."""
        return fit(
            first,
            second,
            max_length=reading.max_tokens,
            special_tokens=self.defaults.make_special_tokens(is_pair=second is not None),
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
