"""What export, verification, lint and import cost: seconds and memory.

python -m benchmarks.cost [--work FOLDER]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from .checkpoints import gpt2
from .common import measured, write_result

IMPORT = """
import resource, time
start = time.perf_counter()
import planforge.runtime
print(time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3)
"""


def export_cost(work: Path) -> dict[str, Any]:
    """`planforge export` of GPT-2 124M: fp32 and fp16 ONNX, a plan for six architectures, verified."""
    checkpoint, bundle = gpt2(work / "gpt2-124m" / "checkpoint"), work / "bundle"
    planforge = Path(sys.executable).with_name("planforge")
    cost = measured([planforge, "export", checkpoint, "-o", bundle, "--force", "--json"])
    sizes = {path.name.split("-")[0]: path.stat().st_size for path in bundle.rglob("*") if path.is_file()}
    return {**cost, "bytes": sizes}


def checking_cost(work: Path) -> dict[str, Any]:
    """`planforge verify` of GPT-2 124M in fp32, fp16 and int8, and `planforge lint` of its 500 MB in fp32."""
    checkpoint, bundle = gpt2(work / "gpt2-124m-sure", sure=True), work / "checked"
    planforge = Path(sys.executable).with_name("planforge")
    choices = ["--target", "cpu,portable", "--precision", "fp32,fp16,int8", "--force", "--no-verify"]
    subprocess.run([str(planforge), "export", str(checkpoint), "-o", str(bundle), *choices], check=True)
    (graph,) = (bundle / "onnx").glob("decoder.portable.fp32*.onnx")
    return {
        "verify_gpt2_124m": measured([planforge, "verify", bundle]),
        "lint_500mb": measured([planforge, "lint", graph], may_object=True),
    }


def import_cost(runs: int = 9) -> dict[str, Any]:
    """`import planforge.runtime` in fresh processes, files in the page cache."""
    samples = []
    for _ in range(runs):
        done = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True)
        samples.append([float(number) for number in done.stdout.split()])
    return {
        "seconds_median": round(statistics.median(s for s, _ in samples), 3),
        "rss_mb": round(max(rss for _, rss in samples), 1),
        "runs": runs,
    }


def main() -> None:
    """Measures all and writes results/cost.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=Path("build/benchmarks"))
    work = parser.parse_args().work
    work.mkdir(parents=True, exist_ok=True)
    write_result(
        "cost",
        {"import_runtime": import_cost(), "export_gpt2_124m": export_cost(work), **checking_cost(work)},
    )


if __name__ == "__main__":
    main()
