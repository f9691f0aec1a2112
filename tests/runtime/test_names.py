"""The runtime knows what a manifest says of a model, and no model by its name."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from planforge.models.families import FAMILIES

from ..helpers.paths import ROOT

FILES = sorted((ROOT / "runtime").rglob("*.py"))
OTHERS = {"albert", "bart", "bloom", "deberta", "electra", "falcon", "minilm", "mpnet", "neox", "opus"}
WORDS_TOO = {
    "clip",
    "oss",
    "seed",
    "static",
    "text",
    "transformer",
    "vectors",
    "word",
}  # that names of families share with everything else
WORDS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")  # of names in snake case and in camel case


def list_names() -> set[str]:
    """Return the names of model families, without the numbers behind them."""
    words = {word for name in FAMILIES for word in WORDS.findall(name)}
    return (words | OTHERS) - WORDS_TOO


def list_docstrings(tree: ast.Module) -> set[int]:
    """Return the ids of docstrings, where a model may serve as example."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    owners = [node for node in ast.walk(tree) if isinstance(node, kinds)]
    first = [node.body[0] for node in owners if node.body]
    return {id(node.value) for node in first if isinstance(node, ast.Expr)}


def list_texts(source: str) -> Iterator[tuple[int, str]]:
    """Yield each identifier and each string of a file that is no docstring, with its line."""
    tree = ast.parse(source)
    docstrings = list_docstrings(tree)
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        for field in ("id", "attr", "name", "arg", "module"):
            if isinstance(text := getattr(node, field, None), str):
                yield line, text
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield line, node.value


OPERATORS = ("com.microsoft.GemmaRotaryEmbedding",)  # as ONNX Runtime calls it


def find_names(source: str) -> list[tuple[int, str]]:
    """Return the names of families in a file's identifiers and strings, with their lines."""
    names = list_names()
    return [
        (line, word)
        for line, text in list_texts(source)
        for word in WORDS.findall(text)
        if word.lower() in names and text not in OPERATORS
    ]


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT / "runtime")))
def test_no_file_of_the_runtime_knows_a_models_name(file: Path) -> None:
    assert find_names(file.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "source",
    ['if family == "gpt2": pass', "class LlamaDecoder: pass", "is_bert = True", 'KINDS = {"camembert": 1}'],
)
def test_a_name_is_found(source: str) -> None:
    assert len(find_names(source)) == 1


def test_prose_may_name_a_model() -> None:
    assert find_names('"""Such as GPT-2."""\n\ndef f():\n    """As Llama does."""  # and BERT\n') == []
