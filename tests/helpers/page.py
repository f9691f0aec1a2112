"""What a reader of the page does: writes into fields, presses buttons, reads what is shown."""

from __future__ import annotations

import json
from collections.abc import Callable

from .browser import Page

Open = Callable[..., Page]
PANEL = "document.querySelector('main > section:not([hidden])')"
# What to write into the fields of each task.
FIELDS = {
    "embeddings": {"Texts": "\na b\nc\n\nd\ne\nf\n"},
    "rerank": {"Question": "who?", "Texts": "first text\nsecond text", "How many to show": "2"},
    "classify": {"Text": "Good."},
    "tags": {"Text": "😀bcde ghij."},
    "answers": {"Question": "where?", "Text": "The 😀bc tail"},
    "fill-mask": {"Text": "x [MASK] y [MASK]"},
    "translations": {"Text": "3 May", "Beams": "4"},
    "images-generations": {"Text": "a red three"},
    "explanations": {"Text": "In the beginning", "Answer": " God", "Words to watch": " sea\n\n light"},
}
TABS = ["chat", "completions", *FIELDS]


def wait_for_text(page: Page, text: str) -> None:
    page.wait(f"{PANEL}?.innerText.includes({json.dumps(text)})")


def ask(page: Page, text: str) -> None:
    page.click(".composer textarea")
    page.type(text)
    page.press("Enter")


def error_line(page: Page) -> str:
    return str(page.wait(f"{PANEL}.querySelector('.error').textContent"))


def fill(page: Page, label: str, text: str) -> None:
    """Write into the field with this label."""
    script = (
        f"[...{PANEL}.querySelectorAll('label')].find((l) => l.textContent === {json.dumps(label)}).control"
    )
    page.evaluate(f"{script}.closest('details')?.setAttribute('open', '')")
    page.evaluate(f"(() => {{ const field = {script}; field.focus(); field.select(); }})()")
    if text:
        page.type(text)
    else:
        page.evaluate(f"{script}.value = ''")


def press_button(page: Page, words: str) -> None:
    found = (
        f"[...{PANEL}.querySelectorAll('button')].filter((b) => b.textContent === {json.dumps(words)}).at(-1)"
    )
    page.wait(f"{found} && !{found}.disabled && !{found}.hidden")
    page.evaluate(f"{found}.click()")


def do_task(page: Page, tab: str) -> None:
    page.click(f"#tab-{tab}")
    for label, value in FIELDS[tab].items():
        fill(page, label, value)
    page.evaluate(f"{PANEL}.querySelector('form').requestSubmit()")
    page.wait(f"{PANEL}.querySelector('.result:not([hidden]) .summary')")
