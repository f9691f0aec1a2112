"""How many of a word's ten nearest remain in fp16 and int8, of vectors in a file.

python -m benchmarks.word_precisions FILE WORK [--words 1000]

FILE is word2vec's or GloVe's, such as glove.6B.50d.txt. Columns of zeros make its width a multiple of 32,
which int8 needs; they change no neighbour. The words asked for lie evenly among the first 50,000,
which in such files are the most frequent ones. Writes results/word_precisions.json.
"""

from __future__ import annotations

import argparse
import statistics
from itertools import islice
from pathlib import Path

import numpy as np

from planforge.exporter import export
from planforge.models import save_word_vectors
from planforge.models.vector_files import read_vector_file
from planforge.runtime import WordVectors

from .common import write_result

FREQUENT = 50_000  # words, from the first
NEAREST = 10
TARGETS = {"fp32": "cpu", "fp16": "portable", "int8": "cpu"}


def list_nearest(bundle: Path, precision: str, words: list[str]) -> list[list[str]]:
    """Return the nearest words of each word, nearest first."""
    with WordVectors.load(bundle, precision=precision) as model:
        return [[near.word for near in model.neighbours(word, NEAREST)] for word in words]


def main() -> None:
    """Measure, and keep the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("work", type=Path, help="a folder for bundles, without any")
    parser.add_argument("--words", type=int, default=1000)
    options = parser.parse_args()
    found, vectors = read_vector_file(options.file)
    step = max(1, min(FREQUENT, len(found)) // options.words)
    words = list(islice(found, 0, step * options.words, step))
    checkpoint = options.work / "checkpoint"
    save_word_vectors(checkpoint, found, np.pad(vectors, ((0, 0), (0, -vectors.shape[1] % 32))))
    nearest = {}
    for precision, target in TARGETS.items():
        bundle = options.work / precision
        export(checkpoint, bundle, target=target, precision=precision)
        nearest[precision] = list_nearest(bundle, precision, words)
    result = {"file": options.file.name, "vectors": list(vectors.shape), "words": len(words)}
    for precision in ("fp16", "int8"):
        pairs = list(zip(nearest["fp32"], nearest[precision], strict=True))
        result[precision] = {
            "same_nearest": statistics.mean(wanted[0] == got[0] for wanted, got in pairs),
            "same_of_ten": statistics.mean(len({*wanted} & {*got}) / NEAREST for wanted, got in pairs),
        }
    write_result("word_precisions", result)


if __name__ == "__main__":
    main()
