"""Requests of many callers for one encoder: the pieces of their texts run together in batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, overload

from ..backends.backend import Array
from ..errors import ClosedError
from ..scheduling.batched_model import QUEUE_SIZE, BatchedModel, refuse_options
from ..scheduling.batcher import Batcher, BatchSettings, IsWanted, PendingResults
from ..scheduling.steps import Steps, run_all
from ..scheduling.worker import find_deadline
from ..text.reading import READ_AHEAD, STEP_CHARACTERS, Item, split_into_chunks
from .request_runner import Collector
from .requests import PieceInput, TextRequest
from .results import (
    Answers,
    Classification,
    Embedding,
    Features,
    FilledMask,
    HybridEmbedding,
    MultiVector,
    NextSentence,
    Ranked,
    Result,
    SparseEmbedding,
    Tags,
)
from .tasks import Tasks

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..options import (
        AnswerOptions,
        ClassifyOptions,
        EmbedOptions,
        EncoderOptions,
        FeatureOptions,
        FillMaskOptions,
        PromptOptions,
        ScoreOptions,
        SparseOptions,
    )

TURN_TOKENS = 512
HINTS = {"progress": "a callback of the future that it returns tells when all are done"}


@dataclass(frozen=True)
class BatchKind:
    """What is equal of requests that run together: graph, outputs, and how many sequences at most."""

    roles: tuple[str, ...]
    batch_size: int
    is_queries: bool


class SubmittingEncoder(BatchedModel):
    """Base of `TextEncoder`: what takes the requests of many callers.

    Args:
        tasks: runs them.
    """

    _TURN_TOKENS = TURN_TOKENS

    def __init__(self, tasks: Tasks) -> None:
        self._tasks = tasks
        settings = BatchSettings(queue_size=QUEUE_SIZE, turn=TURN_TOKENS)
        self._batcher: Batcher[PieceInput, list[Array], Result] = Batcher(self._run_pieces, len, settings)

    def _run_pieces(
        self, kind: BatchKind, pieces: Sequence[PieceInput], is_wanted: IsWanted
    ) -> Iterator[Mapping[int, list[Array]]]:
        del is_wanted  # a turn is short
        return self._tasks.run_pieces(pieces, kind.roles, kind.batch_size, kind.is_queries)

    @overload
    def submit(
        self,
        task: Literal["embed"],
        texts: Iterable[str],
        *,
        client: str = ...,
        timeout: float | None = ...,
        **options: Unpack[EmbedOptions],
    ) -> PendingResults[Embedding]: ...
    @overload
    def submit(
        self,
        task: Literal["embed_sparse"],
        texts: Iterable[str],
        *,
        client: str = ...,
        timeout: float | None = ...,
        **options: Unpack[SparseOptions],
    ) -> PendingResults[SparseEmbedding]: ...
    @overload
    def submit(
        self,
        task: Literal["embed_multi"],
        texts: Iterable[str],
        *,
        client: str = ...,
        timeout: float | None = ...,
        **options: Unpack[PromptOptions],
    ) -> PendingResults[MultiVector]: ...
    @overload
    def submit(
        self,
        task: Literal["embed_hybrid"],
        texts: Iterable[str],
        *,
        client: str = ...,
        timeout: float | None = ...,
        **options: Unpack[PromptOptions],
    ) -> PendingResults[HybridEmbedding]: ...
    @overload
    def submit(
        self,
        task: Literal["features"],
        texts: Iterable[str],
        *,
        client: str = ...,
        timeout: float | None = ...,
        **options: Unpack[FeatureOptions],
    ) -> PendingResults[Features]: ...
    @overload
    def submit(
        self,
        task: Literal["classify"],
        texts: Iterable[Item],
        *,
        client: str = ...,
        timeout: float | None = ...,
        **options: Unpack[ClassifyOptions],
    ) -> PendingResults[Classification]: ...
    @overload
    def submit(
        self,
        task: Literal["rank"],
        texts: Iterable[tuple[str, str]],
        *,
        client: str = ...,
        timeout: float | None = ...,
        **options: Unpack[ScoreOptions],
    ) -> PendingResults[Ranked]: ...
    @overload
    def submit(
        self,
        task: Literal["next_sentence"],
        texts: Iterable[tuple[str, str]],
        *,
        client: str = ...,
        timeout: float | None = ...,
        **options: Unpack[EncoderOptions],
    ) -> PendingResults[NextSentence]: ...
    @overload
    def submit(
        self,
        task: Literal["fill_mask"],
        texts: Iterable[str],
        *,
        client: str = ...,
        timeout: float | None = ...,
        **options: Unpack[FillMaskOptions],
    ) -> PendingResults[FilledMask]: ...
    @overload
    def submit(
        self,
        task: Literal["tag"],
        texts: Iterable[str],
        *,
        client: str = ...,
        timeout: float | None = ...,
        **options: Unpack[EncoderOptions],
    ) -> PendingResults[Tags]: ...
    @overload
    def submit(
        self,
        task: Literal["answer"],
        texts: Iterable[tuple[str, str]],
        *,
        client: str = ...,
        timeout: float | None = ...,
        **options: Unpack[AnswerOptions],
    ) -> PendingResults[Answers]: ...
    def submit(
        self,
        task: str,
        texts: Iterable[Any],
        *,
        client: str = "",
        timeout: float | None = None,
        **options: Any,
    ) -> PendingResults[Any]:
        """Let the engine run a task beside the requests of other callers, and return at once.

        Texts are read and tokenized in the caller's thread; the engine runs in one of its own. Requests whose
        results come from the same outputs of the graph run together, those of similar length in one batch.
        Results are those of `iterate`. `Future.cancel` ends a request at the engine's next turn.

        Args:
            task: as `iterate`'s.
            texts: as `iterate`'s; all of them are read now.
            client: whose request it is: where requests wait, clients take turns.
            timeout: seconds after which a request that still waits fails with a DeadlineError.
            **options: those of the task, without progress.

        Returns:
            The results in the order of the texts, when they are there.

        Raises:
            InputError: as `iterate`, also for what is wrong with a text.
            QueueFullError: too many requests wait.
        """
        steps = self.submit_in_steps(task, texts, client=client, deadline=find_deadline(timeout), **options)
        return run_all(steps)

    def submit_in_steps(
        self,
        task: str,
        texts: Iterable[Any],
        *,
        client: str = "",
        deadline: float | None = None,
        **options: Any,
    ) -> Steps[PendingResults[Any]]:
        """Do what `submit` does, by a deadline of time.monotonic(), in steps that each read some texts."""
        if self._tasks.encoder.closed:
            raise ClosedError
        refuse_options(options, HINTS)
        wanted = self._tasks.make_task(task, texts, options)
        requests: list[TextRequest] = []
        for chunk in split_into_chunks(wanted.items, READ_AHEAD, STEP_CHARACTERS):
            if requests:
                yield
            requests += self._tasks.make_requests(len(requests), chunk, wanted)
        collector = Collector(wanted, requests)
        dropped = [request.fitted.dropped for request in requests]
        shortened = sum(1 for count in dropped if count)
        self._tasks.report_dropped(len(requests), shortened, sum(dropped), wanted.reading)
        kind = BatchKind(wanted.roles, wanted.reading.batch_size, wanted.is_queries)
        pieces = collector.list_inputs()
        return self._batcher.submit(kind, pieces, collector.add, client=client, deadline=deadline)
