"""The recipes of docs/train.md run as they stand there, and end in folders that are exported."""

from __future__ import annotations

import json
import re
import shutil
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from planforge.exporter import export
from planforge.exporter.checkpoints.checkpoint import Checkpoint
from planforge.exporter.checkpoints.source import Source
from planforge.runtime import TextEncoder

from ..helpers.paths import ROOT

RECIPES = re.findall(r"```python\n(.*?)```", (ROOT / "docs/train.md").read_text(encoding="utf-8"), re.DOTALL)
TRAINED = ("gpt2", "translator", "bert", "classifier", "gpt1", "tagger", "reader")
TEXT = "planforge export runs the command"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the recipes write to."""
    folder = tmp_path_factory.mktemp("train")
    shutil.copy(ROOT / "README.md", folder)
    names: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()):
        patch.chdir(folder)
        for recipe in RECIPES:
            exec(compile(recipe, "docs/train.md", "exec"), names)
    return folder / "build"


def test_there_are_six_recipes_and_an_example_of_pairs() -> None:
    assert len(RECIPES) == 7


@pytest.mark.parametrize("name", TRAINED)
def test_a_recipe_ends_in_a_folder_with_a_held_out_number(trained: Path, name: str) -> None:
    folder = trained / f"trained-{name}"
    checkpoint = Checkpoint(Source("folder", name, folder))
    assert checkpoint.tokenizers[0].encode("1")
    figures = json.loads((folder / "training.json").read_text(encoding="utf-8"))
    held_out = next(value for key, value in figures.items() if key.startswith("held_out"))
    assert 0 < held_out < 600  # a perplexity below that of any of 600 tokens; losses are far below


@pytest.mark.parametrize(
    ("name", "architecture"),
    [("classifier", "BertForSequenceClassification"), ("gpt1", "OpenAIGPTForSequenceClassification")],
)
def test_a_fine_tuned_model_is_exported_and_equal_to_transformers(
    trained: Path, tmp_path: Path, name: str, architecture: str
) -> None:
    folder = trained / f"trained-{name}"
    model: Any = getattr(transformers, architecture).from_pretrained(folder).eval()
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    with torch.inference_mode():
        wanted = model(**tokenizer(TEXT, return_tensors="pt")).logits.softmax(-1)[0].tolist()
    export(folder, tmp_path / "bundle", target="cpu", precision="fp32")
    with TextEncoder.load(tmp_path / "bundle") as encoder:
        got = encoder.classify(TEXT)
    assert got.probabilities == pytest.approx(dict(zip(("command", "prose"), wanted, strict=True)), abs=1e-5)
