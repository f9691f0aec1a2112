"""docs/internals: the functions of an export stand in the order of their calls, and all files are there."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import FrameType

import pytest

from ..helpers.cli import planforge
from ..helpers.paths import ROOT

FOLDER = ROOT / "docs" / "internals"
PAGE = (FOLDER / "export.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| ([\w/]+\.py) \| `([\w.]+)` \|", re.MULTILINE)


def test_the_page_follows_an_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = [(str(ROOT / file), function.rpartition(".")[2]) for file, function in ROW.findall(PAGE)]
    (command,) = re.findall(r"^planforge (export .+)$", PAGE, re.MULTILINE)
    waiting = set(listed)
    called = []

    def note(frame: FrameType, event: str, _: object) -> None:
        place = (frame.f_code.co_filename, frame.f_code.co_name)
        if event == "call" and place in waiting:
            waiting.remove(place)
            called.append(place)

    monkeypatch.chdir(tmp_path)
    sys.setprofile(note)
    try:
        done = planforge(*command.split())
    finally:
        sys.setprofile(None)
    assert done.returncode == 0, done.stderr
    assert called == listed and len(listed) > 25


def test_every_file_that_the_pages_name_is_there() -> None:
    named = {
        name for page in FOLDER.glob("*.md") for name in re.findall(r"[\w/]+\.py", page.read_text("utf-8"))
    }
    assert len(named) > 30
    assert [name for name in named if not (ROOT / name).is_file()] == []
