"""Texts in, vectors, classes, words, tags and answers out: every task of an encoder.

N texts, E width of a vector, F width of features
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, cast, overload

from ..backends.backend import Backend, GraphRunner, LoadRequest
from ..bundle.bundle import Bundle
from ..bundle.defaults import EncoderDefaults
from ..errors import ManifestError
from ..memory_budget import MemoryBudget
from ..opening import choose_artifacts, choose_length, list_tokenizer_files, open_programs, weigh
from ..option_checks import check_options, check_whole
from ..options import RankOptions
from ..text.reading import Item, check_each, check_text, make_item, run_one_or_all
from ..text.tokenizer import Tokenizer
from .embedding_encoder import EmbeddingEncoder
from .encoder import Encoder, check_manifest
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
from .tasks import TASK_HEADS, Tasks

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

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


class TextEncoder(EmbeddingEncoder):
    """An encoder of a bundle, ready to embed, classify and so on. Make one with `TextEncoder.load`.

    Every task takes one text, and returns one result, or several texts (also an iterator), and returns
    a list. `iterate` returns results one by one, and never holds all texts. A pair of texts is two
    arguments, or a tuple in a list of them. All take the options of `EncoderOptions`: truncation, stride,
    parse_special, batch_size and progress. Where a text is too long, results say how many of its tokens
    were `dropped`.

    Safe to use from several threads: their batches take turns. Close it, or use it as a context manager.
    """

    task = "text-encoding"
    _MIN_BYTES = 262_144  # a long text is read in windows

    def __init__(
        self,
        encoder: Encoder,
        tokenizer: Tokenizer,
        defaults: EncoderDefaults,
        queries: Encoder | None = None,
    ) -> None:
        self.encoder = encoder
        self.tokenizer = tokenizer
        self.defaults = defaults
        self.max_length = defaults.max_length
        self._queries = queries
        super().__init__(Tasks(encoder, tokenizer, defaults, queries))

    @classmethod
    def _open(cls, bundle: Bundle, engine: Backend, request: LoadRequest) -> Self:
        manifest = bundle.manifest
        if manifest.encoder is None:
            raise ManifestError(f"{bundle.folder}: the manifest of an encoder has no 'encoder'")
        graphs = ("encoder", "query_encoder") if manifest.encoder.roles.own_graph else ("encoder",)
        artifacts = choose_artifacts(engine, bundle, request, *graphs)
        check_manifest(manifest.artifact(artifacts[0].id), manifest.encoder, manifest.config)
        max_length = choose_length(bundle, request.max_length, *artifacts)
        defaults = replace(manifest.encoder, max_length=max_length)
        budget = MemoryBudget(request.memory_limit, weigh(engine, bundle, tuple(artifacts)))
        with open_programs(engine, bundle, *artifacts) as programs:
            tokenizer = Tokenizer.from_file(bundle.path(list_tokenizer_files(manifest, 1)[0]))
        encoders = [
            Encoder(program, artifact, defaults.padding, budget, manifest.config)
            for program, artifact in zip(programs, artifacts, strict=True)
        ]
        return cls(encoders[0], tokenizer, defaults, *encoders[1:])

    @property
    def _runner(self) -> GraphRunner:
        return self.encoder

    @property
    def input_tokenizer(self) -> Tokenizer:
        """The tokenizer that reads texts."""
        return self.tokenizer

    @property
    def tasks(self) -> tuple[str, ...]:
        """The tasks that the bundle's model can do, of those of `iterate`."""
        heads = tuple(task for task, head in TASK_HEADS.items() if head in self.heads)
        return self._tasks.list_embedding_tasks() + heads

    def warm_up(self) -> None:
        """Do the first of `tasks` with one text; see `Model.warm_up`."""
        if not self.tasks:
            return
        item: Any = "a"
        task = self.tasks[0]
        if task in ("rank", "next_sentence", "answer"):
            item = ("a", "a")
        elif task == "fill_mask":
            item = self.tokenizer.spell(self.defaults.tokens["mask"])
        self.submit(task, [item]).result()  # type: ignore[call-overload]

    @property
    def heads(self) -> tuple[str, ...]:
        """The names of the graph's heads; none of an encoder that only embeds."""
        return self.defaults.heads

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of the classes, in the order of the logits."""
        return self.defaults.labels

    @overload
    def features(self, texts: str, **options: Unpack[FeatureOptions]) -> Features: ...  # type: ignore[overload-overlap]  # a str is no iterable of texts here
    @overload
    def features(self, texts: Iterable[str], **options: Unpack[FeatureOptions]) -> list[Features]: ...
    def features(
        self, texts: str | Iterable[str], **options: Unpack[FeatureOptions]
    ) -> Features | list[Features]:
        """Return a vector for each token, for a model on top of a frozen encoder.

        Args:
            texts: one text, or several; long ones in windows unless told otherwise.
            **options: see `FeatureOptions`; layers is "last" unless given.
        """
        return run_one_or_all(texts, lambda many: self._tasks.run_task(self._tasks.features(many, options)))

    @overload
    def classify(  # type: ignore[overload-overlap]  # a str is no iterable of texts here
        self, texts: str, pair: str | None = ..., **options: Unpack[ClassifyOptions]
    ) -> Classification: ...
    @overload
    def classify(self, texts: Iterable[Item], **options: Unpack[ClassifyOptions]) -> list[Classification]: ...
    def classify(
        self, texts: str | Iterable[Item], pair: str | None = None, **options: Unpack[ClassifyOptions]
    ) -> Classification | list[Classification]:
        """Return the class of each text, or of each pair. Windows' probabilities are averaged.

        Args:
            texts: one text, or several texts or pairs (text, other).
            pair: the other text, where the model classifies pairs and `texts` is one text.
            **options: see `ClassifyOptions`. With candidate_labels each text is judged by labels of your own.
        """
        items = make_item(texts, pair, "classify(text, pair=other)", needs_pair=False)
        return run_one_or_all(items, lambda many: self._tasks.run_task(self._tasks.classify(many, options)))

    def rank(self, query: str, texts: Iterable[str], **options: Unpack[RankOptions]) -> list[Ranked]:
        """Score texts against a query with a cross-encoder; the best first.

        Args:
            query: what is looked for.
            texts: where; of a long one's windows the best counts.
            **options: see `RankOptions`.
        """
        top_k, rest = split_rank_options(options)
        check_text(query)
        pairs = ((query, text) for text in check_each(texts, check_text))
        ranked = list(self._tasks.run_task(self._tasks.rank(pairs, rest)))
        return sort_ranked(ranked, top_k)

    @overload
    def next_sentence(self, texts: str, pair: str, **options: Unpack[EncoderOptions]) -> NextSentence: ...
    @overload
    def next_sentence(
        self, texts: Iterable[tuple[str, str]], **options: Unpack[EncoderOptions]
    ) -> list[NextSentence]: ...
    def next_sentence(
        self,
        texts: str | Iterable[tuple[str, str]],
        pair: str | None = None,
        **options: Unpack[EncoderOptions],
    ) -> NextSentence | list[NextSentence]:
        """Return whether the second text of a pair, or of each pair, follows the first.

        Args:
            texts: the first text, or pairs (text, other).
            pair: the second text.
            **options: see `EncoderOptions`.
        """
        items = make_item(texts, pair, "next_sentence(text, other)")
        return run_one_or_all(
            items, lambda many: self._tasks.run_task(self._tasks.next_sentence(many, options))
        )

    @overload
    def fill_mask(self, texts: str, **options: Unpack[FillMaskOptions]) -> FilledMask: ...  # type: ignore[overload-overlap]  # a str is no iterable of texts here
    @overload
    def fill_mask(self, texts: Iterable[str], **options: Unpack[FillMaskOptions]) -> list[FilledMask]: ...
    def fill_mask(
        self, texts: str | Iterable[str], **options: Unpack[FillMaskOptions]
    ) -> FilledMask | list[FilledMask]:
        """Return the `top_k` likeliest words for each mask token, [MASK] for BERT, in each text.

        Args:
            texts: one text, or several.
            **options: see `FillMaskOptions`.
        """
        return run_one_or_all(texts, lambda many: self._tasks.run_task(self._tasks.fill_mask(many, options)))

    @overload
    def tag(self, texts: str, **options: Unpack[EncoderOptions]) -> Tags: ...  # type: ignore[overload-overlap]  # a str is no iterable of texts here
    @overload
    def tag(self, texts: Iterable[str], **options: Unpack[EncoderOptions]) -> list[Tags]: ...
    def tag(self, texts: str | Iterable[str], **options: Unpack[EncoderOptions]) -> Tags | list[Tags]:
        """Return the tagged stretches of each text, with their characters; long texts in windows.

        Args:
            texts: one text, or several.
            **options: see `EncoderOptions`.
        """
        return run_one_or_all(texts, lambda many: self._tasks.run_task(self._tasks.tag(many, options)))

    @overload
    def answer(self, question: str, context: str, **options: Unpack[AnswerOptions]) -> Answers: ...
    @overload
    def answer(
        self, question: Iterable[tuple[str, str]], **options: Unpack[AnswerOptions]
    ) -> list[Answers]: ...
    def answer(
        self,
        question: str | Iterable[tuple[str, str]],
        context: str | None = None,
        **options: Unpack[AnswerOptions],
    ) -> Answers | list[Answers]:
        """Return the stretches of a context that answer a question.

        Args:
            question: a question, or pairs (question, context).
            context: the text that may hold the answer, of any length.
            **options: see `AnswerOptions`.
        """
        items = make_item(question, context, "answer(question, context)")
        return run_one_or_all(items, lambda many: self._tasks.run_task(self._tasks.answer(many, options)))

    @overload
    def iterate(
        self, task: Literal["embed"], texts: Iterable[str], **options: Unpack[EmbedOptions]
    ) -> Iterator[Embedding]: ...
    @overload
    def iterate(
        self, task: Literal["embed_sparse"], texts: Iterable[str], **options: Unpack[SparseOptions]
    ) -> Iterator[SparseEmbedding]: ...
    @overload
    def iterate(
        self, task: Literal["embed_multi"], texts: Iterable[str], **options: Unpack[PromptOptions]
    ) -> Iterator[MultiVector]: ...
    @overload
    def iterate(
        self, task: Literal["embed_hybrid"], texts: Iterable[str], **options: Unpack[PromptOptions]
    ) -> Iterator[HybridEmbedding]: ...
    @overload
    def iterate(
        self, task: Literal["features"], texts: Iterable[str], **options: Unpack[FeatureOptions]
    ) -> Iterator[Features]: ...
    @overload
    def iterate(
        self, task: Literal["classify"], texts: Iterable[Item], **options: Unpack[ClassifyOptions]
    ) -> Iterator[Classification]: ...
    @overload
    def iterate(
        self, task: Literal["rank"], texts: Iterable[tuple[str, str]], **options: Unpack[ScoreOptions]
    ) -> Iterator[Ranked]: ...
    @overload
    def iterate(
        self,
        task: Literal["next_sentence"],
        texts: Iterable[tuple[str, str]],
        **options: Unpack[EncoderOptions],
    ) -> Iterator[NextSentence]: ...
    @overload
    def iterate(
        self, task: Literal["fill_mask"], texts: Iterable[str], **options: Unpack[FillMaskOptions]
    ) -> Iterator[FilledMask]: ...
    @overload
    def iterate(
        self, task: Literal["tag"], texts: Iterable[str], **options: Unpack[EncoderOptions]
    ) -> Iterator[Tags]: ...
    @overload
    def iterate(
        self, task: Literal["answer"], texts: Iterable[tuple[str, str]], **options: Unpack[AnswerOptions]
    ) -> Iterator[Answers]: ...
    def iterate(self, task: str, texts: Iterable[Any], **options: Any) -> Iterator[Result]:
        """Return a task's results one by one, in order, as the texts come.

        Args:
            task: "embed", "embed_sparse", "embed_multi", "embed_hybrid", "features", "classify", "rank",
                "next_sentence", "fill_mask", "tag" or "answer"; of pairs for rank, next_sentence and answer.
            texts: any iterable; at most 1,024 texts are read ahead. Each result is there as soon as its
                batch, and those of the texts before it, are computed.
            **options: those of the task.

        Returns:
            An iterator over `Embedding`, `SparseEmbedding`, `MultiVector`, `HybridEmbedding`, `Features`,
            `Classification`, `Ranked` (in the order of the pairs), `NextSentence`, `FilledMask`, `Tags` or
            `Answers`.

        Raises:
            InputError: no such task or option; what is wrong with a text is raised when it is read.
        """
        return self._tasks.run_task(self._tasks.make_task(task, texts, options))

    def check_task(self, task: str) -> None:
        """Refuse a task that this bundle's model cannot do."""
        self._tasks.check_task(task)

    def count_tokens(self, text: str, *, parse_special: bool = False) -> int:
        """Return how many tokens the model reads of a text, special ones around it included."""
        special_tokens = self.defaults.make_special_tokens()
        special = len(special_tokens.prefix) + len(special_tokens.suffix)
        return len(self.tokenizer.encode(text, parse_special=parse_special)) + special

    def _close(self) -> None:
        self.encoder.close()  # what runs ends with the batch that it is at
        if self._queries is not None:
            self._queries.close()
        self._batcher.close()


def split_rank_options(options: RankOptions) -> tuple[int | None, ScoreOptions]:
    """Check the options of `rank`; return the one that only it has, and the others."""
    check_options(options, RankOptions)
    top_k = options.get("top_k")
    check_whole("top_k", top_k, 1, optional=True)
    rest = {name: value for name, value in options.items() if name != "top_k"}
    return top_k, cast("ScoreOptions", rest)


def sort_ranked(ranked: Iterable[Ranked], top_k: int | None) -> list[Ranked]:
    """Return the best results, the best first; equal ones stay in their order."""
    return sorted(ranked, key=lambda result: -result.score)[:top_k]
