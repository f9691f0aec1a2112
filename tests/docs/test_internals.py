"""docs/internals/export.md names the functions of an export in the order in which they are called."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import FrameType

import pytest

from ..helpers.cli import planforge
from ..helpers.paths import ROOT

PAGE = (ROOT / "docs" / "internals" / "export.md").read_text(encoding="utf-8")
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
