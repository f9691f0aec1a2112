"""A text encoder for programs with an event loop.

N texts, E width of a vector, Q queries
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, overload

import numpy as np
import numpy.typing as npt

from ..encode.embedding_encoder import Embeddings
from ..encode.results import (
    Answers,
    Classification,
    Features,
    FilledMask,
    Hit,
    HybridEmbedding,
    MultiVector,
    NextSentence,
    Ranked,
    SparseEmbedding,
    Tags,
)
from ..encode.similarity import list_hits
from ..encode.text_encoder import TextEncoder, sort_ranked, split_rank_options
from ..option_checks import check_whole
from ..text.reading import Item, Pair, check_each, check_text, make_item
from .model import AsyncModel, run_in_thread, wait_for_result

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

    from ..options import (
        AnswerOptions,
        ClassifyOptions,
        EmbedOptions,
        EncoderOptions,
        FeatureOptions,
        FillMaskOptions,
        LoadOptions,
        PromptOptions,
        RankOptions,
        SparseOptions,
    )

T = TypeVar("T")


class AsyncTextEncoder(AsyncModel[TextEncoder]):
    """A `TextEncoder` whose results are awaited. Make one with `await AsyncTextEncoder.load(...)`.

    Its methods are those of `TextEncoder`, with the options of `TextEncoder.submit`: requests of many tasks
    run together.

    Example:
        >>> async with await AsyncTextEncoder.load("bundles/minilm") as encoder:
        ...     vectors = await encoder.embed(["A cat sat on the mat.", "A dog lay on the rug."])
    """

    @classmethod
    async def load(cls, bundle: str | Path, **options: Unpack[LoadOptions]) -> Self:
        """Open a bundle; see `TextEncoder.load`."""
        return cls(await run_in_thread(lambda: TextEncoder.load(bundle, **options), TextEncoder.close))

    async def embed(self, texts: str | Iterable[str], **options: Unpack[EmbedOptions]) -> npt.NDArray[Any]:
        """Return one vector for each text, (N, E), or (E,) for one text; see `TextEncoder.embed`."""
        many = [texts] if isinstance(texts, str) else list(check_each(texts, check_text))
        results = await self._run(
            lambda: self.model.submit("embed", many or [""], client=self.client, **options)
        )
        if isinstance(texts, str):
            return results[0].vector
        return np.stack([result.vector for result in results])[: len(many)]

    @overload
    async def embed_sparse(self, texts: str, **options: Unpack[SparseOptions]) -> SparseEmbedding: ...  # type: ignore[overload-overlap]  # a str is no iterable of texts here
    @overload
    async def embed_sparse(
        self, texts: Iterable[str], **options: Unpack[SparseOptions]
    ) -> list[SparseEmbedding]: ...
    async def embed_sparse(
        self, texts: str | Iterable[str], **options: Unpack[SparseOptions]
    ) -> SparseEmbedding | list[SparseEmbedding]:
        """Return the weights of each text's words; see `TextEncoder.embed_sparse`."""
        return await self._run_one_or_all(
            texts, lambda many: self.model.submit("embed_sparse", many, client=self.client, **options)
        )

    @overload
    async def embed_multi(self, texts: str, **options: Unpack[PromptOptions]) -> MultiVector: ...  # type: ignore[overload-overlap]  # a str is no iterable of texts here
    @overload
    async def embed_multi(
        self, texts: Iterable[str], **options: Unpack[PromptOptions]
    ) -> list[MultiVector]: ...
    async def embed_multi(
        self, texts: str | Iterable[str], **options: Unpack[PromptOptions]
    ) -> MultiVector | list[MultiVector]:
        """Return a vector for each token that counts; see `TextEncoder.embed_multi`."""
        return await self._run_one_or_all(
            texts, lambda many: self.model.submit("embed_multi", many, client=self.client, **options)
        )

    @overload
    async def embed_hybrid(self, texts: str, **options: Unpack[PromptOptions]) -> HybridEmbedding: ...  # type: ignore[overload-overlap]  # a str is no iterable of texts here
    @overload
    async def embed_hybrid(
        self, texts: Iterable[str], **options: Unpack[PromptOptions]
    ) -> list[HybridEmbedding]: ...
    async def embed_hybrid(
        self, texts: str | Iterable[str], **options: Unpack[PromptOptions]
    ) -> HybridEmbedding | list[HybridEmbedding]:
        """Return vector, weights and tokens' vectors of one pass; see `TextEncoder.embed_hybrid`."""
        return await self._run_one_or_all(
            texts, lambda many: self.model.submit("embed_hybrid", many, client=self.client, **options)
        )

    async def similarity(self, queries: Embeddings, documents: Embeddings) -> npt.NDArray[np.float32]:
        """Return how alike embeddings are, (Q, N); see `TextEncoder.similarity`."""
        return await run_in_thread(lambda: self.model.similarity(queries, documents))

    @overload
    async def search(self, queries: str, documents: Iterable[str], top_k: int = ...) -> list[Hit]: ...  # type: ignore[overload-overlap]  # a str is no iterable of queries here
    @overload
    async def search(
        self, queries: Iterable[str], documents: Iterable[str], top_k: int = ...
    ) -> list[list[Hit]]: ...
    async def search(
        self, queries: str | Iterable[str], documents: Iterable[str], top_k: int = 10
    ) -> list[Hit] | list[list[Hit]]:
        """Return the documents that are most like each query, the best first; see `TextEncoder.search`."""
        check_whole("top_k", top_k, 1)
        texts = list(documents)
        many = [queries] if isinstance(queries, str) else list(queries)
        ways: dict[str, Any] = {"embed_sparse": self.embed_sparse, "embed_multi": self.embed_multi}
        embed = ways.get(self.model.tasks[0], self.embed)
        found: list[list[Hit]] = [[] for _ in many]
        if many and texts:
            asked = await embed(many, input_type="query", truncation="head")
            given = await embed(texts, input_type="document", truncation="head")
            scores = await self.similarity(asked, given)
            found = list_hits(scores, texts, top_k)
        return found[0] if isinstance(queries, str) else found

    @overload
    async def features(self, texts: str, **options: Unpack[FeatureOptions]) -> Features: ...  # type: ignore[overload-overlap]  # a str is no iterable of texts here
    @overload
    async def features(self, texts: Iterable[str], **options: Unpack[FeatureOptions]) -> list[Features]: ...
    async def features(
        self, texts: str | Iterable[str], **options: Unpack[FeatureOptions]
    ) -> Features | list[Features]:
        """Return a vector for each token; see `TextEncoder.features`."""
        return await self._run_one_or_all(
            texts, lambda many: self.model.submit("features", many, client=self.client, **options)
        )

    @overload
    async def classify(  # type: ignore[overload-overlap]  # a str is no iterable of texts here
        self, texts: str, pair: str | None = ..., **options: Unpack[ClassifyOptions]
    ) -> Classification: ...
    @overload
    async def classify(
        self, texts: Iterable[Item], **options: Unpack[ClassifyOptions]
    ) -> list[Classification]: ...
    async def classify(
        self, texts: str | Iterable[Item], pair: str | None = None, **options: Unpack[ClassifyOptions]
    ) -> Classification | list[Classification]:
        """Return the class of each text, or of each pair; see `TextEncoder.classify`."""
        return await self._run_one_or_all(
            make_item(texts, pair, "classify(text, pair=other)", needs_pair=False),
            lambda many: self.model.submit("classify", many, client=self.client, **options),
        )

    async def rank(self, query: str, texts: Iterable[str], **options: Unpack[RankOptions]) -> list[Ranked]:
        """Score texts against a query, the best first; see `TextEncoder.rank`."""
        top_k, rest = split_rank_options(options)
        check_text(query)
        pairs = [(query, text) for text in check_each(texts, check_text)]
        ranked = await self._run(lambda: self.model.submit("rank", pairs, client=self.client, **rest))
        return sort_ranked(ranked, top_k)

    @overload
    async def next_sentence(
        self, texts: str, pair: str, **options: Unpack[EncoderOptions]
    ) -> NextSentence: ...
    @overload
    async def next_sentence(
        self, texts: Iterable[tuple[str, str]], **options: Unpack[EncoderOptions]
    ) -> list[NextSentence]: ...
    async def next_sentence(
        self,
        texts: str | Iterable[tuple[str, str]],
        pair: str | None = None,
        **options: Unpack[EncoderOptions],
    ) -> NextSentence | list[NextSentence]:
        """Return whether the second text of each pair follows the first; see `TextEncoder.next_sentence`."""
        return await self._run_one_or_all(
            make_item(texts, pair, "next_sentence(text, other)"),
            lambda many: self.model.submit("next_sentence", many, client=self.client, **options),
        )

    @overload
    async def fill_mask(self, texts: str, **options: Unpack[FillMaskOptions]) -> FilledMask: ...  # type: ignore[overload-overlap]  # a str is no iterable of texts here
    @overload
    async def fill_mask(
        self, texts: Iterable[str], **options: Unpack[FillMaskOptions]
    ) -> list[FilledMask]: ...
    async def fill_mask(
        self, texts: str | Iterable[str], **options: Unpack[FillMaskOptions]
    ) -> FilledMask | list[FilledMask]:
        """Return the likeliest words for each mask token; see `TextEncoder.fill_mask`."""
        return await self._run_one_or_all(
            texts, lambda many: self.model.submit("fill_mask", many, client=self.client, **options)
        )

    @overload
    async def tag(self, texts: str, **options: Unpack[EncoderOptions]) -> Tags: ...  # type: ignore[overload-overlap]  # a str is no iterable of texts here
    @overload
    async def tag(self, texts: Iterable[str], **options: Unpack[EncoderOptions]) -> list[Tags]: ...
    async def tag(self, texts: str | Iterable[str], **options: Unpack[EncoderOptions]) -> Tags | list[Tags]:
        """Return the tagged stretches of each text; see `TextEncoder.tag`."""
        return await self._run_one_or_all(
            texts, lambda many: self.model.submit("tag", many, client=self.client, **options)
        )

    @overload
    async def answer(self, question: str, context: str, **options: Unpack[AnswerOptions]) -> Answers: ...
    @overload
    async def answer(
        self, question: Iterable[tuple[str, str]], **options: Unpack[AnswerOptions]
    ) -> list[Answers]: ...
    async def answer(
        self,
        question: str | Iterable[tuple[str, str]],
        context: str | None = None,
        **options: Unpack[AnswerOptions],
    ) -> Answers | list[Answers]:
        """Return the stretches of a context that answer a question; see `TextEncoder.answer`."""
        return await self._run_one_or_all(
            make_item(question, context, "answer(question, context)"),
            lambda many: self.model.submit("answer", many, client=self.client, **options),
        )

    async def _run_one_or_all(self, items: Any, submit: Callable[[Any], Future[list[T]]]) -> T | list[T]:
        """Return one result for one text or pair; a list of them for several."""
        if isinstance(items, str | Pair):
            return (await self._run(lambda: submit([items])))[0]
        return await self._run(lambda: submit(items))

    async def _run(self, submit: Callable[[], Future[list[T]]]) -> list[T]:
        future = await run_in_thread(submit, Future.cancel)
        return await wait_for_result(future, future.cancel)
