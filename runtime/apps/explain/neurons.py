"""Factors of the MLPs' neurons: which of them are active together, and over which tokens.

T tokens, N neurons of all layers, K factors
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import numpy as np

from ...backends.backend import Array
from ...errors import InputError

ITERATIONS = 500
STRONGEST = 8  # tokens that are named of a factor


@dataclass(frozen=True, eq=False)
class Factors:
    """Groups of neurons that are active together, by non-negative matrix factorization.

    Attributes:
        activations: (K, T) how active each group is at each token, from 0 to 1.
        layers: (K, layers) how much of each group is in each layer; rows sum to 1.
        neurons: (K, N) how much each neuron, layer by layer, belongs to each group.
        error: the norm of what the factors do not explain, as a share of the neurons' own.
    """

    activations: Array
    layers: Array
    neurons: Array
    error: float

    def list_strongest(self) -> list[list[int]]:
        """Return the tokens at which each factor is strongest."""
        ranked = np.argsort(-self.activations, axis=1, kind="stable")[:, :STRONGEST]
        return [[int(t) for t in row if self.activations[k, t] > 0] for k, row in enumerate(ranked)]


def factorize(activations: list[Array], count: int) -> Factors:
    """Return the factors of each layer's neurons (T, M): of what is above 0, as Ecco does.

    Raises:
        InputError: scikit-learn is missing, or there are fewer tokens than factors.
    """
    try:
        from sklearn.decomposition import NMF
        from sklearn.exceptions import ConvergenceWarning
    except ImportError as error:
        raise InputError(
            "the method neurons needs scikit-learn: pip install 'planforge[explain]'", option="methods"
        ) from error
    tokens = len(activations[0])
    if not 1 <= count <= tokens:
        raise InputError(f"factors={count} must be from 1 to the text's {tokens} tokens", option="factors")
    matrix = np.maximum(np.concatenate(activations, axis=1), 0).T  # (N, T)
    model = NMF(n_components=count, init="nndsvda", max_iter=ITERATIONS, random_state=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # what is left changes by less than one sees
        neurons = model.fit_transform(matrix)  # (N, K)
    parts = model.components_  # (K, T)
    sizes = parts.max(axis=1, keepdims=True)
    sizes[sizes == 0] = 1
    ends = np.cumsum([layer.shape[1] for layer in activations])[:-1]
    by_layer = np.stack([part.sum(0) for part in np.split(neurons, ends)], axis=1)  # (K, layers)
    totals = by_layer.sum(1, keepdims=True)
    totals[totals == 0] = 1
    missed = float(model.reconstruction_err_ / max(float(np.linalg.norm(matrix)), 1e-12))
    return Factors(parts / sizes, by_layer / totals, (neurons * sizes.T).T, missed)
