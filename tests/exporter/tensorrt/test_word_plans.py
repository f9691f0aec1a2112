"""A plan of word vectors: built by TensorRT-RTX, and asked on an emulated GPU."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from planforge.exporter.tensorrt.plans import build
from planforge.runtime import WordVectors
from planforge.runtime.apps.check.selftest import selftest
from planforge.runtime.bundle.bundle import Bundle

from ...helpers.emulated_gpu import emulated_gpu


def test_a_plan_answers_as_its_graph(words_bundle: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx")
    folder = Path(shutil.copytree(words_bundle, tmp_path / "bundle"))
    build(folder, target="rtx", sms=["sm86"])
    (plan,) = Bundle.open(folder).manifest.plans
    assert plan.built_from == "words.portable.fp16"
    with WordVectors.load(folder, backend="ort-cpu", precision="fp16") as model:
        wanted = model.analogy(["king", "woman"], ["man"])
    with emulated_gpu(folder):
        with WordVectors.load(folder, backend="tensorrt-rtx") as model:
            assert model.analogy(["king", "woman"], ["man"]) == wanted
        assert selftest(folder, "tensorrt-rtx").passed
