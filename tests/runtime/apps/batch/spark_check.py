"""Runs docs/examples/spark.py in Spark, and compares its vectors with the model's; `make spark` does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from planforge.runtime import TextEncoder

ROOT = Path(__file__).parents[4]
TEXTS = [f"wings lift the plane {number} times" for number in range(300)]


def main() -> None:
    bundle, folder = sys.argv[1], Path(sys.argv[2])
    rows = {"key": list(range(302)), "text": [*TEXTS, None, "y" * 1_000_000]}
    pq.write_table(pa.table(rows), folder / "in.parquet")
    example = ROOT / "docs/examples/spark.py"
    command = [sys.executable, example, bundle, folder / "in.parquet", folder / "out"]
    subprocess.run([str(part) for part in command], check=True)
    table = pq.read_table(folder / "out").sort_by("key")
    assert table["key"].to_pylist() == rows["key"]
    errors = table["error"].to_pylist()
    assert errors[:300] == [None] * 300 and errors[300] == "text is missing"
    assert errors[301].startswith("text has 1,000,000 bytes")
    with TextEncoder.load(bundle, threads=1) as model:
        wanted = model.embed(TEXTS)
    np.testing.assert_allclose(np.array(table["embedding"].to_pylist()[:300]), wanted, atol=1e-5)
    print("302 rows, each in its place: 300 vectors are the model's, 2 rows have errors")


if __name__ == "__main__":
    main()
