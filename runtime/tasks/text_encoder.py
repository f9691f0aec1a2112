"""Texts in, vectors, classes, words, tags and answers out: every task of an encoder.

E width of a vector, F width of features
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar, overload

import numpy as np

from ..backends.backend import Array
from ..bundle.defaults import EncoderDefaults
from ..bundle.manifest import Artifact
from ..encoding.encoder import Encoder
from ..errors import InputError
from ..text.tokenizer import Tokenizer
from .closing import Closing
from .encoder_results import (
    Answers,
    Classification,
    Features,
    FilledMask,
    NextSentence,
    Ranked,
    Result,
    Tags,
)
from .reading import Item, check_text, checked
from .task_streams import TaskStreams

R = TypeVar("R", bound=Result)
# The tasks that need a head, and which.
TASK_HEADS = {
    "classify": "sequence_classification",
    "rank": "sequence_classification",
    "next_sentence": "next_sentence",
    "fill_mask": "masked_lm",
    "tag": "token_classification",
    "answer": "question_answering",
}
TASKS = ("embed", "features", *TASK_HEADS)


class TextEncoder(Closing):
    """An encoder of a bundle, ready to embed, classify and so on. Make one with `planforge.runtime.load`.

    Every task takes one text, and returns one result, or several texts (also an iterator), and returns
    a list. `stream` returns results one by one, and never holds all texts. All take:

    truncation: what happens to a text that is longer than the model: "head" keeps its beginning,
        "tail" its end, "head+tail" both, "windows" all of it, in overlapping windows whose results are
        merged. Results say how many tokens were `dropped`.
    stride: tokens that neighbouring windows share.
    parse_special: read special tokens such as [SEP] in the text as such.
    progress: called with the number of texts that are done.

    Safe to use from several threads: their batches take turns. Close it, or use it as a context manager.
    """

    def __init__(self, encoder: Encoder, tokenizer: Tokenizer, defaults: EncoderDefaults) -> None:
        self.encoder = encoder
        self.tokenizer = tokenizer
        self.defaults = defaults
        self.tasks = TaskStreams(encoder, tokenizer, defaults)

    @property
    def artifact(self) -> Artifact:
        """The graph that runs."""
        return self.encoder.artifact

    @property
    def heads(self) -> tuple[str, ...]:
        """The names of the graph's heads; none of an encoder that only embeds."""
        return self.defaults.heads

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of the classes, in the order of the logits."""
        return self.defaults.labels

    def embed(self, texts: str | Iterable[str], **options: Any) -> Array:
        """One vector for each text.

        Args:
            texts: one text, or several.
            **options: pooling, "cls", "mean" or "max" over the tokens' last hidden states; normalize, to
                length 1; both as the checkpoint says unless given, else mean and True. prompt, the
                name of a prompt of the checkpoint to put before each text ("": none). truncation is "head"
                unless given, which a line in the log tells of; and the options of all tasks.

        Returns:
            (N, E) float32, or (E,) for one text.
        """
        if isinstance(texts, str):
            (result,) = self.tasks.embed([texts], **options)
            return result.vector
        vectors = [result.vector for result in self.tasks.embed(texts, **options)]
        if not vectors:
            return np.zeros((0, len(next(self.tasks.embed([""], **options)).vector)), np.float32)
        return np.stack(vectors)

    @overload
    def features(self, texts: str, layers: str = ..., **options: Any) -> Features: ...
    @overload
    def features(self, texts: Iterable[str], layers: str = ..., **options: Any) -> list[Features]: ...
    def features(
        self, texts: str | Iterable[str], layers: str = "last", **options: Any
    ) -> Features | list[Features]:
        """A vector for each token, for a model on top of a frozen encoder.

        Args:
            texts: one text, or several; long ones in windows unless told otherwise.
            layers: "embeddings", "second_to_last", "last", "sum_last_four", "concat_last_four" or
                "sum_all"; all but the last need a bundle exported with `--outputs hidden_states`.
        """
        return one_or_all(texts, self.tasks.features, str, layers=layers, **options)

    @overload
    def classify(self, texts: str | tuple[str, str], **options: Any) -> Classification: ...
    @overload
    def classify(self, texts: Iterable[Item], **options: Any) -> list[Classification]: ...
    def classify(self, texts: Item | Iterable[Item], **options: Any) -> Classification | list[Classification]:
        """The class of each text, or of each pair (text, pair). Windows' probabilities are averaged."""
        return one_or_all(texts, self.tasks.classify, (str, tuple), **options)

    def rank(
        self, query: str, texts: Iterable[str], top_k: int | None = None, **options: Any
    ) -> list[Ranked]:
        """Scores texts against a query with a cross-encoder; the best first.

        Args:
            query: what is looked for.
            texts: where; of a long one's windows the best counts.
            top_k: return only so many.
        """
        if top_k is not None and (not isinstance(top_k, int) or isinstance(top_k, bool) or top_k < 1):
            raise InputError(f"top_k={top_k!r} must be None or a whole number of at least 1")
        ranked = list(self.tasks.rank(((query, text) for text in checked(texts, check_text)), **options))
        return sorted(ranked, key=lambda result: -result.score)[:top_k]

    @overload
    def next_sentence(self, texts: tuple[str, str], **options: Any) -> NextSentence: ...
    @overload
    def next_sentence(self, texts: Iterable[tuple[str, str]], **options: Any) -> list[NextSentence]: ...
    def next_sentence(
        self, texts: tuple[str, str] | Iterable[tuple[str, str]], **options: Any
    ) -> NextSentence | list[NextSentence]:
        """Whether the second text of each pair follows the first."""
        return one_or_all(texts, self.tasks.next_sentence, (str, tuple), **options)

    @overload
    def fill_mask(self, texts: str, top_k: int = ..., **options: Any) -> FilledMask: ...
    @overload
    def fill_mask(self, texts: Iterable[str], top_k: int = ..., **options: Any) -> list[FilledMask]: ...
    def fill_mask(
        self, texts: str | Iterable[str], top_k: int = 5, **options: Any
    ) -> FilledMask | list[FilledMask]:
        """The `top_k` likeliest words for each mask token, [MASK] for BERT, in each text."""
        return one_or_all(texts, self.tasks.fill_mask, str, top_k=top_k, **options)

    @overload
    def tag(self, texts: str, **options: Any) -> Tags: ...
    @overload
    def tag(self, texts: Iterable[str], **options: Any) -> list[Tags]: ...
    def tag(self, texts: str | Iterable[str], **options: Any) -> Tags | list[Tags]:
        """The tagged stretches of each text, with their characters; long texts in windows."""
        return one_or_all(texts, self.tasks.tag, str, **options)

    @overload
    def answer(self, question: str, context: str, **options: Any) -> Answers: ...
    @overload
    def answer(self, question: Iterable[tuple[str, str]], **options: Any) -> list[Answers]: ...
    def answer(
        self, question: str | Iterable[tuple[str, str]], context: str | None = None, **options: Any
    ) -> Answers | list[Answers]:
        """The stretches of a context that answer a question.

        Args:
            question: a question, or pairs (question, context).
            context: the text that may hold the answer, of any length.
            **options: n_best, how many answers (1); max_answer_tokens (30); and those of all tasks.
        """
        if isinstance(question, str):
            if context is None:
                raise InputError("answer needs a question and a context")
            (result,) = self.tasks.answer([(question, context)], **options)
            return result
        if context is not None:
            raise InputError("answer needs a question and a context, or pairs of them alone")
        return list(self.tasks.answer(question, **options))

    def stream(self, task: str, texts: Iterable[Item], **options: Any) -> Iterator[Any]:
        """A task's results one by one, in order, as the texts come.

        Args:
            task: "embed", "features", "classify", "rank", "next_sentence", "fill_mask", "tag" or
                "answer"; of pairs for rank, next_sentence and answer.
            texts: any iterable; at most 1,024 texts are read ahead.
            **options: those of the task.

        Returns:
            An iterator over `Embedding`, `Features`, `Classification`, `Ranked` (in the order of the
            pairs), `NextSentence`, `FilledMask`, `Tags` or `Answers`.
        """
        if task not in TASKS:
            raise InputError(f"task {task!r} is not one of {', '.join(TASKS)}")
        return getattr(self.tasks, task)(texts, **options)  # type: ignore[no-any-return]

    def check_task(self, task: str) -> None:
        """Refuses a task that this bundle's model has no head for.

        Raises:
            InputError: names the heads there are.
        """
        if task in TASK_HEADS:
            self.tasks.need_head(task, TASK_HEADS[task])

    def count_tokens(self, text: str, parse_special: bool = False) -> int:
        """How many tokens the text has, special ones not counted."""
        return len(self.tokenizer.encode(text, parse_special=parse_special))

    def close(self) -> None:
        """Frees the engine. Later calls raise ClosedError; closing twice is fine."""
        self.encoder.close()


def one_or_all(
    texts: Any, task: Callable[..., Iterator[R]], one: type | tuple[type, ...], **options: Any
) -> R | list[R]:
    """One result for one text or pair, of type `one`; a list of them for several."""
    if isinstance(texts, one):
        (result,) = task([texts], **options)  # to its end: there stands what is said of dropped tokens
        return result
    return list(task(texts, **options))
