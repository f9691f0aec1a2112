"""Which sizes of batches are verified, and which texts are too short to verify with."""

from __future__ import annotations

from pathlib import Path

import pytest

from planforge.exporter import export
from planforge.exporter.errors import PromptsError
from planforge.exporter.tasks.random_cases import list_sizes


@pytest.mark.parametrize("most", [1, 2, 8, 9, 12, 16, 24, 32, 100])
def test_the_largest_batch_is_among_the_verified(most: int) -> None:
    sizes = list_sizes(most)
    assert max(sizes) == most
    assert sizes == sorted(set(sizes))


def test_a_single_token_is_too_little_to_verify_with(tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("a\n")
    with pytest.raises(PromptsError, match="have 1 tokens in all"):
        export(
            "gpt2-demo",
            tmp_path / "out",
            target=["cpu"],
            precision=["fp32"],
            prompts=tmp_path / "prompts.txt",
        )
    assert not (tmp_path / "out").exists()
