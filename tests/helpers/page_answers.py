"""What the stand-in of the server answers to the page's tasks, with any text wherever there is text."""

from __future__ import annotations

import base64
import io
from typing import Any

import PIL.Image

from .made_explanation import make_generation

LOOKED = [[0.7, 0.2, 0.1], [0.1, 0.8, 0.1]]
VECTORS = [[1.0, 0.0, 0.1], [0.9, 0.2, 0.0], [0.0, 1.0, 0.2], [0.1, 0.9, 0.4], [0.2, 0.1, 1.0]]


def make_picture_events(steps: int = 2) -> list[dict[str, Any]]:
    """Return the events of a picture of 8 x 8: each step, one picture on the way, and the last."""
    file = io.BytesIO()
    PIL.Image.new("RGB", (8, 8), "orange").save(file, "PNG")
    data = base64.b64encode(file.getvalue()).decode()
    picture = {"index": 0, "b64_json": data, "size": "8x8", "output_format": "png"}
    name = "image_generation"
    events: list[dict[str, Any]] = [
        {"type": f"{name}.step", "step": step, "steps": steps, "seconds_left": float(steps - step)}
        for step in range(1, steps + 1)
    ]
    events.insert(1, {"type": f"{name}.partial_image", "partial_image_index": 0, **picture})
    return [*events, {"type": f"{name}.completed", "seed": 7, "dropped": 0, **picture}]


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
        "/v1/images/generations": make_picture_events(),
        "/v1/translations": {"data": [{"index": 0, "text": text, "score": -0.5, "alignment": alignment}]},
    }
