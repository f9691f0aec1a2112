"""Word vectors, such as word2vec's and GloVe's, with the words nearest to a question as part of the model.

B questions, T words of a question, V words, D dimensions, K neighbours
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from .folder import SINGLE

MAX_WORDS = 2**24
MAX_DIMENSIONS = 2**14
MOST_NEIGHBOURS = 256
# The least length of a sum of unit vectors that a question is divided by. Halves have it too.
LEAST_LENGTH = 2.0**-13
# What GloVe's trainer calls the vector of all words that are too rare to have their own.
UNKNOWN = "<unk>"


@dataclass(frozen=True)
class WordVectorsConfig:
    """The sizes of a model.

    Attributes:
        vocab_size: words.
        hidden_size: dimensions of a vector.
    """

    vocab_size: int
    hidden_size: int

    def __post_init__(self) -> None:
        sizes = {"vocab_size": MAX_WORDS, "hidden_size": MAX_DIMENSIONS}
        for name, most in sizes.items():
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= most:
                raise ValueError(f"{name}={value!r:.60} must be an integer from 1 to {most}")

    @property
    def neighbours(self) -> int:
        """Return how many words the model finds for a question."""
        return min(self.vocab_size, MOST_NEIGHBOURS)


class Lengths(nn.Module):
    """The length of each word's vector."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(count))

    def forward(self, ids: Tensor) -> Tensor:
        """Return lengths (B, T, 1) of words (B, T)."""
        return self.weight[ids][:, :, None]


class Question(nn.Module):
    """Adds and subtracts words."""

    def forward(self, directions: Tensor, signs: Tensor) -> Tensor:
        """Return sums (B, D), of unit length, of words (B, T, D) times their signs (B, T)."""
        total = (directions * signs[:, :, None]).sum(dim=1)
        length = torch.linalg.vector_norm(total, dim=-1, keepdim=True)
        return total / length.clamp(min=LEAST_LENGTH)  # type: ignore[no-any-return]


class Ranking(nn.Module):
    """Finds the words that are most alike."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def forward(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Return the largest scores (B, K) of (B, V), the largest first, and their places (B, K), int64."""
        return torch.topk(scores, self.count, dim=-1)


class WordVectors(nn.Module):
    """Vectors of words, each as a direction of unit length and its length."""

    def __init__(self, config: WordVectorsConfig) -> None:
        super().__init__()
        self.config = config
        self.directions = nn.Embedding(config.vocab_size, config.hidden_size)
        self.lengths = Lengths(config.vocab_size)
        self.question = Question()
        self.scores = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.ranking = Ranking(config.neighbours)
        self.tie_weights()

    def tie_weights(self) -> None:
        """Let words be compared with the directions themselves."""
        self.scores.weight = self.directions.weight

    def compare(self, ids: Tensor, signs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the vectors (B, T, D) of words, and the cosines (B, V) of a question and every word."""
        directions = self.directions(ids)
        vectors = directions * self.lengths(ids)
        return vectors, self.scores(self.question(directions, signs))

    def forward(self, ids: Tensor, signs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return what is asked of words.

        Args:
            ids: (B, T) int64, from 0 to V - 1.
            signs: (B, T) float32; 1 for a word that is added, -1 for one that is taken away, 0 for none.

        Returns:
            the words' vectors (B, T, D); the cosines (B, K) of the words nearest to each question, the
            nearest first, the question's own words among them; and these words' ids (B, K), int64.
        """
        vectors, scores = self.compare(ids, signs)
        return vectors, *self.ranking(scores)


def save_word_vectors(folder: str | Path, words: Sequence[str], vectors: Any) -> None:
    """Write words and their vectors as a checkpoint, which `planforge export` and `load_model` read.

    Args:
        folder: created if it does not exist.
        words: V different ones.
        vectors: (V, D), what numpy takes for numbers; kept in float32.

    Raises:
        ValueError: a word is there twice, or the vectors have another shape, or are not finite; nothing is
            written.
    """
    array = np.ascontiguousarray(vectors, np.float32)
    if array.ndim != 2 or len(array) != len(words):
        raise ValueError(f"vectors have the shape {array.shape}; {len(words)} words need ({len(words)}, D)")
    config = WordVectorsConfig(*array.shape)
    ids = {word: number for number, word in enumerate(words)}
    if len(ids) < len(words):
        twice = next(word for number, word in enumerate(words) if ids[word] != number)
        raise ValueError(f"the word {twice!r:.80} is there twice; a word has one vector")
    check_finite(words, array)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    settings = {"model_type": "word-vectors", **asdict(config)}
    (folder / "config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    vocabulary: dict[str, Any] = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": ids, "unk_token": UNKNOWN},
    }
    (folder / "tokenizer.json").write_text(json.dumps(vocabulary, ensure_ascii=False), encoding="utf-8")
    lengths = np.linalg.norm(array.astype(np.float64), axis=1)
    directions = array / np.where(lengths == 0, 1, lengths)[:, None]
    weights = {"directions.weight": directions, "lengths.weight": lengths}
    tensors = {name: torch.from_numpy(values.astype(np.float32)) for name, values in weights.items()}
    save_file(tensors, folder / SINGLE, metadata={"format": "pt"})


def check_finite(words: Sequence[str], vectors: np.ndarray[Any, Any]) -> None:
    """Refuse vectors (V, D) that have NaN or infinity; name the first word."""
    finite = np.isfinite(vectors).all(axis=1)
    if not finite.all():
        raise ValueError(f"the vector of {words[int(np.argmin(finite))]!r:.80} has NaN or infinity in it")
