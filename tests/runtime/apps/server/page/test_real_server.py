"""The page with the server that it is for, and real models."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from planforge.runtime import ImageGenerator, TextEncoder, TextGenerator, Translator
from planforge.runtime.apps.server import ServerSettings

from .....helpers.browser import Browser
from .....helpers.page import PANEL, ask, do_task, fill, press_button, wait_for_text
from .....helpers.serving import HeldTokens, running_server

QUESTION = "And God said, Let there be light: and there was light."
KEY = "a-key"


def test_the_page_talks_with_models(
    llama_demo_bundle: Path,
    minilm_bundle: Path,
    dates_bundle: Path,
    picture_bundle: Path,
    browser: Browser,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with (
        TextGenerator.load(llama_demo_bundle, precision="fp32") as llama,
        TextEncoder.load(minilm_bundle) as encoder,
        Translator.load(dates_bundle) as translator,
        ImageGenerator.load(picture_bundle) as generator,
        running_server(
            {"llama": llama, "minilm": encoder, "dates": translator, "sd": generator},
            ServerSettings(keys=(KEY,)),
        ) as address,
    ):
        page = browser.open(address.url)
        page.wait("document.activeElement.id === 'key-field'")
        page.type(KEY)
        page.press("Enter")
        page.wait(PANEL)
        tabs = page.evaluate("[...document.querySelectorAll('#tabs button')].map((tab) => tab.textContent)")
        assert tabs == ["Chat", "Continue", "Compare", "Translate", "Pictures"]
        fill(page, "Longest answer", "12")
        ask(page, QUESTION)
        wait_for_text(page, "Regenerate")
        expected = llama.chat([{"role": "user", "content": QUESTION}], max_new_tokens=12)
        assert page.evaluate("document.querySelector('.assistant .text').textContent") == expected.text
        figures = page.evaluate("document.querySelector('.assistant .figures').textContent")
        assert figures.startswith(f"{len(expected.token_ids)} tokens · ")
        page.screenshot(tmp_path / "chat.png")
        fill(page, "Longest answer", "400")
        with monkeypatch.context() as patch:
            HeldTokens(patch, most=20)  # so that the answer still runs when Escape is pressed
            press_button(page, "Regenerate")
            page.wait("document.querySelector('.assistant .text').textContent.length > 5")
            page.press("Escape")
            page.wait("document.querySelector('.assistant').innerText.includes('Stopped.')")
        do_task(page, "embeddings")
        likeness = encoder.embed(["a b", "c"])
        shown = page.evaluate(f"{PANEL}.querySelectorAll('tbody td')[1].textContent")
        assert shown == f"{float(likeness[0] @ likeness[1]):.2f}"
        page.screenshot(tmp_path / "embeddings.png", whole=True)
        page.click("#tab-translations")
        fill(page, "Text", "the 3rd of May, 1998")
        press_button(page, "Translate")
        translation = translator.translate("the 3rd of May, 1998").text
        page.wait(f"{PANEL}.querySelector('.summary')?.textContent === {json.dumps(translation)}")
        assert page.evaluate(f"{PANEL}.querySelectorAll('rect').length") > 10 * len(translation)
        page.screenshot(tmp_path / "translations.png", whole=True)
        page.click("#tab-images-generations")
        for label, value in (("Text", "a red one"), ("Steps", "2"), ("Seed", "7")):
            fill(page, label, value)
        press_button(page, "Make it")
        page.wait(f"{PANEL}.querySelector('.summary')?.textContent === '32x32 pixels, seed 7'")
        drawn = page.evaluate(f"{PANEL}.querySelector('figure img').src")
        (picture,) = generator.generate("a red one", steps=2, seed=7)
        assert drawn == f"data:image/png;base64,{base64.b64encode(picture.encode()).decode()}"
        page.screenshot(tmp_path / "pictures.png", whole=True)
        page.close()
        assert [trouble for trouble in page.troubles if "status of 401" not in trouble] == []
        assert all(url.startswith(address.url) for url in page.requests)
