"""The cost of a verdict by a model's size: an export with the comparison at `standard`, and one without.

With `--levels`, also `planforge verify` of the bundle, at each of these levels.

python -m benchmarks.verdicts [--only gpt2-124m,qwen2.5-0.5b] [--levels quick,standard,full] [--work FOLDER]
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from .checkpoints import RANDOM, gpt2
from .common import RESULTS, environment, measure_command_cost


@dataclass(frozen=True)
class Size:
    """A model, and the graphs that are exported of it."""

    make: Callable[[Path], Path]  # its checkpoint in a folder
    weights: int  # of the model
    choices: tuple[str, ...]  # of planforge export


FLOAT_AND_INT8 = ("--target", "cpu,portable", "--precision", "fp32,fp16,int8")
INT8_AND_INT4 = ("--target", "cpu", "--precision", "int8,int4")
SIZES = {
    "gpt2-124m": Size(partial(gpt2, peaked=True), 124_439_808, FLOAT_AND_INT8),
    "gpt2-355m": Size(
        partial(gpt2, peaked=True, n_embd=1024, n_layer=24, n_head=16), 354_823_168, FLOAT_AND_INT8
    ),
    "qwen2.5-0.5b": Size(RANDOM["qwen2.5-0.5b-sure"], 494_032_768, INT8_AND_INT4),
    "llama-3.2-1b": Size(RANDOM["llama-3.2-1b-sure"], 1_235_814_400, INT8_AND_INT4),
}


def measure_size(size: Size, levels: Sequence[str], work: Path) -> dict[str, Any]:
    """Measure both exports of a model, then `verify` at each level; what they write is removed."""
    checkpoint = size.make(work / "checkpoint")
    planforge = Path(sys.executable).with_name("planforge")
    command: list[str | Path] = [
        planforge,
        "export",
        checkpoint,
        "-o",
        work / "bundle",
        "--force",
        *size.choices,
    ]
    without = measure_command_cost([*command, "--no-verify"])
    verified = measure_command_cost([*command, "--verify", "standard"])
    alone = {
        level: measure_command_cost([planforge, "verify", work / "bundle", "--level", level], may_object=True)
        for level in levels
    }
    shutil.rmtree(work)
    fp32_mb = 4 * size.weights / 1e6
    return {
        "weights": size.weights,
        "choices": " ".join(size.choices),
        "not_verified": without,
        "verified": verified,
        "verify_alone": alone,
        "verdict_seconds": round(verified["seconds"] - without["seconds"], 1),
        "peak_rss_of_fp32_weights": round(verified["peak_rss_mb"] / fp32_mb, 2),
        "peak_anonymous_of_fp32_weights": round(verified["peak_anonymous_mb"] / fp32_mb, 2),
    }


def main() -> None:
    """Measure the sizes that are asked for, and add them to those of other runs."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.verdicts", description=__doc__)
    parser.add_argument("--only", default=",".join(SIZES), help="names of sizes, by commas")
    parser.add_argument("--levels", default="", help="quick, standard, full, by commas")
    parser.add_argument("--work", type=Path, default=Path("build/benchmarks"))
    parser.add_argument("--out", type=Path, default=RESULTS / "verdicts.json")
    options = parser.parse_args()
    results = json.loads(options.out.read_text()) if options.out.exists() else {}
    for name in options.only.split(","):
        print(f"measuring {name}", file=sys.stderr)
        work = options.work / f"verdict-{name}"
        levels = [level for level in options.levels.split(",") if level]
        results[name] = {**measure_size(SIZES[name], levels, work), **environment()}
        options.out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
