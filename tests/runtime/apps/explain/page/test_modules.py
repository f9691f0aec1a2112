"""The modules of the page, which are joined to one script with one scope."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from planforge.runtime.apps.explain.page import MODULES, START, join_modules, read

IMPORT = re.compile(r'import \{ ([\w, ]+) \} from "\./(\w+\.js)";')
EXPORT = re.compile(r"export \{ ([\w, ]+) \};")
DECLARATION = re.compile(r"^(?:async )?(?:class|const|function|let) +(\w+)", re.MULTILINE)
NAMES = (*MODULES, START)


def list_exports(name: str) -> list[str]:
    return [one for names in EXPORT.findall(read(name)) for one in names.split(", ")]


@pytest.mark.parametrize("name", NAMES)
def test_each_import_and_export_is_a_line_of_its_own(name: str) -> None:
    """Imports stand above the code, exports below it; no other line begins so."""
    lines = [line for line in read(name).splitlines() if line and not line.startswith("//")]
    kinds = "".join(
        "i" if IMPORT.fullmatch(line) else "e" if EXPORT.fullmatch(line) else "." for line in lines
    )
    assert re.fullmatch(r"i+\.+" if name == START else r"i*\.+e+", kinds)
    code = [line for line, kind in zip(lines, kinds, strict=True) if kind == "."]
    assert not [line for line in code if re.match(r"\s*(import|export)\b", line)]


def test_no_two_modules_declare_the_same_name() -> None:
    declared = Counter(name for module in NAMES for name in DECLARATION.findall(read(module)))
    assert declared.total() > len(NAMES)
    assert [name for name, count in declared.items() if count > 1] == []


def test_each_module_comes_after_those_that_it_imports() -> None:
    exported: dict[str, list[str]] = {}
    for module in NAMES:
        for names, source in IMPORT.findall(read(module)):
            assert set(names.split(", ")) <= set(exported[source])
        exported[module] = list_exports(module)
        assert set(exported[module]) <= set(DECLARATION.findall(read(module)))


def test_the_script_has_all_lines_but_those() -> None:
    script = join_modules()
    assert not re.search(r"^(import|export)\b", script, re.MULTILINE)
    whole = [line for module in NAMES for line in read(module).splitlines()]
    left_out = [line for line in whole if IMPORT.fullmatch(line) or EXPORT.fullmatch(line)]
    assert len(script.splitlines()) == len(whole) - len(left_out) + 3
