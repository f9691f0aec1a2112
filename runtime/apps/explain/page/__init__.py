"""One offline HTML file that shows an explanation: its style, its code and its data are in it.

The code is in modules, so that a server can offer it too; here they are joined to one script. The page may
load nothing and ask nobody: its security policy names the style and the scripts by their hashes.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = Path(__file__).parent
# Each after those that it imports; the last one has `mountExplanation`.
MODULES = (
    "dom.js",
    "colors.js",
    "chooser.js",
    "words.js",
    "lines.js",
    "saliency.js",
    "lens.js",
    "neurons.js",
    "attention.js",
    "explain.js",
)
START = "start.js"  # of the page that stands alone
STYLES = ("base.css", "page.css", "explain.css")
# What the page of a server takes from here: all but the frame of a page that stands alone.
SHARED = (*MODULES, "theme.js", "base.css", "explain.css")
FIELD = re.compile(r"\{\{(\w+)\}\}")


def make_page(explanation: Mapping[str, Any]) -> str:
    """Return the page of an explanation's JSON."""
    theme = read("theme.js")
    style = "".join(read(name) for name in STYLES)
    script = join_modules()
    policy = (
        f"default-src 'none'; script-src {name_hash(theme)} {name_hash(script)};"
        f" style-src {name_hash(style)}; img-src data:; connect-src 'none'; base-uri 'none';"
        " form-action 'none'"
    )
    fields = {
        "policy": policy,
        "title": html.escape(f"Why {explanation.get('model', 'a model')} answered so"),
        "theme": theme,
        "style": style,
        "data": write_data(explanation),
        "script": script,
    }
    return FIELD.sub(lambda field: fields[field[1]], read("template.html"))


def read(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


def join_modules() -> str:
    """Return all modules as one script, which leaves no name behind.

    They share one scope, so that what they import is there: no two of them declare the same name, and each
    import and export is a line of its own.
    """
    lines = [line for name in (*MODULES, START) for line in read(name).splitlines(keepends=True)]
    code = [line for line in lines if not line.startswith(("import ", "export "))]
    return "".join(['(() => {\n"use strict";\n', *code, "})();\n"])


def name_hash(text: str) -> str:
    """Return what a security policy calls a style or script with this text."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def write_data(explanation: Mapping[str, Any]) -> str:
    """Return JSON that may stand between script tags: ASCII alone, so also without U+2028, and no "<"."""
    text = json.dumps(make_plain(explanation), allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c")


def make_plain(value: Any) -> Any:
    """Return a value of what JSON has; numbers that it has not become null."""
    if isinstance(value, Mapping):
        return {str(name): make_plain(one) for name, one in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        return make_plain(value.tolist())
    if isinstance(value, list | tuple):
        return [make_plain(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
