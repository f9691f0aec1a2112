"""Encoders beside their peers: all-MiniLM-L6-v2 on real sentences, BERT base on a batch of mixed lengths.

python -m benchmarks.encode --optimum-python PYTHON [--work FOLDER]

PYTHON is of an environment of its own:
pip install torch==2.13.0 'optimum-onnx[onnxruntime]' 'transformers<4.58'
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np

from planforge.exporter import export
from planforge.exporter.source import resolve_source

from .common import Peer, bert_base, write_result
from .movie_reviews import movie_reviews

SENTENCES, ROUNDS, THREADS = 2000, 5, 2
LENGTHS = (8, 25, 42, 59, 76, 94, 111, 128)  # tokens of the batch of eight, special ones included

# Every peer makes one mean-pooled, normalized vector of each text in a JSON file, and writes them to a file.
SAVE = """
import numpy as np
def save(vectors):
    np.save(sys.argv[3], np.asarray(vectors, np.float32))
    return len(vectors)
"""
PLANFORGE = f"""
import json, sys
from planforge.runtime import load
{SAVE}
model, texts = load(sys.argv[1], threads={THREADS}), json.load(open(sys.argv[2]))
def run():
    return save(model.embed(texts, normalize=True))
"""
SENTENCE_TRANSFORMERS = f"""
import json, sys
import torch
from sentence_transformers import SentenceTransformer
{SAVE}
torch.set_num_threads({THREADS})
model, texts = SentenceTransformer(sys.argv[1], device="cpu"), json.load(open(sys.argv[2]))
def run():
    return save(model.encode(texts, batch_size=32, normalize_embeddings=True))
"""
# What its users write: batches of BATCH, sorted by length where there are many, padded to the longest.
OPTIMUM = f"""
import json, sys
import onnxruntime, torch
from optimum.onnxruntime import ORTModelForFeatureExtraction
from transformers import AutoTokenizer
{SAVE}
torch.set_num_threads({THREADS})
options = onnxruntime.SessionOptions()
options.intra_op_num_threads = {THREADS}
model = ORTModelForFeatureExtraction.from_pretrained(sys.argv[1], export=True, session_options=options)
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
texts, batch = json.load(open(sys.argv[2])), int(sys.argv[4])
def run():
    order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
    vectors = [None] * len(texts)
    for start in range(0, len(order), batch):
        chosen = order[start : start + batch]
        inputs = tokenizer([texts[i] for i in chosen], padding=True, truncation=True, max_length=256,
                           return_tensors="pt")
        states = model(**inputs).last_hidden_state
        mask = inputs["attention_mask"][..., None].float()
        pooled = torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1))
        for i, vector in zip(chosen, pooled.numpy()):
            vectors[i] = vector
    return save(vectors)
"""


def side_by_side(peers: dict[str, Peer], vectors: dict[str, Path], texts: int) -> dict[str, Any]:
    """Alternates the systems; ratios of medians, and each one's smallest cosine to PlanForge's vectors."""
    seconds: dict[str, list[float]] = {name: [] for name in peers}
    for _ in range(ROUNDS):
        for name, peer in peers.items():
            seconds[name].append(peer.run()["seconds"])
    for peer in peers.values():
        peer.close()
    medians = {name: statistics.median(found) for name, found in seconds.items()}
    ours = np.load(vectors["planforge"])
    return {
        "systems": {
            name: {
                "texts_per_s_median": round(texts / medians[name], 1),
                "seconds": [round(value, 4) for value in found],
                "planforge_is_faster_by": round(medians[name] / medians["planforge"], 3),
                "smallest_cosine_to_planforge": float((np.load(vectors[name]) * ours).sum(1).min()),
                "versions": peers[name].versions,
            }
            for name, found in seconds.items()
        }
    }


def minilm(work: Path, optimum: Path) -> dict[str, Any]:
    """2,000 sentences of movie reviews through all-MiniLM-L6-v2 in fp32."""
    texts = [text for text, _ in movie_reviews(work)][:SENTENCES]
    source = resolve_source("bert-demo").folder
    return compared(work, "minilm", source, texts, optimum, batch=32, sentence_transformers=True)


def mixed_lengths(work: Path, optimum: Path) -> dict[str, Any]:
    """Eight texts of 8 to 128 tokens through BERT base; the peer pads them to the longest."""
    source = bert_base(work / "bert-base")
    vocabulary = (source / "vocab.txt").read_text(encoding="utf-8").split("\n")
    words = [w for w in vocabulary if w.isascii() and w.isalpha() and len(w) > 4]
    texts = [" ".join(words[i * 200 : i * 200 + n - 2]) for i, n in enumerate(LENGTHS)]
    result = compared(work, "bert-base", source, texts, optimum, batch=8, sentence_transformers=False)
    return {"tokens": LENGTHS, **result}


def compared(
    work: Path,
    name: str,
    source: Path,
    texts: list[str],
    optimum: Path,
    batch: int,
    sentence_transformers: bool,
) -> dict[str, Any]:
    """Exports a checkpoint, starts every system on the same texts, and lets them take turns."""
    bundle, texts_file = work / f"{name}-bundle", work / f"{name}.json"
    export(source, bundle, precision=["fp32"], target=["cpu"], force=True)
    texts_file.write_text(json.dumps(texts), encoding="utf-8")
    vectors = {n: work / f"{name}.{n}.npy" for n in ("planforge", "optimum-onnx", "sentence-transformers")}
    peers = {"planforge": Peer(sys.executable, PLANFORGE, bundle, texts_file, vectors["planforge"])}
    if sentence_transformers:
        peers["sentence-transformers"] = Peer(
            sys.executable, SENTENCE_TRANSFORMERS, source, texts_file, vectors["sentence-transformers"]
        )
    peers["optimum-onnx"] = Peer(optimum, OPTIMUM, source, texts_file, vectors["optimum-onnx"], batch)
    return side_by_side(peers, vectors, len(texts))


def main() -> None:
    """Writes results/encode.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--optimum-python", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("build/benchmarks"))
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    work, optimum = arguments.work, arguments.optimum_python
    write_result(
        "encode",
        {
            "work": {"threads": THREADS, "precision": "fp32", "rounds": ROUNDS},
            "all-MiniLM-L6-v2, 2,000 sentences": minilm(work, optimum),
            "BERT base, 8 texts of mixed lengths": mixed_lengths(work, optimum),
        },
    )


if __name__ == "__main__":
    main()
