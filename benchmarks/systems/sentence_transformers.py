"""sentence-transformers on PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..alike import digest
from .system import MEAN, Session, System, Tick


class SentenceTransformers(System):
    """sentence-transformers with its own encode(), which sorts by length, in batches of 32, its default."""

    name = "sentence-transformers"
    packages = ("sentence-transformers", "torch")

    def embed(self, model: Path, precision: str, threads: int, settings: Mapping[str, Any]) -> Session:
        import torch
        from sentence_transformers import SentenceTransformer

        torch.set_num_threads(threads)
        return Embedder(SentenceTransformer(str(model), device="cpu"))


class Embedder:
    """An embedder by the checkpoint's own modules; the suite's checkpoints take the mean."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def run(self, work: Mapping[str, Any], tick: Tick) -> Any:
        return self.model.encode(
            work["texts"], batch_size=32, normalize_embeddings=True, show_progress_bar=False
        )

    def did(self, work: Mapping[str, Any]) -> dict[str, Any]:
        most = self.model.max_seq_length
        found = self.model.tokenizer(work["texts"], truncation=True, max_length=most)
        counts = [len(ids) for ids in found["input_ids"]]
        return {"texts_sha256": digest(work["texts"]), "tokens": sum(counts), **MEAN}


SYSTEM = SentenceTransformers()
