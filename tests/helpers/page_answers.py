"""What the stand-in of the server answers to the page's tasks, with any text wherever there is text."""

from __future__ import annotations

from typing import Any

from .made_explanation import make_generation

LOOKED = [[0.7, 0.2, 0.1], [0.1, 0.8, 0.1]]
VECTORS = [[1.0, 0.0, 0.1], [0.9, 0.2, 0.0], [0.0, 1.0, 0.2], [0.1, 0.9, 0.4], [0.2, 0.1, 1.0]]


def make_answers(text: str = "text", label: str = "label") -> dict[str, Any]:
    """Return an answer for each path; stretches are of the first characters of what is asked."""
    stretches = [
        {"label": label, "score": 0.98, "text": text, "start": 0, "end": 5},
        {"label": f"{label}2", "score": 0.5, "text": text, "start": 6, "end": 10},
    ]
    found = [{"text": text, "score": 0.9, "start": 4, "end": 8}]
    fills = [{"token": text, "token_id": 1, "score": 0.75}, {"token": "dawn", "token_id": 2, "score": 0.125}]
    alignment = {"source": [text, " ", "3"], "target": [text, "4"], "weights": LOOKED}
    ranked = [{"index": 1, "relevance_score": 0.875}, {"index": 0, "relevance_score": 0.25}]
    classes = {"index": 0, "label": label, "score": 0.75, "probabilities": {"other": 0.25, label: 0.75}}
    return {
        "/v1/embeddings": {"data": [{"index": i, "embedding": v} for i, v in enumerate(VECTORS)]},
        "/v1/rerank": {"results": ranked},
        "/v1/classify": {"data": [classes]},
        "/v1/tags": {"data": [{"index": 0, "entities": stretches}]},
        "/v1/answers": {"data": [{"index": 0, "answers": found, "no_answer_score": 0.1}]},
        "/v1/fill-mask": {"data": [{"index": 0, "masks": [fills, fills]}]},
        "/v1/explanations": make_generation(["In", " the", f" {text}"], [f" {label}", " and"]),
        "/v1/translations": {"data": [{"index": 0, "text": text, "score": -0.5, "alignment": alignment}]},
    }
