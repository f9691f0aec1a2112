"""llama.cpp by llama-cpp-python's bindings of its C functions, on GGUF files that the package gguf writes."""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..checkpoints import head_size
from ..gguf_tensors import tensors
from ..process import HIDDEN, LLAMA_AVX2
from .system import Session, Skip, System, Tick

FORMATS = {"fp32": "F32", "f16": "F16", "bf16": "BF16", "q8_0": "Q8_0", "q4_0": "Q4_0"}
FILE = "model.gguf"
ARCHITECTURES = ("gpt2", "llama", "qwen2")  # called the same by transformers and llama.cpp


class LlamaCpp(System):
    """llama.cpp: with fp32 weights its cache and attention are fp32, else its defaults, fp16 and flash.

    With the setting "vocabulary" its file has the tokens too, which its server needs.
    """

    name = "llama.cpp"
    packages = ("llama_cpp_python", "gguf", "torch", "safetensors")
    classes: Mapping[str, str] = {
        "fp32": "fp32",
        "f16": "16-bit",
        "bf16": "16-bit",
        "q8_0": "8-bit",
        "q4_0": "4-bit",
    }
    differences: Mapping[str, str] = {
        "cache": "its cache is fp16 by default, which it reads faster than fp32"
    }

    def prepare(
        self, checkpoint: Path, kind: str, precision: str, out: Path, settings: Mapping[str, Any]
    ) -> None:
        import gguf

        config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
        if config["model_type"] not in ARCHITECTURES:
            raise Skip(f"{config['model_type']} is not written to GGUF here: {', '.join(ARCHITECTURES)} are")
        writer = gguf.GGUFWriter(out / FILE, config["model_type"])
        describe(writer, config)
        writer.add_vocab_size(config["vocab_size"])
        if settings.get("vocabulary"):
            add_vocabulary(writer, checkpoint)
        else:
            writer.add_tokenizer_model("no_vocab")  # it is given ids
        writer.add_file_type(
            gguf.LlamaFileType[f"MOSTLY_{FORMATS[precision]}".replace("MOSTLY_F32", "ALL_F32")]
        )
        wanted = gguf.GGMLQuantizationType[FORMATS[precision]]
        for name, array in tensors(checkpoint, config):
            if array.ndim == 2 and name != "position_embd.weight":
                writer.add_tensor(name, gguf.quants.quantize(array, wanted), raw_dtype=wanted)
            else:
                writer.add_tensor(name, array)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    def generate(self, model: Path, precision: str, threads: int, settings: Mapping[str, Any]) -> Session:
        if HIDDEN in os.environ and not LLAMA_AVX2.exists():
            raise Skip(f"no build for AVX2 alone is in {LLAMA_AVX2}; `make bench` makes one")
        return Generator(model / FILE, precision, threads, settings["batch"], settings["tokens"])


def add_vocabulary(writer: Any, checkpoint: Path) -> None:
    """Write GPT-2's tokens into a GGUF file, for a server that answers in text."""
    numbers = json.loads((checkpoint / "vocab.json").read_text(encoding="utf-8"))
    tokens = sorted(numbers, key=numbers.__getitem__)
    merges = (checkpoint / "merges.txt").read_text(encoding="utf-8").splitlines()
    end = numbers["<|endoftext|>"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if number == end else 1 for number in range(len(tokens))])  # 3: control
    writer.add_token_merges([line for line in merges if line and not line.startswith("#version")])
    writer.add_eos_token_id(end)


def describe(writer: Any, config: Mapping[str, Any]) -> None:
    """Write a model's sizes into a GGUF file, by the names that GPT-2's or the Llama family's config has."""
    if config["model_type"] == "gpt2":
        writer.add_context_length(config["n_positions"])
        writer.add_embedding_length(config["n_embd"])
        writer.add_feed_forward_length(4 * config["n_embd"])
        writer.add_block_count(config["n_layer"])
        writer.add_head_count(config["n_head"])
        writer.add_layer_norm_eps(config["layer_norm_epsilon"])
        return
    size = head_size(config)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_rope_dimension_count(size)
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])


class Generator:
    """A greedy generator: numpy finds the largest logit of the last token of each row.

    Args:
        path: of the GGUF file.
        precision: of `LlamaCpp.classes`.
        threads: for the prompt and for later tokens.
        batch: the most rows of any work.
        tokens: the most tokens of a row, prompt and answer.
    """

    def __init__(self, path: Path, precision: str, threads: int, batch: int, tokens: int) -> None:
        from llama_cpp import llama_cpp as api  # type: ignore[import-not-found]

        self.api = api
        self.fp32 = precision == "fp32"
        self.silent = api.llama_log_callback(lambda *_: None)
        api.llama_log_set(self.silent, None)
        api.llama_backend_init()
        self.model = api.llama_model_load_from_file(str(path).encode(), api.llama_model_default_params())
        params = api.llama_context_default_params()
        params.n_ctx = batch * -(-tokens // 256) * 256  # the context is shared out evenly, in steps of 256
        params.n_seq_max = batch
        params.n_batch = max(512, batch * tokens)
        params.n_threads = params.n_threads_batch = threads
        if self.fp32:
            params.type_k = params.type_v = api.GGML_TYPE_F32
            params.flash_attn_type = api.LLAMA_FLASH_ATTN_TYPE_DISABLED  # it rounds to fp16 inside
        self.context = api.llama_init_from_model(self.model, params)
        if not self.context:
            raise RuntimeError(f"llama.cpp could not open {path}")
        self.threads = threads
        self.vocab_size = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self.model))
        self.batch = api.llama_batch_init(params.n_batch, 0, 1)

    def run(self, work: Mapping[str, Any], tick: Tick) -> Any:
        prompts = work["prompts"]
        self.api.llama_memory_clear(self.api.llama_get_memory(self.context), False)
        tokens = self.step(prompts, [0] * len(prompts))
        tick()
        rows = [[token] for token in tokens]
        for _ in range(work["new_tokens"] - 1):
            past = [len(prompt) + len(row) - 1 for prompt, row in zip(prompts, rows, strict=True)]
            tokens = self.step([[token] for token in tokens], past)
            tick()
            for row, token in zip(rows, tokens, strict=True):
                row.append(token)
        return rows

    def step(self, rows: Sequence[Sequence[int]], past: Sequence[int]) -> list[int]:
        """Return the next token of each row behind `past` tokens and these."""
        batch = self.batch
        api = self.api
        last = []
        count = 0
        for number, (row, start) in enumerate(zip(rows, past, strict=True)):
            for offset, token in enumerate(row):
                batch.token[count] = token
                batch.pos[count] = start + offset
                batch.n_seq_id[count] = 1
                batch.seq_id[count][0] = number
                batch.logits[count] = offset == len(row) - 1
                count += 1
            last.append(count - 1)
        batch.n_tokens = count
        if api.llama_decode(self.context, batch) != 0:
            raise RuntimeError("llama_decode failed")
        return [int(self.logits(place).argmax()) for place in last]

    def logits(self, place: int) -> Any:
        pointer = self.api.llama_get_logits_ith(self.context, place)
        return np.ctypeslib.as_array(ctypes.cast(pointer, ctypes.POINTER(ctypes.c_float)), (self.vocab_size,))

    def did(self, work: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "prompts": work["prompts"],
            "beams": 1,
            "prefill_logit_rows": len(work["prompts"]),
            "eos": "off",
            "cache": "fp32" if self.fp32 else "fp16",
        }


SYSTEM = LlamaCpp()
