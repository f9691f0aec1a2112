"""Retrieval models as plans: every graph passes in fp16, where a token's weight is a single number."""

from __future__ import annotations

from pathlib import Path

import pytest

from planforge.exporter import export

from ..helpers.retrieval_folders import write_folder


@pytest.mark.parametrize(
    ("kind", "graphs"),
    [("router", ["encoder", "query_encoder"]), ("colbert", ["encoder"]), ("bge-m3", ["encoder"])],
)
def test_plans_of_all_graphs_are_built_without_a_gpu(kind: str, graphs: list[str], tmp_path: Path) -> None:
    folder = write_folder(kind, tmp_path / kind)
    result = export(folder, tmp_path / "bundle", target=["rtx"], precision=["fp16"])
    assert [plan.built_from for plan in result.manifest.plans] == [f"{one}.portable.fp16" for one in graphs]
    assert all(artifact.gate["passed"] for artifact in result.manifest.artifacts)
