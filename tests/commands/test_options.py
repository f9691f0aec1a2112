"""What holds for every option of every command: none is lost in silence, and --json holds for errors too."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from planforge.exporter.commands.app import COMMANDS, app
from planforge.exporter.linting.all_rules import RULES
from planforge.exporter.precisions import PRECISIONS
from planforge.exporter.targets import TARGETS
from planforge.runtime.errors import InputError
from planforge.runtime.suggest import FORMATS, did_you_mean

from ..helpers.cli import error_line, planforge

PARSERS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
WITH_JSON = [
    name for name, parser in PARSERS.items() if any("--json" in param.opts for param in parser.params)
]


def list_options(parser: Any) -> list[Any]:
    return [param for param in parser.params if param.param_type_name == "option"]


def list_required(parser: Any) -> Iterator[str]:
    """Yield what a command cannot do without, with a value that names nothing."""
    for param in parser.params:
        if param.required:
            yield from (["missing"] if param.param_type_name == "argument" else [param.opts[0], "missing"])


@pytest.mark.parametrize("name", COMMANDS)
def test_an_option_of_one_value_is_refused_where_it_is_given_twice(name: str) -> None:
    parser = PARSERS[name]
    required = list(list_required(parser))
    once = [param for param in list_options(parser) if not param.multiple and not param.is_flag]
    assert once or name in ("doctor", "inspect")
    for param in once:
        for spelled in param.opts:
            typed = [*required, *([] if param.required else [param.opts[0], "1"]), spelled, "2"]
            with pytest.raises(InputError, match=rf"{param.opts[0]} is given 2 times; give it once"):
                parser.make_context(name, typed)
    for param in (param for param in list_options(parser) if param.multiple):
        context = parser.make_context(name, [*required, param.opts[0], "a", param.opts[0], "b"])
        assert list(context.params[param.name]) == ["a", "b"]


@pytest.mark.parametrize("name", COMMANDS)
def test_a_usage_line_has_each_dot_once(name: str) -> None:
    (usage,) = (line for line in planforge(name, "--help").stdout.splitlines() if "Usage:" in line)
    assert f"planforge {name} [OPTIONS]" in usage
    for word in usage.split():
        assert word.count("...") <= 1 and "[[" not in word, usage


def test_names_are_separated_by_commas_and_a_switch_may_be_repeated(tmp_path: Path) -> None:
    twice = ("--precision", "fp32", "--precision=int8")
    line = error_line("export", "gpt2-demo", "-o", tmp_path / "B", *twice)
    assert line.endswith("--precision is given 2 times; give it once, several names separated by commas")
    assert planforge("doctor", "--json", "--json").returncode == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["verify", "B", "--limit", "max_error=1", "--limit", "max_error=2"], "max_error is given already"),
        (["build", "B", "--max", "batch=1,length=8", "--max", "batch=2"], "batch is given already"),
        (["build", "B", "--opt", "batch=1,length=8,batch=2"], "--opt 'batch=2': batch is given already"),
        (["build", "B", "--opt", "batch=-1"], "--opt 'batch=-1' must be NAME=N, as in batch=8"),
        (
            [
                "batch",
                "B",
                "--task",
                "embed",
                "--input",
                "i",
                "-o",
                "o",
                "--option",
                "n=1",
                "--option",
                "n=2",
            ],
            "n is given already",
        ),
    ],
)
def test_a_name_is_not_given_two_values(arguments: list[str], words: str) -> None:
    assert words in error_line(*arguments)


@pytest.mark.parametrize("given", ["", ",", " "])
@pytest.mark.parametrize(
    "arguments",
    [
        *(
            ["export", "gpt2-demo", "-o", "new", option]
            for option in ("--precision", "--target", "--sm", "--outputs")
        ),
        *(["import", ".", "-o", "new", option] for option in ("--precision", "--target", "--sm")),
        ["build", ".", "--sm"],
        ["build", ".", "--max"],
        ["build", ".", "--opt"],
        ["bench", ".", "--precision"],
        ["lint", ".", "--target"],
        ["package", ".", "--for", "genai", "-o", "new", "--precision"],
    ],
    ids=lambda words: f"{words[0]}{words[-1]}" if words else "",
)
def test_a_list_of_no_names_is_refused(
    arguments: list[str], given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert f"{arguments[-1]} {given!r} has no names; give names" in error_line(*arguments, given)


def test_a_level_of_verification_excludes_none(tmp_path: Path) -> None:
    for command in (["export", "gpt2-demo"], ["import", str(tmp_path)]):
        words = [*command, "-o", str(tmp_path / "B"), "--verify", "quick", "--no-verify"]
        assert "--verify quick and --no-verify exclude each other" in error_line(*words)


@pytest.mark.parametrize("name", WITH_JSON)
def test_an_error_is_json_for_whoever_asked_for_json(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    wrong = [[*list_required(PARSERS[name]), "--json", "--bogus"]]
    if name == "lint":  # its argument may be left out, for --rules
        wrong += [["missing", "--json"], ["--json"]]
    elif wrong[0][0] == "missing":
        wrong.append([*wrong[0][:-1]])
    for arguments in wrong:
        done = planforge(name, *arguments)
        (error,) = json.loads(done.stdout).values()
        assert set(error) == {"type", "message", "exit_code"}
        assert error["exit_code"] == done.returncode != 0
        assert "".join(error["message"].split())[:40] in "".join(done.stderr.split())  # for a reader, too
        without = planforge(name, *(word for word in arguments if word != "--json"))
        assert without.stdout == "" and without.returncode == done.returncode


def test_every_command_but_the_server_has_json() -> None:
    assert set(COMMANDS) - set(WITH_JSON) == {"serve"}


def test_the_rules_of_lint_are_json() -> None:
    done = planforge("lint", "--rules", "--json")
    found = json.loads(done.stdout)
    assert [rule["rule"] for rule in found["rules"]] == [rule.id for rule in RULES]
    assert [target["target"] for target in found["targets"]] == list(TARGETS)
    assert all(rule["what_it_finds"] and rule["source"] for rule in found["rules"])


def test_another_format_of_numbers_is_no_typing_error(tmp_path: Path) -> None:
    for name in ("bf16", "bfloat16"):
        line = error_line("export", "gpt2-demo", "-o", tmp_path / "B", "--precision", name)
        assert "did you mean" not in line and "fp32 keeps every weight of a checkpoint in bfloat16" in line
    assert not {did_you_mean(name, PRECISIONS) for name in FORMATS} - {""}
    assert did_you_mean("fp61", PRECISIONS) == "; did you mean 'fp16'?"
