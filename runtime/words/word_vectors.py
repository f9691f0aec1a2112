"""Words in, vectors and the words nearest to them out.

N words, B questions, T words of a question, D dimensions of a vector, K words that the graph finds
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from ..backends.backend import Array, Backend, GraphRunner, LoadRequest
from ..backends.part import Part
from ..bundle.bundle import Bundle
from ..bundle.word_defaults import WordDefaults
from ..errors import InputError, ManifestError
from ..memory_budget import MemoryBudget
from ..model import Model
from ..opening import choose_artifacts, choose_length, list_tokenizer_files, open_programs, weigh
from ..option_checks import check_whole
from ..text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from typing_extensions import Self

Float32: TypeAlias = npt.NDArray[np.float32]

log = logging.getLogger("planforge")

GRAPH = "words"


class Neighbour(NamedTuple):
    """A word that is near to a question.

    Attributes:
        word: as the vectors' file spells it.
        similarity: the cosine of its vector and the question's, from -1 to 1.
    """

    word: str
    similarity: float


class Question(NamedTuple):
    """Words that are added and taken away.

    Attributes:
        ids: of the words, T.
        signs: of each, 1 or -1.
    """

    ids: Sequence[int]
    signs: Sequence[float]


class WordVectors(Model):
    """Vectors of words, such as word2vec's and GloVe's. Make one with `WordVectors.load`.

    Safe to use from several threads: their questions take turns. Close it, or use it as a context manager.
    """

    task = "word-vectors"

    def __init__(self, part: Part, tokenizer: Tokenizer, defaults: WordDefaults) -> None:
        self.part = part
        self.tokenizer = tokenizer
        self.defaults = defaults
        self.max_length = defaults.max_length

    @classmethod
    def _open(cls, bundle: Bundle, engine: Backend, request: LoadRequest) -> Self:
        defaults = bundle.manifest.words
        if defaults is None:
            raise ManifestError(f"{bundle.folder}: the manifest of a model of this task has no 'words'")
        (artifact,) = choose_artifacts(engine, bundle, request, GRAPH)
        length = choose_length(bundle, request.max_length, artifact)
        budget = MemoryBudget(request.memory_limit, weigh(engine, bundle, [artifact]))
        with open_programs(engine, bundle, artifact) as programs:
            tokenizer = Tokenizer.from_file(bundle.path(list_tokenizer_files(bundle.manifest, 1)[0]))
        return cls(Part(programs[0], artifact, budget), tokenizer, WordDefaults(length, defaults.unknown))

    @property
    def _runner(self) -> GraphRunner:
        return self.part

    @property
    def input_tokenizer(self) -> Tokenizer:
        """The tokenizer that has the words."""
        return self.tokenizer

    def warm_up(self) -> None:
        """Ask for a word; see `Model.warm_up`."""
        self._ask(Question([0], [1.0]))

    def _close(self) -> None:
        self.part.close()

    def __contains__(self, word: object) -> bool:
        """Tell whether a word has a vector of its own."""
        return isinstance(word, str) and self.tokenizer.find_id(word) is not None

    def vector(self, word: str) -> Float32:
        """Return the vector (D,) of a word, float32; see `vectors`."""
        return self.vectors([word])[0]  # type: ignore[no-any-return]

    def vectors(self, words: Iterable[str]) -> Float32:
        """Return the vectors of words.

        Args:
            words: as the vectors' file spells them: upper and lower case count. A word that it lacks gets
                the vector "<unk>" where the file has one, as GloVe's trainer writes it; the log says so.

        Returns:
            (N, D), float32, of their own lengths.

        Raises:
            InputError: the file has neither the word nor "<unk>"; names the word.
        """
        if isinstance(words, str):
            raise InputError("words is str; it must be several words: vector() takes one")
        ids = [self._find_or_replace(word) for word in words]
        size = self.part.artifact.outputs[0].axes[-1]
        assert isinstance(size, int)
        found = [np.empty((0, size), np.float32)]
        for begin in range(0, len(ids), self.max_length):
            some = ids[begin : begin + self.max_length]
            found.append(self._ask(Question(some, [1.0] * len(some)))["vectors"][0])
        return np.concatenate(found)

    def neighbours(self, word: str, k: int = 10) -> list[Neighbour]:
        """Return the words nearest to a word, the nearest first.

        Args:
            word: which must have a vector of its own.
            k: how many.

        Raises:
            InputError: there is no such word, or k is out of range.
        """
        return self.analogy([word], k=k)

    def analogy(
        self, positive: str | Iterable[str], negative: str | Iterable[str] = (), k: int = 10
    ) -> list[Neighbour]:
        """Return the words nearest to some words less some others, as gensim's `most_similar` does.

        Each word counts by its direction alone. The question's own words are no answers.

        Args:
            positive: the words that are added, such as "king" and "woman".
            negative: the words that are taken away, such as "man".
            k: how many.

        Raises:
            InputError: a word has no vector, there are too many, they cancel each other, or k is too large.
        """
        question = self._make_question(list_words(positive), list_words(negative))
        asked = set(question.ids)
        (_, most) = self.part.artifact.outputs[-1].axes
        assert isinstance(most, int)
        check_whole("k", k, 1, most - len(asked), what="words that the graph finds, less those asked")
        results = self._ask(question)
        if not results["vectors"].any():
            raise InputError("the question's words have the vector 0, to which no word is near")
        found = zip(results["nearest"][0].tolist(), results["similarity"][0].tolist(), strict=True)
        return [
            Neighbour(self.tokenizer.spell(token), cosine) for token, cosine in found if token not in asked
        ][:k]

    def _make_question(self, positive: Sequence[str], negative: Sequence[str]) -> Question:
        count = len(positive) + len(negative)
        if not 1 <= count <= self.max_length:
            raise InputError(f"a question has 1 to {self.max_length} words, not {count}")
        added = [self._find(word) for word in positive]
        removed = [self._find(word) for word in negative]
        if Counter(added) == Counter(removed):
            raise InputError("the words that are added and those that are taken away are the same")
        return Question([*added, *removed], [1.0] * len(added) + [-1.0] * len(removed))

    def _find(self, word: str) -> int:
        """Return a word's id."""
        if not isinstance(word, str):
            raise InputError(f"a word must be a str, not {type(word).__name__}")
        found = self.tokenizer.find_id(word)
        if found is None:
            cases = [other for other in (word.lower(), word.title(), word.upper()) if other in self]
            hint = f"; did you mean {cases[0]!r}?" if cases else ""
            count = self.tokenizer.vocab_size
            raise InputError(f"there is no vector of {word!r:.80} among {count} words{hint}")
        return found

    def _find_or_replace(self, word: str) -> int:
        """Return a word's id, or that of the vector for words without one."""
        if self.defaults.unknown is None or not isinstance(word, str) or word in self:
            return self._find(word)
        log.warning("there is no vector of %r; that of the unknown word is taken", word)
        return self.defaults.unknown

    def _ask(self, question: Question) -> dict[str, Array]:
        """Return the graph's outputs for one question."""
        return self.part.run(pad_questions([question]))


def list_words(words: str | Iterable[str]) -> list[str]:
    """Return words as a list; a single one may stand alone."""
    return [words] if isinstance(words, str) else list(words)


def pad_questions(questions: Sequence[Question]) -> dict[str, Array]:
    """Return the graph's inputs, ids and signs (B, T); shorter questions are padded by words of sign 0."""
    shape = (len(questions), max(len(question.ids) for question in questions))
    ids = np.zeros(shape, np.int64)
    signs = np.zeros(shape, np.float32)
    for row, question in enumerate(questions):
        ids[row, : len(question.ids)] = question.ids
        signs[row, : len(question.signs)] = question.signs
    return {"ids": ids, "signs": signs}
