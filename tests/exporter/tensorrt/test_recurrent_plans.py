"""Plans of recurrent models: built by TensorRT-RTX, then run emulated, by greedy and beam search."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from planforge.exporter import export
from planforge.runtime import Translator
from planforge.runtime.bundle.bundle import Bundle

from ...helpers.emulated_gpu import emulated_gpu
from ...helpers.recurrent import WORDS, write_recurrent


@pytest.fixture
def luong_bundle(tmp_path: Path) -> Path:
    """An LSTM with input feeding: five states, where the GRU of `recurrent_bundle` has two."""
    checkpoint = write_recurrent(tmp_path / "checkpoint", "luong")
    target = ["portable", "rtx"]
    options: dict[str, Any] = {
        "precision": ["fp16"],
        "target": target,
        "sms": ["sm86"],
        "max_batch": 4,
        "verify": False,
    }
    return export(checkpoint, tmp_path / "bundle", **options).bundle


def write_all(model: Translator, beams: int) -> list[list[tuple[int, ...]]]:
    """Return the tokens of the beams of each source, best first."""
    results = model.translate(WORDS, num_beams=beams, n_best=beams)
    return [[one.token_ids for one in result.candidates] for result in results]


@pytest.mark.parametrize("name", ["recurrent_bundle", "luong_bundle"])
def test_plans_write_what_the_graphs_write(name: str, request: pytest.FixtureRequest) -> None:
    """Sources of unequal length, more than one batch of them."""
    pytest.importorskip("tensorrt_rtx")
    bundle = request.getfixturevalue(name)
    plans = Bundle.open(bundle).manifest.plans
    assert [plan.built_from for plan in plans] == ["encoder.portable.fp16", "decoder.portable.fp16"]
    with Translator.load(bundle, backend="ort-cpu", precision="fp16") as model:
        wanted = {beams: write_all(model, beams) for beams in (1, 2)}
    with emulated_gpu(bundle), Translator.load(bundle, backend="tensorrt-rtx", precision="fp16") as model:
        assert {beams: write_all(model, beams) for beams in (1, 2)} == wanted
    best = {beams: [rows[0] for rows in found] for beams, found in wanted.items()}
    assert len(set(best[1])) > len(WORDS) // 2 and best[1] != best[2]
