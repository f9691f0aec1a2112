"""`planforge explain`: a page, JSON or a table."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from ..helpers.cli import planforge

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


def test_a_table(bundle: Path) -> None:
    done = planforge("explain", bundle, PROMPT, "--max-new-tokens", "2", "--methods", "gradient,occlusion")
    assert done.returncode == 0, done.stderr
    assert "counted most, by gradient norm" in done.stdout.replace("\n", " ")


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
        (["--pair", "b"], "--pair is no option of a bundle for text-generation"),
        (["--html", "no/such/folder/page.html"], "there is no folder"),
        (["--methods", "gradent"], "did you mean 'gradient'"),
        (["--watch", "Jerusalem"], "watch takes words of one token"),
    ],
)
def test_what_is_refused(bundle: Path, options: list[str], words: str) -> None:
    done = planforge("explain", bundle, PROMPT, "--max-new-tokens", "1", *options)
    assert done.returncode == 2
    assert words in done.stderr
    assert not done.stdout
