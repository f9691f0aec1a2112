"""What the `layers` and `lens` graphs say of a text.

L layers, A targets, W watched words, T tokens, E hidden size, V vocabulary
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from ...backends.backend import Array, Arrays
from ...text.tokenizer import Tokenizer
from .explanation import Attention, Lens, Likely, Watched
from .graphs import ExplanationGraphs
from .neurons import Factors, group_neurons
from .options import ResolvedOptions

LENS_BYTES = 2**27  # that a lens may take at a time


def run_layers(graphs: ExplanationGraphs, inputs: Arrays, choices: ResolvedOptions) -> dict[str, Array]:
    """Return what the `layers` graph gives of one text, without the batch: of what it has, what is needed.

    Of a decoder the last hidden states are among it, from which probabilities come.
    """
    prefixes: list[str] = []
    if "gradient" in choices or "integrated_gradients" in choices:
        prefixes += ["embeddings", "source_embeddings"]
    if "lens" in choices:
        prefixes.append("hidden.")
    if "neurons" in choices:
        prefixes.append("activations.")
    if "attention" in choices:
        prefixes += ["attentions.", "source_attentions.", "cross_attentions."]
    names = [name for prefix in prefixes for name in graphs.list_outputs("layers", prefix)]
    hidden = graphs.list_outputs("layers", "hidden.")
    if "embeddings" in prefixes and "embeddings" not in names:
        names.append(hidden[0])  # of models whose first layer reads the embeddings as they are
    if graphs.has_input("lens", "tokens"):
        names.append(hidden[-1])
    outputs = graphs.run("layers", inputs, list(dict.fromkeys(names)))
    alone = {name: array[0] for name, array in outputs.items()}
    if "hidden.0" in alone:
        alone.setdefault("embeddings", alone["hidden.0"])
    return alone


def list_layers(outputs: Mapping[str, Array], prefix: str) -> list[Array]:
    """Return the outputs of all layers, in their order."""
    return [outputs[name] for name in sort_layers(outputs, prefix)]


def sort_layers(outputs: Iterable[str], prefix: str) -> list[str]:
    names = [name for name in outputs if name.startswith(prefix)]
    return sorted(names, key=lambda name: int(name.removeprefix(prefix)))


def attend(outputs: dict[str, Array], prefix: str, queries: range, keys: range) -> Attention:
    """Take the attention weights of all layers out of the outputs, which are the largest by far."""
    names = sort_layers(outputs, prefix)
    weights = np.empty((len(names), *outputs[names[0]].shape), np.float32)
    for layer, name in enumerate(names):
        weights[layer] = outputs.pop(name)
    return Attention(weights, queries, keys)


def find_factors(outputs: Mapping[str, Array], choices: ResolvedOptions) -> Factors | None:
    """Return groups of the neurons, if they are wanted."""
    if "neurons" not in choices:
        return None
    return group_neurons(list_layers(outputs, "activations."), choices)


@dataclass(frozen=True, eq=False)
class LensResults:
    """What a lens says of hidden states: ranks and log-probabilities (..., K) of tokens, the likeliest."""

    ranks: Array
    logprobs: Array
    likeliest: Array  # (..., 10) ids
    likeliest_logprobs: Array

    def name_likeliest(self, tokenizer: Tokenizer) -> list[tuple[Likely, ...]]:
        """Return the likeliest tokens of each of the last layer's states, with their probabilities."""
        rows = zip(self.likeliest[-1], np.exp(self.likeliest_logprobs[-1].astype(np.float64)), strict=True)
        return [
            tuple(
                Likely(tokenizer.show(int(token)), float(share))
                for token, share in zip(ids, shares, strict=True)
                if token < tokenizer.vocab_size
            )
            for ids, shares in rows
        ]

    def make_lens(self, tokenizer: Tokenizer, choices: ResolvedOptions) -> Lens:
        """Return the ranks of the targets, which come first, and of the watched words behind them."""
        best = self.likeliest[..., 0]
        words = {
            int(token): tokenizer.show(int(token)) if token < tokenizer.vocab_size else ""
            for token in np.unique(best)
        }
        return Lens(
            ranks=self.ranks[..., 0],
            logprobs=self.logprobs[..., 0],
            likeliest=tuple(tuple(words[int(token)] for token in row) for row in best),
            watched=tuple(
                Watched(word, self.ranks[..., 1 + number]) for number, word in enumerate(choices.watch)
            ),
        )


def look(graphs: ExplanationGraphs, hidden: Array, tokens: Array) -> LensResults:
    """Return what a decoder's lens says of hidden states (L, A, E), of tokens (A, K)."""
    layers, targets, width = hidden.shape
    asked = np.broadcast_to(tokens, (layers, *tokens.shape)).reshape(layers * targets, -1)
    flat = hidden.reshape(-1, width)
    step = max(1, LENS_BYTES // graphs.count_state_bytes(asked.shape[1]))
    parts = [
        graphs.run("lens", {"hidden": flat[i : i + step], "tokens": asked[i : i + step]})
        for i in range(0, len(flat), step)
    ]

    def join(name: str) -> Array:
        joined = np.concatenate([part[name] for part in parts])
        return joined.reshape(layers, targets, -1)

    return LensResults(join("ranks"), join("logprobs"), join("likeliest"), join("likeliest_logprobs"))
