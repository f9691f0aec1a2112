"""The pages below docs/deploy: their commands parse, their names exist, and they agree with the code."""

from __future__ import annotations

import importlib.metadata
import itertools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import onnx
import pytest
from typer.main import get_group

from planforge.exporter.commands.app import app
from planforge.exporter.linting.lint import lint
from planforge.exporter.precisions import PRECISIONS
from planforge.exporter.targets import NAMES, TARGETS, find_target
from planforge.runtime.apps.diagnostics.doctor import find_backends
from planforge.runtime.apps.diagnostics.jetson import JETPACKS
from planforge.runtime.backends.select import BACKEND_PRIORITY, BACKENDS
from planforge.runtime.backends.tensorrt_library import LIBRARIES

from ..helpers.machines import facts
from ..helpers.paths import ROOT

FOLDER = ROOT / "docs" / "deploy"
PAGES = {path.name: path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.md"))}
FENCED = re.compile(r"^```\w*\n(.*?)^```$", re.DOTALL | re.MULTILINE)
INDENTED = re.compile(r"^(?: {4,}|\t)(.*)$", re.MULTILINE)
INLINE = re.compile(r"`([^`\n]+)`")
NAMED = {
    "--target": NAMES,
    "--backend": BACKENDS,
    "--precision": tuple(PRECISIONS),
    "--engine": tuple(LIBRARIES),
}
GROUP = get_group(app)


def code_of(text: str) -> list[str]:
    """Every line and every piece of a page that is code."""
    fenced = [line for block in FENCED.findall(text) for line in block.splitlines()]
    rest = FENCED.sub("", text)
    return [*fenced, *INDENTED.findall(rest), *INLINE.findall(rest)]


def commands() -> Iterator[tuple[str, list[str]]]:
    """The page and the words of every command."""
    for page, text in PAGES.items():
        for line in code_of(text):
            if found := re.search(r"(?:^|\s)planforge (.*)", line):
                yield page, shlex.split(found[1], comments=True)


COMMANDS = list(commands())


def rows(page: str, columns: int) -> list[list[str]]:
    """The cells of a page's tables of so many columns, heads and rules left out."""
    lines = re.findall(r"^\|(.*)\|$", PAGES[page], re.MULTILINE)
    cells = [[cell.strip() for cell in line.split(" | ")] for line in lines]
    return [row for row, after in zip(cells, [*cells[1:], [""]], strict=True) if is_body(row, after, columns)]


def is_body(row: list[str], after: list[str], columns: int) -> bool:
    return len(row) == columns and "---" not in f"{row[0]}{after[0]}"


def test_the_pages_and_their_commands_were_found() -> None:
    assert set(PAGES) == {"README.md", "jetson.md", "rtx.md", "datacentre.md"}
    for page in PAGES:
        assert len([words for found, words in COMMANDS if found == page]) >= 5, page
    assert {words[0] for _, words in COMMANDS} >= {"export", "build", "doctor", "selftest", "run", "bench"}


@pytest.mark.parametrize(
    ("page", "words"), COMMANDS, ids=[f"{page}: {shlex.join(w)}" for page, w in COMMANDS]
)
def test_a_command_is_one_that_the_program_takes(page: str, words: list[str]) -> None:
    flags = {option for parameter in GROUP.params for option in parameter.opts}
    while words[0] in flags:
        words = words[1:]
    command = GROUP.commands[words[0]]
    if len(words) > 1 or not any(parameter.required for parameter in command.params):
        command.make_context(words[0], words[1:])  # raises a usage error
    for option, value in itertools.pairwise(words):
        for name in value.split(",") if option in NAMED else ():
            assert name in NAMED[option], f"{page}: {option} {name}"
        if option == "--sm":
            assert set(value.split(",")) <= set(LIBRARIES["tensorrt-rtx"].sms), page
    if words[0] == "build" and "--target" in words:
        assert find_target(words[words.index("--target") + 1]).plans, words


def test_every_name_in_the_text_exists() -> None:
    for page, text in PAGES.items():
        for piece in INLINE.findall(text):
            if re.fullmatch(r"(jetpack|tensorrt)[\d.]+", piece):
                assert piece in NAMES, f"{page}: {piece}"
            if re.fullmatch(r"(ort-|tensorrt-).*", piece):
                assert piece in BACKENDS, f"{page}: {piece}"
            for names in re.findall(r"--target ([\w.,]+)", piece):
                assert set(names.split(",")) <= set(NAMES), f"{page}: {piece}"
        for extras in re.findall(r"\.\[([a-z,-]+)\]", text):
            known = set(importlib.metadata.metadata("planforge").get_all("Provides-Extra") or ())
            assert set(extras.split(",")) <= known | {"x"}, f"{page}: {extras}"


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]+))?\)", PAGES[page])
    assert links
    for file, anchor in links:
        target = (FOLDER / file).resolve() if file else FOLDER / page
        assert target.is_file(), file
        if anchor:
            headings = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in headings}, anchor


def test_the_ladder_is_the_one_that_load_walks() -> None:
    ladder = [row for row in rows("README.md", 5) if row[0].strip("`") in BACKENDS]
    assert [row[0] for row in ladder] == [f"`{backend}`" for backend in BACKEND_PRIORITY]
    assert re.findall(r"sm\d+", ladder[0][2]) == list(LIBRARIES["tensorrt-rtx"].sms)


def test_every_jetpack_has_its_row() -> None:
    table = rows("jetson.md", 7)
    targets = {row[4].strip("`"): row for row in table}
    assert set(targets) == {name for name in TARGETS if name.startswith("jetpack")}
    for name, (version, _, python, tensorrt, _, export, _) in targets.items():
        target = find_target(name)
        assert ".".join(map(str, target.version)) == tensorrt
        releases = [pack for pack in JETPACKS.values() if pack.version in version.split(" and ")]
        assert releases and {pack.python for pack in releases} == {python}
        assert export == {"portable": "`cpu,portable`", "inplace": "`cpu,rtx`"}[target.dialect]


@pytest.mark.parametrize(("page", "column"), [("rtx.md", 2), ("datacentre.md", 2)])
def test_gpus_of_tensorrt_rtx(page: str, column: int) -> None:
    table = [
        row for row in rows(page, column + 1 + (page == "datacentre.md")) if re.fullmatch(r"sm\d+", row[1])
    ]
    assert len(table) >= 6
    for row in table:
        assert row[column].startswith("yes") == (row[1] in LIBRARIES["tensorrt-rtx"].sms), row
    if page == "rtx.md":
        assert [row[1] for row in table] == list(LIBRARIES["tensorrt-rtx"].sms)


def test_the_doctor_says_the_same_of_a_jetson() -> None:
    orin = facts("sm87", architecture="aarch64", cuda="12.6", release="36.4.3")
    remedy = next(backend.remedy for backend in find_backends(orin) if backend.backend == "tensorrt")
    first, second, install = remedy.split(", then ")
    assert first in PAGES["jetson.md"] and f"    {second}\n" in PAGES["jetson.md"]
    assert install.split()[-1] in PAGES["jetson.md"]
    jetpack_5 = facts("sm87", architecture="aarch64", cuda="11.4", release="35.4.1")
    for backend in ("tensorrt", "ort-cuda"):
        state = next(state for state in find_backends(jetpack_5) if state.backend == backend)
        assert not state.available and state.remedy == "install JetPack 6 or newer"


def test_the_messages_are_those_of_the_code() -> None:
    joined = ""
    for path in [*(ROOT / "runtime").rglob("*.py"), ROOT / "exporter" / "tensorrt" / "plans.py"]:
        joined += re.sub(r'"\s*\n\s*f?"', "", path.read_text(encoding="utf-8"))
    messages = [row[0].strip("`") for row in rows("README.md", 2) if row[0].startswith("`")]
    assert len(messages) >= 12
    for message in messages:
        for piece in message.split("…"):
            assert piece.strip(" ;") in joined, message


def test_a_graph_for_tensorrt_8_is_written_as_the_page_says(
    demo_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```$", PAGES["jetson.md"], re.DOTALL | re.MULTILINE)
    (tmp_path / "B").symlink_to(demo_bundle)
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "jetson.md", "exec"), {})
    (graph,) = (tmp_path / "older").glob("*.onnx")
    assert onnx.load(graph).opset_import[0].version == 17
    report = lint(graph, ["jetpack5.1"])
    assert {(finding.severity, finding.rule) for finding in report.findings} == {("warning", "int64-input")}
