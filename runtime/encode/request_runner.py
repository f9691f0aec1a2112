"""Runs an encoder's task over texts: reads some ahead, runs them in batches, yields results in order."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Generic

from ..backends.backend import Array
from ..bundle.defaults import EncoderDefaults
from ..option_checks import check_batch_size, check_choice, check_options, check_whole
from ..options import EncoderOptions, Truncation
from ..progress import Progress
from ..text.long_text import TRUNCATIONS
from ..text.reading import Item, count_read_ahead, run_in_chunks
from ..text.tokenizer import Tokenizer
from .encoder import Encoder
from .requests import PieceInput, R, RequestReader, Task, TextRequest, TokenizeOptions

log = logging.getLogger("planforge")

MIN_TOKENS = 8  # of a sequence: room for special tokens, and some of each text


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


class RequestRunner(RequestReader):
    """Runs an encoder's tasks: what all of them have in common."""

    def __init__(
        self,
        encoder: Encoder,
        tokenizer: Tokenizer,
        defaults: EncoderDefaults,
        queries: Encoder | None = None,
    ) -> None:
        super().__init__(tokenizer, defaults)
        self.encoder = encoder
        self.queries = queries  # reads queries, where it is another

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
            inputs = collector.list_inputs()
            for outputs in self.run_pieces(inputs, task.roles, task.reading.batch_size, task.is_queries):
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
        self.report_dropped(done, shortened, dropped, task.reading)

    def run_pieces(
        self, inputs: Sequence[PieceInput], roles: Sequence[str], batch_size: int, is_queries: bool = False
    ) -> Iterator[dict[int, list[Array]]]:
        """Yield after each batch its pieces' outputs by index; all inputs have rows, or none."""
        rows = [one.rows for one in inputs if one.rows is not None]
        encoder = self.queries if is_queries and self.queries is not None else self.encoder
        yield from encoder.run_batches([one.piece for one in inputs], roles, rows or None, batch_size)

    def report_dropped(self, done: int, shortened: int, dropped: int, reading: TokenizeOptions) -> None:
        """Say in the log how many tokens were left out of how many texts."""
        if dropped:
            log.warning(
                "%d of %d texts were longer than the %d tokens that this model takes, and %d tokens were"
                " dropped (truncation=%r)%s",
                shortened,
                done,
                reading.max_tokens,
                dropped,
                reading.truncation,
                "; truncation='windows' keeps all" if self.defaults.pairs is None else "",
            )
