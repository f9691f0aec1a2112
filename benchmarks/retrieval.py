"""Documents embedded a second beside sentence-transformers: SPLADE, ColBERT, and Qwen3-Embedding's shape.

python -m benchmarks.retrieval WORK [--kinds splade,colbert,qwen3] [--rounds 5]

Weights are random, so that speed alone is measured. Texts have 24 to 256 tokens; both sides take turns, with
two threads. Writes results/retrieval.json.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from sentence_transformers import MultiVectorEncoder, SentenceTransformer, SparseEncoder
from sentence_transformers.base.modules import Dense, Normalize, Transformer
from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask
from sentence_transformers.sentence_transformer.modules import Pooling
from sentence_transformers.sparse_encoder.modules import SpladePooling

from planforge.exporter import export
from planforge.exporter.checkpoints.source import find_demo
from planforge.runtime import TextEncoder

from .common import write_result
from .machine import busy_share

THREADS = 2
DOCUMENTS = {"splade": 64, "colbert": 64, "qwen3": 16}
WORDS = Path(__file__).resolve().parents[1] / "exporter" / "calibration" / "prompts.txt"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
TARGETS = {"splade": 1.5, "colbert": 1.5, "qwen3": 2.5}
QWEN3 = {
    "vocab_size": 151_669,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 32_768,
    "tie_word_embeddings": True,
}


def write_body(folder: Path, model: Any) -> str:
    """Write a transformer with MiniLM's tokenizer, whose words all of them have."""
    model.save_pretrained(folder)
    for name in TOKENIZER_FILES:
        (folder / name).write_bytes((find_demo("bert-demo") / name).read_bytes())
    return str(folder)


def make_splade(body: Path) -> Any:
    model = transformers.DistilBertForMaskedLM(transformers.DistilBertConfig())
    transformer = Transformer(write_body(body, model), transformer_task="fill-mask")
    return SparseEncoder(modules=[transformer, SpladePooling("max")], device="cpu")


def make_colbert(body: Path) -> Any:
    model = transformers.DistilBertModel(transformers.DistilBertConfig())
    names = {"module_input_name": "token_embeddings"}
    modules = [
        Transformer(write_body(body, model), document_length=256),
        Dense(768, 128, bias=False, activation_function=torch.nn.Identity(), **names),  # type: ignore[arg-type]
        Normalize(**names),
        MultiVectorMask(),
    ]
    return MultiVectorEncoder(modules=modules, device="cpu")


def make_qwen3(body: Path) -> Any:
    settings: dict[str, Any] = QWEN3
    model = transformers.Qwen3Model(transformers.Qwen3Config(**settings))
    modules = [Transformer(write_body(body, model)), Pooling(1024, pooling_mode="lasttoken"), Normalize()]
    return SentenceTransformer(modules=modules, device="cpu")


MAKERS: dict[str, Callable[[Path], Any]] = {
    "splade": make_splade,
    "colbert": make_colbert,
    "qwen3": make_qwen3,
}
OPENERS: dict[str, Callable[..., Any]] = {
    "splade": SparseEncoder,
    "colbert": MultiVectorEncoder,
    "qwen3": SentenceTransformer,
}
PRECISIONS = {"splade": ["fp32", "int8"], "colbert": ["fp32", "int8"], "qwen3": ["int8"]}
METHODS = {"splade": "embed_sparse", "colbert": "embed_multi", "qwen3": "embed"}


def make_documents(count: int) -> list[str]:
    """Return texts of words of the texts that exports are verified with."""
    words = WORDS.read_text(encoding="utf-8").split()
    random = np.random.default_rng(0)
    return [" ".join(random.choice(words, size)) for size in random.integers(20, 180, count)]


def make_bundle(kind: str, work: Path) -> tuple[Path, Path]:
    """Return a kind's folder and bundle, which are made where they are not there."""
    folder = work / kind
    bundle = work / f"{kind}-bundle"
    if not folder.exists():
        torch.manual_seed(0)
        MAKERS[kind](work / f"{kind}-body").save_pretrained(str(folder))
    if not bundle.exists():
        export(folder, bundle, target=["cpu"], precision=PRECISIONS[kind], verify=False, max_length=512)
    return folder, bundle


def time_calls(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return the median seconds of each call; they take turns, and the first round is warm-up."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(found[1:]) for name, found in times.items()}


def measure(kind: str, work: Path, rounds: int) -> dict[str, Any]:
    """Return the documents a second of both sides, and how many times the other's ours are."""
    folder, bundle = make_bundle(kind, work)
    documents = make_documents(DOCUMENTS[kind])
    theirs = OPENERS[kind](str(folder), device="cpu")
    encode = theirs.encode if kind == "qwen3" else theirs.encode_document
    calls: dict[str, Callable[[], object]] = {"sentence-transformers": lambda: encode(documents)}
    opened = {one: TextEncoder.load(bundle, precision=one, threads=THREADS) for one in PRECISIONS[kind]}
    for precision, model in opened.items():
        calls[precision] = partial(getattr(model, METHODS[kind]), documents)
    seconds = time_calls(calls, rounds)
    for model in opened.values():
        model.close()
    found: dict[str, Any] = {
        "documents_per_s": {name: round(len(documents) / taken, 2) for name, taken in seconds.items()},
        "times_sentence_transformers": {
            name: round(seconds["sentence-transformers"] / seconds[name], 2) for name in opened
        },
        "target": TARGETS[kind],
    }
    return found


def main() -> None:
    """Measure, and keep the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--kinds", default=",".join(MAKERS))
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(THREADS)
    busy = busy_share(2.0)
    kinds = arguments.kinds.split(",")
    found = {kind: measure(kind, arguments.work, arguments.rounds) for kind in kinds}
    write_result("retrieval", {"threads": THREADS, "busy": busy, "kinds": found})


if __name__ == "__main__":
    main()
