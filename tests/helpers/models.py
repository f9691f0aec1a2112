"""Random checkpoints, most written by transformers: the reference for our models and their exports."""

from __future__ import annotations

import json
import math
import os
import shutil
import string
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # conftest says so too; transformers reads it once, when imported

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from planforge.exporter.checkpoints.source import find_demo
from planforge.models import Transformer, TransformerConfig, save_model

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
# By how the names of their classes begin.
TINY_ENCODERS: dict[str, dict[str, Any]] = {
    "Bert": TINY_BERT,
    "DistilBert": TINY_DISTILBERT,
    "XLMRoberta": TINY_BERT | {"type_vocab_size": 1, "pad_token_id": 0},
    "ModernBert": TINY_BERT | {"local_attention": 4, "pad_token_id": 0},
}
TINY_MARIAN: dict[str, Any] = {
    "vocab_size": 60,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 40,
    "max_position_embeddings": 64,
    "activation_function": "swish",
    "scale_embedding": True,
    "init_std": 0.25,
    "eos_token_id": 0,
    "forced_eos_token_id": 0,
}
SOURCES = ([5, 17, 3, 30, 0], [41, 8, 22, 9, 0])
TINY_TRANSFORMER: dict[str, Any] = {
    "source_vocab_size": 60,
    "target_vocab_size": 50,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_heads": 4,
    "decoder_heads": 2,
    "encoder_ffn": 48,
    "decoder_ffn": 40,
    "max_positions": 64,
}
# Our names -> PyTorch's, in this order: a name is part of a later one. The norm of the feed-forward is last.
TORCH_NAMES = {
    "cross_attention_residual.norm": "norm2",
    "attention_residual.norm": "norm1",
    "feed_forward.inner": "linear1",
    "feed_forward.output": "linear2",
    "cross_attention.output": "multihead_attn.out_proj",
    "attention.output": "self_attn.out_proj",
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


def one_layer_gpt2(folder: Path) -> Path:
    """Writes a random GPT-2 of one layer with the tokenizer of gpt2-demo: what a process exports soonest."""
    shutil.copytree(find_demo("gpt2-demo"), folder)
    random_gpt2(**TINY | {"vocab_size": 2048, "n_layer": 1}).save_pretrained(folder)
    return folder


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
    """Writes a random checkpoint of an encoder of BERT's kind, and returns it in eval mode.

    Args:
        folder: gets config.json and model.safetensors.
        architecture: a class of transformers, such as "DistilBertForMaskedLM".
        config: of its kind in `TINY_ENCODERS`, by that kind's published names.
    """
    model = random_bert(architecture, seed, **config)
    model.save_pretrained(folder)
    return model


def random_bert(
    architecture: str, seed: int = 0, noise: float = 0.1, **config: Any
) -> transformers.PreTrainedModel:
    """A seeded encoder of BERT's kind in eval mode, in which no parameter is exactly 0 or 1.

    Args:
        architecture: a class of transformers, such as "DistilBertForMaskedLM".
        noise: added to every parameter, also those that start as 0 or 1.
        config: of its kind in `TINY_ENCODERS`, by that kind's published names.
    """
    kind = next(kind for kind in TINY_ENCODERS if architecture.startswith(kind))
    published: Any = getattr(transformers, f"{kind}Config")(**TINY_ENCODERS[kind] | config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: transformers.PreTrainedModel = getattr(transformers, architecture)(published)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(noise * torch.randn_like(parameter))
    model.eval()
    return model


def tiny_marian(folder: Path, **settings: Any) -> transformers.MarianMTModel:
    """Writes a checkpoint whose greedy translations vary, and differ from source to source.

    Args:
        folder: gets config.json, generation_config.json and model.safetensors.
        settings: of `TINY_MARIAN`, by transformers' names.
    """
    for seed in range(20):
        model: Any = random_marian(seed, **settings)
        sources = torch.tensor(SOURCES) % model.config.vocab_size
        texts = model.generate(sources, num_beams=1, min_new_tokens=40, max_new_tokens=40).tolist()
        if texts[0] != texts[1] and all(len(set(text)) >= VARIED for text in texts):
            model.save_pretrained(folder)
            return model  # type: ignore[no-any-return]
    raise AssertionError(f"no seed gives {VARIED} distinct tokens in 40 with {settings}")


def random_marian(seed: int = 0, **settings: Any) -> transformers.MarianMTModel:
    """A seeded MarianMT in eval mode; biases and norms are random too, which start as 0 and 1.

    Args:
        settings: of `TINY_MARIAN`, by transformers' names. Decoders start with padding, the last id.
    """
    settings = TINY_MARIAN | settings
    last = min(settings["vocab_size"], settings.get("decoder_vocab_size", math.inf)) - 1
    config = transformers.MarianConfig(**{"pad_token_id": last, "decoder_start_token_id": last} | settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.MarianMTModel(config)
        with torch.no_grad():
            model.final_logits_bias.normal_(std=0.1)
            for name, parameter in model.named_parameters():
                if parameter.ndim == 1:
                    parameter.add_(0.1 * torch.randn_like(parameter))
                # What attention adds is nearly the same for all targets: as large, a token would repeat.
                elif name.endswith("out_proj.weight"):
                    parameter.mul_(0.2)
                elif name.endswith("fc2.weight"):
                    parameter.mul_(3)
    model.generation_config.bad_words_ids = [[last]]
    model.eval()
    return model


def tiny_transformer(folder: Path, seed: int = 0, **settings: Any) -> Transformer:
    """Writes a random checkpoint of our own encoder-decoder, and returns it in eval mode.

    Args:
        folder: gets config.json and model.safetensors.
        settings: of `TINY_TRANSFORMER`, by our names.
    """
    model = random_transformer(seed, **settings)
    save_model(model, folder)
    return model


def random_transformer(seed: int = 0, **settings: Any) -> Transformer:
    """A seeded Transformer in eval mode, in which no parameter is exactly 0 or 1.

    Args:
        settings: of `TINY_TRANSFORMER`, by our names.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Transformer(TransformerConfig(**TINY_TRANSFORMER | settings))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.ndim == 1:
                    parameter.add_(0.2 * torch.randn_like(parameter))
                else:  # larger, and fp32 would round off more than 1e-5 where norms come first
                    parameter.normal_(std=0.15 if ".layers." in name else 0.25)
    model.eval()
    return model


def paper_table(length: int, E: int, positions: str = "interleaved") -> Tensor:
    """PE(pos, 2i) = sin(pos / 10000^(2i/E)), PE(pos, 2i+1) = cos(pos / 10000^(2i/E)); or all sines first."""
    table = np.zeros((length, E))
    for position in range(length):
        for pair in range(math.ceil(E / 2)):
            angle = position / 10000 ** (2 * pair / E)
            sine = 2 * pair
            cosine = 2 * pair + 1
            if positions == "concatenated":
                sine = pair
                cosine = math.ceil(E / 2) + pair
            table[position, sine] = math.sin(angle)
            if cosine < E:
                table[position, cosine] = math.cos(angle)
    return torch.from_numpy(table).float()


class EncoderLayerFromNorm(nn.TransformerEncoderLayer):
    """The sum of attention begins at what is normalized; that of the feed-forward does not."""

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        x: Tensor = self.norm1(src)
        x = x + self._sa_block(x, src_mask, src_key_padding_mask)
        return x + self._ff_block(self.norm2(x))


class DecoderLayerFromNorm(nn.TransformerDecoderLayer):
    """Every sum begins at what is normalized."""

    def forward(
        self,
        tgt: Tensor,
        memory: Tensor,
        tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool = False,
        memory_is_causal: bool = False,
    ) -> Tensor:
        x: Tensor = self.norm1(tgt)
        x = x + self._sa_block(x, tgt_mask, tgt_key_padding_mask)
        x = self.norm2(x)
        x = x + self._mha_block(x, memory, memory_mask, memory_key_padding_mask)
        x = self.norm3(x)
        return x + self._ff_block(x)


def torch_reference(model: Transformer) -> nn.Transformer:
    """PyTorch's own Transformer with our weights; its decoder, where it has a norm, is the stock one."""
    c = model.config
    common: dict[str, Any] = {
        **{"dropout": 0.0, "activation": c.activation, "layer_norm_eps": c.layer_norm_eps},
        **{"batch_first": True, "norm_first": c.norm_first, "bias": c.bias},
    }
    of_encoder, of_decoder = nn.TransformerEncoderLayer, nn.TransformerDecoderLayer
    if c.residual_from_norm:
        of_encoder, of_decoder = EncoderLayerFromNorm, DecoderLayerFromNorm
    encoder = nn.TransformerEncoder(
        of_encoder(c.d_model, c.encoder_heads, c.encoder_ffn, **common),
        c.encoder_layers,
        nn.LayerNorm(c.d_model, c.layer_norm_eps, bias=c.bias) if c.final_norms is True else None,
        enable_nested_tensor=False,
    )
    layer = of_decoder(c.d_model, c.decoder_heads, c.decoder_ffn, **common)
    norm = (
        nn.LayerNorm(c.d_model, c.layer_norm_eps, bias=c.bias)
        if c.residual_from_norm and c.final_norms
        else None
    )
    own = None if c.final_norms and norm is None else nn.TransformerDecoder(layer, c.decoder_layers, norm)
    reference = nn.Transformer(
        c.d_model,
        c.decoder_heads,
        num_decoder_layers=c.decoder_layers,
        dim_feedforward=c.decoder_ffn,
        custom_encoder=encoder,
        custom_decoder=own,
        **common,
    )
    reference.load_state_dict(torch_weights(model))
    return reference.eval()


def torch_weights(model: Transformer) -> dict[str, Tensor]:
    """The encoder's and the decoder's weights, as `torch.nn.Transformer` names and joins them."""
    found: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    weights = {}
    for name, parameter in found.items():
        if not name.startswith(("encoder.", "decoder.")):
            continue
        if ".query." in name:
            parts = [found[name.replace("query", part)] for part in ("query", "key", "value")]
            new = name.replace("cross_attention.query.", "multihead_attn.in_proj_")
            weights[new.replace("attention.query.", "self_attn.in_proj_")] = torch.cat(parts)
        elif not (".key." in name or ".value." in name):
            for ours, theirs in TORCH_NAMES.items():
                name = name.replace(ours, theirs)
            last = "norm2" if name.startswith("encoder.") else "norm3"
            weights[name.replace("feed_forward_residual.norm", last)] = parameter
    return weights


def embedded(model: Transformer, side: str, ids: Tensor) -> Tensor:
    """What the encoder or the decoder gets of ids (B, T), by its weights and the paper's formulas."""
    config = model.config
    embeddings = getattr(model, side)
    words = embeddings.words.weight[ids] * (math.sqrt(config.d_model) if config.scale_embedding else 1)
    if side == "target" and not config.target_positions:
        return words  # type: ignore[no-any-return]
    if config.positions == "learned":
        table = embeddings.positions.weight
    else:
        table = paper_table(ids.shape[1], config.d_model, config.positions)
    return words + table[: ids.shape[1]]  # type: ignore[no-any-return]


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


def write_mean_pooling(folder: Path) -> None:
    """Makes a folder of `tiny_bert` one of sentence-transformers, whose vectors are not normalized."""
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    width = json.loads((folder / "config.json").read_text())["hidden_size"]
    pooling = {"word_embedding_dimension": width, "pooling_mode_mean_tokens": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


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
