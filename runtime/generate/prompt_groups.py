"""Several prompts of one call: those that run together, and their answers in order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from ..decoding.decoder import Decoder
from ..progress import Progress
from .generation import Generation
from .loop import GenerationLoop
from .request import GenerationRequest
from .row import Row
from .row_reader import Prompt, RowReader


class PromptGroups:
    """Answers prompts in groups, as many together as a call's batch_size and the memory allow.

    Args:
        request: the call's options.
        decoder: runs the model.
        loop: answers one group.
        max_batch: the most rows that the model runs together.
    """

    def __init__(
        self, request: GenerationRequest, decoder: Decoder, loop: GenerationLoop, max_batch: int
    ) -> None:
        self._request = request
        self._decoder = decoder
        self._loop = loop
        self._size = 1
        if not request.one_by_one:
            self._size = min(request.batch_size or max_batch, max_batch // request.num_beams)

    def answer(self, rows: Sequence[Row], progress: Progress) -> list[Generation]:
        """Return the answers to all; nothing runs where one of them has no room in the memory."""
        answers: list[Generation] = []
        for group in list(self._split(rows)):
            answers += self._loop.answer(group, self._request)
            progress(len(answers))
        return answers

    def iterate(
        self, prompts: Iterable[Prompt], reader: RowReader, progress: Progress
    ) -> Iterator[Generation]:
        """Yield the answers to prompts, which are read as theirs are asked for."""
        numbered = enumerate(prompts)
        done = 0
        with progress:
            while True:
                rows, error = reader.read_some(islice(numbered, self._size), self._request)
                for group in self._split(rows):
                    answers = self._loop.answer(group, self._request)
                    done += len(answers)
                    progress(done)
                    yield from answers
                if error is not None:
                    raise error
                if len(rows) < self._size:
                    return

    def _split(self, rows: Sequence[Row]) -> Iterator[list[Row]]:
        """Yield rows that run together: in their order, as many as batch_size and memory_limit allow."""
        group: list[Row] = []
        for row in rows:
            if group and (len(group) == self._size or not self._go_together([*group, row])):
                yield group
                group = []
            if not group:
                capacity = self._loop.count_capacity([row], self._request)
                self._decoder.check_memory(self._request.num_beams, capacity, reading=1)
            group = [*group, row]
        if group:
            yield group

    def _go_together(self, rows: Sequence[Row]) -> bool:
        if not self._decoder.run_together([len(row.prompt) for row in rows]):
            return False
        capacity = self._loop.count_capacity(rows, self._request)
        return self._decoder.fits(len(rows) * self._request.num_beams, capacity, reading=len(rows))
