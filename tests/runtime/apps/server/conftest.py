"""One server for the tests that only ask it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from planforge.runtime import ImageGenerator, TextEncoder, TextGenerator, Translator, load

from ....helpers.serving import Address, running_server

Models = dict[str, TextGenerator | TextEncoder | Translator | ImageGenerator]


@pytest.fixture(scope="module")
def models(
    demo_bundle: Path,
    llama_demo_bundle: Path,
    minilm_bundle: Path,
    dates_bundle: Path,
    head_bundle: Callable[[str], Path],
    explained: Callable[[str], Path],
    picture_bundle: Path,
    splade_bundle: Path,
) -> Iterator[Models]:
    """A model for each route."""
    bundles = {
        "gpt": demo_bundle,
        "llama": llama_demo_bundle,
        "minilm": minilm_bundle,
        "dates": dates_bundle,
        "sd": picture_bundle,
        "splade": splade_bundle,
        **{name: head_bundle(name) for name in ("classifier", "ranker", "tagger", "reader", "pretrained")},
        "explained": explained("classifier") / "bundle",
    }
    with ExitStack() as stack:
        models: Models = {
            name: load(bundle, backend="ort-cpu", precision="fp32") for name, bundle in bundles.items()
        }
        for model in models.values():
            stack.callback(model.close)
        yield models


@pytest.fixture(scope="module")
def server(models: Models) -> Iterator[Address]:
    with running_server(models) as address:
        yield address


@pytest.fixture(scope="module")
def gpt(models: Models) -> TextGenerator:
    model = models["gpt"]
    assert isinstance(model, TextGenerator)
    return model


@pytest.fixture(scope="module")
def llama(models: Models) -> TextGenerator:
    model = models["llama"]
    assert isinstance(model, TextGenerator)
    return model
