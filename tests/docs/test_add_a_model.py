"""The guide that adds a family: its row, its checkpoint and the errors are those of the source."""

from __future__ import annotations

import re
import shlex
import textwrap
from pathlib import Path

import pytest

from planforge.exporter.export_source import choose_exporter
from planforge.models import llama_families
from planforge.models.checkpoint import describe, load_model
from planforge.models.families import FAMILIES, make_llama
from planforge.models.llama_families import LlamaFamily

from ..helpers.llamas import LLAMAS, tiny_llama
from ..helpers.models import edit_json
from ..helpers.paths import ROOT
from ..models import test_llama

PAGE = (ROOT / "docs/add-a-model.md").read_text(encoding="utf-8")
BLOCKS = [textwrap.dedent(block) for block in re.findall(r"(?:^    .*\n)+", PAGE, re.MULTILINE)]
QUOTES = [
    " ".join(line.removeprefix("> ") for line in block.splitlines())
    for block in re.findall(r"(?:^> .*\n)+", PAGE, re.MULTILINE)
]
# Each block of code of the page that is in a file.
SOURCES = {'"seed_oss": Llama': "models/llama_families.py", '"seed-oss": (': "tests/helpers/llamas.py"}


@pytest.mark.parametrize("start", SOURCES)
def test_what_the_page_quotes_is_in_the_source(start: str) -> None:
    (block,) = [block for block in BLOCKS if block.startswith(start)]
    source = (ROOT / SOURCES[start]).read_text(encoding="utf-8")
    assert textwrap.indent(block, "    ") in source


def test_the_command_runs_the_test_of_its_checkpoint() -> None:
    (command,) = [shlex.split(block) for block in BLOCKS if "pytest" in block]
    file = command[1]
    name = command[command.index("-k") + 1]
    assert Path(test_llama.__file__) == ROOT / file
    assert name in LLAMAS
    assert name in test_llama.LEAVING_OUT


def test_an_export_without_the_row_traces_transformers_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_llama(tmp_path, "seed-oss")
    assert choose_exporter("auto", tmp_path, ()) == "planforge"
    monkeypatch.delitem(FAMILIES, "seed_oss")
    assert choose_exporter("auto", tmp_path, ()) == "transformers"


def test_a_row_without_its_settings_says_what_the_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_llama(tmp_path, "seed-oss")
    monkeypatch.setitem(llama_families.FAMILIES, "seed_oss", LlamaFamily(class_name="SeedOss"))
    monkeypatch.setitem(FAMILIES, "seed_oss", make_llama("seed_oss"))
    with pytest.raises(ValueError, match="is not known") as caught:
        describe(tmp_path)
    assert str(caught.value) == f"{tmp_path}: {QUOTES[0]}"


def test_a_weight_without_a_place_is_named_as_on_the_page(tmp_path: Path) -> None:
    tiny_llama(tmp_path, "seed-oss")
    edit_json(tmp_path / "config.json", attention_out_bias=False)
    assert QUOTES[1].startswith("unexpected: ")
    with pytest.raises(ValueError, match=re.escape(QUOTES[1])):
        load_model(tmp_path)


def test_what_the_page_says_no_row_does_for_has_none() -> None:
    for model_type in ("stablelm", "cohere", "arcee", "nemotron", "glm", "helium", "ernie4_5"):
        assert model_type not in FAMILIES
