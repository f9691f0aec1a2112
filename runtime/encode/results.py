"""What an encoder's tasks return.

T tokens, E width of a vector, F width of features

`dropped` is in every result: how many tokens of the text the model did not see.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[np.float32]


class Result:
    """Base of the results; each converts to JSON."""

    dropped: int

    def to_json(self) -> dict[str, object]:
        """Return the fields of `planforge run --json`."""
        return asdict(self)  # type: ignore[call-overload,no-any-return]


@dataclass(frozen=True, eq=False)
class Embedding(Result):
    """One vector for a text.

    Attributes:
        vector: (E,) float32, or of the type that was asked for.
    """

    vector: npt.NDArray[Any]
    dropped: int = 0

    def to_json(self) -> dict[str, object]:
        return {"embedding": self.vector.tolist(), "dropped": self.dropped}


@dataclass(frozen=True, eq=False)
class SparseEmbedding(Result):
    """The weights of a text: all others of the vocabulary are 0.

    Attributes:
        indices: (N,) int64, the tokens' ids, ascending.
        values: (N,) float32, above 0.
        tokens: how the vocabulary spells them.
    """

    indices: npt.NDArray[np.int64]
    values: Array
    tokens: tuple[str, ...]
    dropped: int = 0

    def to_json(self) -> dict[str, object]:
        return {**vars(self), "indices": self.indices.tolist(), "values": self.values.tolist()}


@dataclass(frozen=True, eq=False)
class MultiVector(Result):
    """A vector for each token of a text that counts.

    Attributes:
        vectors: (T, F) float32.
        tokens: how the vocabulary spells them.
    """

    vectors: Array
    tokens: tuple[str, ...]
    dropped: int = 0

    def to_json(self) -> dict[str, object]:
        return {**vars(self), "vectors": self.vectors.tolist()}


@dataclass(frozen=True, eq=False)
class HybridEmbedding(Result):
    """All that a model makes of a text in one pass.

    Attributes:
        vector: (E,) float32.
        sparse: its tokens' weights.
        multi: its tokens' vectors.
    """

    vector: Array
    sparse: SparseEmbedding
    multi: MultiVector
    dropped: int = 0

    def to_json(self) -> dict[str, object]:
        return {
            "embedding": self.vector.tolist(),
            "sparse": self.sparse.to_json(),
            "multi": self.multi.to_json(),
            "dropped": self.dropped,
        }


@dataclass(frozen=True)
class Hit:
    """A document that a query has found.

    Attributes:
        index: its number among those that were searched.
        score: how alike the two are, by the checkpoint's function; higher is more alike.
        text: of it, where it was given.
    """

    index: int
    score: float
    text: str | None = None


@dataclass(frozen=True)
class Match:
    """A token of a query, the token of a document that matches it, and what the two add to the score.

    Attributes:
        query: the query's token, as the vocabulary spells it.
        document: the document's.
        product: of their weights or vectors; the products of all matches sum to the score.
    """

    query: str
    document: str
    product: float


@dataclass(frozen=True, eq=False)
class Features(Result):
    """A vector for each token of a text.

    Attributes:
        tokens: T spellings, special tokens included.
        offsets: of each token, the characters [start, end) of the text; (0, 0) of special tokens.
        vectors: (T, F) float32.
    """

    tokens: tuple[str, ...]
    offsets: tuple[tuple[int, int], ...]
    vectors: Array
    dropped: int = 0

    def to_json(self) -> dict[str, object]:
        return {**vars(self), "vectors": self.vectors.tolist()}


@dataclass(frozen=True)
class Classification(Result):
    """The class of a text or a pair.

    Attributes:
        label: the likeliest.
        score: its probability; of a regression, as which one label without a problem_type counts, the
            (first) number itself.
        probabilities: of every label; they sum to 1 unless several labels can hold at once. Of a
            regression the numbers, if it has several.
        logits: of every label, where they were asked for; of zero-shot labels those of entailment.
    """

    label: str
    score: float
    probabilities: Mapping[str, float]
    dropped: int = 0
    logits: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Ranked(Result):
    """A text, scored against a query.

    Attributes:
        index: the text's place among those given.
        score: higher is more relevant.
    """

    index: int
    text: str
    score: float
    dropped: int = 0


@dataclass(frozen=True)
class NextSentence(Result):
    """Whether one text follows another.

    Attributes:
        is_next: the likelier answer.
        probability: that it does.
    """

    is_next: bool
    probability: float
    dropped: int = 0


@dataclass(frozen=True)
class Fill:
    """A word for a masked place."""

    token: str
    token_id: int
    score: float


@dataclass(frozen=True)
class FilledMask(Result):
    """The likeliest words for every masked place of a text.

    Attributes:
        masks: for each place in order, words from the likeliest on.
    """

    masks: tuple[tuple[Fill, ...], ...]
    dropped: int = 0


@dataclass(frozen=True)
class Entity:
    """A stretch of words with one tag; text[start:end] is its text."""

    label: str
    score: float
    text: str
    start: int
    end: int


@dataclass(frozen=True)
class Tags(Result):
    """The tagged stretches of a text, in order."""

    entities: tuple[Entity, ...]
    dropped: int = 0


@dataclass(frozen=True)
class Answer:
    """A stretch of the context; context[start:end] is its text."""

    text: str
    score: float
    start: int
    end: int


@dataclass(frozen=True)
class Answers(Result):
    """What a context answers to a question.

    Attributes:
        answers: the best ones, from the best on.
        no_answer_score: the score of there being none, to be compared with an answer's; it means
            something for models that were trained with such questions.
    """

    answers: tuple[Answer, ...]
    no_answer_score: float
    dropped: int = 0

    @property
    def best(self) -> Answer | None:
        """The best answer; None where none has a higher score than there being none."""
        if not self.answers or self.answers[0].score <= self.no_answer_score:
            return None
        return self.answers[0]
