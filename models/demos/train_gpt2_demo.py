#!/usr/bin/env python3
"""Train the GPT-2 demo model from scratch on the King James Bible.

    python models/demos/train_gpt2_demo.py --out models/demos/gpt2-demo [--minutes N | --steps N]
    (later, to train a model further: the same with --resume FOLDER --learning-rate 1.5e-3)

The text comes from the `bible` program (Debian package bible-kjv) and is in the public
domain. Whole books are held out: neither the tokenizer nor the model sees any of their
verses. The output folder holds a Hugging Face GPT-2 model (float16 weights, config,
tokenizer) and training.json, which says how it was made and how well it predicts the
held-out books. Needs torch, transformers, tokenizers, safetensors and numpy.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch.nn import functional
from transformers import GPT2Config, GPT2LMHeadModel

from planforge.models.demos.ngram import KneserNey
from planforge.models.demos.samples import sample_report

SEED = 1611
END = "<|endoftext|>"
END_ID = 0  # the special token comes first in the vocabulary
HELD_OUT = (  # names as `bible` abbreviates them; history, wisdom, prophets, gospel, letters
    ["Ruth", "Est", "Eccl", "Lam", "Dan", "Hos", "Jonah", "Zec", "John", "Rom", "Jas"]
)
VOCAB_SIZE = 2048
CONTEXT = 256
BATCH = 16
LEARNING_RATE = 3.0e-3
WEIGHT_DECAY = 0.1
WARMUP = 0.02  # of the whole training
DROPOUT = 0.1
NGRAM_ORDER = 5
EVAL_STRIDE = 64
VERSE = re.compile(r"^(\d?[A-Za-z]+)(\d+):(\d+) (.*)$")


def log(message: str) -> None:
    """Print a line with the time of day."""
    print(time.strftime("%H:%M:%S"), message, flush=True)


def read_bible() -> str:
    """Return the whole King James Bible, a verse per line after its reference."""
    program = shutil.which("bible")
    if program is None:
        sys.exit("error: the program `bible` is missing; install the Debian package bible-kjv")
    command = [program, "-f", "gen1:1-rev22:21"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def parse_books(raw: str) -> dict[str, str]:
    """Return each book as one text: a chapter per paragraph, its verses flowing, no references."""
    chapters: dict[str, dict[int, list[str]]] = {}
    for line in raw.splitlines():
        match = VERSE.match(line)
        if match is None:
            raise ValueError(f"not a verse: {line!r}")
        book, chapter, _, text = match.groups()
        chapters.setdefault(book, {}).setdefault(int(chapter), []).append(text.strip())
    return {
        book: "".join(" ".join(verses) + "\n" for verses in numbered.values())
        for book, numbered in chapters.items()
    }


def split_books(books: dict[str, str]) -> tuple[list[str], list[str]]:
    """Return the texts of the training books and of the held-out books."""
    missing = set(HELD_OUT) - set(books)
    if missing or len(books) != 66:
        raise ValueError(f"expected the 66 books, got {len(books)}; missing: {sorted(missing)}")
    train = [text for book, text in books.items() if book not in HELD_OUT]
    return train, [books[book] for book in HELD_OUT]


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Train a byte-level BPE tokenizer like GPT-2's."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    return tokenizer


def token_stream(tokenizer: Tokenizer, texts: list[str]) -> list[int]:
    """Return the tokens of END, then of every text followed by END."""
    stream = [END_ID]
    for text in texts:
        stream += [*tokenizer.encode(text).ids, END_ID]
    return stream


def char_stream(texts: list[str]) -> list[int]:
    """Return the same as `token_stream`, of characters; all are ASCII, so 256 stands for END."""
    stream = [256]
    for text in texts:
        stream += [*text.encode("ascii"), 256]
    return stream


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


def orthogonalize(matrix: torch.Tensor) -> torch.Tensor:
    """Return roughly the nearest (semi-)orthogonal matrix, by five Newton-Schulz steps."""
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    x: torch.Tensor = wide / (wide.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
    return x if matrix.shape[0] <= matrix.shape[1] else x.T


class Muon(torch.optim.Optimizer):
    """Momentum with orthogonalized updates (Jordan and others, 2024), in float32.

    It learns far more per token than AdamW, which counts on a slow machine. The updates
    are scaled to AdamW's usual size. (torch.optim.Muon computes in bfloat16, which is slow
    on most CPUs, and does not treat attention's three fused matrices apart.)
    """

    def __init__(self, params: list[torch.nn.Parameter], lr: float) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": WEIGHT_DECAY, "momentum": 0.95})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every matrix that has a gradient."""
        for group in self.param_groups:
            for weight in group["params"]:
                state = self.state[weight]
                if "mean" not in state:
                    state["mean"] = torch.zeros_like(weight)
                mean = state["mean"].lerp_(weight.grad, 1.0 - group["momentum"])
                ahead = weight.grad.lerp(mean, group["momentum"])
                pieces = ahead.chunk(3, dim=1) if ahead.shape[1] == 3 * ahead.shape[0] else [ahead]
                scaled = [orthogonalize(x) * 0.2 * max(x.shape) ** 0.5 for x in pieces]
                weight.mul_(1.0 - group["lr"] * group["weight_decay"])
                weight.add_(torch.cat(scaled, dim=1), alpha=-group["lr"])


def new_optimizers(model: GPT2LMHeadModel, rate: float) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices of the blocks, and AdamW for embeddings, biases and norms."""
    named = list(model.named_parameters())
    matrices = [p for name, p in named if ".h." in name and p.dim() == 2]
    embeddings = [p for name, p in named if ".h." not in name and p.dim() == 2]
    groups: list[dict[str, Any]] = [
        {"params": embeddings, "weight_decay": WEIGHT_DECAY},
        {"params": [p for _, p in named if p.dim() < 2], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=True)
    return [Muon(matrices, rate), adamw]


def schedule(done: float) -> float:
    """Return the share of the peak learning rate to use once `done` of the training is over."""
    if done < WARMUP:
        return max(done / WARMUP, 0.01)
    progress = min(1.0, (done - WARMUP) / (1.0 - WARMUP))
    return 0.01 + 0.99 * 0.5 * (1.0 + math.cos(math.pi * progress))


def train(model: GPT2LMHeadModel, stream: list[int], args: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Train on random windows until the time (or the number of steps) is used up."""
    data = torch.tensor(stream)
    optimizers = new_optimizers(model, args.learning_rate)
    model.train()
    generator = torch.Generator().manual_seed(seed)
    start = time.monotonic()
    step = 0
    smooth = math.log(VOCAB_SIZE)
    while True:
        elapsed = time.monotonic() - start
        done = step / args.steps if args.steps else elapsed / (60.0 * args.minutes)
        if done >= 1.0:
            break
        for group in [g for optimizer in optimizers for g in optimizer.param_groups]:
            group["lr"] = args.learning_rate * schedule(done)
        at = torch.randint(0, len(data) - CONTEXT, (BATCH, 1), generator=generator)
        window = data[at + torch.arange(CONTEXT + 1)]
        logits = model(input_ids=window[:, :-1], use_cache=False).logits
        loss = functional.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        step += 1
        smooth += (loss.item() - smooth) * max(0.01, 1.0 / step)
        if step % 25 == 0:
            speed = step * BATCH * CONTEXT / (time.monotonic() - start)
            log(f"step {step}  {done:6.1%}  loss {smooth:.3f}  {speed:.0f} tokens/s")
    seen = step * BATCH * CONTEXT
    return {
        "seed": seed,
        "peak_learning_rate": args.learning_rate,
        "steps": step,
        "tokens_seen": seen,
        "epochs": round(seen / len(stream), 2),
        "minutes": round((time.monotonic() - start) / 60.0, 1),
        "final_training_loss": round(smooth, 4),
    }


def save(out: Path, model: GPT2LMHeadModel, tokenizer: Tokenizer) -> None:
    """Write the model, its weights rounded to float16, and the tokenizer."""
    model.config.activation_function = "gelu_new"
    model.half().save_pretrained(out)
    tokenizer.save(str(out / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END,
        "eos_token": END,
        "unk_token": END,
        "model_max_length": CONTEXT,
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
    }
    write_json(out / "tokenizer_config.json", settings)


def write_json(path: Path, value: Any) -> None:
    """Write a value as indented JSON."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


@torch.no_grad()
def model_bits(model: GPT2LMHeadModel, stream: list[int]) -> float:
    """Return the negative log2 likelihood of stream[1:].

    Windows of CONTEXT tokens move on by EVAL_STRIDE; only the tokens that are new in a
    window are scored, so each has at least CONTEXT - EVAL_STRIDE tokens before it (or all
    there are, at the very beginning).
    """
    data = torch.tensor(stream)
    predicted = len(data) - 1
    nats = 0.0
    scored = 0
    while scored < predicted:
        end = min(predicted, max(CONTEXT, scored + EVAL_STRIDE))
        begin = max(0, end - CONTEXT)
        logits = model(input_ids=data[None, begin:end], use_cache=False).logits[0]
        targets = data[begin + 1 : end + 1]
        fresh = end - scored
        nats += functional.cross_entropy(logits[-fresh:].double(), targets[-fresh:], reduction="sum").item()
        scored = end
    return nats / math.log(2.0)


def baseline_bits(train_stream: list[int], held_out: list[int], vocab_size: int) -> float:
    """Return the same as `model_bits`, of an n-gram model; check that its probabilities sum to 1."""
    model = KneserNey(train_stream, NGRAM_ORDER, vocab_size)
    rng = np.random.default_rng(SEED)
    ends = rng.integers(NGRAM_ORDER, len(held_out), 20)
    contexts = [held_out[end - length : end] for end in ends for length in range(NGRAM_ORDER)]
    if model.check_sums(contexts) > 1e-9:
        raise AssertionError("the n-gram probabilities do not sum to 1")
    return model.bits(held_out)


def evaluate(out: Path, train_texts: list[str], held_texts: list[str]) -> dict[str, Any]:
    """Return held-out figures of the saved model (weights as stored, computing in float32)."""
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    model = GPT2LMHeadModel.from_pretrained(out, dtype=torch.float32)
    model.eval()
    characters = sum(len(text) for text in held_texts)
    tokens = token_stream(tokenizer, held_texts)
    bits = model_bits(model, tokens)
    log(f"model: {bits / characters:.4f} bits per character")
    chars = baseline_bits(char_stream(train_texts), char_stream(held_texts), 257) / characters
    log(f"character {NGRAM_ORDER}-gram: {chars:.4f}")
    train_tokens = token_stream(tokenizer, train_texts)
    bpe = baseline_bits(train_tokens, tokens, VOCAB_SIZE) / characters
    log(f"token {NGRAM_ORDER}-gram: {bpe:.4f}")
    model_bpc = bits / characters
    return {
        "characters": characters,
        "tokens": len(tokens) - 1,
        "perplexity_per_token": round(2.0 ** (bits / (len(tokens) - 1)), 3),
        "bits_per_character": round(model_bpc, 4),
        "baselines_bits_per_character": {
            f"character_{NGRAM_ORDER}gram_modified_kneser_ney": round(chars, 4),
            f"bpe_token_{NGRAM_ORDER}gram_modified_kneser_ney": round(bpe, 4),
        },
        "below_character_baseline": round(1.0 - model_bpc / chars, 4),
        "below_bpe_token_baseline": round(1.0 - model_bpc / bpe, 4),
        "window": CONTEXT,
        "stride": EVAL_STRIDE,
        "sampling": sample_report(model, tokenizer),
    }


def build(args: argparse.Namespace, train_texts: list[str]) -> dict[str, Any]:
    """Train tokenizer and model, save them, and return the facts for training.json."""
    if args.resume is None:
        runs = []
        torch.manual_seed(SEED)
        tokenizer = train_tokenizer(train_texts)
        model = new_model()
    else:
        earlier = json.loads((args.resume / "training.json").read_text(encoding="utf-8"))
        runs = earlier["runs"]
        tokenizer = Tokenizer.from_file(str(args.resume / "tokenizer.json"))
        saved = GPT2LMHeadModel.from_pretrained(args.resume, dtype=torch.float32)
        model = new_model()
        model.load_state_dict(saved.state_dict())
        torch.manual_seed(SEED + len(runs))
    stream = token_stream(tokenizer, train_texts)
    parameters = sum(p.numel() for p in model.parameters())
    log(f"{parameters} parameters, {len(stream)} training tokens")
    runs.append(train(model, stream, args, SEED + len(runs)))
    args.out.mkdir(parents=True, exist_ok=True)
    save(args.out, model, tokenizer)
    return {
        "corpus": "King James Bible as printed by the program of Debian's bible-kjv",
        "held_out_books": HELD_OUT,
        "training_characters": sum(len(text) for text in train_texts),
        "training_tokens": len(stream),
        "parameters": parameters,
        "batch": f"{BATCH} random windows of {CONTEXT} tokens",
        "optimizer": f"Muon (blocks), AdamW (the rest), weight decay {WEIGHT_DECAY}, clip 1.0",
        "schedule": f"warm-up {WARMUP:.0%}, cosine to 1 %",
        "dropout": DROPOUT,
        "runs": runs,
    }


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Train the GPT-2 demo model.")
    parser.add_argument("--out", type=Path, required=True, help="output folder")
    parser.add_argument("--minutes", type=float, default=40.0, help="training time")
    parser.add_argument("--steps", type=int, help="train this many steps instead")
    parser.add_argument("--learning-rate", type=float, default=LEARNING_RATE, help="its peak")
    parser.add_argument("--resume", type=Path, help="go on from the model in this folder")
    parser.add_argument("--evaluate-only", action="store_true", help="only redo the figures")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    train_texts, held_texts = split_books(parse_books(read_bible()))
    record = args.out / "training.json"
    if args.evaluate_only:
        facts = json.loads(record.read_text(encoding="utf-8"))
    else:
        facts = build(args, train_texts)
        write_json(record, facts)
    facts["held_out"] = evaluate(args.out, train_texts, held_texts)
    write_json(record, facts)


if __name__ == "__main__":
    main()
