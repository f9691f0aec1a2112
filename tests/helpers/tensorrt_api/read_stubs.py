"""Reads the names out of PyPI's tensorrt-stubs 10.13, which were made from the compiled module.

They are the reference for what read_sources.py finds in the sources of 10.13:

    python tests/helpers/tensorrt_api/read_stubs.py site-packages/tensorrt_bindings/tensorrt.pyi
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
import sys
from pathlib import Path
from typing import Any


def read_stubs(text: str) -> dict[str, Any]:
    """Classes with their bases and public attributes, enums with their members, functions, constants."""
    names: dict[str, Any] = {"classes": {}, "enums": {}, "functions": [], "constants": []}
    # One signature is no Python, and none is needed.
    body = ast.parse(re.sub(r"(def \w+)\([^\n]*:$", r"\1(): ", text, flags=re.MULTILINE)).body
    for node in body:
        if isinstance(node, ast.ClassDef):
            read_class(node, node.name, names)
        elif isinstance(node, ast.FunctionDef) and node.name not in names["functions"]:
            names["functions"].append(node.name)
        elif isinstance(node, ast.AnnAssign):
            names["constants"].append(ast.unparse(node.target))
    return names


def read_class(node: ast.ClassDef, name: str, names: dict[str, Any]) -> None:
    """Adds a class or an enum, and what is nested in it."""
    variables = [ast.unparse(part.target) for part in node.body if isinstance(part, ast.AnnAssign)]
    if "__members__" in variables:
        names["enums"][name] = [member for member in variables if member != "__members__"]
        return
    methods = [part.name for part in node.body if isinstance(part, ast.FunctionDef)]
    names["classes"][name] = {
        "bases": [ast.unparse(base) for base in node.bases],
        "attributes": sorted({part for part in [*variables, *methods] if not part.startswith("__")}),
    }
    for part in node.body:
        if isinstance(part, ast.ClassDef):
            read_class(part, f"{name}.{part.name}", names)


def main(path: str) -> None:
    text = Path(path).read_text(encoding="utf-8")
    names = {"sha256": hashlib.sha256(text.encode()).hexdigest(), **read_stubs(text)}
    lines = json.dumps(names, separators=(",", ":")).replace('},"', '},\n"').replace('],"', '],\n"')
    lines = lines.replace('],\n"attributes"', '],"attributes"')
    Path(__file__).with_name("10.13-stubs.json").write_text(lines + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
