"""The README's examples of encoders, of translation and of imports run as they stand there."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from planforge.exporter.checkpoints.checkpoint import Checkpoint
from planforge.exporter.checkpoints.source import Source
from planforge.exporter.import_folder import import_folder
from planforge.runtime import TextEncoder

from ..helpers.cli import planforge
from ..helpers.paths import ROOT

README = ROOT / "README.md"
SECTION = README.read_text(encoding="utf-8").split("\n## Encoders")[1].split("\n## The command")[0]
EXAMPLES = re.findall(r"```python\n(.*?)```", SECTION, re.DOTALL)
# The README's names of bundles, and the tiny ones that stand for them.
BUNDLES = {
    "sentiment": "classifier",
    "cross-encoder": "ranker",
    "bert": "pretrained",
    "tagger": "tagger",
    "reader": "reader",
}
# What an example prints somewhere.
PRINTED = {
    "embed(": r"0\.\d+\n\(384,\) 0",
    "layers=": r"zurich 0 6 \(1536,\)",
    "classify(": r"LABEL_\d 0\.\d+ \{'LABEL_0'",
    "rank(": r"[01] 0\.\d+ (Wings|Bread)",
    "next_sentence(": r"^0\.\d+",
    "fill_mask(": r"(\S+ 0\.\d+\n){3}",
    "tag(": r"LABEL_\d .* \d+ \d+ 0\.\d+\n",
    "answer(": r"\d+ \d+ 0\.\d+\n.*Answer\(|None",
    "truncation=": r"\(384,\)\n1746",
    "translate(": r"1998-05-03\n(1998-05-03 \S+\n){3}\[\('2007-09-03', .*\n2012-12-21\n\('1',.*\(11, 12\)",
}


@pytest.fixture(scope="module")
def folder(
    tmp_path_factory: pytest.TempPathFactory,
    minilm_bundle: Path,
    head_bundle: Callable[[str], Path],
    dates_bundle: Path,
    exported: Path,
) -> Path:
    """A folder as the README has it: build/minilm, build/transformer-demo, build/t5, one for each head."""
    folder = tmp_path_factory.mktemp("readme")
    shutil.copy(README, folder)
    (folder / "build").mkdir()
    (folder / "build" / "minilm").symlink_to(minilm_bundle)
    (folder / "build" / "transformer-demo").symlink_to(dates_bundle)
    import_folder(exported / "t5.onnx", folder / "build/t5", precision="fp32", target="cpu", verify=False)
    for name, tiny in BUNDLES.items():
        (folder / "build" / name).symlink_to(head_bundle(tiny))
    return folder


@pytest.fixture(scope="module")
def printed(folder: Path) -> Iterator[dict[str, str]]:
    """What each example prints; later ones use what earlier ones loaded."""
    names: dict[str, Any] = {}
    outputs = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for example in EXAMPLES:
            with redirect_stdout(StringIO()) as out:
                exec(compile(example, "README.md", "exec"), names)
            outputs[example] = out.getvalue()
    yield outputs
    for value in names.values():
        if isinstance(value, TextEncoder):
            value.close()


@pytest.mark.parametrize("call", PRINTED)
def test_an_example_prints_what_it_says(printed: dict[str, str], call: str) -> None:
    found = [output for example, output in printed.items() if call in example]
    assert found, f"no example has {call}"
    assert any(re.search(PRINTED[call], output) for output in found), found


def test_every_task_has_an_example() -> None:
    encoders = ("embed", "features", "classify", "rank", "next_sentence", "fill_mask", "tag", "answer")
    for task in (*encoders, "translate", "iterate", "stream", "align"):
        assert any(f".{task}(" in example for example in EXAMPLES), task


def test_the_commands_of_the_section_are_real() -> None:
    for name in set(re.findall(r"^    planforge (\S+)", SECTION, re.MULTILINE)):
        done = planforge(name, "--help")
        assert done.returncode == 0, name
        for option in re.findall(rf"^    planforge {name} .*?(--[a-z-]+)", SECTION, re.MULTILINE):
            assert option in done.stdout


def test_the_transformer_of_ones_own_can_be_exported(printed: dict[str, str], folder: Path) -> None:
    checkpoint = Checkpoint(Source("folder", "own", folder / "build" / "own"))
    found = checkpoint.generation
    assert found is not None and (found.decoder_start, found.source_eos, found.max_new_tokens) == (0, 1, 31)
    assert checkpoint.tokenizers[0].encode("good morning") == [3, 4]
