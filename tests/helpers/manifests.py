"""One manifest, written by hand twice: as its file has it, and as the object that it is read as."""

from __future__ import annotations

import copy
import json
from typing import Any

from planforge.runtime.bundle.defaults import GenerationDefaults
from planforge.runtime.bundle.manifest import Artifact, Axis, FileEntry, Manifest, Plan, TensorSpec

# Written by hand after docs/bundle.md: order and spelling of all that goes to disk.
LITERAL: dict[str, Any] = {
    "format": 1,
    "family": "gpt2",
    "task": "text-generation",
    "export_id": "7f3a",
    "config": {"n_layer": 1, "activation_function": "gelu_new", "n_inner": None},
    "generation": {
        "eos": [50256],
        "prefix": [],
        "bos": 50256,
        "pad": None,
        "decoder_start": None,
        "source_eos": None,
        "forced_bos": None,
        "forced_eos": None,
        "suppressed": [],
        "num_beams": 1,
        "length_penalty": 1.0,
        "early_stopping": False,
        "no_repeat_ngram_size": None,
        "min_new_tokens": 0,
        "renormalize": False,
        "max_new_tokens": None,
        "max_total_tokens": None,
        "max_length": 1024,
        "do_sample": False,
        "temperature": None,
        "top_k": None,
        "top_p": None,
        "min_p": None,
        "repetition_penalty": 1.0,
        "stop": [],
        "rules": {
            "min_length": 0,
            "bad_words": [],
            "suppress_tokens": [],
            "begin_suppress_tokens": [],
            "sequence_bias": [],
            "decay_start": 0,
            "decay_factor": 1.0,
        },
        "adapters": [],
    },
    "tokenizer": {"files": ["tokenizer.json"], "vocab_size": 50257},
    "files": {
        "onnx/decoder.onnx": {"sha256": "aa", "bytes": 11},
        "onnx/weights.data": {"sha256": "bb", "bytes": 12},
        "plans/décodeur.plan": {"sha256": "cc", "bytes": 13},
        "tokenizer.json": {"sha256": "dd", "bytes": 0},
    },
    "artifacts": [
        {
            "id": "decoder.inplace.fp16",
            "graph": "decoder",
            "dialect": "inplace",
            "precision": "fp16",
            "opset": 24,
            "file": "onnx/decoder.onnx",
            "data": ["onnx/weights.data"],
            "padding_side": "right",
            "inputs": [
                {
                    "name": "input_ids",
                    "role": "ids",
                    "dtype": "int64",
                    "axes": [["batch", 1, 1, 8], ["tokens", 1, 128, 1024]],
                },
                {
                    "name": "cache.0.key",
                    "role": "past.0.key",
                    "dtype": "float16",
                    "axes": [["batch", 1, 1, 8], 12, ["slots", 1, 1024, 1024], 64],
                },
            ],
            "outputs": [
                {
                    "name": "logits",
                    "role": "logits",
                    "dtype": "float32",
                    "axes": [["rows", 1, 1, 8192], 50257],
                },
                {
                    "name": "present.0.key",
                    "role": "present.0.key",
                    "dtype": "float16",
                    "axes": [["batch", 1, 1, 8], 12, ["slots", 1, 1024, 1024], 64],
                },
            ],
            "aliases": {"present.0.key": "cache.0.key"},
            "constraints": ["past_lengths + tokens <= slots"],
            "gate": {"passed": True, "limits": {"logits": 0.02}, "measured": {"logits": 0.001}},
        }
    ],
    "plans": [
        {
            "built_from": "decoder.inplace.fp16",
            "file": "plans/décodeur.plan",
            "engine": "tensorrt-rtx",
            "version": "1.7.1.116",
            "sms": ["sm75", "sm86"],
            "profiles": [{"name": "decode", "axes": {"tokens": [1, 1, 1]}}],
        }
    ],
    "source": {"argument": "gpt2", "sha256": "ee"},
    "tools": {"planforge": "0.1.0", "torch": "2.13.0"},
}

BATCH = Axis("batch", 1, 1, 8)
SLOTS = Axis("slots", 1, 1024, 1024)
OBJECT = Manifest(
    family="gpt2",
    task="text-generation",
    export_id="7f3a",
    config={"n_layer": 1, "activation_function": "gelu_new", "n_inner": None},
    generation=GenerationDefaults(eos=(50256,), bos=50256, pad=None, max_length=1024),
    tokenizer={"files": ["tokenizer.json"], "vocab_size": 50257},
    files={
        "tokenizer.json": FileEntry("dd", 0),
        "plans/décodeur.plan": FileEntry("cc", 13),
        "onnx/weights.data": FileEntry("bb", 12),
        "onnx/decoder.onnx": FileEntry("aa", 11),
    },
    artifacts=(
        Artifact(
            graph="decoder",
            dialect="inplace",
            precision="fp16",
            opset=24,
            file="onnx/decoder.onnx",
            data=("onnx/weights.data",),
            padding_side="right",
            inputs=(
                TensorSpec("input_ids", "ids", "int64", (BATCH, Axis("tokens", 1, 128, 1024))),
                TensorSpec("cache.0.key", "past.0.key", "float16", (BATCH, 12, SLOTS, 64)),
            ),
            outputs=(
                TensorSpec("logits", "logits", "float32", (Axis("rows", 1, 1, 8192), 50257)),
                TensorSpec("present.0.key", "present.0.key", "float16", (BATCH, 12, SLOTS, 64)),
            ),
            aliases={"present.0.key": "cache.0.key"},
            constraints=("past_lengths + tokens <= slots",),
            gate={"passed": True, "limits": {"logits": 0.02}, "measured": {"logits": 0.001}},
        ),
    ),
    plans=(
        Plan(
            built_from="decoder.inplace.fp16",
            file="plans/décodeur.plan",
            engine="tensorrt-rtx",
            version="1.7.1.116",
            sms=("sm75", "sm86"),
            profiles=({"name": "decode", "axes": {"tokens": [1, 1, 1]}},),
        ),
    ),
    source={"argument": "gpt2", "sha256": "ee"},
    tools={"planforge": "0.1.0", "torch": "2.13.0"},
)


def changed(*path: str | int, to: object) -> str:
    """Return the JSON of the literal manifest with one value replaced."""
    value = copy.deepcopy(LITERAL)
    place: Any = value
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = to
    return json.dumps(value)


def without(*path: str | int) -> str:
    """Return the JSON of the literal manifest without one key."""
    value = copy.deepcopy(LITERAL)
    place: Any = value
    for key in path[:-1]:
        place = place[key]
    del place[path[-1]]
    return json.dumps(value)
