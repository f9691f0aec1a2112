"""tests/verdicts/older_bundle: what a PlanForge wrote whose golden data had another format.

It is a BERT of one layer with its checkpoint, exported on 2026-11-28 by the commit before cases became data.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from planforge.exporter import verify
from planforge.exporter.errors import VerificationError
from planforge.runtime import BundleError, TextEncoder
from planforge.runtime.apps.check.selftest import selftest

from ...helpers.paths import ROOT

TEXTS = ["hello world", "a"]


@pytest.fixture
def older(tmp_path: Path) -> Path:
    """The folder of an older bundle and its checkpoint."""
    return Path(shutil.copytree(ROOT / "tests" / "verdicts" / "older_bundle", tmp_path / "older"))


def test_an_older_bundle_is_verified_with_its_checkpoint(
    older: Path, caplog: pytest.LogCaptureFixture
) -> None:
    report = verify(older / "bundle", level="quick")
    assert report.passed and report.with_pytorch
    assert any("export the checkpoint again" in note for note in report.notes)
    assert "export the checkpoint again" in caplog.text


def test_without_the_checkpoint_the_way_out_is_named(older: Path) -> None:
    shutil.rmtree(older / "checkpoint")
    with pytest.raises(VerificationError, match=r"another PlanForge.*export .* again"):
        verify(older / "bundle")
    with pytest.raises(BundleError, match=r"another version of PlanForge.*; export the bundle again"):
        selftest(older / "bundle")


def test_an_older_bundle_runs(older: Path) -> None:
    """Its vectors are transformers'."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(older / "checkpoint")
    reference = transformers.AutoModel.from_pretrained(older / "checkpoint").eval()
    with TextEncoder.load(older / "bundle") as model:
        found = model.embed(TEXTS, normalize=False)
    for vector, text in zip(found, TEXTS, strict=True):
        with torch.no_grad():
            states = reference(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
        np.testing.assert_allclose(vector, states.mean(0), atol=1e-5)
