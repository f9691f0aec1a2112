"""Answers by HTTP of a model that reads neighbours: which they were, whole and in a stream."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from planforge.runtime import InputError, TextGenerator
from planforge.runtime.apps.commands.serve import find_reading, serve

from ....helpers.retro import PROMPT, TINY, write_index
from ....helpers.serving import Address, running_server

BODY: dict[str, Any] = {"model": "retro", "prompt": PROMPT, "max_tokens": 12, "temperature": 0}


@pytest.fixture(scope="module")
def model(retro_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TextGenerator]:
    index = write_index(retro_bundle, tmp_path_factory.mktemp("index") / "index")
    with TextGenerator.load(retro_bundle, index=index, precision="fp32") as opened:
        yield opened


@pytest.fixture(scope="module")
def address(model: TextGenerator) -> Iterator[Address]:
    with running_server({"retro": model}) as opened:
        yield opened


def list_wanted(model: TextGenerator) -> list[list[dict[str, Any]]]:
    answer = model.generate(PROMPT, max_new_tokens=12, generation="checkpoint", temperature=0)
    names = ("document", "start", "distance", "text")
    return [[{name: getattr(one, name) for name in names} for one in chunk] for chunk in answer.neighbours]


def test_an_answer_tells_its_neighbours(address: Address, model: TextGenerator) -> None:
    (choice,) = address.ask("/v1/completions", **BODY)["choices"]
    assert choice["neighbours"] == list_wanted(model)
    assert len(choice["neighbours"]) >= len(PROMPT) // TINY["chunk_length"]


def test_a_stream_ends_with_its_neighbours(address: Address, model: TextGenerator) -> None:
    response = address.post("/v1/completions", **BODY, stream=True)
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data:")]
    assert lines[-1] == "[DONE]"
    choices = [choice for line in lines[:-1] for choice in json.loads(line)["choices"]]
    assert [choice.get("neighbours") for choice in choices[:-1]] == [None] * (len(choices) - 1)
    assert choices[-1]["neighbours"] == list_wanted(model) and choices[-1]["text"] == ""


def test_the_model_continues_texts(address: Address) -> None:
    (entry,) = address.client.get("/v1/models").json()["data"]
    assert entry["capabilities"] == ["completions"]


def test_an_index_needs_a_model_that_reads_neighbours(
    demo_bundle: Path, retro_bundle: Path, tmp_path: Path
) -> None:
    folders = {"gpt2": demo_bundle, "retro": retro_bundle}
    assert find_reading(folders) == {"retro"}
    with pytest.raises(InputError, match="--index is for a model that reads neighbours"):
        serve([str(demo_bundle)], index=tmp_path)
    with pytest.raises(InputError, match="--index-keys is for an index; give --index too"):
        serve([str(retro_bundle)], port=0, index_keys=tmp_path)
