"""`planforge run` of encoder-decoders."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from planforge.runtime.apps.commands.run_options import TRANSLATION
from planforge.runtime.option_checks import list_options
from planforge.runtime.options import TranslationOptions

from ..helpers.cli import error_line, planforge

PNG = b"\x89PNG\r\n\x1a\n"
TEXTS = {
    "the 3rd of May, 1998": "1998-05-03",
    "3/5/98": "1998-05-03",
    "May 3 98": "1998-05-03",
    "1 Jan 68": "2068-01-01",
    "1 Jan 69": "1969-01-01",
}


def test_a_batch_from_stdin(dates_bundle: Path) -> None:
    lines = "".join(f"{text}\n" for text in TEXTS)
    assert planforge("run", dates_bundle, stdin=lines).stdout.splitlines() == list(TEXTS.values())


def test_blank_lines_keep_their_place(dates_bundle: Path) -> None:
    lines = "\n3/5/98\n  \n\nMay 3 98\n\n"
    assert planforge("run", dates_bundle, stdin=lines).stdout == "\n1998-05-03\n\n\n1998-05-03\n\n"
    shown = planforge("run", dates_bundle, "--json", stdin="\n3/5/98\n").stdout.splitlines()
    blank, result = map(json.loads, shown)
    assert blank is None and result["text"] == "1998-05-03"
    pair = '{"text": "3/5/98", "pair": "b"}\n'
    done = planforge("run", dates_bundle, "--input", "-", "--attention", "map.png", stdin=pair)
    assert (done.returncode, done.stdout) == (1, "")
    assert "translation takes texts, not pairs" in done.stderr


def test_the_command_has_the_options_of_the_runtime() -> None:
    of_many_texts = {"batch_size"}
    of_a_program = {"on_token", "parse_special"}  # --parse-special is an option of every task
    assert set(TRANSLATION) - of_many_texts == set(list_options(TranslationOptions)) - of_a_program


def test_json_and_the_n_best(dates_bundle: Path) -> None:
    result = planforge("run", dates_bundle, "3/5/98", "--json", "--num-beams", 4, "--n-best", 2)
    value = json.loads(result.stdout)
    assert value["text"] == value["candidates"][0]["text"] == "1998-05-03"
    assert value["finish_reason"] == "eos"
    assert value["candidates"][1]["score"] < value["score"] <= 0
    # As many beams as are wanted; a blank line between two texts.
    lines = planforge("run", dates_bundle, "3/5/98", "3/5/99", "--n-best", 2).stdout.splitlines()
    assert [line.partition("\t")[0] for line in lines[::3]] == ["1998-05-03", "1999-05-03"]
    assert lines[2] == "" and len(lines) == 5


def test_the_attention_is_drawn(dates_bundle: Path, tmp_path: Path) -> None:
    picture = tmp_path / "map.png"
    args = ("run", dates_bundle, "1998, May 3", "--attention", picture)
    planforge(*args, "--attention-layer", 1, "--attention-head", 3)
    assert picture.read_bytes().startswith(PNG)
    assert "layer=2 must be" in error_line(*args, "--attention-layer", 2)
    assert "the translation of exactly one text, but 2 were given" in error_line(
        *args[:2], "a", "b", "--attention", picture
    )
    done = planforge(*args[:2], "--attention", picture, stdin="\n \n")
    assert done.returncode == 1
    assert done.stderr.startswith(
        "error: --attention draws the translation of exactly one text, but only blank lines were"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["x", "--num-beams", "0"], "--num-beams is 0"),
        (["x", "--early-stopping", "soon"], "must be one of true, false, never"),
        (["x", "--task", "embed"], "this bundle translates; it does not support the task 'embed'"),
        (["x", "--temperature", "1"], "--temperature cannot be used with the task translate"),
        (["x", "--chat"], "--chat cannot be used with the task translate"),
        (["x", "--pair", "y"], "--pair cannot be used with the task translate"),
        (["x", "--attention-head", "1"], "need --attention FILE"),
        (["3/5/98 " * 20], "Translate it in parts"),
        ([" "], "empty"),
    ],
)
def test_wrong_use_is_one_line(dates_bundle: Path, arguments: list[str], message: str) -> None:
    assert message in error_line("run", dates_bundle, *arguments)


def test_a_language_and_an_output_that_are_not_there(marian_bundle: Path) -> None:
    line = error_line("run", marian_bundle, ">>it<< Hello")
    assert ">>it<<" in line and ">>de<<, >>fr<<" in line
    line = error_line("run", marian_bundle, "Hello", "--attention", "map.png")
    assert "--outputs cross_attentions" in line


def test_inspect_shows_how_it_searches(dates_bundle: Path) -> None:
    shown = planforge("inspect", dates_bundle).stdout
    assert "greedy, at most 15 new tokens" in shown
    assert "cross_attentions.1" in shown
