"""Compares embeddings: dense vectors, sparse weights, and vectors of tokens.

Q queries, N documents, F numbers of a vector, T tokens
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from ..backends.backend import Array
from ..errors import InputError
from .pooling import normalize_vector
from .results import Hit, Match, MultiVector, SparseEmbedding

NO_TOKENS = -1e9  # the score of a document without a vector, as in sentence-transformers: behind all others
MAX_PRODUCTS = 2**24  # of a query's tokens and documents' at one time: 64 MiB


def choose_function(function: str, kind: type[SparseEmbedding] | type[MultiVector]) -> str:
    """Return how a model whose function is for vectors compares sparse weights, or vectors of tokens."""
    usual, other = ("dot", "cosine") if kind is SparseEmbedding else ("maxsim", "meanmaxsim")
    return other if function == other else usual


def compare_dense(queries: Array, documents: Array, function: str) -> Array:
    """Return the similarity (Q, N) of vectors (Q, F) and (N, F); of distances the negative."""
    if function == "cosine":
        queries, documents = normalize_vector(queries), normalize_vector(documents)
    if function in ("cosine", "dot"):
        product: Array = queries @ documents.T
        return product
    rows = [measure_distances(query, documents, function) for query in queries]
    return -np.stack(rows) if rows else np.zeros((0, len(documents)), np.float32)


def measure_distances(query: Array, documents: Array, function: str) -> Array:
    """Return the distances (N,) of a vector (F,) to others (N, F)."""
    differences = documents - query
    if function == "manhattan":
        distances: Array = np.abs(differences).sum(-1)
        return distances
    return np.sqrt((differences * differences).sum(-1))  # type: ignore[no-any-return]


def compare_sparse(
    queries: Sequence[SparseEmbedding], documents: Sequence[SparseEmbedding], function: str
) -> Array:
    """Return the similarity (Q, N) of sparse weights: their product, or cosine."""
    if function not in ("dot", "cosine"):
        raise InputError(f"sparse weights are compared by dot or cosine, not {function!r}")
    words = 1 + max((int(one.indices.max(initial=0)) for one in (*queries, *documents)), default=0)
    counts = np.array([len(one.indices) for one in documents], np.int64)
    indices = np.concatenate([np.zeros(0, np.int64), *(one.indices for one in documents)])
    values = np.concatenate([np.zeros(0, np.float32), *(one.values for one in documents)])
    owners = np.repeat(np.arange(len(documents)), counts)
    scores = np.zeros((len(queries), len(documents)), np.float32)
    weights = np.zeros(words, np.float32)
    for row, query in zip(scores, queries, strict=True):
        weights[query.indices] = query.values
        row[:] = np.bincount(owners, weights=values * weights[indices], minlength=len(documents))
        weights[query.indices] = 0
    if function == "cosine":
        scores /= measure_weights(queries)[:, None] * measure_weights(documents)
    return scores


def measure_weights(embeddings: Sequence[SparseEmbedding]) -> Array:
    """Return the lengths (N,) of sparse weights as vectors; of none a tiny one, to divide by."""
    return np.array([max(float(np.linalg.norm(one.values)), 1e-12) for one in embeddings], np.float32)


def match_sparse(query: SparseEmbedding, document: SparseEmbedding, function: str) -> list[Match]:
    """Return the words that both have a weight for, the largest product first."""
    _, own, other = np.intersect1d(query.indices, document.indices, assume_unique=True, return_indices=True)
    products = query.values[own] * document.values[other]
    if function == "cosine":
        products /= measure_weights([query]) * measure_weights([document])
    order = np.argsort(-products, kind="stable")
    words = [query.tokens[place] for place in own[order].tolist()]
    return [Match(word, word, product) for word, product in zip(words, products[order].tolist(), strict=True)]


def compare_multi(
    queries: Sequence[MultiVector], documents: Sequence[MultiVector], function: str = "maxsim"
) -> Array:
    """Return for each query and document the sum of the query's tokens' largest products, (Q, N).

    "meanmaxsim" divides it by the number of the query's tokens.
    """
    if function not in ("maxsim", "meanmaxsim"):
        raise InputError(f"vectors of tokens are compared by maxsim or meanmaxsim, not {function!r}")
    scores = np.full((len(queries), len(documents)), NO_TOKENS, np.float32)
    with_tokens = [number for number, one in enumerate(documents) if len(one.vectors)]
    longest = max((len(query.vectors) for query in queries), default=0)
    for numbers in cut_documents(with_tokens, documents, longest):
        joined = np.concatenate([documents[number].vectors for number in numbers])  # (T, F)
        starts = np.cumsum([0, *(len(documents[number].vectors) for number in numbers[:-1])])
        for row, query in zip(scores, queries, strict=True):
            best = np.maximum.reduceat(query.vectors @ joined.T, starts, axis=1)
            row[numbers] = best.sum(0)
    if function == "meanmaxsim":
        scores /= np.array([max(1, len(query.vectors)) for query in queries], np.float32)[:, None]
    return scores


def match_multi(query: MultiVector, document: MultiVector, function: str) -> list[Match]:
    """Return each token of the query with the token of the document that it has the largest product with."""
    if not len(query.vectors) or not len(document.vectors):
        return []
    products = query.vectors @ document.vectors.T
    best = products.argmax(1).tolist()
    largest = products.max(1)
    if function == "meanmaxsim":
        largest /= len(query.vectors)
    return [
        Match(token, document.tokens[place], product)
        for token, place, product in zip(query.tokens, best, largest.tolist(), strict=True)
    ]


def cut_documents(
    numbers: Sequence[int], documents: Sequence[MultiVector], query_tokens: int
) -> Iterator[list[int]]:
    """Yield some documents at a time, whose products with a query's tokens take little memory."""
    part: list[int] = []
    tokens = 0
    for number in numbers:
        count = len(documents[number].vectors)
        if part and (tokens + count) * max(1, query_tokens) > MAX_PRODUCTS:
            yield part
            part, tokens = [], 0
        part.append(number)
        tokens += count
    if part:
        yield part


def find_best(scores: Array, top_k: int) -> npt.NDArray[np.int64]:
    """Return the places (Q, K) of the largest scores (Q, N), the best first; equal ones in their order."""
    return np.argsort(-scores, axis=1, kind="stable")[:, :top_k]


def list_hits(scores: Array, texts: Sequence[str], top_k: int) -> list[list[Hit]]:
    """Return the best texts of each query by their scores (Q, N), the best first."""
    return [
        [Hit(place, float(row[place]), texts[place]) for place in places.tolist()]
        for row, places in zip(scores, find_best(scores, top_k), strict=True)
    ]
