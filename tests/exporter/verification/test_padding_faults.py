"""Faults that only batches of several texts show: each is named, and none is called a precision's loss."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from planforge.exporter import export, verify
from planforge.exporter.checkpoints.source import find_demo
from planforge.exporter.errors import VerificationError
from planforge.exporter.verification.explain import LOSS, PADDED
from planforge.exporter.verification.structure import READING
from planforge.runtime.backends.backend import Array
from planforge.runtime.decoding.decoder import DecoderRun

from ...helpers.faults import Fault, Plant
from ...helpers.ground import Ground
from ...helpers.models import TINY, random_gpt2, tiny_bert, write_wordpiece
from ...helpers.rare_faults import (
    early_positions,
    length_of_the_first_row,
    length_of_the_longest_row,
    positions_of_four,
    seen_as_far_as_the_longest_row,
    unmasked,
)

ALL = 10**6  # rows or columns
MASK = {("", "Unsqueeze"), ("", "And"), ("", "Where"), ("", "Or")}
LENGTHS = {("", "Cast"), ("", "Unsqueeze"), ("h.0.attn", "GroupQueryAttention")}
MASKS = [
    ("padding is not masked", unmasked(1, 0, ALL), MASK),
    ("the second row's padding is not masked", unmasked(0, 1, 1), MASK),
    ("the fourth row's padding is not masked", unmasked(0, 3, 3), MASK),
    ("padding behind 30 tokens is not masked", unmasked(1, 30, ALL), MASK),
]
ROWS = [
    ("rows are as long as the first", length_of_the_first_row, LENGTHS),
    ("rows are as long as the longest", length_of_the_longest_row, LENGTHS),
    ("rows see as much as the longest", seen_as_far_as_the_longest_row, LENGTHS),
    ("positions of batches are one too small", early_positions("wpe"), {("wpe", "Gather")}),
    ("positions of batches of 4 are one too small", positions_of_four, {("wpe", "Gather")}),
]
POSITIONS = [("positions of batches are one too small", early_positions("embeddings.positions"))]
FAULTS = [
    *(("gpt2", "decoder.portable.fp32", *fault) for fault in MASKS),
    *(("gpt2", "decoder.ort.int8", *fault) for fault in ROWS),
    *(("bert", "encoder.ort.int4", *fault) for fault in MASKS),
    *(("bert", "encoder.ort.int4", *fault, {("embeddings.positions", "Gather")}) for fault in POSITIONS),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny checkpoints, and their bundles."""
    folder = tmp_path_factory.mktemp("padding")
    shutil.copytree(find_demo("gpt2-demo"), folder / "gpt2")
    settings = TINY | {"vocab_size": 2048, "initializer_range": 0.15}
    random_gpt2(seed=1, **settings).save_pretrained(folder / "gpt2")
    tiny_bert(folder / "bert", "BertForTokenClassification", intermediate_size=64)
    write_wordpiece(folder / "bert")
    for name, precision in (("gpt2", "int8"), ("bert", "int4")):
        export(
            folder / name,
            folder / f"{name}-bundle",
            precision=["fp32", precision],
            target=["cpu", "portable"],
            verify=False,
        )
    return folder


@pytest.fixture(scope="module")
def grounds(folder: Path) -> dict[str, Ground]:
    return {name: Ground(folder / f"{name}-bundle", folder / f"{name}-copy") for name in ("gpt2", "bert")}


@pytest.mark.parametrize(
    ("model", "artifact", "name", "plant", "right"), FAULTS, ids=[" ".join(fault[1:3]) for fault in FAULTS]
)
def test_a_fault_of_batches_alone_is_named(
    grounds: dict[str, Ground],
    model: str,
    artifact: str,
    name: str,
    plant: Plant,
    right: set[tuple[str, str]],
) -> None:
    ground = grounds[model]
    with ground.damaged(artifact, Fault(name, plant, "", ())) as bundle:
        failed, mismatch = ground.examined(bundle, bundle.manifest.artifact(artifact))
    assert failed
    ran = [comparison for comparison in failed if comparison.backend != READING]  # modules show some, too
    assert ran and all("padded" in comparison.case for comparison in ran)
    assert mismatch is not None
    assert (mismatch.module, mismatch.op_type) in right


@pytest.mark.parametrize(("rows", "why"), [(2, PADDED), (1, LOSS)])
def test_only_what_single_texts_lose_too_may_be_a_loss_of_the_precision(
    folder: Path, rows: int, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits of another token, in int8 and of batches of at least so many rows: no node is at fault."""
    usual = DecoderRun.step

    def step(self: DecoderRun, ids: Array, *given: Any) -> Array:
        logits = usual(self, ids, *given)
        is_wrong = self.decoder.artifact.precision == "int8" and len(ids) >= rows
        return np.roll(logits, 1, axis=-1) if is_wrong else logits

    monkeypatch.setattr(DecoderRun, "step", step)
    only = ["decoder.ort.fp32", "decoder.ort.int8"]
    report = verify(folder / "gpt2-bundle", only=only, level="quick")
    assert report.unexplained == {"decoder.ort.int8": why}
    with pytest.raises(VerificationError) as caught:
        report.raise_if_failed()
    assert ("fp32 passed: int8 can be left out" in str(caught.value)) == (why == LOSS)
