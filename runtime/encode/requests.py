"""Runs an encoder's task over texts: reads some ahead, runs them in batches, yields results in order."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from ..backends.backend import Array
from ..bundle.defaults import EncoderDefaults
from ..errors import ContextLengthError
from ..text.batching import yield_in_order
from ..text.long_text import FittedText, fit
from ..text.reading import Item, Reading, chunks
from ..text.tokenizer import Encoding, Tokenizer
from .encoder import Encoder
from .results import Result

log = logging.getLogger("planforge")

R = TypeVar("R", bound=Result)


@dataclass(frozen=True)
class TextRequest:
    """One text, or a pair, as the encoder gets it.

    Attributes:
        number: the text's index in the call.
        item: the text, and its pair if it has one.
        first, second: their tokens.
        fitted: the sequences that the model takes.
    """

    number: int
    item: tuple[str, str | None]
    first: Encoding
    second: Encoding | None
    fitted: FittedText

    @property
    def body(self) -> tuple[str, Encoding]:
        """The text that windows slide over: the second if there is one."""
        text, pair = self.item
        return (text, self.first) if pair is None or self.second is None else (pair, self.second)


Outputs: TypeAlias = list[list[Array]]  # of each piece of a request, an array per role
Rows: TypeAlias = Callable[[TextRequest], list[list[int]]]


class RequestRunner:
    """Runs an encoder's tasks: what all of them have in common."""

    def __init__(self, encoder: Encoder, tokenizer: Tokenizer, defaults: EncoderDefaults) -> None:
        self.encoder = encoder
        self.tokenizer = tokenizer
        self.defaults = defaults

    def results(
        self,
        items: Iterable[Item],
        roles: Sequence[str],
        finish: Callable[[TextRequest, Outputs], R],
        reading: Reading,
        rows: Rows | None = None,
    ) -> Iterator[R]:
        """Run a task over items, some ahead at a time; say at the end what was dropped.

        Results come in the order of the items, each as soon as it and those before it are computed.
        Progress is reported after each batch.
        """
        done = 0
        shortened = 0
        dropped = 0
        with reading.progress as progress:
            for chunk in chunks(items, reading.read_ahead):
                requests = self.requests(chunk, reading, done)
                batches = self.finish_batches(requests, roles, finish, reading, rows)
                yield from yield_in_order(batches, progress, before=done)
                done += len(requests)
                shortened += sum(request.fitted.dropped > 0 for request in requests)
                dropped += sum(request.fitted.dropped for request in requests)
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

    def finish_batches(
        self,
        requests: Sequence[TextRequest],
        roles: Sequence[str],
        finish: Callable[[TextRequest, Outputs], R],
        reading: Reading,
        rows: Rows | None,
    ) -> Iterator[dict[int, R]]:
        """Yield after each batch the results that it completes, by the place of their request."""
        pieces = [piece for request in requests for piece in request.fitted.pieces]
        owners = [place for place, request in enumerate(requests) for _ in request.fitted.pieces]
        wanted = None if rows is None else [row for request in requests for row in rows(request)]
        outputs: list[dict[int, list[Array]]] = [{} for _ in requests]  # by piece, until all are there
        for batch in self.encoder.run_batches(pieces, roles, wanted, reading.batch_size):
            results: dict[int, R] = {}
            for index, arrays in batch.items():
                place = owners[index]
                request = requests[place]
                computed = outputs[place]
                computed[index] = arrays
                if len(computed) == len(request.fitted.pieces):
                    results[place] = finish(request, [computed[i] for i in sorted(computed)])
                    outputs[place] = {}
            yield results

    def requests(self, items: Sequence[Item], reading: Reading, done: int) -> list[TextRequest]:
        """Tokenize texts and pairs, of which `done` came before, and fit them to the model."""
        pairs = [(item, None) if isinstance(item, str) else item for item in items]
        special = reading.parse_special
        firsts = self.tokenizer.encode_batch([first for first, _ in pairs], special, done)
        given = [second for _, second in pairs if second is not None]
        seconds = iter(self.tokenizer.encode_batch(given, special, done))
        requests = []
        for number, (pair, first) in enumerate(zip(pairs, firsts, strict=True), done):
            second = None if pair[1] is None else next(seconds)
            fitted = self.fit_tokens(number, first.ids, None if second is None else second.ids, reading)
            requests.append(TextRequest(number, pair, first, second, fitted))
        return requests

    def fit_tokens(
        self, number: int, first: Sequence[int], second: Sequence[int] | None, reading: Reading
    ) -> FittedText:
        """Fit the tokens of a text, or of a pair, to the model; `number` is what an error calls it."""
        try:
            return fit(
                first,
                second,
                max_length=self.defaults.max_length,
                tokens=self.defaults.tokens,
                truncation=reading.truncation,
                stride=reading.stride,
                separators=self.defaults.separators,
            )
        except ContextLengthError as error:
            message = f"texts[{number}]: {error}"
            raise ContextLengthError(message, tokens=error.tokens, limit=error.limit) from error
