"""Trains a demo's language model on the King James Bible, and says how well it predicts the held-out books.

A demo's script has a `Recipe`; `run_command` is its command line. The output folder holds a Hugging Face
model (half precision, config, tokenizer) and training.json, which says how it was made. Needs torch,
transformers, tokenizers, safetensors and numpy.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch.nn import functional
from transformers import PreTrainedModel

from planforge.models import training
from planforge.models.demos.bible import (
    END,
    HELD_OUT,
    VOCAB_SIZE,
    Book,
    char_stream,
    parse_books,
    read_bible,
    split_books,
    text_of,
    token_stream,
    train_tokenizer,
)
from planforge.models.demos.ngram import KneserNey
from planforge.models.demos.samples import sample_report
from planforge.models.training import schedule_rate, token_loss

SEED = 1611
WEIGHT_DECAY = 0.1
WARMUP = 0.02  # of the whole training
NGRAM_ORDER = 5
EVAL_STRIDE = 64


@dataclass(frozen=True)
class Recipe:
    """The choices of one demo's training.

    Attributes:
        model: makes the untrained model.
        dtype: of the weights as they are stored.
        context: tokens of a window that is trained on.
        batch: windows of a step.
        learning_rate: its peak.
        special_tokens: of the tokenizer; END first.
        fused: how many matrices one holds side by side, by the end of its name; each is updated on its own.
        make_stream: the tokens to train on, of the training books.
        finish: writes what else the folder needs, and changes the config before it is written.
        facts: for training.json.
    """

    model: Callable[[], PreTrainedModel]
    dtype: torch.dtype
    context: int
    batch: int
    learning_rate: float
    special_tokens: list[str]
    fused: dict[str, int]
    make_stream: Callable[[Tokenizer, list[Book]], list[int]]
    finish: Callable[[PreTrainedModel, Path], None]
    facts: dict[str, Any]


def log(message: str) -> None:
    """Print a line with the time of day."""
    print(time.strftime("%H:%M:%S"), message, flush=True)


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

    def __init__(self, groups: list[dict[str, Any]], lr: float) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": WEIGHT_DECAY, "momentum": 0.95, "pieces": 1})

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
                pieces = ahead.chunk(group["pieces"], dim=1)
                scaled = [orthogonalize(x) * 0.2 * max(x.shape) ** 0.5 for x in pieces]
                weight.mul_(1.0 - group["lr"] * group["weight_decay"])
                weight.add_(torch.cat(scaled, dim=1), alpha=-group["lr"])


def new_optimizers(model: PreTrainedModel, recipe: Recipe, rate: float) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices of the blocks, and AdamW for embeddings, biases and norms."""
    embeddings = [module.weight for module in model.modules() if isinstance(module, torch.nn.Embedding)]
    known = {id(weight) for weight in embeddings}
    matrices: list[dict[str, Any]] = []
    for name, weight in model.named_parameters():
        if weight.dim() == 2 and id(weight) not in known:
            pieces = [count for end, count in recipe.fused.items() if name.endswith(end)]
            matrices.append({"params": [weight], "pieces": pieces[0] if pieces else 1})
    vectors = [weight for weight in model.parameters() if weight.dim() < 2]
    groups: list[dict[str, Any]] = [
        {"params": embeddings, "weight_decay": WEIGHT_DECAY},
        {"params": vectors, "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=True)
    return [Muon(matrices, rate), adamw]


def draw_windows(
    stream: list[int], recipe: Recipe, seed: int, is_over: Callable[[], bool]
) -> Iterator[torch.Tensor]:
    """Yield random windows (B, T + 1), each with the token behind it, until the training is over."""
    data = torch.tensor(stream)
    generator = torch.Generator().manual_seed(seed)
    while not is_over():
        at = torch.randint(0, len(data) - recipe.context, (recipe.batch, 1), generator=generator)
        yield data[at + torch.arange(recipe.context + 1)]


def train(
    model: PreTrainedModel, recipe: Recipe, stream: list[int], args: argparse.Namespace, seed: int
) -> dict[str, Any]:
    """Train on random windows until the time (or the number of steps) is used up."""
    start = time.monotonic()
    step = 0
    smooth = math.log(VOCAB_SIZE)
    window_tokens = recipe.batch * recipe.context

    def measure_done() -> float:
        return float(step / args.steps if args.steps else (time.monotonic() - start) / (60.0 * args.minutes))

    def compute_loss(window: torch.Tensor) -> torch.Tensor:
        return token_loss(model(input_ids=window[:, :-1], use_cache=False).logits, window[:, 1:])

    for step, loss in training.train(
        model,
        draw_windows(stream, recipe, seed, lambda: measure_done() >= 1.0),
        compute_loss,
        lambda _: args.learning_rate * schedule_rate(measure_done(), WARMUP, floor=0.01, cosine=True),
        new_optimizers(model, recipe, args.learning_rate),
    ):
        smooth += (loss - smooth) * max(0.01, 1.0 / step)
        if step % 25 == 0:
            speed = step * window_tokens / (time.monotonic() - start)
            log(f"step {step}  {measure_done():6.1%}  loss {smooth:.3f}  {speed:.0f} tokens/s")
    return {
        "seed": seed,
        "peak_learning_rate": args.learning_rate,
        "steps": step,
        "tokens_seen": step * window_tokens,
        "epochs": round(step * window_tokens / len(stream), 2),
        "minutes": round((time.monotonic() - start) / 60.0, 1),
        "final_training_loss": round(smooth, 4),
    }


def save(out: Path, model: PreTrainedModel, tokenizer: Tokenizer, recipe: Recipe) -> None:
    """Write the model in half precision, and the tokenizer."""
    recipe.finish(model, out)
    model.to(dtype=recipe.dtype).save_pretrained(out)  # type: ignore[call-arg]  # wrapped without its self
    tokenizer.save(str(out / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END,
        "eos_token": END,
        "unk_token": END,
        "model_max_length": recipe.context,
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
    }
    write_json(out / "tokenizer_config.json", settings)


def write_json(path: Path, value: Any) -> None:
    """Write a value as indented JSON."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


@torch.no_grad()
def model_bits(model: PreTrainedModel, context: int, stream: list[int]) -> float:
    """Return the negative log2 likelihood of stream[1:].

    Windows of `context` tokens move on by EVAL_STRIDE; only the tokens that are new in a
    window are scored, so each has at least context - EVAL_STRIDE tokens before it (or all
    there are, at the very beginning).
    """
    data = torch.tensor(stream)
    predicted = len(data) - 1
    nats = 0.0
    scored = 0
    while scored < predicted:
        end = min(predicted, max(context, scored + EVAL_STRIDE))
        begin = max(0, end - context)
        logits = model(input_ids=data[None, begin:end], use_cache=False).logits[0]
        targets = data[begin + 1 : end + 1]
        fresh = end - scored
        nats += functional.cross_entropy(logits[-fresh:].double(), targets[-fresh:], reduction="sum").item()
        scored = end
    return nats / math.log(2.0)


def baseline_bits(train_stream: list[int], held_out: list[int], vocab_size: int) -> float:
    """Return the same as `model_bits` for an n-gram model; check that its probabilities sum to 1."""
    model = KneserNey(train_stream, NGRAM_ORDER, vocab_size)
    rng = np.random.default_rng(SEED)
    ends = rng.integers(NGRAM_ORDER, len(held_out), 20)
    contexts = [held_out[end - length : end] for end in ends for length in range(NGRAM_ORDER)]
    if model.check_sums(contexts) > 1e-9:
        raise AssertionError("the n-gram probabilities do not sum to 1")
    return model.bits(held_out)


def evaluate(out: Path, recipe: Recipe, train_texts: list[str], held_texts: list[str]) -> dict[str, Any]:
    """Return held-out figures of the saved model (weights as stored, computing in float32)."""
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    model = type(recipe.model()).from_pretrained(out, dtype=torch.float32)
    model.eval()
    characters = sum(len(text) for text in held_texts)
    tokens = token_stream(tokenizer, held_texts)
    bits = model_bits(model, recipe.context, tokens)
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
        "window": recipe.context,
        "stride": EVAL_STRIDE,
        "sampling": sample_report(model, tokenizer),
    }


def build(args: argparse.Namespace, recipe: Recipe, books: list[Book]) -> dict[str, Any]:
    """Train tokenizer and model, save them, and return the facts for training.json."""
    train_texts = [text_of(book) for book in books]
    if args.resume is None:
        runs = []
        torch.manual_seed(SEED)
        tokenizer = train_tokenizer(train_texts, recipe.special_tokens)
        model = recipe.model()
    else:
        earlier = json.loads((args.resume / "training.json").read_text(encoding="utf-8"))
        runs = earlier["runs"]
        tokenizer = Tokenizer.from_file(str(args.resume / "tokenizer.json"))
        model = recipe.model()
        saved = type(model).from_pretrained(args.resume, dtype=torch.float32)
        model.load_state_dict(saved.state_dict())
        torch.manual_seed(SEED + len(runs))
    stream = recipe.make_stream(tokenizer, books)
    parameters = sum(weight.numel() for weight in model.parameters())
    log(f"{parameters} parameters, {len(stream)} training tokens")
    runs.append(train(model, recipe, stream, args, SEED + len(runs)))
    args.out.mkdir(parents=True, exist_ok=True)
    save(args.out, model, tokenizer, recipe)
    return {
        "corpus": "King James Bible as printed by the program of Debian's bible-kjv",
        "held_out_books": HELD_OUT,
        "training_characters": sum(len(text) for text in train_texts),
        "training_tokens": len(stream),
        "parameters": parameters,
        "batch": f"{recipe.batch} random windows of {recipe.context} tokens",
        "optimizer": f"Muon (blocks), AdamW (the rest), weight decay {WEIGHT_DECAY}, clip 1.0",
        "schedule": f"warm-up {WARMUP:.0%}, cosine to 1 %",
        **recipe.facts,
        "runs": runs,
    }


def run_command(recipe: Recipe, description: str) -> None:
    """Run a demo's command line."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, required=True, help="output folder")
    parser.add_argument("--minutes", type=float, default=40.0, help="training time")
    parser.add_argument("--steps", type=int, help="train this many steps instead")
    parser.add_argument("--learning-rate", type=float, default=recipe.learning_rate, help="its peak")
    parser.add_argument("--resume", type=Path, help="go on from the model in this folder")
    parser.add_argument("--evaluate-only", action="store_true", help="only redo the figures")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    training, held_out = split_books(parse_books(read_bible()))
    record = args.out / "training.json"
    if args.evaluate_only:
        facts = json.loads(record.read_text(encoding="utf-8"))
    else:
        facts = build(args, recipe, training)
        write_json(record, facts)
    facts["held_out"] = evaluate(
        args.out, recipe, [text_of(book) for book in training], [text_of(book) for book in held_out]
    )
    write_json(record, facts)
