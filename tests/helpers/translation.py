"""A random MarianMT that gives varied text, its bundle, and what transformers makes of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from .marian import AWKWARD, ENGLISH, OTHERS, load_marian_reference, write_marian_tokenizer

MARIAN: dict[str, Any] = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
    "activation_function": "swish",
    "scale_embedding": True,
    "tie_word_embeddings": False,
    "eos_token_id": 0,
    "forced_eos_token_id": 0,
    "init_std": 0.3,
}
WORDS = (ENGLISH + OTHERS).split()
# Of unequal length; more than 50, so that there are 50 whose translations differ from one another.
SENTENCES = [" ".join(WORDS[i : i + 2 + i % 7]) for i in range(100)]
SHORT_AWKWARD = [text for text in AWKWARD if text.strip() and len(text) < 60 and ">>" not in text]


def write_varied_marian(folder: Path, seed: int = 16) -> Path:
    """Saves a MarianMT whose outputs differ from source to source and end at unequal steps.

    Each token leads to another one, and the layers are too weak to always overrule that.
    """
    folder.mkdir(parents=True, exist_ok=True)
    count = write_marian_tokenizer(folder)
    pad = count - 1
    torch.manual_seed(seed)
    config = transformers.MarianConfig(
        vocab_size=count, pad_token_id=pad, decoder_start_token_id=pad, **MARIAN
    )
    model = transformers.MarianMTModel(config).eval()
    with torch.no_grad():
        for side in (model.model.encoder, model.model.decoder):
            side.embed_tokens.weight.normal_(0, 2 / config.d_model**0.5)
        embeddings = model.model.decoder.embed_tokens.weight
        model.lm_head.weight.copy_(embeddings[torch.randperm(count)] * 0.7)
        for layer in model.model.decoder.layers:
            layer.self_attn.out_proj.weight *= 0.15
            layer.encoder_attn.out_proj.weight *= 0.8
            layer.fc2.weight *= 0.3
        model.final_logits_bias.normal_(0, 0.3)
        model.final_logits_bias[:, 0] += 1.2
    model.generation_config = transformers.GenerationConfig(
        bad_words_ids=[[pad]],
        decoder_start_token_id=pad,
        pad_token_id=pad,
        eos_token_id=0,
        forced_eos_token_id=0,
        max_length=24,
        num_beams=1,
    )
    model.save_pretrained(folder)
    return folder


@dataclass(frozen=True)
class Reference:
    """transformers' model and tokenizer of a folder."""

    model: Any
    tokenizer: Any

    @classmethod
    def of(cls, folder: Path) -> Reference:
        model = transformers.MarianMTModel.from_pretrained(folder).eval()
        return cls(model, load_marian_reference(folder))

    def generate(self, text: str, **options: Any) -> list[tuple[tuple[int, ...], float | None]]:
        """The n best targets of one text, without start token and padding, each with its score."""
        ids = self.tokenizer(text, return_tensors="pt").input_ids
        with torch.inference_mode():
            found = self.model.generate(
                ids, do_sample=False, return_dict_in_generate=True, output_scores=True, **options
            )
        scores = getattr(found, "sequences_scores", None)
        results: list[tuple[tuple[int, ...], float | None]] = []
        for row, (_, *tokens) in enumerate(found.sequences.tolist()):
            end = tokens.index(0) + 1 if 0 in tokens else len(tokens)
            results.append((tuple(tokens[:end]), None if scores is None else float(scores[row])))
        return results
