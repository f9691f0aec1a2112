#!/usr/bin/env python3
"""Train the Transformer demo from scratch: dates written any way -> ISO form.

    python models/demos/train_transformer_demo.py --out models/demos/transformer-demo

The texts are made up by dates.py. Source and target are read and written character by character, with a
tokenizer each. The output folder holds the model (float32), the tokenizers, prompts.txt with a few held-out
texts, and training.json, which says how it was made and how many held-out texts it gets right, format by
format. Needs torch, tokenizers and safetensors.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from torch import Tensor

from planforge.models import (
    PaddedAttention,
    SourceAttention,
    Transformer,
    TransformerConfig,
    save_model,
    training,
)
from planforge.models.demos import dates
from planforge.models.training import schedule_rate, token_loss
from planforge.models.training_data import pad_rows, shift_right

SEED = 1582  # the year of the Gregorian calendar
SPECIALS = PAD, END, UNKNOWN = "<pad>", "</s>", "<unk>"  # the first tokens of both vocabularies
PAD_ID, END_ID, UNKNOWN_ID = range(3)  # the decoder starts from PAD, as Marian's
SOURCE_LETTERS = sorted(
    {*"0123456789 '-./,", *"".join((*dates.MONTHS, *dates.WEEKDAYS, *dates.ORDINALS)).lower()}
)
TARGET_LETTERS = [*"0123456789-"]
MAX_POSITIONS = 64
MAX_LENGTH = 16  # of an answer; an ISO date and END are 11
BATCH = 256
POOL = 8  # batches that are drawn together, to put texts of like length into one
LEARNING_RATE = 2.0e-3
WARMUP = 0.08  # of the steps
BETAS = (0.9, 0.98)
UNKNOWN_RATE = 0.02  # of the training texts get an unknown character somewhere
SAMPLE = 500  # held-out texts of each format in training.json
PROMPT_FORMATS = (
    "iso",
    "slashes",
    "slashes-short",
    "dots",
    "compact",
    "month-day-short",
    "month-day-year",
    "ordinal-of-month",
    "word-of-month",
    "day-month-apostrophe",
    "year-month-day",
    "weekday-day-month",
)


def log(message: str) -> None:
    """Print a line with the time of day."""
    print(time.strftime("%H:%M:%S"), message, file=sys.stderr, flush=True)


def character_tokenizer(letters: Sequence[str]) -> Tokenizer:
    """Return a tokenizer with one token per character, and END after the last."""
    vocabulary = {token: i for i, token in enumerate([*SPECIALS, *letters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {END}", special_tokens=[(END, END_ID)]
    )
    return tokenizer


def source_tokenizer() -> Tokenizer:
    """Return the tokenizer of dates, which ignores case, extra space, and kinds of dashes and quotes."""
    tokenizer = character_tokenizer(SOURCE_LETTERS)
    tokenizer.normalizer = normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.Lowercase(),
            normalizers.Replace(
                Regex("[\N{LEFT SINGLE QUOTATION MARK}\N{RIGHT SINGLE QUOTATION MARK}`]"), "'"
            ),
            normalizers.Replace(Regex("[\N{HYPHEN}-\N{EM DASH}\N{MINUS SIGN}]"), "-"),
            normalizers.Replace(Regex(r"\s+"), " "),
            normalizers.Strip(),
        ]
    )
    return tokenizer


def target_tokenizer() -> Tokenizer:
    """Return the tokenizer of ISO dates."""
    return character_tokenizer(TARGET_LETTERS)


@dataclass(frozen=True)
class DateModel:
    """The model and its tokenizers."""

    model: Transformer
    source: Tokenizer
    target: Tokenizer

    @torch.no_grad()
    def answers(self, texts: Sequence[str]) -> list[str]:
        """Return answers of the likeliest character at each step, until all have ended."""
        ids, mask = pad_batch([encoding.ids for encoding in self.source.encode_batch(texts)])
        memory = self.model.encode(ids, PaddedAttention(mask))
        source = SourceAttention(self.model.decoder.keys_values(memory), mask)  # type: ignore[operator]
        tokens = torch.full((len(texts), 1), PAD_ID)
        past = None
        rows = [tokens]
        while len(rows) < MAX_LENGTH and not torch.cat(rows, 1).eq(END_ID).any(1).all():
            logits, past = self.model.step(rows[-1], source, past)
            logits[:, :, PAD_ID] = -torch.inf
            rows.append(logits.argmax(-1))
        answers = torch.cat(rows[1:], 1).tolist()
        return [self.target.decode(row[: row.index(END_ID)] if END_ID in row else row) for row in answers]


def new_model() -> DateModel:
    """Return a model with random weights."""
    source = source_tokenizer()
    target = target_tokenizer()
    config = TransformerConfig(
        source_vocab_size=source.get_vocab_size(),
        target_vocab_size=target.get_vocab_size(),
        d_model=128,
        encoder_layers=2,
        decoder_layers=2,
        encoder_heads=4,
        decoder_heads=4,
        encoder_ffn=512,
        decoder_ffn=512,
        max_positions=MAX_POSITIONS,
    )
    model = Transformer(config)
    for name, weight in model.named_parameters():
        if ".words." in name:  # these are scaled up by sqrt(d_model), and then as large as the positions
            torch.nn.init.normal_(weight, std=config.d_model**-0.5)
        elif weight.dim() == 2:
            torch.nn.init.xavier_uniform_(weight)
    return DateModel(model, source, target)


def pad_batch(rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Return ids (B, S) and mask (B, S), which is 0 at the padding on the right."""
    return pad_rows(rows, PAD_ID)


def batches(dated: DateModel, seed: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield batches without end: source ids and mask, each (B, S), and target ids (B, 11)."""
    rng = random.Random(seed)
    pairs = dates.training_pairs(seed)
    while True:
        drawn = list(islice(pairs, POOL * BATCH))
        encoded = dated.source.encode_batch([text for text, _ in drawn])
        labels = [encoding.ids for encoding in dated.target.encode_batch([iso for _, iso in drawn])]
        rows = [(encoding.ids, label) for encoding, label in zip(encoded, labels, strict=True)]
        for ids, _ in rows:
            if rng.random() < UNKNOWN_RATE:
                ids.insert(rng.randrange(len(ids)), UNKNOWN_ID)
        rows.sort(key=lambda row: len(row[0]))
        starts = list(range(0, len(rows), BATCH))
        rng.shuffle(starts)
        for start in starts:
            some = rows[start : start + BATCH]
            yield *pad_batch([ids for ids, _ in some]), torch.tensor([label for _, label in some])


def train(dated: DateModel, steps: int, seed: int) -> dict[str, Any]:
    """Train with teacher forcing; return the facts for training.json."""
    model = dated.model

    def compute_loss(batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        ids, mask, labels = batch
        return token_loss(model(ids, shift_right(labels, PAD_ID, PAD_ID), mask), labels)

    started = time.monotonic()
    smooth = math.log(len(TARGET_LETTERS))
    for step, loss in training.train(
        model,
        islice(batches(dated, seed), steps),
        compute_loss,
        lambda step: LEARNING_RATE * schedule_rate(step / steps, WARMUP, floor=0.01, cosine=True),
        [torch.optim.Adam(model.parameters(), betas=BETAS, eps=1e-9)],
    ):
        smooth += (loss - smooth) * max(0.02, 1.0 / step)
        if step % 100 == 0:
            log(f"step {step}  loss {smooth:.5f}  {(time.monotonic() - started) / step:.3f} s/step")
    return {
        "seed": seed,
        "steps": steps,
        "batch": BATCH,
        "optimizer": f"Adam, betas {BETAS}, clip 1.0",
        "peak_learning_rate": LEARNING_RATE,
        "schedule": f"warm-up {WARMUP:.0%}, cosine to 1 %",
        "minutes": round((time.monotonic() - started) / 60.0, 1),
        "final_training_loss": round(smooth, 6),
    }


def evaluate(dated: DateModel, seed: int) -> dict[str, Any]:
    """Return the share of held-out texts whose answer is right, overall and of each format."""
    shares = {}
    for name in dates.FORMATS:
        texts, wanted = zip(*dates.held_out_sample(name, SAMPLE, seed), strict=True)
        got = dated.answers(texts)
        for text, iso, answer in zip(texts, wanted, got, strict=True):
            if answer != iso:
                log(f"wrong: {name}: {text!r} is {iso}, not {answer}")
        shares[name] = sum(map(str.__eq__, wanted, got)) / SAMPLE
    return {
        "texts_per_format": SAMPLE,
        "seed": seed,
        "exact_match": round(sum(shares.values()) / len(shares), 5),
        "exact_match_by_format": shares,
    }


def save(out: Path, dated: DateModel) -> None:
    """Write the model, its tokenizers, the generation config, and the prompts."""
    save_model(dated.model, out)
    dated.source.save(str(out / "tokenizer.source.json"))
    dated.target.save(str(out / "tokenizer.target.json"))
    generation = {
        "decoder_start_token_id": PAD_ID,
        "eos_token_id": END_ID,
        "pad_token_id": PAD_ID,
        "bad_words_ids": [[PAD_ID]],
        "max_length": MAX_LENGTH,
        "num_beams": 1,
    }
    write_json(out / "generation_config.json", generation)
    prompts = [dates.held_out_sample(name, 1, SEED)[0][0] for name in PROMPT_FORMATS]
    (out / "prompts.txt").write_text("".join(f"{text}\n" for text in prompts), encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Write a value as indented JSON."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Train the Transformer demo model.")
    parser.add_argument("--out", type=Path, required=True, help="output folder")
    parser.add_argument("--steps", type=int, default=2000, help="training steps")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(SEED)
    dated = new_model()
    parameters = sum(weight.numel() for weight in dated.model.parameters())
    log(f"{parameters} parameters, {len(dates.FORMATS)} formats")
    facts = {"parameters": parameters, **train(dated, args.steps, SEED)}
    facts["held_out"] = evaluate(dated, SEED)
    log(f"{facts['held_out']['exact_match']:.3%} of the held-out texts are right")
    save(args.out, dated)
    write_json(args.out / "training.json", facts)


if __name__ == "__main__":
    main()
