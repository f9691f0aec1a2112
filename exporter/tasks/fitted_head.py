"""Computes the logits of a fitted classifier from an encoder's states, with scikit-learn's weights.

T tokens, E hidden size, F features, C classes
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...runtime.backends.backend import Array
from ...runtime.bundle.bundle import Bundle
from ...runtime.bundle.manifest import Manifest
from ...runtime.encode.pooling import LAYERS, combine_layers, normalize_vector, pool_tokens

HEAD = "sequence_classification"  # the role of its logits among a graph's outputs
TAGS = "token_classification"  # the same, of a classifier of tokens
EMBEDDING = "embedding"  # the features that are a text's vector
CLS = "cls"  # those that are the last hidden state of the first token


def is_fitted(manifest: Manifest) -> bool:
    """Tell whether a bundle has a head that was fitted to its encoder."""
    return manifest.encoder is not None and manifest.encoder.fitted is not None


@dataclass(frozen=True)
class LinearHead:
    """A classifier that was fitted to an encoder's features, as scikit-learn gave it."""

    features: str  # "embedding", "cls", or a choice of hidden states, averaged over the tokens
    weight: Array  # (C, F)
    bias: Array  # (C,)
    normalize: bool  # whether an averaged embedding gets length 1
    role: str = HEAD  # of its logits

    @staticmethod
    def load(bundle: Bundle) -> LinearHead | None:
        """Return the fitted head of a bundle; None where its heads are the checkpoint's."""
        defaults = bundle.manifest.encoder
        if not is_fitted(bundle.manifest):
            return None
        assert defaults is not None and defaults.fitted is not None
        with np.load(bundle.path(defaults.fitted.file), allow_pickle=False) as file:
            role = TAGS if TAGS in defaults.heads else HEAD
            return LinearHead(
                defaults.fitted.features, file["weight"], file["bias"], defaults.normalize, role
            )

    def compute_logits(self, states: Sequence[Array], embedding: Array | None) -> Array:
        """Return a text's logits (C,), or those of its tokens (T, C).

        Args:
            states: all of its hidden states (T, E).
            embedding: (F,), if the graph gives one.
        """
        if self.role == TAGS:
            chosen = [states[layer] for layer in LAYERS[self.features](len(states) - 1)]
            tokens: Array = combine_layers(chosen, self.features) @ self.weight.T + self.bias
            return tokens
        if self.features == CLS:
            vector = pool_tokens(states[-1], "cls")
        elif self.features != EMBEDDING:
            chosen = [states[layer] for layer in LAYERS[self.features](len(states) - 1)]
            vector = pool_tokens(combine_layers(chosen, self.features), "mean")
        elif embedding is not None:
            vector = embedding
        else:
            vector = pool_tokens(states[-1], "mean")
            vector = normalize_vector(vector) if self.normalize else vector
        logits: Array = self.weight @ vector + self.bias
        return logits
