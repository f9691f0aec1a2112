"""Embeds a column of a Spark data frame with a bundle; each of Spark's Python workers loads it once.

`python docs/examples/spark.py BUNDLE INPUT.parquet OUTPUT`, or `spark-submit` with the same. Every machine
needs the bundle at the same path, and `pip install 'planforge[batch,cpu]'`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import numpy as np


def make_predict(bundle: str) -> Callable[[np.ndarray], dict[str, np.ndarray]]:
    """Return the function that Spark's worker calls with each batch of texts; the worker keeps it."""
    from planforge.runtime.apps.batch import BatchWorker

    worker = BatchWorker(bundle, "embed", load_options={"threads": 1})
    width = len(worker.answer({"text": ["a"]})["embedding"][0])
    missing = np.full(width, np.nan, dtype=np.float32)

    def predict(texts: np.ndarray) -> dict[str, np.ndarray]:
        """Return (N, E) embeddings, NaN where the error says why a row has none, and N errors."""
        answers = worker.answer({"text": texts})
        vectors = [missing if vector is None else vector for vector in answers["embedding"].to_pylist()]
        return {
            "embedding": np.array(vectors, dtype=np.float32),
            "error": np.array(answers["error"].to_pylist(), dtype=object),
        }

    return predict


def main() -> None:
    """Embed the column "text" of a file."""
    from pyspark.ml.functions import predict_batch_udf
    from pyspark.sql import SparkSession
    from pyspark.sql.types import ArrayType, FloatType, StringType, StructType

    bundle, source, output = sys.argv[1:4]
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # else workers are the first python3 of the PATH
    spark = SparkSession.builder.appName("planforge").getOrCreate()
    embed = predict_batch_udf(
        lambda: make_predict(bundle),
        return_type=StructType().add("embedding", ArrayType(FloatType())).add("error", StringType()),
        batch_size=1000,
    )
    frame = spark.read.parquet(source)
    answers = frame.withColumn("answer", embed("text"))
    answers.select(*frame.columns, "answer.embedding", "answer.error").write.parquet(output)
    spark.stop()


if __name__ == "__main__":
    main()
