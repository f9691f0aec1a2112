"""What runs take in a process is what a memory limit counts for them: not more, and not a third of it.

A model is used once, so that its weights and the engine's own memory are there; then comes what is measured.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ..helpers.models import edit_json

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc/self/status is Linux's")

MB = 10**6
MEASURE = """
import ctypes, json, sys
from pathlib import Path
from planforge.runtime import load

def read():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))

options = {"backend": "ort-cpu", "precision": "fp32", "threads": 1, "prepared": False}
with load(sys.argv[1], **options, memory_limit=int(sys.argv[2]) or None) as model:
"""
# Each prints the bytes that were counted, and those that the process took.
ENCODER = """
    from planforge.runtime.encode.encoder import count_section_bytes
    model.embed("a")
    ctypes.CDLL(None).malloc_trim(0)
    before = read()
    model.embed(["a " * 300] * 16)  # each 256 tokens; one word, so that one row of the weights is read
    after = read()
    encoder = model.encoder
    outputs = encoder.list_outputs(["sentence_embedding"])
    print(json.dumps([count_section_bytes(encoder.config, outputs, 16, 256, 0), after - before]))
"""
DECODER = """
    run = model.decoder.start(1, 8)
    run.prefill([[5] * 4])
    run.decode([5])
    ctypes.CDLL(None).malloc_trim(0)
    before = read()
    wide = model.decoder.start(16, 240)
    wide.prefill([[5] * 239] * 16)
    wide.decode([5] * 16)
    print(json.dumps([model.decoder.count_bytes(16, 240), read() - before]))
"""
PICTURES = """
    from planforge.runtime.activations import PictureBatch, count_picture_bytes
    model.generate("one", steps=1, seed=0, height=8, width=8)
    ctypes.CDLL(None).malloc_trim(0)
    before = read()
    model.generate("one", steps=1, seed=0, height=192, width=192)
    after = read()
    side = 192 // model.defaults.multiple
    options = dict(reads_picture=False, has_scores=False)
    batch = PictureBatch(1, True, 2, side, side, model.max_length, **options)
    print(json.dumps([count_picture_bytes(model.bundle.manifest.config, batch, 4), after - before]))
"""
# Eight of the longest sources, four beams each.
RECURRENT = """
    from planforge.runtime.memory_needs import sum_memory
    model.decoder.start(1, 2, model.encoder.prepare([[5]])).decode([5])
    ctypes.CDLL(None).malloc_trim(0)
    before = read()
    run = model.decoder.start(32, 2, model.encoder.prepare([[5] * 256] * 8))
    run.decode([5] * 32)
    after = read()
    graphs = [model.decoder.artifact, model.encoder.artifact]
    need = sum_memory(model.bundle.manifest, graphs, 8, 256, True)
    print(json.dumps([need.cache + need.activations, after - before]))
"""


@pytest.fixture(scope="module")
def wide_recurrent_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GRU of two directions with additive attention, wide enough that its runs take far more than noise."""
    from planforge.exporter import export

    from ..helpers.recurrent import write_recurrent

    folder = tmp_path_factory.mktemp("wide")
    sizes: dict[str, Any] = {
        "encoder_size": 256,
        "decoder_size": 256,
        "attention_size": 512,
        "max_positions": 256,
    }
    checkpoint = write_recurrent(folder / "checkpoint", **sizes, encoder_layers=1, decoder_layers=1)
    edit_json(checkpoint / "generation_config.json", num_beams=4)
    options: dict[str, Any] = {"precision": ["fp32"], "target": ["cpu"], "max_batch": 32, "verify": False}
    return export(checkpoint, folder / "bundle", **options).bundle


def measure(bundle: Path, work: str, limit: int = 0) -> tuple[int, int]:
    """Return the bytes that a limit counts for some work, and those that a process takes for it."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURE + work, str(bundle), str(limit)],
        capture_output=True,
        encoding="utf-8",
        check=True,
    )
    counted, taken = json.loads(done.stdout.splitlines()[-1])
    return counted, taken


@pytest.fixture(scope="module")
def mixture_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a mixture whose experts are narrow, so that most of a step is rows in parts by expert."""
    from planforge.exporter import export

    from ..helpers.llamas import tiny_llama

    folder = tmp_path_factory.mktemp("mixture")
    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 32, "num_hidden_layers": 2}
    experts = {"num_experts": 16, "num_experts_per_tok": 12}
    tiny_llama(folder / "checkpoint", "olmoe", max_position_embeddings=256, **sizes, **experts)
    how: dict[str, Any] = {"precision": ["fp32"], "target": ["cpu"], "verify": False}
    export(folder / "checkpoint", folder / "bundle", **how)
    return folder / "bundle"


@pytest.mark.parametrize(
    ("bundle", "work"),
    [
        ("minilm_bundle", ENCODER),
        ("demo_bundle", DECODER),
        ("picture_bundle", PICTURES),
        ("wide_recurrent_bundle", RECURRENT),
        ("mixture_bundle", DECODER),
    ],
    ids=["encoder", "decoder", "pictures", "recurrent", "mixture"],
)
def test_what_is_counted_bounds_what_is_taken(request: pytest.FixtureRequest, bundle: str, work: str) -> None:
    """With memory patterns, or scores that count once, it would be more."""
    counted, taken = measure(request.getfixturevalue(bundle), work)
    assert counted > 40 * MB  # far above what a process's memory varies by
    assert counted / 3 < taken <= counted + 4 * MB  # and Python's own objects, of 16 texts


def test_a_limit_makes_batches_smaller(minilm_bundle: Path) -> None:
    """A limit for one text of full length at a time takes a quarter of what four take."""
    weights = sum(path.stat().st_size for path in minilm_bundle.glob("onnx/*fp32*.data"))
    counted, free = measure(minilm_bundle, ENCODER)
    room = counted // 2
    _, taken = measure(minilm_bundle, ENCODER, weights + room)
    assert taken <= room + 4 * MB < free
