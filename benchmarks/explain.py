"""Compares explanations with a forward pass: time, bytes, and whether important tokens really matter.

python -m benchmarks.explain BUNDLE... [--rounds 40] [--prompts 200]

Bundles are of language models, exported with --outputs explain. Results go to results/explain.json.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from planforge.exporter.checkpoints.source import resolve_source
from planforge.runtime import load
from planforge.runtime.apps.explain import explain
from planforge.runtime.apps.explain.gradients import integrate, multiply_by_input
from planforge.runtime.apps.explain.options import make_choices
from planforge.runtime.apps.explain.targets import make_score
from planforge.runtime.bundle.bundle import Bundle

from .common import write_result

TOKENS = 64
WORDS = 14  # of a prompt


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bundles", type=Path, nargs="+")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--prompts", type=int, default=200)
    given = parser.parse_args()
    results = {}
    for bundle in given.bundles:
        with load(bundle) as model:
            results[bundle.resolve().name] = {
                "bytes": count_bytes(bundle),
                **measure_times(model, given.rounds),
                "removal": measure_removal(model, given.prompts),
            }
    write_result("explain", {"tokens": TOKENS, "bundles": results})


def count_bytes(bundle: Path) -> dict[str, int]:
    """Return the bytes that the graphs of explanations add to a bundle, and those of all of it."""
    manifest = Bundle.open(bundle).manifest
    own = [artifact.file for artifact in manifest.explanations]
    own += [name for name in manifest.files if name.startswith("checks/explain-")]
    return {
        "added": sum(manifest.files[name].bytes for name in own),
        "bundle": sum(entry.bytes for entry in manifest.files.values()),
    }


def measure_times(model: Any, rounds: int) -> dict[str, Any]:
    """Return medians in milliseconds, the rounds of all of them taking turns, and their ratios."""
    graphs = model.explanations
    ids = np.random.default_rng(0).integers(0, model.tokenizer.vocab_size, TOKENS + 1)
    outputs = graphs.run("layers", {"input_ids": ids[None]})
    embeddings = outputs.get("embeddings", outputs["hidden.0"])[0]
    read = [embeddings[:TOKENS]]
    choices = make_choices(graphs, ["gradient"], "logit", 1)
    score = make_score(graphs, ["embeddings"], TOKENS - 1, int(ids[TOKENS]), choices)
    measured: Mapping[str, Callable[[], Any]] = {
        "forward_ms": lambda: model.decoder.start(1, TOKENS).prefill([ids[:TOKENS].tolist()]),
        "gradient_x_input_ms": lambda: multiply_by_input(score, read),
        "layers_ms": lambda: graphs.run("layers", {"input_ids": ids[None, :TOKENS]}),
        "integrated_gradients_ms": lambda: integrate(score, read),
    }
    times: dict[str, list[float]] = {name: [] for name in measured}
    for number in range(rounds + 3):
        for name, run in measured.items():
            began = time.perf_counter()
            run()
            if number >= 3:  # the first ones warm up
                times[name].append(1000 * (time.perf_counter() - began))
    medians = {name: round(median(values), 2) for name, values in times.items()}
    ratio = medians["gradient_x_input_ms"] / medians["forward_ms"]
    return {**medians, "gradient_x_input_to_forward": round(ratio, 2)}


def measure_removal(model: Any, prompts: int) -> dict[str, float]:
    """Return the share of prompts where removing the most important token costs more than a random one."""
    words = (resolve_source("gpt2-demo").folder / "prompts.txt").read_text(encoding="utf-8").split()
    random = np.random.default_rng(0)
    methods = ("gradient_norm", "gradient_x_input", "integrated_gradients")  # occlusion is the judge
    wins = dict.fromkeys(methods, 0)
    for begin in random.choice(len(words) - WORDS, prompts, replace=False):
        prompt = " ".join(words[begin : begin + WORDS])
        result = explain(
            model, prompt, max_new_tokens=1, methods=["gradient", "integrated_gradients", "occlusion"]
        )
        falls = result.saliency["occlusion"][0]
        known = np.flatnonzero(~np.isnan(falls))
        for method in methods:
            row = result.saliency[method][0]
            salient = int(known[np.argmax(row[known])])
            other = int(random.choice(known[known != salient]))
            wins[method] += bool(falls[salient] > falls[other])
    return {method: round(count / prompts, 3) for method, count in wins.items()}


if __name__ == "__main__":
    main()
