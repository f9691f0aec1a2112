"""The manual's English: short sentences, and the field's terms instead of words of our own."""

from __future__ import annotations

import re

import pytest

from ..helpers.paths import ROOT

PAGES = sorted(str(page.relative_to(ROOT)) for page in (ROOT / "README.md", *ROOT.glob("docs/**/*.md")))
TABLES = ("docs/glossary.md",)  # pages without prose
USUAL = 25  # words of a sentence
MOST = 40
SHARE = 0.95  # of sentences that have at most the usual number
# Words that only this project understood, and the field's.
GONE = {
    r"drawn at random|are drawn|is drawn": "sampled",
    r"held to": "checked against",
    r"meant is": "expected",
    r"that which|those of which|that one's": "a sentence of its own",
    r"words (no )?tools": "supports tools",
    r"table of words": "embedding matrix",
    r"whole numbers": "quantized weights",
    r"\bbands?\b": "tolerance",
    r"\bseats?\b": "slot",
    r"a gain counts": "what the limit is",
    r"\bno JSON\b": "not valid JSON",
}


def list_sentences(page: str) -> list[str]:
    """Return the sentences of a page's prose: no code, tables, headings or pictures."""
    text = (ROOT / page).read_text(encoding="utf-8")
    text = re.sub(r"```.*?```|<!-- benchmarks: begin.*?end -->|<!--.*?-->", "", text, flags=re.DOTALL)
    kept = [
        "" if re.match(r"\s*$|\||#| {4}|!\[", line) else re.sub(r"^\s*([-*]|\d+\.) ", "\n", line)
        for line in text.splitlines()
    ]
    paragraphs = re.split(r"\n\s*\n", "\n".join(kept))
    found = []
    for paragraph in paragraphs:
        words = re.sub(r"`[^`]*`", "code", re.sub(r"\]\([^)]*\)", "]", " ".join(paragraph.split())))
        found += re.split(r"(?<=[.!?:])\s+(?=[A-Z\"'(\[*`]|code)", words)
    return [sentence for sentence in found if len(sentence.split()) > 1]


@pytest.mark.parametrize("page", PAGES)
def test_sentences_are_short(page: str) -> None:
    lengths = {sentence: len(sentence.split()) for sentence in list_sentences(page)}
    assert bool(lengths) != (page in TABLES)
    assert [sentence for sentence, length in lengths.items() if length > MOST] == []
    long = [sentence for sentence, length in lengths.items() if length > USUAL]
    assert len(long) <= (1 - SHARE) * len(lengths), long


@pytest.mark.parametrize("page", PAGES)
def test_words_of_our_own_are_gone(page: str) -> None:
    prose = " ".join(list_sentences(page))
    found = {word: better for word, better in GONE.items() if re.search(word, prose, re.IGNORECASE)}
    assert found == {}


def test_all_pages_are_found() -> None:
    assert {"README.md", "docs/index.md", "docs/deploy/rtx.md", "docs/internals/export.md"} <= set(PAGES)
    assert sum(len(list_sentences(page)) for page in PAGES) > 500


def test_a_long_sentence_and_a_gone_word_are_found() -> None:
    """The tests above can fail: the changelog breaks both rules."""
    sentences = list_sentences("CHANGELOG.md")
    assert max(len(sentence.split()) for sentence in sentences) > MOST
    assert re.search("held to", " ".join(sentences))
