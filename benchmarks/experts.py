"""How long a mixture of experts takes for a step that computes the chosen experts, or all of them.

python -m benchmarks.experts WORK [--rounds 7]

A Mixtral of random weights with 16 experts of which each token uses 2, in fp32 and int8, and a Mistral whose
MLP has the size of both, which reads as many weights. Steps take turns. Writes results/experts.json.
"""

from __future__ import annotations

import argparse
import statistics
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import transformers

from planforge.exporter import export
from planforge.runtime import TextGenerator

from .common import write_result
from .machine import busy_share

TOKENIZER = Path(__file__).resolve().parents[1] / "models" / "demos" / "gpt2-demo" / "tokenizer.json"
SIZES: dict[str, Any] = {
    **{"vocab_size": 2048, "hidden_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 16},
    **{"num_key_value_heads": 4, "max_position_embeddings": 512},
}
INNER = 2816
EXPERTS = 16
CHOSEN = 2
BATCHES = (1, 8)
PAST = 64
STEPS = 16
PRECISIONS = ("fp32", "int8")


def write_models(work: Path) -> dict[str, Path]:
    """Write the mixture and the dense model, and return their folders."""
    torch.manual_seed(0)
    configs = {
        "mixture": transformers.MixtralConfig(
            **SIZES, intermediate_size=INNER, num_local_experts=EXPERTS, num_experts_per_tok=CHOSEN
        ),
        "dense": transformers.MistralConfig(**SIZES, intermediate_size=CHOSEN * INNER, sliding_window=None),
    }
    for name, config in configs.items():
        if not (work / name).exists():
            transformers.AutoModelForCausalLM.from_config(config).save_pretrained(work / name)
            (work / name / "tokenizer.json").write_bytes(TOKENIZER.read_bytes())
    return {name: work / name for name in configs}


def time_steps(model: TextGenerator, batch: int) -> float:
    """Return the median seconds of a step of other tokens each time, which choose other experts."""
    run = model.decoder.start(batch, PAST + STEPS + 1)
    run.prefill([[1 + row] * PAST for row in range(batch)])
    seconds = []
    for step in range(STEPS):
        tokens = [(97 * step + 31 * row) % SIZES["vocab_size"] for row in range(batch)]
        start = time.perf_counter()
        run.decode(tokens)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def measure(precision: str, work: Path, rounds: int) -> dict[str, Any]:
    """Compare steps of the chosen experts, of all (in fp32), and of the dense model."""
    folders = write_models(work)
    asked = {"chosen": ("mixture", "cpu"), "dense": ("dense", "cpu")}
    if precision == "fp32":
        asked["all"] = ("mixture", "portable")
    with ExitStack() as stack:
        models = {}
        for name, (kind, target) in asked.items():
            bundle = work / f"{name}-{precision}"
            how: dict[str, Any] = {"target": [target], "precision": [precision], "quantizer": "rtn"}
            if not bundle.exists():
                export(folders[kind], bundle, verify=False, **how)
            models[name] = stack.enter_context(TextGenerator.load(bundle))
        found: dict[str, Any] = {}
        for batch in BATCHES:
            turns = [
                {name: time_steps(model, batch) for name, model in models.items()} for _ in range(rounds + 1)
            ]
            found[f"batch {batch}"] = {
                name: round(1e3 * statistics.median(turn[name] for turn in turns[1:]), 3) for name in models
            }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    busy = round(busy_share(1.0), 2)
    found = {precision: measure(precision, args.work, args.rounds) for precision in PRECISIONS}
    sizes = {**SIZES, "expert_size": INNER, "experts": EXPERTS, "chosen": CHOSEN}
    write_result("experts", {"busy_before": busy, "sizes": sizes, "step_ms": found})


if __name__ == "__main__":
    main()
