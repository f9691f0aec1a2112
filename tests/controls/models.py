"""Sound checkpoints, drawn at random: shapes, heads, vocabularies, spreads of weights, outliers."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from planforge.exporter.checkpoints.source import find_demo
from planforge.models import Transformer, save_model

from ..helpers.llamas import LLAMAS, SHALLOW, tiny_llama
from ..helpers.marian import write_marian_tokenizer
from ..helpers.models import (
    WORDPIECES,
    random_bert,
    random_gpt2,
    random_marian,
    random_transformer,
    write_wordpiece,
)

FAMILIES = ("GPT-2", "Llama", "BERT", "Transformer")
SPREADS = (0.01, 0.02, 0.05, 0.15, 0.3, 0.7)  # of weights: published models begin with 0.02
# Scores of attention stay below the 30,000 by which masks lower them: beyond that a graph is not the model.
STRONG = 10.0
MILD = 3.0
OUTLIERS = ("none", "columns", "weights", "norms")
MIN_TOKENS = 257  # of byte-level BPE without merges
MAX_TOKENS = 2048  # of gpt2-demo's tokenizer
BLOCK = 32  # columns of the smallest block of int8 and int4, which has to divide every width
ENCODERS = (
    "BertModel",
    "BertForMaskedLM",
    "BertForSequenceClassification",
    "BertForTokenClassification",
    "BertForQuestionAnswering",
    "DistilBertForMaskedLM",
    "DistilBertForSequenceClassification",
    "ModernBertModel",
)


@dataclass(frozen=True)
class Control:
    """A sound checkpoint, as it was drawn.

    Attributes:
        number: decides everything else.
        family: one of `FAMILIES`.
        kind: the class of models.
        shape: what was drawn of its config.
        spread: the standard deviation of its weights.
        outliers: which numbers are many times as large as the others.
    """

    number: int
    family: str
    kind: str
    shape: dict[str, Any]
    spread: float
    outliers: str


def write_control(number: int, folder: Path) -> Control:
    """Write the checkpoint of a number, the same each time, and return what it is."""
    random = np.random.default_rng(number)
    family = FAMILIES[number % len(FAMILIES)]
    turn = number // len(FAMILIES)  # every spread meets every kind of outliers
    spread = SPREADS[turn % len(SPREADS)]
    outliers = OUTLIERS[(turn + turn // len(SPREADS)) % len(OUTLIERS)]
    folder.mkdir(parents=True)
    draw = (draw_gpt2, draw_llama, draw_bert, draw_translator)[number % len(FAMILIES)]
    kind, shape, model = draw(random, turn, folder)
    draw_weights(model, random, spread, outliers, MILD if spread == max(SPREADS) else STRONG)
    if isinstance(model, Transformer):
        save_model(model, folder)
    else:
        model.save_pretrained(folder)
    return Control(number, family, kind, shape, spread, outliers)


def draw_heads(random: np.random.Generator, turn: int) -> tuple[int, int]:
    """Return a number of heads and their size."""
    if is_odd(turn):
        return int(random.integers(1, 6)), int(random.choice((6, 8, 10, 12, 24)))
    size = int(random.choice((8, 16, 24, 32)))
    least = BLOCK // math.gcd(size, BLOCK)
    return least * int(random.integers(1, max(2, 5 // least))), size


def draw_width(random: np.random.Generator, turn: int) -> int:
    """Return the width of a feed-forward part, or of what heads do not divide."""
    return int(random.integers(17, 150)) if is_odd(turn) else BLOCK * int(random.integers(1, 5))


def is_odd(turn: int) -> bool:
    """Tell whether widths are such that int8, int4 or ONNX Runtime's attention cannot have them."""
    return turn % 4 == 3


def draw_gpt2(random: np.random.Generator, turn: int, folder: Path) -> tuple[str, dict[str, Any], Any]:
    heads, size = draw_heads(random, turn)
    tokens = int(random.integers(MIN_TOKENS, MAX_TOKENS + 1))
    write_bpe(folder, tokens)
    shape = {
        "vocab_size": tokens,
        "n_head": heads,
        "n_embd": heads * size,
        "n_inner": draw_width(random, turn),
        "n_layer": int(random.integers(1, 4)),
        "n_positions": draw_width(random, turn) + 30,
        "tie_word_embeddings": bool(turn % 2),
    }
    return "GPT2LMHeadModel", shape, random_gpt2(bos_token_id=0, eos_token_id=0, **shape)


def draw_llama(random: np.random.Generator, turn: int, folder: Path) -> tuple[str, dict[str, Any], Any]:
    groups, size = draw_heads(random, turn)
    heads = groups * int(random.integers(1, 4))
    name = list(LLAMAS)[(turn * 7) % len(LLAMAS)]  # 7 and their number share no factor: each once
    shape: dict[str, Any] = {
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "hidden_size": heads * size,
        "intermediate_size": draw_width(random, turn),
        "max_position_embeddings": 64,
    }
    if "head_dim" in LLAMAS[name][1]:  # which need not be the hidden size over the heads
        shape["head_dim"] = size
        shape["hidden_size"] = heads * (int(random.integers(5, 33)) if is_odd(turn) else BLOCK)
    if "longrope" in str(LLAMAS[name][1]):  # its factors are as many as half the rotated numbers
        shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64}
    model = tiny_llama(folder, name, num_hidden_layers=2, **SHALLOW.get(name, {}), **shape)
    return name, shape, model


def draw_bert(random: np.random.Generator, turn: int, folder: Path) -> tuple[str, dict[str, Any], Any]:
    heads, size = draw_heads(random, turn)
    kind = ENCODERS[turn % len(ENCODERS)]
    write_wordpiece(folder)
    inner = draw_width(random, turn)
    layers = int(random.integers(1, 4))
    tokens = len(WORDPIECES) + int(random.integers(0, 50)) * int(turn % 2)
    if kind.startswith("DistilBert"):
        shape = {"n_heads": heads, "dim": heads * size, "hidden_dim": inner, "n_layers": layers}
    else:
        shape = {
            "num_attention_heads": heads,
            "hidden_size": heads * size,
            "intermediate_size": inner,
            "num_hidden_layers": layers,
        }
    shape["vocab_size"] = tokens
    return kind, shape, random_bert(kind, noise=0.0, **shape)


def draw_translator(random: np.random.Generator, turn: int, folder: Path) -> tuple[str, dict[str, Any], Any]:
    heads, size = draw_heads(random, turn)
    shape: dict[str, Any] = {
        "d_model": heads * size,
        "encoder_layers": int(random.integers(1, 3)),
        "decoder_layers": int(random.integers(1, 3)),
    }
    inner = [draw_width(random, turn) for _ in range(2)]
    if turn % 2:
        count = write_marian_tokenizer(folder)
        shape |= {
            "vocab_size": count,
            "encoder_attention_heads": heads,
            "decoder_attention_heads": heads,
            "encoder_ffn_dim": inner[0],
            "decoder_ffn_dim": inner[1],
        }
        return "MarianMTModel", shape, random_marian(**shape)
    for file in find_demo("transformer-demo").glob("*token*.json"):
        shutil.copy(file, folder)
    shutil.copy(find_demo("transformer-demo") / "generation_config.json", folder)
    shutil.copy(find_demo("transformer-demo") / "prompts.txt", folder)
    shape |= {
        "source_vocab_size": 42,
        "target_vocab_size": 14,
        "encoder_heads": heads,
        "decoder_heads": heads,
        "encoder_ffn": inner[0],
        "decoder_ffn": inner[1],
        "norm_first": bool(random.integers(2)),
        "final_norms": bool(random.integers(2)),
        "positions": str(random.choice(["interleaved", "concatenated", "learned"])),
        "tie_word_embeddings": bool(random.integers(2)),
    }
    return "Transformer", shape, random_transformer(**shape)


def draw_weights(
    model: nn.Module, random: np.random.Generator, spread: float, outliers: str, times: float
) -> None:
    """Give every matrix numbers of a spread, vectors a little noise, and some numbers `times` as large."""
    generator = torch.Generator().manual_seed(int(random.integers(2**31)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            is_bias = name.endswith("bias")
            if parameter.ndim == 1:
                parameter.add_(noise * (min(spread, 0.1) if is_bias else 0.1))
                if outliers == "norms" and not is_bias:
                    parameter[:: max(1, len(parameter) // 2)] *= times
                continue
            parameter.copy_(noise * spread)
            if outliers == "columns":
                parameter[:, :: max(1, parameter.shape[1] // 2)] *= times
            if outliers == "weights":
                parameter.view(-1)[:: max(1, parameter.numel() // 8)] *= 3 * times


def write_bpe(folder: Path, count: int) -> None:
    """Write gpt2-demo's tokenizer with the first tokens alone."""
    demo = find_demo("gpt2-demo")
    shutil.copy(demo / "tokenizer_config.json", folder)
    tokenizer = json.loads((demo / "tokenizer.json").read_text(encoding="utf-8"))
    model = tokenizer["model"]
    model["vocab"] = {token: index for token, index in model["vocab"].items() if index < count}
    model["merges"] = [pair for pair in model["merges"] if "".join(pair) in model["vocab"]]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
