"""Whether int8 and int4 rank documents as fp32 does: MiniLM, and a SPLADE and a ColBERT trained from it.

python -m benchmarks.train_retrieval WORK --kinds splade,colbert
python -m benchmarks.retrieval_ranking WORK [--kinds minilm,splade,colbert] [--precisions fp32,int8,int4]

Documents are verses of the King James Bible, queries words of held-out ones. fp32 is compared with
sentence-transformers, the others with fp32. A precision that the export refuses is measured without
verification. Writes results/retrieval_ranking.json; kinds and precisions that are not chosen keep their last
results.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.stats import kendalltau
from sentence_transformers import MultiVectorEncoder, SentenceTransformer, SparseEncoder

from planforge.exporter import export
from planforge.exporter.checkpoints.source import find_demo
from planforge.exporter.errors import VerificationError
from planforge.runtime import TextEncoder

from .common import RESULTS, write_result
from .verses import Corpus, make_corpus, measure_recall, rank_documents

RESULT = "retrieval_ranking"
TOP = 10
TARGET = 0.98  # of int8's agreement
DOCUMENTS = 3_000  # all verses of the held-out books, and some others
QUERIES = 300
OPENERS: dict[str, Any] = {
    "minilm": SentenceTransformer,
    "splade": SparseEncoder,
    "colbert": MultiVectorEncoder,
}
ROWS = ("sentence-transformers", "fp32", "int8", "int4")
FIGURES = ("agreement", "tau", "recall")
METHODS = {"minilm": "embed", "splade": "embed_sparse", "colbert": "embed_multi"}

Scores = npt.NDArray[np.float32]  # (queries, documents)


def find_folder(kind: str, work: Path) -> Path:
    return find_demo("bert-demo") if kind == "minilm" else work / kind


def score_by_sentence_transformers(kind: str, work: Path, corpus: Corpus) -> Scores:
    """Return the scores of sentence-transformers."""
    model = OPENERS[kind](str(find_folder(kind, work)), device="cpu")
    scores: Scores = model.similarity(
        model.encode_query(corpus.queries), model.encode_document(corpus.texts)
    ).numpy()
    return scores


def score_by_bundle(kind: str, bundle: Path, corpus: Corpus) -> Scores:
    """Return the scores of a bundle of one precision."""
    with TextEncoder.load(bundle, backend="ort-cpu") as model:
        embed = getattr(model, METHODS[kind])
        queries = embed(corpus.queries, input_type="query")
        return model.similarity(queries, embed(corpus.texts, input_type="document"))


def make_bundle(folder: Path, bundle: Path, precision: str) -> dict[str, str]:
    """Export in one precision; return the figures that refused it, and then export without verification."""
    shutil.rmtree(bundle, ignore_errors=True)
    try:
        export(folder, bundle, target=["cpu"], precision=[precision])
    except VerificationError as error:
        export(folder, bundle, target=["cpu"], precision=[precision], verify=False)
        return list_refusals(str(error))
    return {}


def list_refusals(message: str) -> dict[str, str]:
    """Return the figures of an export's error by their names: the worst of each, and what is allowed."""
    worst: dict[str, tuple[float, str]] = {}
    for name, value, limit in re.findall(r"([\w.]+) is (\S+), at most (\S+) is allowed", message):
        worst[name] = max(worst.get(name, (0.0, "")), (float(value), f"{value}, at most {limit}"))
    return {name: told for name, (_, told) in worst.items()}


def compare(scores: Scores, wanted: Scores, corpus: Corpus) -> dict[str, float]:
    """Return how far two rankings agree, and how often the first one finds a query's own verse.

    `agreement` is the mean share of common documents among the first ten of both. `tau` is Kendall's, over
    the documents that are among the first ten of either.
    """
    best = rank_documents(scores, TOP)
    others = rank_documents(wanted, TOP)
    agreements = []
    taus = []
    for query, (own, other) in enumerate(zip(best, others, strict=True)):
        union = np.union1d(own, other)
        agreements.append((2 * TOP - len(union)) / TOP)
        taus.append(kendalltau(scores[query, union], wanted[query, union]).statistic)
    return {
        "agreement": round(float(np.mean(agreements)), 4),
        "tau": round(float(np.mean(taus)), 4),
        "recall": round(measure_recall(best, corpus.wanted), 4),
    }


def measure(kind: str, precisions: list[str], work: Path, corpus: Corpus) -> dict[str, Any]:
    """Return how far each precision agrees with fp32, and fp32 with sentence-transformers."""
    theirs = score_by_sentence_transformers(kind, work, corpus)
    best = rank_documents(theirs, TOP)
    found: dict[str, Any] = {
        "sentence-transformers": {"recall": round(measure_recall(best, corpus.wanted), 4)}
    }
    wanted = theirs
    for precision in precisions:
        bundle = work / f"{kind}-{precision}"
        refused = make_bundle(find_folder(kind, work), bundle, precision)
        scores = score_by_bundle(kind, bundle, corpus)
        found[precision] = compare(scores, wanted, corpus)
        found[precision] |= {"refused": refused} if refused else {}
        if precision == "fp32":
            wanted = scores
        print(kind, precision, found[precision], flush=True)
    return found


def make_table(result: dict[str, Any]) -> str:
    """Return the documentation's table: for each model and precision how far its ranking agrees."""
    lines = ["| Model | | Top 10 in common | Kendall's tau | Recall@10 |", "|---|---|--:|--:|--:|"]
    for kind, found in result["kinds"].items():
        for precision, figures in found.items():
            name = f"{precision}, refused" if "refused" in figures else precision
            cells = [f"{figures[one]:.3f}" if one in figures else "" for one in FIGURES]
            lines.append(f"| {kind} | {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def read_kinds() -> dict[str, Any]:
    """Return the recorded results by their kinds."""
    path = RESULTS / f"{RESULT}.json"
    kinds: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["kinds"] if path.exists() else {}
    return kinds


def main() -> None:
    """Measure, and keep the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("work", type=Path, help="where benchmarks.train_retrieval wrote its folders")
    parser.add_argument("--kinds", default=",".join(OPENERS))
    parser.add_argument("--precisions", default="fp32,int8,int4", help="fp32 first")
    arguments = parser.parse_args()
    corpus = make_corpus(DOCUMENTS, QUERIES)
    kinds = read_kinds()
    for kind in arguments.kinds.split(","):
        found = measure(kind, arguments.precisions.split(","), arguments.work, corpus)
        merged = kinds.get(kind, {}) | found
        kinds[kind] = {row: merged[row] for row in ROWS if row in merged}
    size = {"documents": len(corpus.documents), "queries": len(corpus.queries), "top": TOP}
    ordered = {kind: kinds[kind] for kind in OPENERS if kind in kinds}
    write_result(RESULT, {**size, "target": TARGET, "kinds": ordered})


if __name__ == "__main__":
    main()
