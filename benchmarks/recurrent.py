"""New tokens a second of a recurrent translator at batch 1, beside PyTorch's own modules in a loop.

python -m benchmarks.recurrent WORK [--rounds 9]

The models are random: the shape of recurrent-demo, and one of 512 with a vocabulary of 2,000. Both sides
have the same weights, must write the same tokens, and take turns; each has one thread or two, whichever is
faster. A step is also timed alone, and in it ONNX Runtime's run of the graph: no loop around that can be
faster. Writes results/recurrent.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn

from planforge.exporter import export
from planforge.models import Recurrent, RecurrentConfig, save_model
from planforge.runtime import Translator

from .common import write_result

SOURCE = 24  # tokens
NEW = 32
BLOCK = 10  # calls of one side, one after the other
TARGET = 3.0  # times PyTorch's loop, at least


@dataclass(frozen=True)
class Shape:
    """The sizes of a model: a GRU of two directions, and one with additive attention."""

    vocabulary: int
    embedding: int
    encoder: int
    decoder: int
    attention: int

    def make_config(self) -> RecurrentConfig:
        return RecurrentConfig(
            source_vocab_size=self.vocabulary,
            target_vocab_size=self.vocabulary,
            embedding_size=self.embedding,
            encoder_size=self.encoder,
            decoder_size=self.decoder,
            attention_size=self.attention,
            max_positions=64,
        )


SHAPES = {
    "recurrent-demo": Shape(42, 48, 96, 160, 96),
    "512 wide": Shape(2000, 128, 256, 512, 256),
}


class EagerTranslator(nn.Module):
    """The same model as users write it: nn.GRU, nn.GRUCell, and attention in a few lines."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        memory = 2 * shape.encoder
        self.source = nn.Embedding(shape.vocabulary, shape.embedding)
        self.target = nn.Embedding(shape.vocabulary, shape.embedding)
        self.encoder = nn.GRU(shape.embedding, shape.encoder, bidirectional=True, batch_first=True)
        self.bridge = nn.Linear(memory, shape.decoder)
        self.key = nn.Linear(memory, shape.attention)
        self.query = nn.Linear(shape.decoder, shape.attention, bias=False)
        self.score = nn.Linear(shape.attention, 1, bias=False)
        self.cell = nn.GRUCell(shape.embedding + memory, shape.decoder)
        self.output = nn.Linear(shape.decoder + memory + shape.embedding, shape.vocabulary)

    @torch.inference_mode()
    def translate(self, source: Tensor) -> list[int]:
        """Return NEW tokens of a source (1, S), the likeliest at each step but for 0 and 1."""
        memory, last = self.encoder(self.source(source))
        keys = self.key(memory)
        state = torch.tanh(self.bridge(torch.cat(list(last), dim=-1)))
        token = torch.zeros(1, dtype=torch.int64)
        found = []
        for _ in range(NEW):
            word = self.target(token)
            scores = self.score(torch.tanh(keys + self.query(state)[:, None]))  # (1, S, 1)
            context = (scores.softmax(dim=1) * memory).sum(dim=1)
            state = self.cell(torch.cat([word, context], dim=-1), state)
            logits = self.output(torch.cat([state, context, word], dim=-1))
            logits[:, :2] = -torch.inf
            token = logits.argmax(-1)
            found.append(int(token))
        return found

    def copy_to(self, model: Recurrent) -> None:
        """Give the weights to PlanForge's model."""
        attention = model.attention
        assert attention is not None
        model.encoder[0].copy_from(self.encoder)  # type: ignore[operator]
        model.cells[0].copy_from(self.cell)  # type: ignore[operator]
        pairs = [
            (self.source, model.source_words),
            (self.target, model.target_words),
            (self.bridge, model.bridges[0]),
            (self.key, attention.key),
            (self.query, attention.query),
            (self.score, attention.score),
            (self.output, model.output),
        ]
        for own, other in pairs:
            other.load_state_dict(own.state_dict())


def make_bundle(eager: EagerTranslator, shape: Shape, folder: Path) -> Path:
    """Export the same weights, with words that are numbers, unless they are there."""
    bundle = folder / "bundle"
    if bundle.exists():
        return bundle
    model = Recurrent(shape.make_config())
    eager.copy_to(model)
    save_model(model, folder / "checkpoint")
    words = {"<pad>": 0, "</s>": 1, "<unk>": 2} | {f"w{i}": i for i in range(3, shape.vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<pad>", "</s>", "<unk>"])
    for side in ("source", "target"):
        tokenizer.save(str(folder / "checkpoint" / f"tokenizer.{side}.json"))
    settings = {"decoder_start_token_id": 0, "eos_token_id": 1, "bad_words_ids": [[0]], "max_length": 64}
    (folder / "checkpoint" / "generation_config.json").write_text(json.dumps(settings), encoding="utf-8")
    export(folder / "checkpoint", bundle, target=["cpu"], precision=["fp32"], verify="quick", force=True)
    return bundle


def time_calls(calls: Sequence[Callable[[], object]], rounds: int) -> list[float]:
    """Return the median seconds of each call; they take turns by blocks, whose first calls are warm-up."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for call, found in zip(calls, times, strict=True):
            for number in range(BLOCK):
                start = time.perf_counter()
                call()
                if number >= BLOCK // 2:
                    found.append(time.perf_counter() - start)
    return [statistics.median(found) for found in times]


def measure(name: str, work: Path, rounds: int) -> dict[str, Any]:
    """Return the tokens a second of both sides, the encoder's time included, and a decoder's step alone."""
    shape = SHAPES[name]
    torch.manual_seed(0)
    eager = EagerTranslator(shape).eval().requires_grad_(False)
    bundle = make_bundle(eager, shape, work / name.replace(" ", "-"))
    tokens = torch.randint(3, shape.vocabulary, (SOURCE - 1,)).tolist()
    text = " ".join(f"w{token}" for token in tokens)
    source = torch.tensor([[*tokens, 1]])
    with Translator.load(bundle) as model, Translator.load(bundle, threads=1) as single:

        def translate(one: Translator) -> tuple[int, ...]:
            return one.translate(text, num_beams=1, min_new_tokens=NEW, max_new_tokens=NEW).token_ids

        def translate_eagerly(threads: int) -> list[int]:
            torch.set_num_threads(threads)
            return eager.translate(source)

        if list(translate(model)) != translate_eagerly(1):
            sys.exit(f"{name}: PlanForge and PyTorch write different tokens")
        found = time_calls(
            (
                lambda: translate(model),
                lambda: translate(single),
                lambda: translate_eagerly(1),
                lambda: translate_eagerly(2),
            ),
            rounds,
        )
        run = single.decoder.start(1, NEW, single.encoder.prepare([[*tokens, 1]]))
        for _ in range(BLOCK):  # the graph is bound once a step is repeated
            run.decode([3])
        program: Any = single.decoder.program
        state: Any = run.cache
        bound = next(iter(state.steps.values()))
        calls = (lambda: run.decode([3]), lambda: program.execute(program.session, bound.binding))
        step, graph = time_calls(calls, 10 * rounds)
    own = min(found[:2])
    theirs = min(found[2:])
    return {
        "planforge_per_s": round(NEW / own),
        "pytorch_per_s": round(NEW / theirs),
        "times_pytorch": round(theirs / own, 2),
        "planforge_step_us": round(1e6 * step),
        "graph_us": round(1e6 * graph),
        "pytorch_step_us": round(1e6 * theirs / NEW),
    }


def main() -> None:
    """Measure, and keep the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    found = {name: measure(name, arguments.work, arguments.rounds) for name in SHAPES}
    write_result("recurrent", {"source": SOURCE, "new": NEW, "target": TARGET, "models": found})
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
