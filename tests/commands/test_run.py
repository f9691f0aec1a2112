"""`planforge run`: help in panels, lines in batches, blank and broken lines, terminals, suggestions."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from planforge.exporter.commands.app import app
from planforge.runtime import TextGenerator, load
from planforge.runtime.apps.commands.run_input import keep_blanks
from planforge.runtime.apps.commands.run_options import FLAGS, TASKS
from planforge.runtime.option_checks import list_options

from ..helpers.cli import COMMAND


def run(*arguments: str | Path, stdin: str | bytes = "") -> Result:
    return CliRunner().invoke(app, ["run", *map(str, arguments)], input=stdin)


def test_help_has_panels_by_task_and_every_option_stands_in_one() -> None:
    done = CliRunner().invoke(app, ["run", "--help"], env={"COLUMNS": "80", "TERM": "dumb"})
    panels = re.findall(r"╭─ (.*?) ─+╮", done.stdout)
    assert panels[0] == "Arguments"
    wanted = {"Input and output", "Text generation", "Conversations", "Translation", "Encoders", "Engine"}
    assert wanted <= set(panels)
    for name in {name for names in TASKS.values() for name in names}:
        assert FLAGS.get(name, f"--{name.replace('_', '-')}") + " " in done.stdout
    lost = done.stdout.partition("╭─ Options")[2].partition("╭─")[0]
    assert re.findall(r"--[\w-]+", lost) == ["--help"]


def test_lines_run_in_batches_and_blank_ones_stay(demo_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one list they give the answers that they have alone, and as many steps as a list takes."""
    steps: list[int] = []
    iterate = TextGenerator.iterate

    def counted(self: TextGenerator, prompts: Any, **options: Any) -> Iterator[Any]:
        def noted() -> Iterator[Any]:
            for prompt in prompts:
                steps.append(len(steps))
                yield prompt

        return iterate(self, noted(), **options)

    monkeypatch.setattr(TextGenerator, "iterate", counted)
    lines = ["And God", "", "And he", "  ", "O my God", "In the beginning"]
    done = run(demo_bundle, "--max-new-tokens", "4", "--json", stdin="\n".join(lines) + "\n")
    assert done.exit_code == 0, done.stderr
    values = [json.loads(line) for line in done.stdout.splitlines()]
    assert [value is None for value in values] == [not line.strip() for line in lines]
    assert len(steps) == 4
    with load(demo_bundle) as model:
        assert isinstance(model, TextGenerator)
        wanted = model.generate([line for line in lines if line.strip()], max_new_tokens=4)
    assert [value["token_ids"] for value in values if value] == [list(one.token_ids) for one in wanted]
    # All in one batch: one prefill is shared by its rows.
    assert len({value["timings"]["prefill_ms"] for value in values if value}) == 1
    text = run(demo_bundle, "--max-new-tokens", "1", stdin="And God\n\nAnd he\n").stdout.splitlines()
    assert [line == "" for line in text] == [False, True, False]


def test_results_stay_beside_their_lines_however_far_is_read_ahead() -> None:
    for ahead in (1, 2, 9):

        def computed(texts: Iterator[Any], ahead: int = ahead) -> Iterator[str]:
            read: list[Any] = []
            for text in texts:
                read.append(text)
                if len(read) == ahead:
                    yield from (str(one).upper() for one in read)
                    read = []
            yield from (str(one).upper() for one in read)

        items = iter([None, "a", None, None, "b", "c", None])
        assert list(keep_blanks(items, computed)) == [
            *(None, ("a", "A"), None, None),
            *(("b", "B"), ("c", "C"), None),
        ]


def test_a_line_that_is_not_utf8_is_named(demo_bundle: Path, tmp_path: Path) -> None:
    done = run(demo_bundle, "--max-new-tokens", "1", stdin=b"And God\nAnd h\xe9\n")
    assert done.exit_code == 1
    assert "error: stdin, line 2 is not UTF-8: byte 6 is 0xe9" in done.stderr
    (tmp_path / "in.jsonl").write_bytes(b'{"text": "a"}\n\n{"text": "\xff"}\n')
    done = run(demo_bundle, "--max-new-tokens", "1", "--input", tmp_path / "in.jsonl")
    assert done.exit_code == 1
    assert "in.jsonl, line 3 is not UTF-8: byte 11 is 0xff" in done.stderr


def test_options_are_refused_before_lines_are_read(demo_bundle: Path) -> None:
    done = run(demo_bundle, "--temperature", "nan", stdin=b"\xff\n")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "temperature is nan" in done.stderr
    done = run(demo_bundle, stdin="word " * 1000)
    assert done.exit_code == 1  # the line, not the command, is wrong
    assert "truncation='tail'" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--task", "generat"], "did you mean 'generate'"),
        (["--backend", "ort-cpuu"], "did you mean 'ort-cpu'"),
        (["--precision", "fp61"], "did you mean 'fp16'"),
        (["--generation", "chekpoint"], "did you mean 'checkpoint'"),
        (["--early-stopping", "nevr"], "did you mean 'never'"),
        (["--tempratur", "1"], "--temperature"),
        (["--truncate", "tail"], "--truncation"),
        (["--top-logprobs", "2"], "needs --json"),
        (["--system", "x"], "--system needs --chat"),
        (["--chat", "--num-beams", "2"], "--num-beams cannot be used with --chat"),
        (["--chat", "--num-beams", "2", "--json"], "--num-beams cannot be used with --chat"),
        (["--pooling", "cls"], "--pooling cannot be used with the task generate"),
    ],
)
def test_names_and_options_that_are_not_there(demo_bundle: Path, arguments: list[str], words: str) -> None:
    done = run(demo_bundle, "x", *arguments)
    assert done.exit_code == 2
    assert words in done.stderr
    if "--json" in arguments:
        assert words in json.loads(done.stdout)["error"]["message"]
    else:
        assert done.stdout == ""


def test_the_command_has_the_options_of_the_runtime() -> None:
    from planforge.runtime.options import (
        AnswerOptions,
        EmbedOptions,
        FeatureOptions,
        GenerationOptions,
        PromptOptions,
        RankOptions,
        SparseOptions,
    )

    only_python = {"progress", "parse_special", "on_token", "logits_processor", "logit_bias", "logprobs"}
    only_python |= {"json_schema", "regex", "grammar", "choices", "tools", "tool_choice"}
    only_python.add("continue_final_message")  # --continue takes the message itself
    only_python.add("precision")  # of vectors; --precision is the graph's
    for task, options in (
        ("generate", GenerationOptions),
        ("embed", EmbedOptions),
        ("embed_sparse", SparseOptions),
        ("embed_multi", PromptOptions),
        ("features", FeatureOptions),
        ("answer", AnswerOptions),
        ("rank", RankOptions),
    ):
        missing = set(list_options(options)) - set(TASKS[task])
        assert missing <= {*only_python, "reuse_prompt", "normalize", "max_answer_tokens", "max_tokens"}, task


@pytest.mark.skipif(sys.platform == "win32", reason="has no pseudo-terminals")
def test_a_terminal_gets_no_control_characters_and_a_pipe_gets_them_all(demo_bundle: Path) -> None:
    import pty

    arguments = ["run", str(demo_bundle), "a\x1b[31mred\x9b", "--max-new-tokens", "1"]
    piped = subprocess.run([*COMMAND, *arguments], capture_output=True, encoding="utf-8", timeout=120)
    assert piped.stdout.startswith("a\x1b[31mred\x9b")
    ours, theirs = pty.openpty()
    with subprocess.Popen([*COMMAND, *arguments], stdout=theirs, stderr=subprocess.DEVNULL) as process:
        os.close(theirs)
        shown = b""
        while piece := read(ours):
            shown += piece
        assert process.wait(timeout=120) == 0
    os.close(ours)
    text = shown.decode("utf-8")
    assert text.startswith("a\\x1b[31mred\\x9b")
    assert not re.search(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]", text)


def read(terminal: int) -> bytes:
    """What the other side wrote; nothing when it has closed."""
    try:
        return os.read(terminal, 4096)
    except OSError:  # how Linux says so
        return b""
