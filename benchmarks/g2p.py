"""Compares pronunciations of g2p-en's checkpoint here with those of the package's own numpy.

    pip download g2p-en==2.1.0 --no-deps && unzip g2p_en-2.1.0-py3-none-any.whl
    python -m benchmarks.g2p g2p_en WORK

It spells 1,000 words of this repository's pages, chosen by their hashes. The package's `G2p.predict` runs as
it is, without nltk and its downloads, which that does not use. Writes results/g2p.json.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from planforge.exporter import export
from planforge.models.g2p import import_g2p
from planforge.runtime import Translator

from .common import write_result

COUNT = 1000
PAGES = Path(__file__).parent.parent
SHOWN = 10  # words that differ


def choose_words() -> list[str]:
    """Return words of the repository's pages, in lower case."""
    text = "".join(path.read_text(encoding="utf-8") for path in sorted(PAGES.glob("docs/*.md")))
    words = set(re.findall(r"\b[a-z]{3,}\b", text.lower()))
    return sorted(words, key=lambda word: hashlib.sha256(word.encode()).digest())[:COUNT]


def load_package(folder: Path) -> Any:
    """Return an object of the package's class with its weights, without what `predict` does not use."""
    found = {"data": SimpleNamespace(find=lambda name: name), "pos_tag": None}
    stand_ins: dict[str, dict[str, Any]] = {
        "nltk": found,
        "nltk.corpus": {"cmudict": SimpleNamespace(dict=dict)},
        "nltk.tokenize": {"TweetTokenizer": lambda: SimpleNamespace(tokenize=str.split)},
        "inflect": {"engine": lambda: None},
    }
    for name, members in stand_ins.items():
        module = ModuleType(name)
        vars(module).update(members)
        sys.modules[name] = module
    sys.path.insert(0, str(folder.resolve().parent))
    return importlib.import_module(f"{folder.name}.g2p").G2p()


def main() -> None:
    """Compare, and keep the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("package", type=Path, help="the folder g2p_en of the unpacked wheel")
    parser.add_argument("work", type=Path)
    arguments = parser.parse_args()
    checkpoint = arguments.package / "checkpoint20.npz"
    import_g2p(checkpoint, arguments.work / "checkpoint")
    options: dict[str, Any] = {"target": ["cpu"], "precision": ["fp32"], "force": True}
    report = export(arguments.work / "checkpoint", arguments.work / "bundle", **options).report
    package = load_package(arguments.package)
    words = choose_words()
    wanted = [" ".join(package.predict(word)) for word in words]
    with Translator.load(arguments.work / "bundle") as model:
        got = [result.text for result in model.translate(words)]
    differing = [
        {"word": word, "package": theirs, "planforge": ours}
        for word, theirs, ours in zip(words, wanted, got, strict=True)
        if theirs != ours
    ]
    write_result(
        "g2p",
        {
            "checkpoint": hashlib.sha256(checkpoint.read_bytes()).hexdigest(),
            "verified": report is not None and report.passed,
            "words": len(words),
            "equal": len(words) - len(differing),
            "pronunciations": len(set(wanted)),
            "differing": differing[:SHOWN],
        },
    )


if __name__ == "__main__":
    main()
