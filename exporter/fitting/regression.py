"""Fits scikit-learn's LogisticRegression to features, and measures it on rows that it was not fitted to.

N rows, F features, C classes
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...runtime.backends.backend import Array
from ...runtime.errors import InputError

FOLDS = 5
STRENGTHS = (0.001, 0.01, 0.1, 1.0, 10.0, 100.0)  # C: larger is less regularized


@dataclass(frozen=True)
class Fitted:
    """The classifier that scikit-learn fitted: decision = weight @ features + bias."""

    labels: tuple[str, ...]
    weight: Array  # (C, F)
    bias: Array  # (C,)
    C: float
    train: Array
    test: Array
    predicted: Array  # of the held-out texts, indices of labels
    margins: Array  # by how much each was preferred to the next best
    accuracy: float
    confusion: Array


def check_counts(named: Sequence[str], test_share: float) -> None:
    """Refuse labels that are too few to train with, and to measure."""
    needed = int(np.ceil(FOLDS / (1 - test_share))) + 1
    counts = Counter(named)
    for label, count in sorted(counts.items()):
        if count < needed:
            rows = "1 row" if count == 1 else f"{count} rows"
            raise InputError(f"the class {label!r} has {rows}; at least {needed} are needed")
    if len(named) * test_share < len(counts):
        raise InputError(f"test_share={test_share} of {len(named)} rows is less than one row per class")


def fit(matrix: Array, named: Sequence[str], groups: Array | None, test_share: float, seed: int) -> Fitted:
    """Split, choose C by cross-validation inside the training part, fit, and measure on the rest."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import confusion_matrix
    from sklearn.model_selection import GridSearchCV

    labels = tuple(sorted(set(named)))
    y = np.array([labels.index(label) for label in named])
    check_counts(named, test_share)
    train, test, folds = split(y, groups, test_share, seed)
    if lacking := set(range(len(labels))) - set(y[train].tolist()):
        raise InputError(
            f"no text that is trained on has the label {labels[lacking.pop()]!r}; give more texts"
        )
    search = GridSearchCV(LogisticRegression(max_iter=2000), {"C": STRENGTHS}, cv=folds)
    search.fit(matrix[train], y[train])
    model = search.best_estimator_
    weight = model.coef_.astype(np.float32)
    bias = model.intercept_.astype(np.float32)
    if len(labels) == 2:  # scikit-learn keeps one row: the second class against the first
        weight = np.concatenate([np.zeros_like(weight), weight])
        bias = np.concatenate([np.zeros_like(bias), bias])
    predicted = model.predict(matrix[test])
    best = np.sort(matrix[test] @ weight.T + bias, axis=1)[:, -2:]
    return Fitted(
        labels=labels,
        weight=weight,
        bias=bias,
        C=float(search.best_params_["C"]),
        train=train,
        test=test,
        predicted=predicted,
        margins=best[:, 1] - best[:, 0],
        accuracy=float((predicted == y[test]).mean()),
        confusion=confusion_matrix(y[test], predicted, labels=range(len(labels))),
    )


def split(
    y: Array, groups: Array | None, test_share: float, seed: int
) -> tuple[Array, Array, list[tuple[Array, Array]]]:
    """Return the rows to train on, those to measure on, and the folds of the former.

    Rows of a group, such as words of a text, stay together.
    """
    from sklearn.model_selection import (
        GroupShuffleSplit,
        StratifiedGroupKFold,
        StratifiedKFold,
        train_test_split,
    )

    every = np.arange(len(y))
    if groups is None:
        train, test = train_test_split(every, test_size=test_share, random_state=seed, stratify=y)
        folds = StratifiedKFold(FOLDS, shuffle=True, random_state=seed).split(train, y[train])
        return train, test, list(folds)
    texts = len(set(groups.tolist()))
    if texts < 2 * FOLDS:
        raise InputError(f"there are {texts} texts; a tagger needs at least {2 * FOLDS}")
    ((train, test),) = GroupShuffleSplit(1, test_size=test_share, random_state=seed).split(every, y, groups)
    kept = StratifiedGroupKFold(FOLDS, shuffle=True, random_state=seed)
    return train, test, list(kept.split(train, y[train], groups[train]))
