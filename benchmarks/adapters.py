"""How much longer a step takes by an adapter that stays beside its model, alone and in a mixed batch.

python -m benchmarks.adapters WORK [--rounds 7]

A GPT-2 of 124M parameters with random weights, once alone and once with three random LoRAs of rank 16 beside
it. Steps of both take turns, behind the same number of tokens. "attention" adapters change the projection
that peft chooses for GPT-2, "all-linear" ones each linear layer. Writes results/adapters.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from planforge.exporter import export
from planforge.runtime import TextGenerator
from planforge.runtime.decoding.decoder import DecoderRun

from .checkpoints import gpt2
from .common import write_result
from .machine import busy_share

RANK = 16
NAMES = ("one", "two", "three")
KINDS: Mapping[str, tuple[str, ...]] = {
    "attention": ("attn.c_attn",),
    "all-linear": ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"),
}
PRECISIONS = ("fp32", "int8", "int4")
PAST = 128  # tokens before the first step that is measured
STEPS = 24  # of a round
ALONE_TARGET = 1.15  # times the model's own step at batch 1, at most
BATCH_TARGET = 0.7  # of the plain batch's tokens in a second, at least


def write_lora(base: Path, modules: Sequence[str], folder: Path, seed: int) -> Path:
    """Write a random LoRA in peft's layout."""
    random = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    with safe_open(base / "model.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118
            module = name.removesuffix(".weight")
            if module.endswith(tuple(modules)):
                width, height = file.get_slice(name).get_shape()  # a Conv1D's, transposed
                stem = f"base_model.model.transformer.{module.removeprefix('transformer.')}"
                tensors[f"{stem}.lora_A.weight"] = 0.02 * torch.randn(RANK, width, generator=random)
                tensors[f"{stem}.lora_B.weight"] = 0.02 * torch.randn(height, RANK, generator=random)
    folder.mkdir(parents=True, exist_ok=True)
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "fan_in_fan_out": True}
    (folder / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def begin(model: TextGenerator, adapters: Sequence[int]) -> DecoderRun:
    """Return a run whose rows have read `PAST` tokens."""
    run = model.decoder.start(len(adapters), PAST + STEPS + 1, adapters=adapters if model.adapters else ())
    ids = np.random.default_rng(0).integers(0, 50000, (len(adapters), PAST)).tolist()
    run.prefill(ids)
    return run


def time_steps(run: DecoderRun, rows: int) -> float:
    """Return the median seconds of a step, and forget what the steps added."""
    seconds = []
    for step in range(STEPS):
        start = time.perf_counter()
        run.decode([100 + step] * rows)
        seconds.append(time.perf_counter() - start)
    run.truncate(PAST)
    return statistics.median(seconds)


def compare(alone: TextGenerator, beside: TextGenerator, rounds: int) -> dict[str, Any]:
    """Time steps of a model alone, and of the same with adapters beside it, in turns."""
    settings = {"batch 1": [1], "batch 1, no adapter": [0], "batch 8": [1, 2, 3, 1, 2, 3, 1, 0]}
    found: dict[str, Any] = {}
    for name, adapters in settings.items():
        runs = (begin(alone, [0] * len(adapters)), begin(beside, adapters))
        pairs = [[time_steps(run, len(adapters)) for run in runs] for _ in range(rounds + 1)][1:]
        plain, own = (statistics.median(pair[side] for pair in pairs) for side in (0, 1))
        ratio = statistics.median(pair[1] / pair[0] for pair in pairs)
        found[name] = {
            "model_ms": round(1e3 * plain, 3),
            "adapter_ms": round(1e3 * own, 3),
            "times": round(ratio, 3),
            "share": round(1 / ratio, 3),
        }
    return found


def measure(kind: str, precision: str, work: Path, rounds: int) -> dict[str, Any]:
    """Export both bundles of a kind of adapters in a precision, and compare their steps."""
    base = gpt2(work / "gpt2")
    folders = {
        name: write_lora(base, KINDS[kind], work / kind / name, number) for number, name in enumerate(NAMES)
    }
    how: dict[str, Any] = {"target": ["cpu"], "precision": [precision], "verify": False, "quantizer": "rtn"}
    bundles = (work / f"alone-{precision}", work / f"{kind}-{precision}")
    for bundle, adapter in zip(bundles, (None, folders), strict=True):
        if not bundle.exists():
            export(base, bundle, adapter=adapter, **how)
    with TextGenerator.load(bundles[0]) as alone, TextGenerator.load(bundles[1]) as beside:
        found = compare(alone, beside, rounds)
    sizes = [sum(path.stat().st_size for path in bundle.glob("onnx/*.data")) for bundle in bundles]
    adapters = sum((folder / "adapter_model.safetensors").stat().st_size for folder in folders.values())
    return {**found, "bytes": {"model": sizes[0], "with_adapters": sizes[1], "adapter_files": adapters}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    busy = round(busy_share(1.0), 2)
    found = {
        kind: {precision: measure(kind, precision, args.work, args.rounds) for precision in PRECISIONS}
        for kind in KINDS
    }
    targets = {"batch 1, times": ALONE_TARGET, "batch 8, share": BATCH_TARGET}
    write_result("adapters", {"busy_before": busy, "past": PAST, "rank": RANK, "targets": targets, **found})


if __name__ == "__main__":
    main()
