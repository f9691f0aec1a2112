"""The logits of a fitted classifier, computed from an encoder's states with scikit-learn's weights.

T tokens, E hidden size, F features, C classes
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ...runtime.bundle.bundle import Bundle
from ...runtime.encode.pooling import LAYERS, combine_layers, normalize_vector, pool_tokens

HEAD = "sequence_classification"  # the role of its logits among a graph's outputs
Array: TypeAlias = npt.NDArray[Any]


@dataclass(frozen=True)
class LinearHead:
    """A classifier that was fitted to an encoder's features, as scikit-learn gave it.

    Attributes:
        features: "embedding", or a choice of hidden states, averaged over the tokens.
        weight: (C, F).
        bias: (C,).
        normalize: whether an averaged embedding gets length 1.
    """

    features: str
    weight: Array
    bias: Array
    normalize: bool

    @staticmethod
    def of(bundle: Bundle) -> LinearHead | None:
        """Return the fitted head of a bundle; None where its heads are the checkpoint's."""
        defaults = bundle.manifest.encoder
        if defaults is None or defaults.fitted is None:
            return None
        with np.load(bundle.path(defaults.fitted.file), allow_pickle=False) as file:
            return LinearHead(defaults.fitted.features, file["weight"], file["bias"], defaults.normalize)

    def logits(self, states: Sequence[Array], embedding: Array | None) -> Array:
        """Return the logits (C,) of a text.

        Args:
            states: its hidden states (T, E), from the embeddings to the last layer.
            embedding: its sentence embedding (F,), of a model that makes one.
        """
        if self.features != "embedding":
            chosen = [states[layer] for layer in LAYERS[self.features](len(states) - 1)]
            vector = pool_tokens(combine_layers(chosen, self.features), "mean")
        elif embedding is not None:
            vector = embedding
        else:
            vector = pool_tokens(states[-1], "mean")
            vector = normalize_vector(vector) if self.normalize else vector
        logits: Array = self.weight @ vector + self.bias
        return logits
