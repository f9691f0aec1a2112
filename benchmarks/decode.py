"""Greedy decoding of GPT-2 124M, PlanForge and optimum-onnx side by side on the same weights.

python -m benchmarks.decode --optimum-python PYTHON [--work FOLDER]

PYTHON is of an environment of its own:
pip install torch==2.13.0 'optimum-onnx[onnxruntime]' 'transformers<4.58'
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from .common import Peer, gpt2_124m, write_result

NEW_TOKENS, ROUNDS, THREADS = 64, 7, 2
PROMPT = (
    "It is a truth universally acknowledged, that a single man in possession of a good fortune, must be"
    " in want of a wife. However little known the feelings"
)

# Each peer generates once per call; see `common.Peer`.
PLANFORGE = """
import json, sys, time
from planforge.runtime import load
model, prompt, new = load(sys.argv[1], threads=int(sys.argv[3])), sys.argv[2], int(sys.argv[4])
def run():
    return list(model.generate(prompt, max_new_tokens=new).token_ids)
"""
OPTIMUM = """
import json, sys, time, warnings
import onnxruntime, torch
from optimum.onnxruntime import ORTModelForCausalLM
torch.set_num_threads(int(sys.argv[3]))
from transformers import AutoTokenizer
options = onnxruntime.SessionOptions()
options.intra_op_num_threads = int(sys.argv[3])
model = ORTModelForCausalLM.from_pretrained(sys.argv[1], session_options=options)
ids = AutoTokenizer.from_pretrained(sys.argv[1])(sys.argv[2], return_tensors="pt").input_ids
new = int(sys.argv[4])
def run():
    out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, min_new_tokens=new,
                         max_new_tokens=new, eos_token_id=None, pad_token_id=0)
    return out[0, ids.shape[1]:].tolist()
"""


def summary(answers: list[dict[str, Any]]) -> dict[str, Any]:
    seconds = [answer["seconds"] for answer in answers]
    return {
        "tokens_per_s_median": round(NEW_TOKENS / statistics.median(seconds), 2),
        "tokens_per_s_best": round(NEW_TOKENS / min(seconds), 2),
        "seconds": [round(value, 3) for value in seconds],
    }


def export_with_optimum(python: Path, checkpoint: Path, out: Path) -> float:
    """Seconds that optimum-onnx takes for its fp32 ONNX alone."""
    started = time.perf_counter()
    command = ["export", "onnx", "--model", checkpoint, "--task", "text-generation-with-past", out]
    subprocess.run([python.with_name("optimum-cli"), *map(str, command)], check=True, capture_output=True)
    return round(time.perf_counter() - started, 1)


def main() -> None:
    """Alternates the two systems and writes results/decode_gpt2_124m.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--optimum-python", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("build/benchmarks"))
    arguments = parser.parse_args()
    work: Path = arguments.work
    work.mkdir(parents=True, exist_ok=True)
    checkpoint, bundle, peer = gpt2_124m(work / "gpt2-124m"), work / "bundle", work / "optimum"
    if not bundle.exists():
        subprocess.run(
            [Path(sys.executable).with_name("planforge"), "export", checkpoint, "-o", bundle], check=True
        )
    export_seconds = export_with_optimum(arguments.optimum_python, checkpoint, peer)
    peers = {
        "planforge fp32": Peer(sys.executable, PLANFORGE, bundle, PROMPT, THREADS, NEW_TOKENS),
        "optimum-onnx fp32": Peer(arguments.optimum_python, OPTIMUM, peer, PROMPT, THREADS, NEW_TOKENS),
    }
    answers: dict[str, list[dict[str, Any]]] = {name: [] for name in peers}
    for _ in range(ROUNDS):
        for name, system in peers.items():
            answers[name].append(system.run())
    for system in peers.values():
        system.close()
    tokens = {name: found[0]["result"] for name, found in answers.items()}
    same = tokens["planforge fp32"] == tokens["optimum-onnx fp32"]
    systems = {name: {**summary(found), "versions": peers[name].versions} for name, found in answers.items()}
    ours, theirs = (systems[name]["tokens_per_s_median"] for name in peers)
    write_result(
        "decode_gpt2_124m",
        {
            "work": {"prompt": PROMPT, "new_tokens": NEW_TOKENS, "batch": 1, "threads": THREADS},
            "systems": systems,
            "same_tokens": same,
            "ratio_of_medians": round(ours / theirs, 3),
            "optimum_export_seconds": export_seconds,
            "optimum_bytes": sum(path.stat().st_size for path in peer.glob("*.onnx*")),
        },
    )


if __name__ == "__main__":
    main()
