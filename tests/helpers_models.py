"""Random checkpoints, written by transformers: the witness for our models and their exports."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # conftest says so too; transformers reads it once, when imported

import torch
import transformers
from torch import Tensor

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
torch.set_num_threads(1)  # tiny tensors: more threads only wait for each other, 10 times as long

TINY: dict[str, Any] = {
    "vocab_size": 96,
    "n_positions": 64,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "initializer_range": 0.3,  # at the published 0.02 a tied random GPT-2 repeats its last token
}
PROMPTS = ([5, 17], [80, 3, 41])
VARIED = 10  # distinct tokens in 40: fewer, and equal tokens would show nothing


def tiny_gpt2(folder: Path, **overrides: Any) -> transformers.GPT2LMHeadModel:
    """Writes a checkpoint whose greedy continuations vary, and differ from prompt to prompt.

    Args:
        folder: gets config.json and model.safetensors.
        overrides: of `TINY`, by transformers' names.
    """
    for seed in range(20):
        model = random_gpt2(seed, **TINY | overrides)
        texts = [greedy(model, [token % model.config.vocab_size for token in p]) for p in PROMPTS]
        if texts[0] != texts[1] and all(len(set(text)) >= VARIED for text in texts):
            model.save_pretrained(folder)
            return model
    raise AssertionError(f"no seed gives {VARIED} distinct tokens in 40 with {overrides}")


def random_gpt2(seed: int = 0, **config: Any) -> transformers.GPT2LMHeadModel:
    """A seeded GPT-2 in eval mode; biases and norms are random too, which start as 0 and 1."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**config))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.add_(0.1 * torch.randn_like(parameter))
    model.eval()
    return model


def greedy(model: transformers.GPT2LMHeadModel, prompt: list[int], tokens: int = 40) -> list[int]:
    """The most likely `tokens` tokens after the prompt, whatever eos is."""
    new: list[int] = []
    with torch.inference_mode():
        out = model(torch.tensor([prompt]), use_cache=True)
        while True:
            new.append(int(out.logits[0, -1].argmax()))
            if len(new) == tokens:
                return new
            step = torch.tensor([new[-1:]])
            out = model(step, past_key_values=out.past_key_values, use_cache=True)


def reference_logits(
    model: transformers.GPT2LMHeadModel, input_ids: Tensor, mask: Tensor | None = None
) -> Tensor:
    """transformers' logits (B, T, V) in one pass; `mask` (B, T) is 0 where a row is padded."""
    if mask is None:
        mask = torch.ones_like(input_ids)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.inference_mode():
        out = model(input_ids, attention_mask=mask, position_ids=positions, use_cache=False)
    logits: Tensor = out.logits
    return logits
