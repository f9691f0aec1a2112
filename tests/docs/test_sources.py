"""Each row of docs/sources.md names a test, example, page or command, or says why it is not here.

Its examples run, and its commands that are marked as tested.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ..helpers.cli import planforge
from ..helpers.paths import ROOT

PAGE = (ROOT / "docs/sources.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(
    r"^### ([^\n]+)\n(?:(?!^### ).)*?```python\n(.*?)```\n\n```text\n(.*?)```", PAGE, re.M | re.S
)


class Row(NamedTuple):
    system: str
    shown: str
    reason: str


ROWS = [
    Row(*map(str.strip, line[1:-1].split("|")))
    for line in re.findall(r"^\|.*\|$", PAGE, re.MULTILINE)
    if not line.startswith(("| System", "|-"))
]
TESTS = sorted(set(re.findall(r"`(tests/[\w/]+\.py::\w+)`", " ".join(row.shown for row in ROWS))))
COMMANDS = sorted(set(re.findall(r"`planforge ([a-z-]+)([^`]*)`", PAGE)))
TESTED = re.findall(r"`planforge ([^`]*)` \*\(tested\)\*", "\n".join(row.shown for row in ROWS))
# What the commands print, by how they begin.
PRINTED = {
    "run build/gpt2-demo": r"\AAnd it came to pass[^.]+\Z",
    "run build/minilm": r'\A\{.*"embedding": \[-?0\.\d+',
    "explain build/dates-explained": r"^'1' +\d+ %$",
    "bench build/gpt2-demo": r"batch 8",
}


def make_anchor(heading: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", heading.lower().replace(",", "")).strip("-")


def test_the_table_and_the_examples_were_found() -> None:
    assert len(ROWS) > 90
    assert len(TESTS) > 50
    assert len(TESTED) == len(PRINTED)
    assert len(EXAMPLES) == len(re.findall("^### ", PAGE, re.MULTILINE)) == PAGE.count("```python")


def test_each_row_is_shown_or_has_a_reason() -> None:
    for row in ROWS:
        assert row.shown or row.reason, row


@pytest.mark.parametrize("name", TESTS)
def test_a_named_test_is_there(name: str) -> None:
    file, function = name.split("::")
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_commands_take_their_options() -> None:
    assert len(COMMANDS) > 15
    for name in sorted({name for name, _ in COMMANDS}):
        shown = planforge(name, "--help")
        assert shown.returncode == 0, name
        for command, arguments in COMMANDS:
            if command == name:
                assert [
                    option for option in re.findall(r"--[a-z-]+", arguments) if option not in shown.stdout
                ] == []


def test_commands_without_the_mark_have_a_reason_to_lack_it() -> None:
    for row in ROWS:
        commands = re.findall(r"`planforge [^`]*`(?: \*\(tested\)\*)?", row.shown)
        assert all(command.endswith("*") for command in commands) or row.reason, row


@pytest.fixture(scope="module")
def workplace(
    tmp_path_factory: pytest.TempPathFactory,
    demo_bundle: Path,
    minilm_bundle: Path,
    explained: Callable[[str], Path],
) -> Path:
    """A folder whose build/ has the bundles of the page."""
    folder = tmp_path_factory.mktemp("sources")
    (folder / "build").mkdir()
    bundles = {
        "gpt2-demo": demo_bundle,
        "minilm": minilm_bundle,
        "dates-explained": explained("transformer-demo") / "bundle",
    }
    for name, bundle in bundles.items():
        (folder / "build" / name).symlink_to(bundle)
    return folder


@pytest.mark.parametrize("command", TESTED)
def test_a_command_runs(command: str, workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(workplace)
    done = planforge(*shlex.split(command))
    assert done.returncode == 0, done.stderr
    (wanted,) = (pattern for begin, pattern in PRINTED.items() if command.startswith(begin))
    assert re.search(wanted, done.stdout, re.MULTILINE), done.stdout


def test_links_lead_to_headings() -> None:
    links = re.findall(r"\]\(([\w.-]*)#([\w-]+)\)", PAGE)
    assert len(links) > 20
    for page, anchor in links:
        text = (ROOT / "docs" / page).read_text(encoding="utf-8") if page else PAGE
        assert anchor in map(make_anchor, re.findall(r"^#+ (.+)$", text, re.MULTILINE)), (page, anchor)


@pytest.fixture(scope="module")
def printed(workplace: Path) -> dict[str, str]:
    """What each example prints; later ones use the names of those before."""
    names: dict[str, Any] = {}
    outputs = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(workplace)
        for heading, example, _ in EXAMPLES:
            with redirect_stdout(StringIO()) as out:
                exec(compile(example, heading, "exec"), names)
            outputs[heading] = out.getvalue()
    return outputs


@pytest.mark.parametrize(("heading", "wanted"), [(heading, wanted) for heading, _, wanted in EXAMPLES])
def test_an_example_prints_what_stands_below_it(printed: dict[str, str], heading: str, wanted: str) -> None:
    assert printed[heading] == wanted
