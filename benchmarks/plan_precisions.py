"""What a plan in each precision takes and loses: bytes, seconds and memory, and metrics on real text.

python -m benchmarks.plan_precisions [--work FOLDER] [--models gpt2-demo,...] [--precisions fp16,...]

Trained demos are verified; of other shapes, whose weights are random, a loss says nothing. Plans are built
without a GPU, so none is run.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from .checkpoints import RANDOM
from .common import RESULTS, measure_command_cost, write_result

TRAINED = ("gpt2-demo", "bert-demo", "transformer-demo", "llama-demo")
MODELS = (*TRAINED, "gpt2-124m", "bert-base", "marian", "qwen2.5-0.5b")
ENCODERS = ("bert-demo", "bert-base")
OF_ENCODERS = ("w8a8", "fp8a8")
PRECISIONS = ("fp16", "w8a16", "fp8a16", "w4a16", "nvfp4a16", *OF_ENCODERS)
RESULT = "plan_precisions"
TOO_LARGE = "the error of a precision is too large"  # export's words


def measure(model: str, precision: str, work: Path) -> dict[str, Any]:
    """Export a model with a plan in one precision, and build the plan again alone."""
    planforge = Path(sys.executable).with_name("planforge")
    bundle = work / f"{model}-{precision}"
    source = model if model in TRAINED else RANDOM[model](work / model)
    choices = ["--target", "rtx", "--precision", precision, "--force"]
    choices += [] if model in TRAINED else ["--no-verify"]
    done = subprocess.run(
        [planforge, "export", source, "-o", bundle, *choices], capture_output=True, text=True
    )
    if done.returncode:
        if TOO_LARGE not in done.stderr:
            sys.exit(done.stderr)
        return {"refused": done.stderr[done.stderr.index(TOO_LARGE) :].splitlines()[1].strip()}
    cost = measure_command_cost([planforge, "build", bundle])
    manifest = json.loads((bundle / "manifest.json").read_text(encoding="utf-8"))
    weights = {name for artifact in manifest["artifacts"] for name in artifact["data"]}
    plans = manifest["plans"]
    gates = [artifact.get("gate", {}) for artifact in manifest["artifacts"]]
    quantized = [artifact.get("quantization", {}) for artifact in manifest["artifacts"]]
    return {
        "weight_bytes": sum((bundle / name).stat().st_size for name in weights),
        "plan_bytes": sum((bundle / plan["file"]).stat().st_size for plan in plans),
        "profiles": sum(len(plan["profiles"]) for plan in plans),
        "sms": plans[0]["sms"],
        "build": cost,
        "weights_of_other_bits": sum(len(own.get("other_bits", {})) for own in quantized),
        "measured": {name: value for gate in gates for name, value in gate.get("measured", {}).items()},
    }


def make_table(result: dict[str, Any]) -> str:
    """Return the documentation's table: for each model and precision the plan's size and loss."""
    lines = [f"| Model | {' | '.join(PRECISIONS)} |", f"|---|{'---|' * len(PRECISIONS)}"]
    for model in MODELS:
        if found := result["models"].get(model):
            cells = [describe(found[name]) if name in found else "" for name in PRECISIONS]
            lines.append(f"| {model} | {' | '.join(cells)} |")
    return "\n".join(lines)


def describe(cell: dict[str, Any]) -> str:
    """Return a cell of the table: megabytes, and the loss on real text where it is known."""
    if "refused" in cell:
        return "refused"
    size = f"{cell['plan_bytes'] / 1e6:,.0f} MB"
    measured = cell["measured"]
    if (change := measured.get("perplexity_change")) is not None:
        return f"{size}, +{change:.2%}"
    if (gap := measured.get("sentence_embedding.mean_cosine_gap")) is not None:
        return f"{size}, {1 - gap:.4f}"
    return size


def main() -> None:
    """Measure the models, one after another, and keep all results so far."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=Path("build/benchmarks"))
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--precisions", default=",".join(PRECISIONS))
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{RESULT}.json"
    models = json.loads(path.read_text(encoding="utf-8"))["models"] if path.exists() else {}
    for model in arguments.models.split(","):
        for precision in arguments.precisions.split(","):
            if precision in OF_ENCODERS and model not in ENCODERS:
                continue
            models.setdefault(model, {})[precision] = measure(model, precision, arguments.work)
            write_result(RESULT, {"models": models})
    print(make_table({"models": models}))


if __name__ == "__main__":
    main()
