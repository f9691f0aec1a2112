#!/usr/bin/env python3
"""Train the GPT-2 demo model from scratch on the King James Bible.

python models/demos/train_gpt2_demo.py --out models/demos/gpt2-demo [--minutes N | --steps N]
(later, to train a model further: the same with --resume FOLDER --learning-rate 1.5e-3)
"""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

from planforge.models.demos.bible import END, END_ID, VOCAB_SIZE, Book, text_of, token_stream
from planforge.models.demos.language_model import Recipe, run_command

CONTEXT = 256
DROPOUT = 0.1


def new_model() -> GPT2LMHeadModel:
    """Return an untrained GPT-2. The activation is gelu_new's formula in its fused, faster form."""
    config = GPT2Config(
        vocab_size=VOCAB_SIZE,
        n_positions=CONTEXT,
        n_embd=256,
        n_layer=4,
        n_head=4,
        activation_function="gelu_pytorch_tanh",
        embd_pdrop=DROPOUT,
        resid_pdrop=DROPOUT,
        attn_pdrop=0.0,
        bos_token_id=END_ID,
        eos_token_id=END_ID,
    )
    return GPT2LMHeadModel(config)


def make_stream(tokenizer: Tokenizer, books: list[Book]) -> list[int]:
    """Return the tokens to train on: the books as they are."""
    return token_stream(tokenizer, [text_of(book) for book in books])


def finish(model: PreTrainedModel, out: Path) -> None:
    """Name the activation as GPT-2 does."""
    model.config.activation_function = "gelu_new"


RECIPE = Recipe(
    model=new_model,
    dtype=torch.float16,
    context=CONTEXT,
    batch=16,
    learning_rate=3.0e-3,
    special_tokens=[END],
    fused={"attn.c_attn.weight": 3},
    make_stream=make_stream,
    finish=finish,
    facts={"dropout": DROPOUT},
)

if __name__ == "__main__":
    run_command(RECIPE, "Train the GPT-2 demo model.")
