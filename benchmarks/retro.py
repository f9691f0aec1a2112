"""How long a step of a RETRO takes beside a GPT-2's of the same size, and the end of a chunk beside a step.

python -m benchmarks.retro WORK [--rounds 5]

Both have random weights, in fp32 on a CPU: the shape of retro-demo, and that of GPT-2 small with RETRO's
encoder of two layers. Steps of both take turns. The search for neighbours is left out, which `index_search`
measures. Writes results/retro.json.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from planforge.exporter import export
from planforge.models import GPT2, GPT2Config, Retro, RetroConfig, save_model
from planforge.models.training import initialize
from planforge.runtime import TextGenerator
from planforge.runtime.apps.check.retrieval import SampledNeighbour
from planforge.runtime.decoding.decoder import DecoderRun
from planforge.runtime.generate.retrieval_generator import RetrievalGenerator

from .common import write_result
from .machine import busy_share

TOKENIZER = Path(__file__).resolve().parents[1] / "models" / "demos" / "gpt2-demo" / "tokenizer.json"
VOCABULARY = 2048
CONTEXT = 512
PAST = 128  # tokens before the first step that is measured
CHUNKS = 3  # that are measured in a round
STEP_TARGET = 1.5  # times GPT-2's step, at most
TURN_TARGET = 5.0  # times a step, at most


@dataclass(frozen=True)
class Shape:
    """The sizes that both models share, and RETRO's own."""

    width: int
    layers: int
    inner: int
    cross_layers: tuple[int, ...]
    chunk: int
    encoder: int
    encoder_layers: int

    def make_retro(self) -> Retro:
        heads = self.width // 64
        return Retro(
            RetroConfig(
                vocab_size=VOCABULARY,
                max_positions=CONTEXT,
                hidden_size=self.width,
                num_hidden_layers=self.layers,
                num_attention_heads=heads,
                intermediate_size=self.inner,
                cross_layers=self.cross_layers,
                chunk_length=self.chunk,
                neighbour_length=2 * self.chunk,
                encoder_size=self.encoder,
                encoder_layers=self.encoder_layers,
                encoder_heads=self.encoder // 64,
                encoder_intermediate_size=2 * self.encoder,
                encoder_words=self.encoder != self.width,
            )
        )

    def make_gpt2(self) -> GPT2:
        return GPT2(
            GPT2Config(
                vocab_size=VOCABULARY,
                n_positions=CONTEXT,
                n_embd=self.width,
                n_layer=self.layers,
                n_head=self.width // 64,
                n_inner=self.inner,
            )
        )


SHAPES = {
    "retro-demo": Shape(256, 4, 768, (1, 3), 32, 192, 1),
    "GPT-2 small": Shape(768, 12, 3072, (5, 8, 11), 64, 768, 2),
}


def make_bundle(model: Retro | GPT2, folder: Path) -> Path:
    """Export a random model, unless it is there."""
    bundle = folder / "bundle"
    if not bundle.exists():
        torch.manual_seed(0)
        initialize(model)
        save_model(model, folder / "checkpoint", settings={"eos_token_id": 0})
        (folder / "checkpoint" / "tokenizer.json").write_bytes(TOKENIZER.read_bytes())
        export(folder / "checkpoint", bundle, target=["cpu"], precision=["fp32"], verify="quick")
    return bundle


def measure(shape: Shape, work: Path, rounds: int) -> dict[str, Any]:
    """Return the median times of a step between chunks' ends, of one at such an end, and of GPT-2's."""
    random = np.random.default_rng(0)
    neighbours = [
        SampledNeighbour(tuple(random.integers(VOCABULARY, size=2 * shape.chunk).tolist())) for _ in range(2)
    ]
    tokens = random.integers(1, VOCABULARY, PAST + CHUNKS * shape.chunk).tolist()
    times: dict[str, list[float]] = {"step": [], "turn": [], "gpt2": []}
    retro = make_bundle(shape.make_retro(), work / "retro")
    gpt2 = make_bundle(shape.make_gpt2(), work / "gpt2")
    with TextGenerator.load(retro) as model, TextGenerator.load(gpt2) as other:
        assert isinstance(model, RetrievalGenerator)
        model.decoder.find = lambda chunks: [neighbours for _ in chunks]  # type: ignore[attr-defined]
        for number in range(rounds + 1):  # the first warms up
            runs = [one.decoder.start(1, len(tokens)) for one in (model, other)]
            for run in runs:
                run.prefill([tokens[:PAST]])
            for place, token in enumerate(tokens[PAST:], PAST):
                own, theirs = (time_step(run, [token]) for run in runs)
                if number:
                    times["turn" if (place + 1) % shape.chunk == 0 else "step"].append(own)
                    times["gpt2"].append(theirs)
    found = {name: statistics.median(values) for name, values in times.items()}
    return {
        **{f"{name}_us": round(seconds * 1e6) for name, seconds in found.items()},
        "step_of_gpt2s": round(found["step"] / found["gpt2"], 2),
        "turn_of_steps": round(found["turn"] / found["step"], 2),
    }


def time_step(run: DecoderRun, tokens: Sequence[int]) -> float:
    start = time.perf_counter()
    run.decode(tokens)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure RETRO's steps beside GPT-2's.")
    parser.add_argument("work", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    busy = busy_share(2.0)
    models = {
        name: measure(shape, args.work / name.replace(" ", "-"), args.rounds)
        for name, shape in SHAPES.items()
    }
    targets = {"step_of_gpt2s": STEP_TARGET, "turn_of_steps": TURN_TARGET}
    write_result("retro", {"busy_before": busy, "past": PAST, "targets": targets, "models": models})


if __name__ == "__main__":
    main()
