"""Runs an encoder's task over texts: reads some ahead, runs them in batches, yields results in order."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from ..backends.backend import Array
from ..bundle.defaults import EncoderDefaults
from ..options import EncoderOptions, Truncation, check_batch_size, check_choice, check_options, check_whole
from ..progress import Progress
from ..text.long_text import TRUNCATIONS, FittedText, fit
from ..text.reading import Item, count_read_ahead, name_item, run_in_chunks
from ..text.tokenizer import Encoding, Tokenizer
from .encoder import Encoder
from .results import Result

log = logging.getLogger("planforge")

R = TypeVar("R", bound=Result)


@dataclass(frozen=True)
class Reading:
    """How texts become sequences, and how those run: the options that all tasks share."""

    truncation: Truncation
    stride: int | None
    parse_special: bool
    batch_size: int  # the most sequences that run together
    read_ahead: int  # the most texts that are read before the first of them is done
    progress: Progress


@dataclass(frozen=True)
class TextRequest:
    """One text, or a pair, as the encoder gets it; `number` is its index in the call."""

    number: int
    item: tuple[str, str | None]
    first: Encoding
    second: Encoding | None
    fitted: FittedText


Outputs: TypeAlias = list[list[Array]]  # of each piece of a request, an array per role
Rows: TypeAlias = Callable[[TextRequest], list[list[int]]]


class RequestRunner:
    """Runs an encoder's tasks: what all of them have in common."""

    def __init__(self, encoder: Encoder, tokenizer: Tokenizer, defaults: EncoderDefaults) -> None:
        self.encoder = encoder
        self.tokenizer = tokenizer
        self.defaults = defaults

    def read_options(self, options: EncoderOptions, known: type, truncation: Truncation) -> Reading:
        """Check a call's options; `truncation` is what the task does unless told otherwise."""
        check_options(options, known)
        truncation = options.get("truncation", truncation)
        check_choice("truncation", truncation, (None, *TRUNCATIONS))
        stride = options.get("stride")
        check_whole("stride", stride, 0, optional=True)
        return Reading(
            truncation=truncation,
            stride=stride,
            parse_special=options.get("parse_special", False),
            batch_size=check_batch_size(options.get("batch_size"), self.encoder.max_batch),
            read_ahead=count_read_ahead(options.get("batch_size")),
            progress=Progress(options.get("progress", False)),
        )

    def run_task(
        self,
        items: Iterable[Item],
        roles: Sequence[str],
        finish: Callable[[TextRequest, Outputs], R],
        reading: Reading,
        find_rows: Rows | None = None,
    ) -> Iterator[R]:
        """Yield the results of a task over items, in their order; say at the end what was dropped."""

        def run_chunk(done: int, chunk: Sequence[Item]) -> Iterator[dict[int, R]]:
            return self.run_requests(
                self.make_requests(done, chunk, reading), roles, finish, reading.batch_size, find_rows
            )

        done = 0
        shortened = 0
        dropped = 0
        for result in run_in_chunks(items, reading.read_ahead, reading.progress, run_chunk):
            yield result
            done += 1
            shortened += result.dropped > 0
            dropped += result.dropped
        if dropped:
            log.warning(
                "%d of %d texts were longer than the %d tokens that this model takes, and %d tokens were"
                " dropped (truncation=%r); truncation='windows' keeps all",
                shortened,
                done,
                self.defaults.max_length,
                dropped,
                reading.truncation,
            )

    def run_requests(
        self,
        requests: Sequence[TextRequest],
        roles: Sequence[str],
        finish: Callable[[TextRequest, Outputs], R],
        batch_size: int,
        find_rows: Rows | None,
    ) -> Iterator[dict[int, R]]:
        """Yield after each batch the results that it completes, by the number of their request."""
        pieces = [piece for request in requests for piece in request.fitted.pieces]
        owners = [place for place, request in enumerate(requests) for _ in request.fitted.pieces]
        rows = None if find_rows is None else [row for request in requests for row in find_rows(request)]
        outputs: list[dict[int, list[Array]]] = [{} for _ in requests]  # by piece, until all are there
        for batch in self.encoder.run_batches(pieces, roles, rows, batch_size):
            results: dict[int, R] = {}
            for index, arrays in batch.items():
                request = requests[owners[index]]
                computed = outputs[owners[index]]
                computed[index] = arrays
                if len(computed) == len(request.fitted.pieces):
                    results[request.number] = finish(request, [computed[i] for i in sorted(computed)])
                    outputs[owners[index]] = {}
            yield results

    def make_requests(self, done: int, items: Sequence[Item], reading: Reading) -> list[TextRequest]:
        """Tokenize texts and pairs, of which `done` came before, and fit them to the model."""
        pairs = [(item, None) if isinstance(item, str) else item for item in items]
        special = reading.parse_special
        firsts = self.tokenizer.encode_batch([first for first, _ in pairs], special, done)
        given = [second for _, second in pairs if second is not None]
        seconds = iter(self.tokenizer.encode_batch(given, special, done))
        requests = []
        for number, (pair, first) in enumerate(zip(pairs, firsts, strict=True), done):
            second = None if pair[1] is None else next(seconds)
            with name_item(f"texts[{number}]"):
                fitted = fit(
                    first.ids,
                    None if second is None else second.ids,
                    max_length=self.defaults.max_length,
                    tokens=self.defaults.tokens,
                    truncation=reading.truncation,
                    stride=reading.stride,
                    separators=self.defaults.separators,
                )
            requests.append(TextRequest(number, pair, first, second, fitted))
        return requests
