#!/usr/bin/env python3
"""Train the recurrent demo from scratch: dates written any way -> ISO form, by a GRU with attention.

    python models/demos/train_recurrent_demo.py --out models/demos/recurrent-demo

Texts, tokenizers and training are transformer-demo's; the model is that of Bahdanau et al., 2014, read and
written character by character. Needs torch, tokenizers and safetensors.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from planforge.models import Recurrent, RecurrentConfig
from planforge.models.demos.train_transformer_demo import (
    END_ID,
    MAX_LENGTH,
    MAX_POSITIONS,
    PAD_ID,
    SEED,
    DateModel,
    evaluate,
    log,
    pad_batch,
    save,
    source_tokenizer,
    target_tokenizer,
    train,
    write_json,
)


@dataclass(frozen=True)
class RecurrentDateModel(DateModel):
    """The model and its tokenizers."""

    model: Recurrent  # type: ignore[assignment]  # trained, evaluated and saved by the same functions

    @torch.no_grad()
    def answers(self, texts: Sequence[str]) -> list[str]:
        """Return answers of the likeliest character at each step, until all have ended."""
        ids, mask = pad_batch([encoding.ids for encoding in self.source.encode_batch(texts)])
        source, states = self.model.encode(ids, mask.sum(dim=1))
        rows: list[Tensor] = [torch.full((len(texts), 1), PAD_ID)]
        while len(rows) < MAX_LENGTH and not torch.cat(rows, 1).eq(END_ID).any(1).all():
            x, states = self.model.step(rows[-1], states, source)
            logits = self.model.output(x)
            logits[:, :, PAD_ID] = -torch.inf
            rows.append(logits.argmax(-1))
        answers = torch.cat(rows[1:], 1).tolist()
        return [self.target.decode(row[: row.index(END_ID)] if END_ID in row else row) for row in answers]


def new_model() -> RecurrentDateModel:
    """Return a model with random weights."""
    source = source_tokenizer()
    target = target_tokenizer()
    config = RecurrentConfig(
        source_vocab_size=source.get_vocab_size(),
        target_vocab_size=target.get_vocab_size(),
        embedding_size=48,
        encoder_size=96,
        decoder_size=160,
        attention_size=96,
        max_positions=MAX_POSITIONS,
    )
    return RecurrentDateModel(Recurrent(config), source, target)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Train the recurrent demo model.")
    parser.add_argument("--out", type=Path, required=True, help="output folder")
    parser.add_argument("--steps", type=int, default=700, help="training steps")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(SEED)
    dated = new_model()
    parameters = sum(weight.numel() for weight in dated.model.parameters())
    log(f"{parameters} parameters")
    facts = {"parameters": parameters, **train(dated, args.steps, SEED)}
    facts["held_out"] = evaluate(dated, SEED)
    log(f"{facts['held_out']['exact_match']:.3%} of the held-out texts are right")
    save(args.out, dated)
    write_json(args.out / "training.json", facts)


if __name__ == "__main__":
    main()
