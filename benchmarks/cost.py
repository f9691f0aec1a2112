"""The cost of export, plans, verification, lint and import: seconds, memory, and bytes on disk.

python -m benchmarks.cost [--work FOLDER] [--plans | --imports [--python PYTHON] | --llama]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from .case import Entry, Work
from .checkpoints import gpt2
from .common import measure_command_cost, write_result
from .process import ROOT
from .workshop import Workshop

IMPORT = """
import resource, time
start = time.perf_counter()
import planforge.runtime
print(time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3)
"""


def export_cost(work: Path) -> dict[str, Any]:
    """Measure `planforge export` of GPT-2 124M, verified: fp32 and fp16, a plan for six architectures."""
    checkpoint = gpt2(work / "gpt2-124m" / "checkpoint")
    bundle = work / "bundle"
    planforge = Path(sys.executable).with_name("planforge")
    cost = measure_command_cost([planforge, "export", checkpoint, "-o", bundle, "--force", "--json"])
    sizes = {path.name.split("-")[0]: path.stat().st_size for path in bundle.rglob("*") if path.is_file()}
    return {**cost, "bytes": sizes}


def checking_cost(work: Path) -> dict[str, Any]:
    """Measure `planforge verify` of GPT-2 124M in fp32, fp16 and int8, and `planforge lint` in fp32."""
    checkpoint = gpt2(work / "gpt2-124m-peaked", peaked=True)
    bundle = work / "checked"
    planforge = Path(sys.executable).with_name("planforge")
    choices = ["--target", "cpu,portable", "--precision", "fp32,fp16,int8", "--force", "--no-verify"]
    subprocess.run([str(planforge), "export", str(checkpoint), "-o", str(bundle), *choices], check=True)
    (graph,) = (bundle / "onnx").glob("decoder.portable.fp32*.onnx")
    return {
        "verify_gpt2_124m": measure_command_cost([planforge, "verify", bundle]),
        "lint_500mb": measure_command_cost([planforge, "lint", graph], may_object=True),
    }


def quantizing_cost(work: Path) -> dict[str, Any]:
    """Measure `planforge export` of GPT-2 124M for the CPU in int8 and int4, with GPTQ and without."""
    checkpoint = gpt2(work / "gpt2-124m-peaked", peaked=True)
    planforge = Path(sys.executable).with_name("planforge")
    command: list[str | Path] = [planforge, "export", checkpoint, "-o", work / "quantized", "--force"]
    command += ["--target", "cpu", "--precision", "int8,int4", "--quantizer"]
    return {name: measure_command_cost([*command, name]) for name in ("gptq", "rtn")}


def plan_cost(work: Path) -> dict[str, Any]:
    """Measure `planforge build` of GPT-2 124M for six architectures, whole and stripped, without a GPU."""
    checkpoint = gpt2(work / "gpt2-124m" / "checkpoint")
    bundle = work / "planned"
    planforge = Path(sys.executable).with_name("planforge")
    choices = ["--target", "rtx", "--precision", "fp16", "--sm", "sm86", "--force", "--no-verify"]
    subprocess.run([str(planforge), "export", str(checkpoint), "-o", str(bundle), *choices], check=True)
    costs: dict[str, Any] = {}
    for name, choice in (("whole", []), ("stripped", ["--strip"])):
        costs[name] = measure_command_cost([planforge, "build", bundle, *choice])
        newest = max((bundle / "plans").iterdir(), key=lambda path: path.stat().st_mtime)
        costs[name]["plan_bytes"] = newest.stat().st_size
    (weights,) = (bundle / "onnx").glob("weights.fp16*")
    return {"fp16_weight_bytes": weights.stat().st_size, **costs}


def folder_cost(work: Path, python: Path) -> dict[str, Any]:
    """Measure `planforge import` of a Llama of 110M parameters that optimum exported, for the CPU in fp32.

    Args:
        python: of an environment that has optimum-onnx.
    """
    made = Workshop(work, [python]).prepare(Entry("optimum_onnx", "fp32", "llama-110m", Work("generate", ())))
    planforge = Path(sys.executable).with_name("planforge")
    command: list[str | Path] = [
        planforge,
        "import",
        made.folder,
        "--source",
        made.checkpoint,
        "-o",
        work / "imported",
    ]
    command += ["--precision", "fp32", "--target", "cpu", "--force"]
    return {
        "weight_bytes": (made.checkpoint / "model.safetensors").stat().st_size,
        "verified": measure_command_cost(command),
        "not_verified": measure_command_cost([*command, "--no-verify"]),
    }


def llama_cost(work: Path) -> dict[str, Any]:
    """Measure `planforge export` of Qwen2.5 0.5B's shape for the CPU: fp32 alone, and int8 and int4 too.

    Its weights are sure ones, which keep their tokens in int8 and int4.
    """
    checkpoint = Workshop(work).checkpoint("qwen2.5-0.5b-sure")
    planforge = Path(sys.executable).with_name("planforge")
    command: list[str | Path] = [planforge, "export", checkpoint, "-o", work / "llama"]
    command += ["--target", "cpu", "--force"]
    fp32 = measure_command_cost([*command, "--precision", "fp32"])
    all_three = measure_command_cost([*command, "--precision", "fp32,int8,int4"])
    weights = 2 * (checkpoint / "model.safetensors").stat().st_size  # the checkpoint's are bfloat16
    shares = {
        f"peak_{kind}_of_fp32_weights": round(all_three[f"peak_{kind}_mb"] * 1e6 / weights, 2)
        for kind in ("anonymous", "rss")
    }
    return {
        "fp32": fp32,
        "fp32_int8_int4": all_three,
        "int8_int4_more_seconds": round(all_three["seconds"] - fp32["seconds"], 2),
        "fp32_weight_mb": round(weights / 1e6),
        **shares,
    }


def import_cost(runs: int = 9) -> dict[str, Any]:
    """Measure `import planforge.runtime` in fresh processes, with files in the page cache."""
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
    """Measure all and write results/cost.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=Path("build/benchmarks"))
    parser.add_argument("--plans", action="store_true", help="measure plans alone, into results/plans.json")
    parser.add_argument(
        "--imports", action="store_true", help="measure imports alone, into results/imports.json"
    )
    parser.add_argument(
        "--llama",
        action="store_true",
        help="measure exports of Qwen2.5 0.5B's shape alone, into results/llama.json",
    )
    parser.add_argument(
        "--python", type=Path, default=ROOT / "build/bench-venv/bin/python", help="has optimum"
    )
    arguments = parser.parse_args()
    work = arguments.work
    work.mkdir(parents=True, exist_ok=True)
    if arguments.plans:
        write_result("plans", {"build_gpt2_124m": plan_cost(work)})
        return
    if arguments.imports:
        write_result("imports", {"import_llama_110m": folder_cost(work, arguments.python)})
        return
    if arguments.llama:
        write_result("llama", {"export_qwen2.5_0.5b": llama_cost(work)})
        return
    write_result(
        "cost",
        {
            "import_runtime": import_cost(),
            "export_gpt2_124m": export_cost(work),
            "int8_int4_gpt2_124m": quantizing_cost(work),
            **checking_cost(work),
        },
    )


if __name__ == "__main__":
    main()
