"""The cases on a GPU: systems and their work, in fp16 and below, with random weights of published shapes."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from planforge.exporter.precisions import PRECISIONS

from ..case import Case, Entry, Work
from ..texts import gpt2_prompts, marian_sources

PROMPT = 128  # tokens
LONG_PROMPT = 2048
NEW = 64
SOURCE = 24
ENCODED = 128
CLS = 101  # of BERT's uncased vocabulary
SEP = 102
WORDS = range(1996, 29612)
BATCHES = {"gpt2-124m": 64, "gpt2-124m-4k": 1, "gpt2-xl": 1, "bert-base": 32, "marian": 1}  # each export's
NEEDED_GB = {"gpt2-xl": 48}  # on the device, of all that is loaded together; the others fit any GPU

EAGER = "PyTorch eager"
COMPILED = "torch.compile"
COPIES = "ORT-CUDA with copies"
ORT_CUDA = "PlanForge ort-cuda"
RTX = "PlanForge tensorrt-rtx"
TENSORRT = "PlanForge tensorrt"
GENAI = "onnxruntime-genai"
# By kind of work, the precisions below fp16 of PlanForge on CUDA, and all of its peer.
BELOW = {"generate": ("int8", "int4"), "embed": ("int8", "int4"), "translate": ()}
CACHES = {"gpt2-124m": ("fp16-kv8", "int8-kv8"), "gpt2-124m-4k": ("fp16-kv8", "int8-kv8")}  # by checkpoint
PEERS = {"generate": ("fp16", "int8", "int4")}
SMALLER = "fewer bits are what is measured"
PLANS = (RTX, TENSORRT)
CANDIDATES = 64  # tokens that another plan of each library picks by itself
SYSTEMS = "benchmarks.gpu.systems"


def add_precision(name: str, precision: str) -> str:
    """Return the name of a system's entry in a precision; that in fp16 is the system's own."""
    return name if precision == "fp16" else f"{name} {precision}"


def entries(checkpoint: str, work: Work) -> dict[str, Entry]:
    """Return all systems at one piece of work, PyTorch first, with which the others' results are compared."""

    def entry(system: str, prepare: Mapping[str, Any], **settings: Any) -> Entry:
        return Entry(f"{SYSTEMS}.{system}", "fp16", checkpoint, work, prepare=prepare, settings=settings)

    def planforge(backend: str, **build: Any) -> Entry:
        return entry("planforge", {"backend": backend, **batch, **build}, backend=backend)

    def lower(made: Entry, precision: str) -> Entry:
        kind = PRECISIONS[precision]
        bits = {"precision": kind.weight_bits, "cache": kind.cache_bits}
        return replace(made, precision=precision, varies={part: SMALLER for part, b in bits.items() if b})

    batch = {"max_batch": BATCHES[checkpoint]}
    below = (*BELOW[work.kind], *CACHES.get(checkpoint, ()))
    picking = {
        f"{name}, --top-k {CANDIDATES}": planforge(backend, candidates=CANDIDATES)
        for name, backend in ((RTX, "tensorrt-rtx"), (TENSORRT, "tensorrt"))
        if work.kind == "generate"
    }
    return {
        EAGER: entry("pytorch", {}),
        COMPILED: entry("pytorch", {}, compiled=True),
        COPIES: entry("copies", batch),
        ORT_CUDA: planforge("ort-cuda"),
        RTX: planforge("tensorrt-rtx"),
        TENSORRT: planforge("tensorrt"),
        **picking,
        **{add_precision(ORT_CUDA, p): lower(planforge("ort-cuda"), p) for p in below},
        **{add_precision(GENAI, p): lower(entry("genai", batch), p) for p in PEERS.get(work.kind, ())},
    }


def generation(name: str, checkpoint: str, title: str, rows: int, new: int, prompt: int = PROMPT) -> Case:
    texts, prompts = gpt2_prompts(rows, prompt)
    work = Work("generate", texts, prompts, new)
    return Case(name, "gpu", f"{title}: {new} tokens past {prompt}, batch {rows}", entries(checkpoint, work))


def encoding(name: str, rows: int) -> Case:
    """Return the work from token ids to the last hidden states, both in host memory."""
    words = [random.Random(row).sample(WORDS, ENCODED - 2) for row in range(rows)]
    work = Work("embed", ("",) * rows, tuple((CLS, *row, SEP) for row in words))
    return Case(name, "gpu", f"BERT base: {ENCODED} tokens, batch {rows}", entries("bert-base", work))


def translation(name: str, new: int) -> Case:
    texts, prompts = marian_sources(1, SOURCE)
    work = Work("translate", texts, prompts, new // 2)
    title = f"Transformer base (MarianMT's shape): {SOURCE} tokens to {new // 2}, greedy, batch 1"
    return Case(name, "gpu", title, entries("marian", work))


def cases(new: int = NEW) -> dict[str, Case]:
    """Return all cases by name, with so many new tokens where text is generated."""
    made = (
        generation("gpt2-124m-b1", "gpt2-124m", "GPT-2 124M", 1, new),
        generation("gpt2-124m-b8", "gpt2-124m", "GPT-2 124M", 8, new),
        generation("gpt2-124m-b64", "gpt2-124m", "GPT-2 124M", 64, new),
        generation("gpt2-124m-long", "gpt2-124m-4k", "GPT-2 124M, 4,096 places", 1, new, LONG_PROMPT),
        generation("gpt2-xl-b1", "gpt2-xl", "GPT-2 XL shape", 1, new),
        encoding("bert-base-b1", 1),
        encoding("bert-base-b32", 32),
        translation("marian-b1", new),
    )
    return {case.name: case for case in made}
