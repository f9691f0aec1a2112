"""The methods of `TextEncoder` whose results are embeddings, and those that compare them.

N texts, E width of a vector, Q queries
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, cast, overload

import numpy as np
import numpy.typing as npt

from ..bundle.defaults import EncoderDefaults
from ..errors import InputError
from ..option_checks import check_whole
from ..text.reading import run_one_or_all
from .results import Hit, HybridEmbedding, Match, MultiVector, SparseEmbedding
from .similarity import (
    choose_function,
    compare_dense,
    compare_multi,
    compare_sparse,
    list_hits,
    match_multi,
    match_sparse,
)
from .submitting import SubmittingEncoder

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..options import EmbedOptions, PromptOptions, SparseOptions

Embeddings: TypeAlias = npt.NDArray[np.float32] | Sequence[SparseEmbedding] | Sequence[MultiVector]


class EmbeddingEncoder(SubmittingEncoder):
    """Base of `TextEncoder`: what embeds texts, and compares embeddings."""

    defaults: EncoderDefaults

    def embed(self, texts: str | Iterable[str], **options: Unpack[EmbedOptions]) -> npt.NDArray[Any]:
        """Return one vector for each text.

        Args:
            texts: one text, or several.
            **options: see `EmbedOptions`. Long texts lose their end unless truncation says otherwise, which
                a line in the log tells of.

        Returns:
            (N, E) float32, or (E,) for one text; E is truncate_dim if that is given. Of another precision
            than "float32" int8 or uint8.

        Raises:
            InputError: an option or a text that cannot be used.
            ContextLengthError: a text is too long and truncation=None.
        """
        if isinstance(texts, str):
            (result,) = self._tasks.run_task(self._tasks.embed([texts], options))
            return result.vector
        vectors = [result.vector for result in self._tasks.run_task(self._tasks.embed(texts, options))]
        if not vectors:
            options["progress"] = False
            (sample,) = self._tasks.run_task(self._tasks.embed(["0"], options))
            return np.zeros((0, *sample.vector.shape), sample.vector.dtype)
        return np.stack(vectors)

    @overload
    def embed_sparse(self, texts: str, **options: Unpack[SparseOptions]) -> SparseEmbedding: ...  # type: ignore[overload-overlap]  # a str is no iterable of texts here
    @overload
    def embed_sparse(
        self, texts: Iterable[str], **options: Unpack[SparseOptions]
    ) -> list[SparseEmbedding]: ...
    def embed_sparse(
        self, texts: str | Iterable[str], **options: Unpack[SparseOptions]
    ) -> SparseEmbedding | list[SparseEmbedding]:
        """Return the weights of each text's words, and of words like them: SPLADE and its relatives.

        Args:
            texts: one text, or several. Of a long one's windows each word has its largest weight.
            **options: see `SparseOptions`.

        Raises:
            InputError: the bundle's model gives none; or an option or a text that cannot be used.
        """
        return run_one_or_all(
            texts, lambda many: self._tasks.run_task(self._tasks.embed_sparse(many, options))
        )

    @overload
    def embed_multi(self, texts: str, **options: Unpack[PromptOptions]) -> MultiVector: ...  # type: ignore[overload-overlap]  # a str is no iterable of texts here
    @overload
    def embed_multi(self, texts: Iterable[str], **options: Unpack[PromptOptions]) -> list[MultiVector]: ...
    def embed_multi(
        self, texts: str | Iterable[str], **options: Unpack[PromptOptions]
    ) -> MultiVector | list[MultiVector]:
        """Return a vector for each token of each text that counts, for late interaction: ColBERT.

        Args:
            texts: one text, or several. Without an input_type they are read as documents.
            **options: see `PromptOptions`.

        Raises:
            InputError: the bundle's model gives none; or an option or a text that cannot be used.
        """
        return run_one_or_all(
            texts, lambda many: self._tasks.run_task(self._tasks.embed_multi(many, options))
        )

    @overload
    def embed_hybrid(self, texts: str, **options: Unpack[PromptOptions]) -> HybridEmbedding: ...  # type: ignore[overload-overlap]  # a str is no iterable of texts here
    @overload
    def embed_hybrid(
        self, texts: Iterable[str], **options: Unpack[PromptOptions]
    ) -> list[HybridEmbedding]: ...
    def embed_hybrid(
        self, texts: str | Iterable[str], **options: Unpack[PromptOptions]
    ) -> HybridEmbedding | list[HybridEmbedding]:
        """Return the dense vector, the weights and the tokens' vectors of each text, of one pass: BGE-M3.

        Args:
            texts: one text, or several.
            **options: see `PromptOptions`.

        Raises:
            InputError: the bundle's model does not give all three; or what is given cannot be used.
        """
        return run_one_or_all(
            texts, lambda many: self._tasks.run_task(self._tasks.embed_hybrid(many, options))
        )

    def similarity(self, queries: Embeddings, documents: Embeddings) -> npt.NDArray[np.float32]:
        """Return how alike embeddings are, by the function that the checkpoint names.

        Args:
            queries: what `embed`, `embed_sparse` or `embed_multi` gave of several texts: vectors (Q, E), or a
                list.
            documents: what the same method gave, (N, E) or a list.

        Returns:
            (Q, N) float32, higher is more alike: cosine, dot product, or a distance's negative; of weights
            their product or cosine; of vectors of tokens MaxSim.

        Raises:
            InputError: embeddings of two kinds, of another width, or vectors that are no floats.
        """
        function = self.defaults.roles.similarity
        if isinstance(queries, np.ndarray) and isinstance(documents, np.ndarray):
            for one in (queries, documents):
                if not np.issubdtype(one.dtype, np.floating):
                    raise InputError(
                        f"vectors in {one.dtype} have another unit for each number, or are bits: compare them"
                        " in an index that knows them, such as faiss (docs/retrieval.md), or embed in float32"
                    )
            if queries.ndim != 2 or documents.ndim != 2 or queries.shape[1] != documents.shape[1]:
                raise InputError(
                    f"queries {list(queries.shape)} and documents {list(documents.shape)} must be (Q, E) and"
                    " (N, E): embed lists of texts"
                )
            return compare_dense(queries, documents, function)
        given: Any = (*queries, *documents)
        if all(isinstance(one, SparseEmbedding) for one in given):
            name = self._choose_function(SparseEmbedding)
            return compare_sparse(cast(Any, queries), cast(Any, documents), name)
        if all(isinstance(one, MultiVector) for one in given):
            name = self._choose_function(MultiVector)
            return compare_multi(cast(Any, queries), cast(Any, documents), name)
        raise InputError(
            "queries and documents must be of one kind: vectors of embed, or lists of what embed_sparse or"
            " embed_multi gave"
        )

    @overload
    def search(self, queries: str, documents: Iterable[str], top_k: int = ...) -> list[Hit]: ...  # type: ignore[overload-overlap]  # a str is no iterable of queries here
    @overload
    def search(
        self, queries: Iterable[str], documents: Iterable[str], top_k: int = ...
    ) -> list[list[Hit]]: ...
    def search(
        self, queries: str | Iterable[str], documents: Iterable[str], top_k: int = 10
    ) -> list[Hit] | list[list[Hit]]:
        """Return the documents that are most like each query, the best first.

        Both are embedded by the first of the model's `tasks`, and compared by `similarity`. All embeddings
        are in memory; `search.vector_store` keeps those of many documents in a folder.

        Args:
            queries: one, or several.
            documents: what is searched.
            top_k: how many documents of each query.
        """
        check_whole("top_k", top_k, 1)
        texts = list(documents)
        many = [queries] if isinstance(queries, str) else list(queries)
        kind = next(iter(self._tasks.list_embedding_tasks()), "embed")
        ways: dict[str, Any] = {"embed_sparse": self.embed_sparse, "embed_multi": self.embed_multi}
        embed = ways.get(kind, self.embed)
        found: list[list[Hit]] = [[] for _ in many]
        if many and texts:
            options: Any = {"truncation": "head"}
            scores = self.similarity(
                embed(many, input_type="query", **options), embed(texts, input_type="document", **options)
            )
            found = list_hits(scores, texts, top_k)
        return found[0] if isinstance(queries, str) else found

    def maxsim(self, query: MultiVector, document: MultiVector) -> float:
        """Return the late-interaction score of a query's vectors and a document's.

        It is the sum over the query's tokens of the largest product with a token of the document.
        """
        return float(compare_multi([query], [document])[0, 0])

    def matches(
        self, query: SparseEmbedding | MultiVector, document: SparseEmbedding | MultiVector
    ) -> list[Match]:
        """Return which tokens of a query and a document match; the products sum to their `similarity`.

        Args:
            query: what `embed_sparse` or `embed_multi` gave of a text.
            document: what the same method gave of another.

        Returns:
            Of weights the words that both have one for, the largest product first. Of vectors each token of
            the query, in their order, with the document's token that it has the largest product with; none
            where the document has no vector.

        Raises:
            InputError: embeddings of two kinds, or of one that has no tokens.
        """
        if isinstance(query, SparseEmbedding) and isinstance(document, SparseEmbedding):
            return match_sparse(query, document, self._choose_function(SparseEmbedding))
        if isinstance(query, MultiVector) and isinstance(document, MultiVector):
            return match_multi(query, document, self._choose_function(MultiVector))
        raise InputError(
            "query and document must both be what embed_sparse gave, or both what embed_multi gave"
        )

    def _choose_function(self, kind: type[SparseEmbedding] | type[MultiVector]) -> str:
        """Return how embeddings of a kind are compared; the checkpoint's function is that of its vectors."""
        is_dense = "embed" in self._tasks.list_embedding_tasks()
        return choose_function("" if is_dense else self.defaults.roles.similarity, kind)
