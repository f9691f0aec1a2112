"""`planforge explain`: a page, JSON or a table."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import numpy as np
import PIL.Image
import pytest

from ..helpers.cli import error_line, planforge

PROMPT = "In the beginning God created the"


@pytest.fixture
def bundle(explained: Callable[[str], Path]) -> Path:
    return explained("gpt2-demo") / "bundle"


def test_a_page_and_json(bundle: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    options: list[str | Path] = ["--answer", " heavens and", "--watch", " earth", "--html", page, "--json"]
    done = planforge("explain", bundle, PROMPT, *options)
    assert done.returncode == 0, done.stderr
    value = json.loads(done.stdout)
    assert [target["text"] for target in value["targets"]] == [" heavens", " and"]
    assert value["lens"]["watched"][0]["text"] == " earth"
    assert "shows it in any browser" in done.stderr
    assert page.read_text().startswith("<!DOCTYPE html>")
    assert not list(tmp_path.glob("*.partial"))


def test_a_table(bundle: Path, tmp_path: Path) -> None:
    command: list[str | Path] = ["explain", bundle, PROMPT, "--max-new-tokens", "2"]
    command += ["--methods", "gradient,occlusion"]
    done = planforge(*command)
    assert done.returncode == 0, done.stderr
    assert "counted most, by gradient norm" in done.stdout.replace("\n", " ")
    page = tmp_path / "page.html"
    with_page = planforge(*command, "--html", page)
    assert with_page.stdout == done.stdout
    assert with_page.stderr.endswith(f"{page} shows it in any browser, offline\n")
    assert page.exists()


def test_the_table_tells_equal_tokens_and_layers_apart(bundle: Path) -> None:
    done = planforge("explain", bundle, PROMPT, "--answer", " heavens and the", "--methods", "gradient,lens")
    assert done.returncode == 0, done.stderr
    words = " ".join(done.stdout.split())
    assert "first in rank 1" in words
    assert "' the'[2]" in words or "' the'[9]" in words


def test_a_label(explained: Callable[[str], Path]) -> None:
    done = planforge("explain", explained("classifier") / "bundle", "a film", "--answer", "LABEL_2", "--json")
    assert done.returncode == 0, done.stderr
    (target,) = json.loads(done.stdout)["targets"]
    assert target["text"] == "LABEL_2"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--pair", "b"], "error: --pair is for models that read two texts"),
        (["--pair", ""], "error: --pair is for models that read two texts"),
        (["--html", "no/such/folder/page.html"], "does not exist"),
        (["--html", "."], "--html .: this is a folder"),
        (["--methods", "gradent"], "error: --methods: 'gradent' is not one of gradient"),
        (["--methods", "gradent"], "did you mean 'gradient'"),
        (["--objective", "logits"], "error: --objective 'logits' is not one of logit, probability"),
        (
            ["--factors", "100", "--methods", "neurons"],
            "error: --factors 100 must be an integer from 1 to 64",
        ),
        (["--grouping", "kmeans"], "error: --grouping is for groups of neurons: add --methods neurons"),
        (["--firing", "x.png"], "error: --firing is for groups of neurons: add --methods neurons"),
        (["--watch", "Jerusalem"], "error: --watch takes words of one token"),
        (["--watch", "Jerusalem", "--methods", "gradient"], "error: --watch needs the method lens"),
    ],
)
def test_what_is_refused(bundle: Path, options: list[str], words: str) -> None:
    check_refusal(planforge("explain", bundle, PROMPT, "--max-new-tokens", "1", *options), words)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--answer", "LABEL_9"], "error: --answer 'LABEL_9' is not one of LABEL_0, LABEL_1, LABEL_2"),
        (["--watch", "film"], "error: --watch is for models that write text"),
        (["--max-new-tokens", "3"], "error: --max-new-tokens is for models that write text"),
    ],
)
def test_what_is_refused_of_labels(explained: Callable[[str], Path], options: list[str], words: str) -> None:
    check_refusal(planforge("explain", explained("classifier") / "bundle", "a film", *options), words)


def test_texts_that_cannot_be_explained(bundle: Path) -> None:
    check_refusal(planforge("explain", bundle, ""), "error: the prompt is empty: there is nothing to explain")
    long = planforge("explain", bundle, " God" * 300)
    check_refusal(long, "error: the text has 300 tokens, special ones included; the model takes 255. Explain")
    assert "truncation" not in long.stderr


def check_refusal(done: CompletedProcess[str], words: str) -> None:
    assert done.returncode == 2
    assert words in done.stderr
    assert not done.stdout


def test_a_chart_of_neurons(bundle: Path, tmp_path: Path) -> None:
    chart = tmp_path / "firing.png"
    command = ("explain", bundle, PROMPT, "--answer", " heavens", "--methods", "neurons", "--json")
    options = ("--grouping", "kmeans", "--layer", "2", "--factors", "3", "--firing", chart)
    done = planforge(*command, *options)
    assert done.returncode == 0, done.stderr
    layers = json.loads(done.stdout)["neurons"]["layers"]
    assert [row[1] for row in layers] == [1, 1, 1]
    pixels = np.asarray(PIL.Image.open(chart).convert("RGB"))
    assert len(np.unique(pixels.reshape(-1, 3), axis=0)) > 50  # shades, not an empty frame
    assert f"{chart} shows how the neurons fire" in done.stderr
    shown = planforge(*command[:-1], "--factors", "2").stdout
    assert re.search(r"groups of neurons\n.*group .*most active at\s*\n1 +\d+ +'.*\n2 +\d+ +'", shown), shown


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--grouping", "kmean"), "--grouping 'kmean' is not one of 'nmf', 'kmeans'; did you mean 'kmeans'?"),
        (("--layer", "9"), "--layer 9 must be from 1 to the model's"),
        (("--firing", "nowhere/x.png"), "--firing nowhere/x.png: the folder"),
    ],
)
def test_groups_that_cannot_be_are_one_line(bundle: Path, options: tuple[str, ...], words: str) -> None:
    line = error_line("explain", bundle, PROMPT, "--answer", " heavens", "--methods", "neurons", *options)
    assert words in line
