"""The page of docs/examples/browser in a real Chromium, whose WebAssembly has other kernels than Node's."""

from __future__ import annotations

import functools
import http.server
import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from planforge.exporter import package
from planforge.runtime import TextEncoder, TextGenerator

from ...helpers.browser import Browser, Page, running_browser
from ...helpers.models import edit_json
from ...helpers.paths import NODE_FOLDER

PAGE = Path(__file__).parents[3] / "docs/examples/browser/index.html"
LIBRARY = ("@huggingface/transformers/dist/transformers.min.js", "onnxruntime-web/dist/ort-wasm-*")
PROMPT = "And it came to pass"
TOKENS = 24


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page and the library's files; packages come later."""
    modules = NODE_FOLDER / "node_modules"
    if not modules.exists():
        pytest.skip("needs make build/transformers-js/.ready")
    folder = tmp_path_factory.mktemp("site")
    shutil.copy(PAGE, folder / "index.html")
    (folder / "lib").mkdir()
    for pattern in LIBRARY:
        for file in modules.glob(pattern):
            shutil.copy(file, folder / "lib")
    return folder


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    handler = functools.partial(Quiet, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with running_browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


def open_page(browser: Browser, address: str, site: Path, bundle: Path) -> Page:
    """Return the page with a bundle's package."""
    shutil.rmtree(site / "model", ignore_errors=True)
    package(bundle, site / "model", runtime="transformers.js", verify=False)
    page = browser.open(f"{address}/index.html")
    page.wait("/^(Ready|This page)/.test(document.getElementById('status').textContent)")
    return page


def run(page: Page, dtype: str, text: str) -> str:
    """Return what the page answers in a precision."""
    page.evaluate(f"document.getElementById('dtype').value = '{dtype}'")
    page.evaluate(f"document.getElementById('text').value = {text!r}")
    page.evaluate(f"document.getElementById('length').value = {TOKENS}")
    page.click("#run")
    status = page.wait(
        "(s => /^(Done|It failed)/.test(s) && !document.getElementById('run').disabled && s)"
        "(document.getElementById('status').textContent)"
    )
    assert status.startswith("Done"), status
    answer: str = page.evaluate("document.getElementById('answer').textContent")
    page.evaluate("document.getElementById('status').textContent = ''")
    return answer


def test_texts_in_every_precision_are_ours(
    browser: Browser, address: str, site: Path, llama_demo_bundle: Path
) -> None:
    page = open_page(browser, address, site, llama_demo_bundle)
    for precision, dtype in (("fp32", "fp32"), ("int8", "int8"), ("int4", "q4")):
        with TextGenerator.load(llama_demo_bundle, backend="ort-cpu", precision=precision) as model:
            want = model.generate(PROMPT, max_new_tokens=TOKENS).text
        assert run(page, dtype, PROMPT) == PROMPT + want
    assert page.troubles == []
    assert all(url.startswith(address) for url in page.requests)  # nothing else is asked


def test_vectors_are_ours(
    browser: Browser, address: str, site: Path, bert_bundle: Path, tmp_path: Path
) -> None:
    """Of a model that puts a prompt before every text, too."""
    bundle = Path(shutil.copytree(bert_bundle, tmp_path / "B"))
    encoder = json.loads((bundle / "manifest.json").read_text())["encoder"]
    prompts = {"prompts": {"query": "query: "}, "default_prompt": "query"}
    edit_json(bundle / "manifest.json", encoder=encoder | prompts)
    page = open_page(browser, address, site, bundle)
    texts = ["NASA launched a rocket", "A rocket was launched by NASA", "The cat sat on the mat"]
    run(page, "fp32", "\n".join(texts))
    with TextEncoder.load(bundle, backend="ort-cpu", precision="fp32") as model:
        want = model.embed(texts)
        assert not np.allclose(want, model.embed(texts, prompt=""), atol=1e-2)
    np.testing.assert_allclose(np.array(page.evaluate("window.vectors")), want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["classifier", "dates"])
def test_a_model_for_something_else_is_refused_by_name(
    browser: Browser, address: str, site: Path, name: str, request: pytest.FixtureRequest
) -> None:
    if name == "dates":
        bundle, kind = request.getfixturevalue("dates_bundle"), "MarianMTModel"
    else:
        bundle, kind = request.getfixturevalue("head_bundle")(name), "BertForSequenceClassification"
    page = open_page(browser, address, site, bundle)
    told = page.evaluate("document.getElementById('status').textContent")
    assert f"This page generates and embeds text; the package's model is a {kind}" in told
    assert page.evaluate("document.getElementById('run').disabled") is True
