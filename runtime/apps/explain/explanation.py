"""What explains an answer: arrays with the tokens that they are about.

A targets (tokens of an answer, or labels), T tokens, L layers, H heads, Q tokens that look, K tokens that are
looked at
"""

from __future__ import annotations

import base64
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...backends.backend import Array
from ...errors import InputError
from .neurons import Factors

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Token:
    """A token that was read or written.

    Attributes:
        text: as it stands in the text, with the space before it; half a character is U+FFFD.
        id: its number in the vocabulary.
        part: "prompt", "answer", "source", "translation", "text", "pair", "query", or "special".
        start, end: its characters in that part's text; an answer's begins with the space before it.
    """

    text: str
    id: int
    part: str
    start: int
    end: int


@dataclass(frozen=True)
class Likely:
    """A token or label that could have been the answer."""

    text: str
    probability: float


@dataclass(frozen=True)
class Target:
    """What is explained.

    Attributes:
        text: a token of the answer, or a label's name.
        token: its index among the tokens; None of a label.
        logit: the model's score of it; None where no gradient was computed.
        probability: None of a number that is none.
        likeliest: the ten likeliest in its place, the likeliest first.
    """

    text: str
    token: int | None
    logit: float | None
    probability: float | None
    likeliest: tuple[Likely, ...] = ()


@dataclass(frozen=True, eq=False)
class Watched:
    """The ranks (L + 1, A) of a word at each layer, in the place of each target."""

    text: str
    ranks: Array


@dataclass(frozen=True, eq=False)
class Lens:
    """What each layer would answer, through the final norm and the head (nostalgebraist, 2020).

    Attributes:
        ranks: (L + 1, A) int64 of each target after the embeddings and each layer; 1 is the likeliest.
        logprobs: (L + 1, A), natural logarithms; of a ranker's score or a likeness that number itself.
        likeliest: of each layer the likeliest in the place of each target.
        watched: the same of words that were asked for.
    """

    ranks: Array
    logprobs: Array
    likeliest: tuple[tuple[str, ...], ...]
    watched: tuple[Watched, ...] = ()


@dataclass(frozen=True, eq=False)
class Attention:
    """The weights (L, H, Q, K) of tokens that look at others; `queries` and `keys` are ranges of tokens."""

    weights: Array
    queries: range
    keys: range


@dataclass(frozen=True, eq=False)
class Explanation:
    """Why a model answered so.

    Attributes:
        kind: "generation", "translation", "classification", "ranking" or "similarity".
        model: the bundle's name.
        tokens: what was read, and the answer behind it.
        targets: what is explained.
        saliency: (A, T) float32 by method, how much each token counted for each target, NaN where a token
            comes later. "gradient_norm" are shares that sum to 1; "gradient_x_input",
            "integrated_gradients" and "occlusion" have a sign. Occlusion is how much the log-probability (of
            a label or a likeness: the score) falls when the token is taken out.
        missing: (A,) by how much of their sum integrated gradients miss the score's difference from
            embeddings of zeros; None without that method.
        lens: what each layer would answer; None unless asked for.
        attention: by name, "self", and of a translation "source" and "cross".
        neurons: groups of neurons; None unless asked for.
        other: the text that a likeness is to, whose tokens are not explained.
    """

    kind: str
    model: str
    tokens: tuple[Token, ...]
    targets: tuple[Target, ...]
    saliency: Mapping[str, Array]
    missing: Array | None = None
    lens: Lens | None = None
    attention: Mapping[str, Attention] | None = None
    neurons: Factors | None = None
    other: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the fields of `planforge explain --json`, which a page draws."""
        return {
            "kind": self.kind,
            "model": self.model,
            "tokens": [vars(token) for token in self.tokens],
            "targets": [write_target(target) for target in self.targets],
            "saliency": {name: write_rows(rows) for name, rows in self.saliency.items()},
            "missing": None if self.missing is None else self.missing.tolist(),
            "lens": None if self.lens is None else write_lens(self.lens),
            "attention": [write_attention(name, one) for name, one in (self.attention or {}).items()],
            "neurons": None if self.neurons is None else write_factors(self.neurons),
            "other": self.other,
        }

    def to_html(self, path: str | Path) -> None:
        """Write one page that shows it offline, in any browser.

        Raises:
            InputError: the file cannot be written.
        """
        from .page import make_page

        partial = Path(path).with_name(f"{Path(path).name}.partial")
        try:
            partial.write_text(make_page(self.to_json()), encoding="utf-8")
            partial.replace(path)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise InputError(f"{path} cannot be written: {error.strerror}", option="path") from error

    def plot(self, method: str | None = None) -> Figure:
        """Return a picture of how much each token counted, targets below each other; needs matplotlib.

        Args:
            method: one of `saliency`; the first of them unless given.

        Raises:
            InputError: no such method.
        """
        from .picture import draw_saliency

        tokens = [token.text for token in self.tokens]
        return draw_saliency(self.saliency, method, tokens, [target.text for target in self.targets])

    def plot_neurons(self) -> Figure:
        """Return a chart of how neurons fire: a row for each, by group, a column for each token.

        It has the 400 most active neurons, and nothing below 0. Needs matplotlib.

        Raises:
            InputError: the explanation has no neurons.
        """
        from .picture import draw_firing

        return draw_firing(self.neurons, [token.text for token in self.tokens])


def write_target(target: Target) -> dict[str, Any]:
    return {**vars(target), "likeliest": [vars(one) for one in target.likeliest]}


def write_rows(rows: Array) -> list[list[float | None]]:
    """Return numbers of four digits, None in the place of NaN."""
    return [[None if math.isnan(x) else float(f"{x:.4g}") for x in row] for row in rows.tolist()]


def write_lens(lens: Lens) -> dict[str, Any]:
    layers = [f"layer {number}" for number in range(1, len(lens.ranks))]
    return {
        "layers": ["embeddings", *layers],
        "ranks": lens.ranks.tolist(),
        "logprobs": write_rows(lens.logprobs),
        "likeliest": [list(row) for row in lens.likeliest],
        "watched": [{"text": one.text, "ranks": one.ranks.tolist()} for one in lens.watched],
    }


def write_attention(name: str, attention: Attention) -> dict[str, Any]:
    """Return weights as bytes, 255 of them to 1."""
    layers, heads = attention.weights.shape[:2]
    steps = np.rint(attention.weights * 255).astype(np.uint8)
    return {
        "name": name,
        "layers": layers,
        "heads": heads,
        "queries": [attention.queries.start, attention.queries.stop],
        "keys": [attention.keys.start, attention.keys.stop],
        "weights": base64.b64encode(zlib.compress(steps.tobytes(), 6)).decode(),
    }


def write_factors(factors: Factors) -> dict[str, Any]:
    return {
        "activations": write_rows(factors.activations),
        "tokens": factors.list_strongest(),
        "layers": write_rows(factors.layers),
        "error": factors.error,
    }
