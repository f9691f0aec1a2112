#!/usr/bin/env python3
"""Train sd-demo from scratch: a small Stable Diffusion that draws coloured digits.

    python models/demos/train_sd_demo.py --out models/demos/sd-demo

First the autoencoder learns to give a picture of 32 x 32 back from latents of 4 x 8 x 8. Then text encoder
and UNet learn together to take noise out of latents. The output folder is one of diffusers: weights in
float16, a CLIP tokenizer whose words are the captions', prompts.txt, and training.json with the figures.
Needs torch, tokenizers, safetensors and scikit-learn.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from torch.nn import functional as F

from planforge.models import StableDiffusion, StableDiffusionConfig, training
from planforge.models.autoencoder import AutoencoderConfig
from planforge.models.clip import ClipTextConfig
from planforge.models.demos import digits
from planforge.models.diffusers_saving import save_pipeline, write_json
from planforge.models.training import schedule_rate
from planforge.models.unet import UNetConfig

START = "<|startoftext|>"
END = "<|endoftext|>"
TOKENS = 16  # of a caption, special ones included
LATENTS = 8  # height and width
CHANNELS = 4
TRAINED_STEPS = 1000
SCHEDULER: dict[str, Any] = {
    "_class_name": "DDIMScheduler",
    "num_train_timesteps": TRAINED_STEPS,
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "prediction_type": "epsilon",
    "steps_offset": 1,
    "timestep_spacing": "leading",
    "clip_sample": False,
    "set_alpha_to_one": False,
    "skip_prk_steps": True,
}
EMPTY_RATE = 0.1  # of the captions are empty, which guidance needs
AVERAGED = 0.999  # of the mean of the weights that are kept stays from step to step
KL_WEIGHT = 1e-3  # of the latents' distance from normal noise, beside the squared error of pictures
JUDGED = 600  # pictures that training.json counts
GUIDANCE = 2.0
STEPS = 20
LOGGED = 200  # steps between two lines of the log, and of the means in them


def log(message: str) -> None:
    """Print a line with the time of day."""
    print(time.strftime("%H:%M:%S"), message, file=sys.stderr, flush=True)


def make_vocabulary() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Return a byte-level vocabulary of CLIP and its merges: each word of a caption is one token."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    symbols = [*letters, *(f"{letter}</w>" for letter in letters)]
    merges: list[tuple[str, str]] = []
    words = sorted({word for form in digits.FORMS for word in form.split() if "{" not in word})
    for word in (*words, *digits.NAMES, *digits.NUMBERS):
        vocab = {symbol: number for number, symbol in enumerate(symbols)}
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, end_of_word_suffix="</w>"))
        first, *rest = tokenizer.encode(word).tokens
        for piece in rest:  # what earlier merges make of a word comes first, so each stays one token
            merges.append((first, piece))
            first += piece
            symbols.append(first)
    symbols = [*dict.fromkeys(symbols), START, END]
    return {symbol: number for number, symbol in enumerate(symbols)}, merges


def write_tokenizer(folder: Path, vocab: dict[str, int], merges: list[tuple[str, str]]) -> None:
    """Write the files of transformers' CLIPTokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "vocab.json", vocab)
    lines = ["#version: 0.2", *(" ".join(pair) for pair in merges)]
    (folder / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    settings = {"bos_token": START, "eos_token": END, "pad_token": END, "unk_token": END}
    write_json(
        folder / "tokenizer_config.json",
        {"tokenizer_class": "CLIPTokenizer", "model_max_length": TOKENS, **settings},
    )


class Captions:
    """Turns captions into tokens: the words are known, so none is split."""

    def __init__(self, vocab: dict[str, int]) -> None:
        self.vocab = vocab

    def encode(self, captions: list[str]) -> Tensor:
        """Return tokens (N, T), with the end token as padding."""
        rows = []
        for text in captions:
            ids = [self.vocab[START], *(self.vocab[f"{word}</w>"] for word in text.split())]
            rows.append(ids + [self.vocab[END]] * (TOKENS - len(ids)))
        return torch.tensor(rows)


def new_model(vocab: dict[str, int]) -> StableDiffusion:
    """Return a model with random weights: 0.1 + 3.2 + 0.7 million."""
    model = StableDiffusion(
        StableDiffusionConfig(
            text=ClipTextConfig(
                vocab_size=len(vocab),
                hidden_size=64,
                intermediate_size=256,
                num_hidden_layers=2,
                num_attention_heads=4,
                max_position_embeddings=TOKENS,
                eos_token_id=vocab[END],
            ),
            unet=UNetConfig(
                block_out_channels=(64, 128),
                layers_per_block=1,
                cross_attention_dim=64,
                heads=(4, 4),
                has_attention=(True, False),
                depths=(1, 1),
                norm_num_groups=16,
                sample_size=LATENTS,
            ),
            vae=AutoencoderConfig(
                block_out_channels=(16, 32, 64),
                layers_per_block=1,
                norm_num_groups=8,
                scaling_factor=1.0,
            ),
        )
    )
    for part in (model.text_encoder.token_embedding, model.text_encoder.position_embedding):
        nn.init.normal_(part.weight, std=0.02)
    return model


def make_rate(peak: float, steps: int) -> Callable[[int], float]:
    """Return the learning rate of each step: up in 100 steps, then down to a fiftieth of the peak."""
    return lambda step: peak * schedule_rate(step / steps, 100 / steps, floor=0.02)


def draw_pictures(trained: digits.Digits, batch: int) -> Iterator[Tensor]:
    """Yield pictures (N, 3, 32, 32) of digits in random colours without end."""
    random = np.random.default_rng(digits.SEED)
    while True:
        numbers = random.integers(len(trained.images), size=batch)
        yield torch.from_numpy(trained.draw(numbers, random.integers(len(digits.NAMES), size=batch)))


def train_autoencoder(model: StableDiffusion, trained: digits.Digits, steps: int, batch: int) -> float:
    """Train the autoencoder; return the mean squared error of its pictures at the end."""
    errors = deque[float](maxlen=LOGGED)

    def compute_loss(pictures: Tensor) -> Tensor:
        mean, deviation = model.vae.encode(pictures)
        error = F.mse_loss(model.vae.decode(mean + deviation * torch.randn_like(mean)), pictures)
        errors.append(error.item())
        divergence = 0.5 * (mean.square() + deviation.square() - 1 - 2 * deviation.log()).mean()
        return error + KL_WEIGHT * divergence

    batches = islice(draw_pictures(trained, batch), steps)
    optimizers = [torch.optim.AdamW(model.vae.parameters())]
    for step, _ in training.train(
        model.vae, batches, compute_loss, make_rate(2e-3, steps), optimizers, clip=None
    ):
        if step % LOGGED == 0:
            log(f"autoencoder, step {step} of {steps}: {np.mean(errors):.5f}")
    return float(np.mean(errors))


@torch.no_grad()
def encode_all(model: StableDiffusion, trained: digits.Digits) -> tuple[Tensor, Tensor]:
    """Return mean and deviation (colours, N, 4, 8, 8) of the latents of all digits, and set their scale."""
    count = len(trained.images)
    found = [
        model.vae.encode(torch.from_numpy(trained.draw(np.arange(count), np.full(count, colour))))
        for colour in range(len(digits.NAMES))
    ]
    mean = torch.stack([one for one, _ in found])
    deviation = torch.stack([two for _, two in found])
    scale = 1 / float((mean + deviation * torch.randn_like(mean)).std())
    model.vae.config = model.vae.config.__class__(**{**vars(model.vae.config), "scaling_factor": scale})
    model.config = model.config.__class__(model.config.text, model.config.unet, model.vae.config)
    return mean * scale, deviation * scale


def make_levels() -> Tensor:
    """Return how much of a picture is left at each time step (1000,)."""
    first, last = (SCHEDULER[name] ** 0.5 for name in ("beta_start", "beta_end"))
    betas = torch.linspace(first, last, TRAINED_STEPS) ** 2
    return torch.cumprod(1 - betas, dim=0)


def draw_batches(
    trained: digits.Digits, latents: tuple[Tensor, Tensor], batch: int
) -> Iterator[tuple[Tensor, list[str]]]:
    """Yield latents (N, 4, 8, 8) and captions without end."""
    random = np.random.default_rng(digits.SEED + 1)
    mean, deviation = latents
    while True:
        numbers = random.integers(len(trained.images), size=batch)
        colours = random.integers(len(digits.NAMES), size=batch)
        drawn = mean[colours, numbers] + deviation[colours, numbers] * torch.randn(
            batch, CHANNELS, LATENTS, LATENTS
        )
        yield (
            drawn,
            [
                "" if random.random() < EMPTY_RATE else digits.caption(int(trained.labels[n]), int(c), random)
                for n, c in zip(numbers, colours, strict=True)
            ],
        )


def train_unet(
    model: StableDiffusion, captions: Captions, batches: Iterator[tuple[Tensor, list[str]]], steps: int
) -> float:
    """Train text encoder and UNet, and keep the mean of their weights; return the loss at the end."""
    parameters = [*model.unet.parameters(), *model.text_encoder.parameters()]
    averaged = [parameter.detach().clone() for parameter in parameters]
    levels = make_levels()

    def compute_loss(batch: tuple[Tensor, list[str]]) -> Tensor:
        latents, texts = batch
        times = torch.randint(0, TRAINED_STEPS, (len(latents),))
        noise = torch.randn_like(latents)
        level = levels[times][:, None, None, None]
        noisy = level.sqrt() * latents + (1 - level).sqrt() * noise
        states = model.text_encoder(captions.encode(texts))
        return F.mse_loss(model.unet(noisy, times, states), noise)

    losses = deque[float](maxlen=LOGGED)
    optimizers = [torch.optim.AdamW(parameters, weight_decay=1e-4)]
    rate = make_rate(1e-3, steps)
    for step, loss in training.train(model, islice(batches, steps), compute_loss, rate, optimizers):
        share = min(AVERAGED, (1 + step) / (10 + step))
        with torch.no_grad():
            torch._foreach_mul_(averaged, share)
            torch._foreach_add_(averaged, [one.detach() for one in parameters], alpha=1 - share)
        losses.append(loss)
        if step % LOGGED == 0:
            log(f"unet, step {step} of {steps}: {np.mean(losses):.4f}")
    with torch.no_grad():
        for parameter, mean in zip(parameters, averaged, strict=True):
            parameter.copy_(mean)
    return float(np.mean(losses))


@torch.no_grad()
def draw(model: StableDiffusion, captions: Captions, texts: list[str]) -> Tensor:
    """Return the pictures (N, 3, 32, 32) of texts, by DDIM with guidance."""
    levels = make_levels()
    latents = torch.randn(len(texts), CHANNELS, LATENTS, LATENTS)
    towards = model.text_encoder(captions.encode(texts))
    away = model.text_encoder(captions.encode([""] * len(texts)))
    stride = TRAINED_STEPS // STEPS
    for step in range((STEPS - 1) * stride + 1, 0, -stride):
        times = torch.full((len(texts),), step)
        plain = model.unet(latents, times, away)
        noise = plain + GUIDANCE * (model.unet(latents, times, towards) - plain)
        now = levels[step]
        before = levels[max(step - stride, 0)]
        clean = (latents - (1 - now).sqrt() * noise) / now.sqrt()
        latents = before.sqrt() * clean + (1 - before).sqrt() * noise
    return model.vae.decode(latents / model.vae.config.scaling_factor)


def count_right(model: StableDiffusion, captions: Captions) -> dict[str, float]:
    """Return the shares of pictures whose digit and colour are those of the caption, and by chance."""
    random = np.random.default_rng(digits.SEED + 2)
    numbers = random.integers(10, size=JUDGED)
    colours = random.integers(len(digits.NAMES), size=JUDGED)
    texts = [digits.caption(int(n), int(c), random) for n, c in zip(numbers, colours, strict=True)]
    torch.manual_seed(digits.SEED)
    pictures = draw(model, captions, texts)
    read, tints = digits.Reader.train().read(pictures.numpy())
    return {
        "digits": float((read == numbers).mean()),
        "colours": float((tints == colours).mean()),
        "digits_of_shuffled_captions": float((read == random.permutation(numbers)).mean()),
    }


def main() -> None:
    """Train, count, and write the folder."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--autoencoder-steps", type=int, default=1500)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.manual_seed(digits.SEED)
    torch.set_num_threads(arguments.threads)
    started = time.monotonic()
    vocab, merges = make_vocabulary()
    captions = Captions(vocab)
    model = new_model(vocab)
    trained, _ = digits.load()
    error = train_autoencoder(model, trained, arguments.autoencoder_steps, 32)
    latents = encode_all(model, trained)
    loss = train_unet(model, captions, draw_batches(trained, latents, 64), arguments.steps)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.half())  # as the files have them
    figures = count_right(model, captions)
    log(f"right: {figures}")
    save_pipeline(model, arguments.out, SCHEDULER, torch.float16)
    write_tokenizer(arguments.out / "tokenizer", vocab, merges)
    prompts = [digits.caption(n % 10, n % len(digits.NAMES), np.random.default_rng(n)) for n in range(30)]
    (arguments.out / "prompts.txt").write_text("\n".join(prompts) + "\n", encoding="utf-8")
    write_json(
        arguments.out / "training.json",
        {
            "seconds": round(time.monotonic() - started),
            "cpu_seconds": round(time.process_time()),
            "threads": arguments.threads,
            "autoencoder": {"steps": arguments.autoencoder_steps, "batch": 32, "squared_error": error},
            "unet": {"steps": arguments.steps, "batch": 64, "loss": loss},
            "pictures": {"count": JUDGED, "steps": STEPS, "guidance_scale": GUIDANCE, **figures},
        },
    )


if __name__ == "__main__":
    main()
