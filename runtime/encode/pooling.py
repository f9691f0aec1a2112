"""From hidden states to features: which layers, and how tokens become one vector; logits to probabilities.

T tokens, E hidden size, F = E or 4 E
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from ..backends.backend import Array

# BERT's paper, table 7: what a frozen encoder gives to a model on top of it. L layers, 0 the embeddings.
LAYERS: Mapping[str, Callable[[int], list[int]]] = {
    "embeddings": lambda L: [0],
    "second_to_last": lambda L: [L - 1],
    "last": lambda L: [L],
    "sum_last_four": lambda L: [*range(L - 3, L + 1)],
    "concat_last_four": lambda L: [*range(L - 3, L + 1)],
    "sum_all": lambda L: [*range(1, L + 1)],
}
POOLINGS = ("cls", "mean", "max", "lasttoken")


def combine_layers(states: Sequence[Array], layers: str) -> Array:
    """Return the features (T, F) for the states (T, E) of the layers that `LAYERS` names."""
    if layers == "concat_last_four":
        return np.concatenate(states, axis=-1)
    return np.add.reduce(np.stack(states))  # type: ignore[no-any-return]


def pool_tokens(states: Array, pooling: str) -> Array:
    """Return one vector (E,) for a text's states (T, E), by one of `POOLINGS`."""
    vector: Array
    match pooling:
        case "cls":
            vector = states[0]
        case "lasttoken":
            vector = states[-1]
        case "max":
            vector = states.max(0)
        case _:
            vector = states.mean(0)
    return vector


def merge_windows(vectors: Sequence[Array], lengths: Sequence[int], pooling: str) -> Array:
    """Return one vector (E,) for those of several windows: their maximum, or their mean by token count."""
    if len(vectors) == 1:
        return vectors[0]
    vector: Array = (
        np.max(vectors, axis=0) if pooling == "max" else np.average(vectors, axis=0, weights=lengths)
    )
    return vector.astype(np.float32)


def normalize_vector(vector: Array) -> Array:
    """Return the vector, or each along the last axis, scaled to length 1; a zero vector stays."""
    scaled: Array = vector / np.maximum(np.linalg.norm(vector, axis=-1, keepdims=True), 1e-12)
    return scaled


def share_classes(logits: Array, problem_type: str | None) -> Array | None:
    """Return the probabilities (..., C) of a text's classes for logits (..., C); None of a regression."""
    if problem_type == "regression":
        return None
    multi = problem_type == "multi_label_classification" or logits.shape[-1] == 1  # no softmax of one
    return (sigmoid if multi else softmax)(logits)


def softmax(logits: Array) -> Array:
    """Return probabilities along the last axis."""
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    shares: Array = powers / powers.sum(-1, keepdims=True)
    return shares


def sigmoid(logits: Array) -> Array:
    """Return the probability of each logit by itself."""
    shares: Array = 0.5 * (1.0 + np.tanh(0.5 * logits))  # never overflows
    return shares
