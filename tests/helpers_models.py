"""Random checkpoints, written by transformers: the witness for our models and their exports."""

from __future__ import annotations

import json
import os
import string
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # conftest says so too; transformers reads it once, when imported

import torch
import transformers
from safetensors.torch import load_file, save_file
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
TINY_BERT: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
TINY_DISTILBERT: dict[str, Any] = {
    "vocab_size": 96,
    "dim": 32,
    "n_layers": 2,
    "n_heads": 4,
    "hidden_dim": 48,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
WORDPIECES = [  # at most the 96 of the configs above; digits do not continue a word, so 42 is [UNK]
    *("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"),
    *string.ascii_lowercase,
    *(f"##{letter}" for letter in string.ascii_lowercase),
    *string.digits,
    *".,!?-'",
    *("the", "and", "hello", "world", "paris", "plan", "forge", "is", "it", "not"),
    *("##ing", "##ed", "##er", "##ly", "##un"),
    *"我在北京东",
]
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


def tiny_bert(
    folder: Path, architecture: str = "BertModel", seed: int = 0, **config: Any
) -> transformers.PreTrainedModel:
    """Writes a random checkpoint of BERT or DistilBERT, and returns it in eval mode.

    Args:
        folder: gets config.json and model.safetensors.
        architecture: a class of transformers, such as "DistilBertForMaskedLM".
        config: of `TINY_BERT` or `TINY_DISTILBERT`, by that kind's published names.
    """
    model = random_bert(architecture, seed, **config)
    model.save_pretrained(folder)
    return model


def random_bert(
    architecture: str, seed: int = 0, noise: float = 0.1, **config: Any
) -> transformers.PreTrainedModel:
    """A seeded BERT or DistilBERT in eval mode, in which no parameter is exactly 0 or 1.

    Args:
        architecture: a class of transformers, such as "DistilBertForMaskedLM".
        noise: added to every parameter, also those that start as 0 or 1.
        config: of `TINY_BERT` or `TINY_DISTILBERT`, by that kind's published names.
    """
    if architecture.startswith("DistilBert"):
        published: Any = transformers.DistilBertConfig(**TINY_DISTILBERT | config)
    else:
        published = transformers.BertConfig(**TINY_BERT | config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: transformers.PreTrainedModel = getattr(transformers, architecture)(published)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(noise * torch.randn_like(parameter))
    model.eval()
    return model


def write_wordpiece(folder: Path, **settings: Any) -> None:
    """Writes BERT's tokenizer with `WORDPIECES`, so that a folder of `tiny_bert` is complete.

    Args:
        folder: gets vocab.txt and tokenizer_config.json.
        settings: of tokenizer_config.json, on top of those of bert-base-uncased.
    """
    folder.mkdir(parents=True, exist_ok=True)
    special = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    config = {"tokenizer_class": "BertTokenizer", "do_lower_case": True, "model_max_length": 64} | special
    (folder / "vocab.txt").write_text("".join(f"{piece}\n" for piece in WORDPIECES), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config | settings), encoding="utf-8")


def edit_weights(folder: Path, **changes: Tensor | None) -> dict[str, Tensor]:
    """Rewrites model.safetensors with some tensors replaced, added or, with None, taken out."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()  # the tensors map it
    for name, tensor in changes.items():
        weights.pop(name, None)
        if tensor is not None:
            weights[name] = tensor
    save_file(weights, folder / "model.safetensors")
    return weights


def edit_json(path: Path, **changes: Any) -> None:
    """Rewrites a JSON object with some members replaced, added or, with `...`, taken out."""
    value = json.loads(path.read_text(encoding="utf-8")) | changes
    path.write_text(json.dumps({k: v for k, v in value.items() if v is not ...}), encoding="utf-8")
