"""Every kind of model exports for every target, in every precision that it has, at the smallest batches.

What decides how numbers are kept runs the model on real text, in pieces that fit into neither the largest
batch nor one step: each model has more positions than the 256 of a piece. Nothing is verified here.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from planforge.exporter import export
from planforge.exporter.checkpoints.source import find_demo
from planforge.exporter.host_inputs import find_late_inputs
from planforge.exporter.passes.weight_files import load_graph
from planforge.runtime.bundle.bundle import Bundle
from planforge.runtime.bundle.export_again import find_max_batch

from ..helpers.llamas import tiny_llama
from ..helpers.marian import write_marian_tokenizer
from ..helpers.models import (
    TINY,
    random_gpt2,
    random_marian,
    tiny_bert,
    tiny_transformer,
    write_wordpiece,
)

POSITIONS = 300
BATCHES = (1, 2, 3)
HALVES = ("fp32", "fp16")
OF_DECODERS = ("fp32", "int8", "int4", "fp32-kv8", "int8-kv8", "int4-kv8")
# By target: of decoders, and of others, which keep no long cache.
PRECISIONS = {
    "cpu": (OF_DECODERS, ("fp32", "int8", "int4")),
    "cuda": (HALVES, HALVES),
    "portable": (HALVES, HALVES),
}


def write_gpt2(folder: Path) -> None:
    shutil.copytree(find_demo("gpt2-demo"), folder)
    sizes = {"vocab_size": 2048, "n_layer": 1, "n_positions": POSITIONS}
    random_gpt2(**TINY | sizes).save_pretrained(folder)


def write_llama(folder: Path) -> None:
    tiny_llama(folder, "llama 2", num_hidden_layers=1, max_position_embeddings=POSITIONS)


def write_marian(folder: Path) -> None:
    folder.mkdir()
    sizes = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1}
    widths = {"encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
    count = write_marian_tokenizer(folder)
    random_marian(vocab_size=count, max_position_embeddings=POSITIONS, **sizes, **widths).save_pretrained(
        folder
    )


def write_transformer(folder: Path) -> None:
    shutil.copytree(find_demo("transformer-demo"), folder)
    sizes = {"source_vocab_size": 42, "target_vocab_size": 14, "encoder_layers": 1, "decoder_layers": 1}
    widths = {"encoder_ffn": 64, "decoder_ffn": 64}
    tiny_transformer(folder, max_positions=POSITIONS, **sizes, **widths)


def write_bert(folder: Path) -> None:
    sizes = {"num_hidden_layers": 1, "intermediate_size": 64, "max_position_embeddings": POSITIONS}
    tiny_bert(folder, "BertForSequenceClassification", num_labels=3, **sizes)
    write_wordpiece(folder)


WRITERS: dict[str, Callable[[Path], None]] = {
    "gpt2": write_gpt2,
    "llama": write_llama,
    "marian": write_marian,
    "transformer": write_transformer,
    "bert": write_bert,
}


@pytest.mark.usefixtures("kept_answers")
@pytest.mark.parametrize("target", PRECISIONS)
@pytest.mark.parametrize("kind", WRITERS)
def test_each_precision_is_exported_at_the_smallest_batches(kind: str, target: str, tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    WRITERS[kind](checkpoint)
    precisions = PRECISIONS[target][kind not in ("gpt2", "llama")]
    for batch in BATCHES:
        result = export(
            checkpoint,
            tmp_path / f"bundle-{batch}",
            target=[target],
            precision=precisions,
            max_batch=batch,
            quantizer="rtn",
            verify=False,
        )
        bundle = Bundle.open(result.bundle)
        assert {artifact.precision for artifact in bundle.manifest.artifacts} == set(precisions)
        assert find_max_batch(bundle.manifest) == batch
        if target == "cuda":  # every graph that a GPU is to run finds on the host what it reads there
            for artifact in bundle.manifest.artifacts:
                assert not list(find_late_inputs(load_graph(bundle.path(artifact.file)).graph)), artifact.id
