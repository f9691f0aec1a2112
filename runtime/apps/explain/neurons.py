"""Groups of the MLPs' neurons: which of them are active together, and over which tokens.

T tokens, L layers, N neurons of all layers or of one, K groups, F neurons of a chart
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ...backends.backend import Array
from ...errors import InputError

if TYPE_CHECKING:
    from .options import ResolvedOptions

ITERATIONS = 500
STARTS = 4  # of k-means, of which the best is kept
STRONGEST = 8  # tokens that are named of a group
CHARTED = 400  # neurons of a chart
GROUPINGS = ("nmf", "kmeans")


@dataclass(frozen=True, eq=False)
class Factors:
    """Groups of neurons that are active together, by non-negative matrix factorization or by k-means.

    Attributes:
        activations: (K, T) how active each group is at each token, from 0 to 1.
        layers: (K, L) how much of each group is in each layer; rows sum to 1.
        neurons: (K, N) how much each neuron, layer by layer, belongs to each group. By k-means it belongs to
            one alone.
        error: the norm of what the groups do not explain, as a share of the neurons' own.
        firing: (F, T) how active the most active neurons are at each token, by group.
        groups: (F,) the group that each of these neurons belongs to most.
    """

    activations: Array
    layers: Array
    neurons: Array
    error: float
    firing: Array
    groups: Array

    def list_strongest(self) -> list[list[int]]:
        """Return the tokens at which each factor is strongest."""
        ranked = np.argsort(-self.activations, axis=1, kind="stable")[:, :STRONGEST]
        return [[int(t) for t in row if self.activations[k, t] > 0] for k, row in enumerate(ranked)]


def group_neurons(activations: Sequence[Array], choices: ResolvedOptions) -> Factors:
    """Return groups of each layer's neurons (T, M), or of one layer's: of what is above 0, as Ecco does.

    Raises:
        InputError: scikit-learn is missing, there is no such layer, or there are fewer tokens than groups.
    """
    count = choices.factors
    tokens = len(activations[0])
    if not 1 <= count <= tokens:
        raise InputError(f"factors={count} must be from 1 to the text's {tokens} tokens", option="factors")
    if count > (width := activations[0].shape[1]):
        raise InputError(f"factors={count} must be from 1 to a layer's {width} neurons", option="factors")
    total = len(activations)
    if choices.layer is not None and not 1 <= choices.layer <= total:
        raise InputError(f"layer={choices.layer} must be from 1 to the model's {total}", option="layer")
    chosen = range(total) if choices.layer is None else [choices.layer - 1]
    parts = [np.maximum(activations[layer], 0) for layer in chosen]
    matrix = np.concatenate(parts, axis=1).T  # (N, T)
    try:
        neurons, rows = (cluster if choices.grouping == "kmeans" else factorize)(matrix, count)
    except ImportError as error:
        raise InputError(
            "the method neurons needs scikit-learn: pip install 'planforge[explain]'", option="methods"
        ) from error
    sizes = rows.max(axis=1, keepdims=True)
    sizes[sizes == 0] = 1
    ends = np.cumsum([part.shape[1] for part in parts])[:-1]
    by_layer = np.zeros((count, total))
    by_layer[:, list(chosen)] = np.stack([part.sum(0) for part in np.split(neurons, ends)], axis=1)
    totals = by_layer.sum(1, keepdims=True)
    totals[totals == 0] = 1
    missed = np.linalg.norm(matrix - neurons @ rows) / max(float(np.linalg.norm(matrix)), 1e-12)
    strengths = (neurons * sizes.T).T  # (K, N)
    charted = order_by_group(matrix, strengths)
    return Factors(
        activations=rows / sizes,
        layers=by_layer / totals,
        neurons=strengths,
        error=float(missed),
        firing=matrix[charted],
        groups=strengths[:, charted].argmax(axis=0),
    )


def factorize(matrix: Array, count: int) -> tuple[Array, Array]:
    """Return how much each neuron (N, K) is of each factor, and the factors (K, T) of (N, T)."""
    from sklearn.decomposition import NMF
    from sklearn.exceptions import ConvergenceWarning

    model = NMF(n_components=count, init="nndsvda", max_iter=ITERATIONS, random_state=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # what is left changes by less than one sees
        return model.fit_transform(matrix), model.components_


def cluster(matrix: Array, count: int) -> tuple[Array, Array]:
    """Return each neuron's cluster, as a row (N, K) with a single 1, and the clusters' means (K, T)."""
    from sklearn.cluster import KMeans
    from sklearn.exceptions import ConvergenceWarning

    model = KMeans(n_clusters=count, n_init=STARTS, max_iter=ITERATIONS, random_state=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # fewer neurons differ than there are groups
        labels = model.fit_predict(matrix)
    return np.eye(count, dtype=matrix.dtype)[labels], model.cluster_centers_


def order_by_group(matrix: Array, strengths: Array) -> Array:
    """Return the numbers of the most active neurons (F,), by group and in their order there."""
    most = np.argsort(-matrix.max(axis=1), kind="stable")[:CHARTED]
    active = np.sort(most)
    order: Array = active[np.argsort(strengths[:, active].argmax(axis=0), kind="stable")]
    return order
