"""docs/internals: functions stand in the order of their calls, and all files are there."""

from __future__ import annotations

import re
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest

from planforge.runtime import TextGenerator, load

from ..helpers.cli import planforge
from ..helpers.paths import ROOT
from ..helpers.serving import running_server

FOLDER = ROOT / "docs" / "internals"
ROW = re.compile(r"^\| ([\w/]+\.py) \| `([\w.]+)` \|", re.MULTILINE)
Place = tuple[str, str]  # a file and a function
QUALIFIED = sys.version_info >= (3, 11)  # whether a function's code knows its class


def list_places(text: str) -> list[Place]:
    """Return the functions of a page or a part of it."""
    return [
        (str(ROOT / file), function if QUALIFIED else function.split(".")[-1])
        for file, function in ROW.findall(text)
    ]


@contextmanager
def watch(places: Sequence[Place]) -> Iterator[dict[str, list[Place]]]:
    """Yield the first calls of functions in the block, in their order, by the beginning of a thread's name.

    Threads that begin in the block are watched too.
    """
    called: dict[str, list[Place]] = defaultdict(list)

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        place = (code.co_filename, getattr(code, "co_qualname", code.co_name))
        if event == "call" and place in wanted:
            own = called[re.split(r"[-_]\d", threading.current_thread().name)[0]]
            if place not in own:
                own.append(place)

    wanted = set(places)
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield called
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def test_the_page_follows_an_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (FOLDER / "export.md").read_text(encoding="utf-8")
    listed = list_places(page)
    (command,) = re.findall(r"^planforge (export .+)$", page, re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    with watch(listed) as called:
        done = planforge(*command.split())
    assert done.returncode == 0, done.stderr
    assert called["MainThread"] == listed and len(listed) > 25


PROMPT = (FOLDER / "prompt.md").read_text(encoding="utf-8").split("\n## ")


def test_the_page_follows_a_prompt(demo_bundle: Path) -> None:
    listed = list_places(PROMPT[1])
    with watch(listed) as called, load(demo_bundle, backend="ort-cpu", precision="fp32") as model:
        assert isinstance(model, TextGenerator)
        model.generate("In the beginning", max_new_tokens=4)
    assert called["MainThread"] == listed and len(listed) > 15


def test_the_page_follows_a_chat_over_http(llama_demo_bundle: Path) -> None:
    """In each thread of the server the functions are called in the order of its table."""
    loop, reader, engine = (list_places(part) for part in PROMPT[2:])
    body = {"messages": [{"role": "user", "content": "And God said"}], "stream": True, "max_tokens": 3}
    with (
        load(llama_demo_bundle, backend="ort-cpu", precision="fp32") as model,
        watch([*loop, *reader, *engine]) as called,
        running_server({"llama": model}) as address,
    ):
        answer = address.post("/v1/chat/completions", model="llama", **body)
    assert answer.text.endswith("data: [DONE]\n\n")
    names = {"Thread": loop, "planforge-reader": reader, "planforge-scheduler": engine}
    found = {name: [place for place in called[name] if place in own] for name, own in names.items()}
    if found["Thread"][-2:] == loop[:-3:-1]:  # the answer was whole before its first event was sent
        found["Thread"][-2:] = loop[-2:]
    assert found == names


def test_every_file_that_the_pages_name_is_there() -> None:
    named = {
        name for page in FOLDER.glob("*.md") for name in re.findall(r"[\w/]+\.py", page.read_text("utf-8"))
    }
    assert len(named) > 30
    assert [name for name in named if not (ROOT / name).is_file()] == []
