"""fastembed, which runs ONNX Runtime's graphs: here optimum's, and its dynamic quantization of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..alike import digest
from .optimum_onnx import OptimumOnnx
from .system import MEAN, Session, Tick


class Fastembed(OptimumOnnx):
    """fastembed with a model of a folder, in batches of 32."""

    name = "fastembed"
    packages: tuple[str, ...] = ("fastembed", *OptimumOnnx.packages)

    def embed(self, model: Path, precision: str, threads: int, settings: Mapping[str, Any]) -> Session:
        from fastembed import TextEmbedding
        from fastembed.common.model_description import ModelSource, PoolingType

        TextEmbedding.add_custom_model(
            model=str(model),
            pooling=PoolingType.MEAN,
            normalization=True,
            sources=ModelSource(hf=str(model)),
            dim=read_width(model),
            model_file="model.onnx",
        )
        return Embedder(TextEmbedding(str(model), specific_model_path=str(model), threads=threads))


class Embedder:
    """fastembed's own loop: it neither sorts texts nor lets a longer one grow beyond the model's length."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def run(self, work: Mapping[str, Any], tick: Tick) -> Any:
        import numpy as np

        return np.stack(list(self.model.embed(list(work["texts"]), batch_size=32)))

    def did(self, work: Mapping[str, Any]) -> dict[str, Any]:
        found = self.model.model.tokenizer.encode_batch(list(work["texts"]))
        tokens = sum(sum(one.attention_mask) for one in found)
        return {"texts_sha256": digest(work["texts"]), "tokens": tokens, **MEAN}


def read_width(model: Path) -> int:
    """Return the width of the vectors, by the checkpoint's settings."""
    import json

    width: int = json.loads((model / "config.json").read_text(encoding="utf-8"))["hidden_size"]
    return width


SYSTEM = Fastembed()
