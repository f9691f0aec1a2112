"""Classifies movie reviews on frozen features, and compares with scikit-learn on other vectors.

python -m benchmarks.classify [--work FOLDER]
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np

from planforge.exporter import export, fit_head
from planforge.exporter.checkpoints.source import resolve_source
from planforge.exporter.fitting.regression import FOLDS, STRENGTHS

from .common import write_result
from .movie_reviews import movie_reviews, write_table


def with_planforge(bundle: Path, table: Path, out: Path, features: str) -> dict[str, Any]:
    """Measure fit-head, which also compares the graph with scikit-learn on every held-out sentence."""
    started = time.perf_counter()
    result = fit_head(bundle, table, out, features=features, force=True)
    return {
        "accuracy": round(result.accuracy, 4),
        "held_out": sum(map(sum, result.confusion)),
        "training": result.training,
        "C": result.C,
        "seconds": round(time.perf_counter() - started, 1),
    }


def with_sentence_transformers(work: Path) -> dict[str, Any]:
    """Measure the same split, folds and choices of C on sentence-transformers' vectors."""
    from sentence_transformers import SentenceTransformer
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import GridSearchCV, StratifiedKFold, train_test_split

    rows = movie_reviews(work)
    labels = np.array([label for _, label in rows])
    model = SentenceTransformer(str(resolve_source("bert-demo").folder), device="cpu")
    matrix = model.encode([text for text, _ in rows], batch_size=32, show_progress_bar=False)
    train, test = train_test_split(np.arange(len(rows)), test_size=0.25, random_state=0, stratify=labels)
    folds = StratifiedKFold(FOLDS, shuffle=True, random_state=0)
    search = GridSearchCV(LogisticRegression(max_iter=2000), {"C": STRENGTHS}, cv=folds)
    search.fit(matrix[train], labels[train])
    return {"accuracy": round(float(search.score(matrix[test], labels[test])), 4), **search.best_params_}


def main() -> None:
    """Write results/classify_movie_reviews.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=Path("build/benchmarks"))
    work: Path = parser.parse_args().work
    work.mkdir(parents=True, exist_ok=True)
    bundle = work / "minilm-hidden"
    table = write_table(work)
    export("bert-demo", bundle, precision=["fp32"], target=["cpu"], outputs=["hidden_states"], force=True)
    result = {
        features: with_planforge(bundle, table, work / f"fitted-{features}", features)
        for features in ("embedding", "concat_last_four")
    }
    result["scikit-learn on sentence-transformers' vectors"] = with_sentence_transformers(work)
    write_result("classify_movie_reviews", result)


if __name__ == "__main__":
    main()
