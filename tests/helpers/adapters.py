"""Random base models and adapters of them, as peft writes and reads them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import peft
import torch
import transformers

from .random_checkpoints import GROUPED, write_tokenizer

CAUSAL: Any = transformers.AutoModelForCausalLM
ATTENTION = ["q_proj", "v_proj"]
GPT2: dict[str, Any] = {
    **{"vocab_size": 2048, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128},
    **{"bos_token_id": 0, "eos_token_id": 0},
}
LLAMA = transformers.LlamaConfig(**GROUPED, tie_word_embeddings=False)
Lora = peft.LoraConfig


def write_base(config: Any, folder: Path) -> Path:
    torch.manual_seed(0)
    model: Any = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.12) if parameter.dim() == 2 else None
    model.save_pretrained(folder)
    write_tokenizer("gpt_neox", folder)
    return folder


def write_adapter(base: Path, config: Any, folder: Path, auto: Any = CAUSAL, seed: int = 1) -> Path:
    """Write a random adapter of a base model: trained ones are no zeros, and so neither are these."""
    torch.manual_seed(seed)
    options = {"num_labels": 3} if config.task_type == "SEQ_CLS" else {}
    wrapped = peft.get_peft_model(auto.from_pretrained(base, **options), copy.deepcopy(config))
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if parameter.requires_grad:
                scale = 0.5 if "ia3" in name or "magnitude" in name else 0.2
                parameter.add_(torch.randn_like(parameter) * scale)
    wrapped.save_pretrained(folder)
    return folder


def load_peft(base: Path, adapter: Path, auto: Any = CAUSAL) -> Any:
    """Load peft's model, in which the adapter stays apart."""
    more = {"num_labels": 3} if auto is transformers.AutoModelForSequenceClassification else {}
    return peft.PeftModel.from_pretrained(auto.from_pretrained(base, **more), adapter).eval()
