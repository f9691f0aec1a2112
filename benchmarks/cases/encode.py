"""Encoders: BERT base with random weights at fixed lengths, all-MiniLM-L6-v2 on real sentences."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..case import Case, Entry, Limit, Target, Work
from ..texts import bert_texts, sentences

SENTENCES = 2000
MIXED = (8, 25, 42, 59, 76, 94, 111, 128)  # tokens of a batch of eight, special ones included
INT8_DIFFERS = {"precision": "all are compared with fp32; the cosine to fp32 says what they cost"}
RUNTIME = "ONNX Runtime alone"
PEERS = ("onnxruntime", "openvino", "fastembed")
NNCF = "OpenVINO, quantized by NNCF"
ENGINE = "in OpenVINO"
IN_A_ROW = 10  # works; batch jobs and servers under load have no pauses
FAITHFUL = (
    Limit("planforge int8", "cosine_mean", at_least=0.999),
    Limit("planforge int8", "cosine_min", at_least=0.99),
)


def bert(name: str, title: str, lengths: tuple[int, ...], **options: Any) -> Case:
    """Return the case of BERT base; ONNX Runtime runs optimum's graph, and its dynamic quantization of it."""
    work = Work("embed", bert_texts(lengths))
    limit = {"max_length": 512}
    entries = {
        "planforge": Entry("planforge", "fp32", "bert-base", work, settings=limit),
        "planforge int8": Entry("planforge", "int8", "bert-base", work, settings=limit),
        "planforge bf16": Entry("planforge", "bf16", "bert-base", work, settings=limit, label=ENGINE),
        "planforge w8a8": Entry("planforge", "w8a8", "bert-base", work, settings=limit, label=ENGINE),
        "transformers": Entry("transformers", "fp32", "bert-base", work, settings=limit),
        "onnxruntime": Entry("optimum_onnx", "fp32", "bert-base", work, settings=limit, label=RUNTIME),
        "onnxruntime int8": Entry("optimum_onnx", "int8", "bert-base", work, settings=limit, label=RUNTIME),
        "openvino": Entry("openvino", "fp32", "bert-base", work, settings=limit),
        "openvino bf16": Entry("openvino", "bf16", "bert-base", work, settings=limit),
        "openvino int8": Entry("openvino", "int8", "bert-base", work, settings=limit, label=NNCF),
    }
    title = f"BERT base, {title}: texts/s"
    return Case(name, "encode", title, entries, varies=INT8_DIFFERS, in_a_row=IN_A_ROW, **options)


def minilm(work: Path) -> Case:
    """Return the case of all-MiniLM-L6-v2, verified at export, as real text chooses an encoder's int8."""
    texts = Work("embed", sentences(SENTENCES, work))
    limit = {"max_length": 256}
    ours: Mapping[str, Any] = {"source": "bert-demo", "verify": True}
    entries = {
        "planforge": Entry("planforge", "fp32", "bert-demo", texts, prepare=ours, settings=limit),
        "planforge int8": Entry("planforge", "int8", "bert-demo", texts, prepare=ours, settings=limit),
        "planforge bf16": Entry(
            "planforge", "bf16", "bert-demo", texts, prepare=ours, settings=limit, label=ENGINE
        ),
        "sentence-transformers": Entry("sentence_transformers", "fp32", "bert-demo", texts),
        "onnxruntime": Entry("optimum_onnx", "fp32", "bert-demo", texts, settings=limit, label=RUNTIME),
        "onnxruntime int8": Entry("optimum_onnx", "int8", "bert-demo", texts, settings=limit, label=RUNTIME),
        "openvino": Entry("openvino", "fp32", "bert-demo", texts, settings=limit),
        "openvino bf16": Entry("openvino", "bf16", "bert-demo", texts, settings=limit),
        "openvino int8": Entry("openvino", "int8", "bert-demo", texts, settings=limit, label=NNCF),
        "fastembed int8": Entry("fastembed", "int8", "bert-demo", texts, settings=limit),
    }
    return Case(
        "encode-minilm",
        "encode",
        f"all-MiniLM-L6-v2, {SENTENCES:,} sentences: texts/s",
        entries,
        varies=INT8_DIFFERS,
        targets=(
            Target("planforge int8", "sentence-transformers", "per_s", 4.0),
            *(Target("planforge int8", f"{peer} int8", "per_s", 1.15) for peer in PEERS),
            *FAITHFUL,
        ),
        rounds=3,
        in_a_row=IN_A_ROW,
    )


def cases(work: Path) -> list[Case]:
    targets = (
        Target("planforge", "onnxruntime", "per_s", 1.0),
        Target("planforge int8", "planforge", "per_s", 2.2),
        Target("planforge int8", "onnxruntime int8", "per_s", 1.1),
        Target("planforge w8a8", "openvino bf16", "per_s", 1.1),
        *FAITHFUL,
    )
    return [
        bert("encode-bert-b1", "a text of 128 tokens", (128,), targets=targets),
        bert("encode-bert-b8", "8 texts of 128 tokens", (128,) * 8, targets=targets),
        bert("encode-bert-mixed", "8 texts of 8 to 128 tokens", MIXED),
        minilm(work),
    ]
