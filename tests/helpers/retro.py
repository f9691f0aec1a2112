"""Small random RETROs over a tokenizer of letters, their checkpoints, and texts for an index."""

from __future__ import annotations

import json
import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from planforge.models import Retro, RetroConfig, save_model
from planforge.runtime.bundle.bundle import Bundle
from planforge.runtime.search.build import build_index
from planforge.runtime.text.tokenizer import Tokenizer as OwnTokenizer

END = "</s>"
LETTERS = string.ascii_lowercase + " .,"
TINY: dict[str, Any] = {
    "vocab_size": 1 + len(LETTERS),
    "max_positions": 96,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "head_size": 16,
    "intermediate_size": 64,
    "cross_layers": (1, 2),
    "chunk_length": 8,
    "neighbours": 2,
    "neighbour_length": 16,
    "encoder_size": 64,
    "encoder_layers": 2,
    "encoder_heads": 2,
    "encoder_head_size": 16,
    "encoder_intermediate_size": 96,
    "encoder_cross_layers": (1,),
    "encoder_words": True,
    "tie_word_embeddings": False,  # else it repeats its last letter
}
# As labml_nn's model has it.
LABML: dict[str, Any] = {
    "encoder_size": 32,
    "encoder_head_size": 16,
    "encoder_intermediate_size": 64,
    "encoder_words": False,
    "activation": "relu",
    "norm": "layer",
    "norm_eps": 1e-5,
    "bias": True,
    "final_norm": False,
    "cross_positions": False,
    "output_bias": True,
}
TEXTS = {
    "birds": "the heron stands in the reeds and waits. the swift sleeps in the air, and never lands on earth",
    "stones": "granite is hard and grey. chalk is soft and white, and the sea takes it away, year by year.",
    "ships": "the ship left the harbour at dawn. the wind was fair, and they sang till the sun went down.",
}
PROMPT = "the heron stands in the wind, and the sea"


def make_retro(**settings: Any) -> Retro:
    """Return a random model whose answers depend on each of its parts."""
    torch.manual_seed(0)
    model = Retro(RetroConfig(**TINY | settings)).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            parameter.add_(0.3 * torch.randn(parameter.shape))
        elif "words" not in name:
            parameter.mul_(2)
    return model


def write_retro(folder: Path, **settings: Any) -> Path:
    """Save a random model with its tokenizer, and return the folder."""
    save_model(make_retro(**settings), folder, settings={"eos_token_id": 0})
    vocabulary = {token: number for number, token in enumerate((END, *LETTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=END))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(END, special=True, normalized=False)])
    tokenizer.save(str(folder / "tokenizer.json"))
    prompts = "".join(f"{text}\n" for text in TEXTS.values())
    (folder / "prompts.txt").write_text(prompts, encoding="utf-8")
    return folder


def write_index(bundle: Path, folder: Path, names: Sequence[str] = tuple(TEXTS)) -> Path:
    """Write an index of some of `TEXTS` for a bundle, and return its folder."""
    opened = Bundle.open(bundle)
    name = str(opened.manifest.tokenizer["files"][0])
    retrieval = opened.manifest.retrieval
    assert retrieval is not None
    build_index(
        {name: TEXTS[name] for name in names},
        folder,
        tokenizer=OwnTokenizer.from_file(opened.path(name)),
        tokenizer_hash=opened.manifest.files[name].sha256,
        chunk_length=retrieval.chunk_length,
        neighbour_length=retrieval.neighbour_length,
    )
    return folder


def read_settings(folder: Path) -> dict[str, Any]:
    """Return the config.json of a checkpoint."""
    settings: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return settings
