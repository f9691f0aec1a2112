"""Bundles with the graphs that explain, and the same models in transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from planforge.exporter.checkpoints.source import resolve_source
from planforge.runtime import load


@pytest.fixture(scope="module")
def gpt2(explained: Callable[[str], Path]) -> Iterator[Any]:
    """gpt2-demo, opened with its explanations."""
    with load(explained("gpt2-demo") / "bundle") as model:
        yield model


@pytest.fixture(scope="session")
def gpt2_reference() -> Any:
    """gpt2-demo in transformers, in fp32, whose attention weights can be read."""
    folder = resolve_source("gpt2-demo").folder
    kind: Any = transformers.AutoModelForCausalLM
    return kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
