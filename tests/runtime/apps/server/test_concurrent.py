"""Sixteen requests of several kinds at a time get what they get alone, in every dialect that the CPU runs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from planforge.runtime import TextGenerator, load
from planforge.runtime.backends.dialects import CPU_DIALECTS
from planforge.runtime.bundle.bundle import Bundle

from ....helpers.serving import Address, running_server

CHAT = "/v1/chat/completions"
COMPLETE = "/v1/completions"
EMBED = "/v1/embeddings"
RANK = "/v1/rerank"
TRANSLATE = "/v1/translations"
PLACES = ("wilderness", "city", "house", "sea", "field", "mountain")
PROMPTS = (
    "And God said, Let there be light",
    "The sons of Levi; Gershon,",
    "And when he had opened the seventh",
    "Then answered Job and",
    "In the twelfth year of Ahaz king of",
    "My son, keep my words, and",
)
TOKENS = 24

Request = tuple[str, dict[str, Any]]
Head = Callable[[str], Path]


@contextmanager
def serve_bundles(bundles: Mapping[str, Path], dialect: str, folder: Path) -> Iterator[Address]:
    """Run a server of bundles in a dialect, in fp32; an encoder without it in `portable`."""
    with ExitStack() as stack:
        models = {}
        for name, bundle in bundles.items():
            has_it = any(one.dialect == dialect for one in Bundle.open(bundle).manifest.artifacts)
            own = dialect if has_it else "portable"
            kept = keep_dialect(bundle, folder / name, own)
            models[name] = stack.enter_context(load(kept, backend="ort-cpu", precision="fp32"))
            assert models[name].artifact.dialect == own
        assert any(model.artifact.dialect == dialect for model in models.values())
        yield stack.enter_context(running_server(models))


def keep_dialect(bundle: Path, folder: Path, dialect: str) -> Path:
    """Copy a bundle without its graphs of other dialects, and without plans."""
    shutil.copytree(bundle, folder)
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text(encoding="utf-8"))
    manifest["artifacts"] = [one for one in manifest["artifacts"] if one["dialect"] == dialect]
    manifest["plans"] = []
    path.write_text(json.dumps(manifest), encoding="utf-8")
    return folder


def make_requests(models: Mapping[str, str], **options: Any) -> list[Request]:
    """Return sixteen requests to models by the routes that each is asked on."""
    requests: list[Request] = []
    for number, (place, prompt) in enumerate(zip(PLACES, PROMPTS, strict=True)):
        draw = {"seed": number, **options}
        said = [{"role": "user", "content": f"Who went into the {place}?"}]
        bodies: dict[str, dict[str, Any]] = {
            CHAT: {"messages": said, "logprobs": True, **draw},
            COMPLETE: {"prompt": prompt, "logprobs": 5, **draw},
            EMBED: {"input": [place, " ".join(PLACES[:number])]},
            RANK: {"query": place, "documents": [f"the {place}", *PLACES[: number + 1]]},
            TRANSLATE: {"input": f"the {number + 1}th of May, 1998", "num_beams": 2},
        }
        requests += [(path, {"model": name, **bodies[path]}) for name, path in models.items()]
    return requests[:16]


def ask_alone_and_together(server: Address, requests: Sequence[Request]) -> tuple[list[Any], list[Any]]:
    """Return the answers to requests that are asked one by one, and to the same ones all at once."""
    alone = [server.ask(path, **body) for path, body in requests]
    with ThreadPoolExecutor(len(requests)) as pool:
        together = list(pool.map(lambda request: server.ask(request[0], **request[1]), requests))
    return alone, together


def count_steps(server: Address, model: str) -> tuple[int, int]:
    """Return how many steps a text generator made, and how many of them for a single request."""
    lines = server.client.get("/metrics").text.splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines)
    name = "planforge_batch_requests"
    single = values[f'{name}_bucket{{le="1.0",model="{model}"}}']
    return int(float(values[f'{name}_count{{model="{model}"}}'])), int(float(single))


def list_choices(path: str, answer: Any) -> list[Any]:
    """Return what is equal of equal answers: tokens, texts, the order of documents."""
    if path == CHAT:
        return [entry["token"] for choice in answer["choices"] for entry in choice["logprobs"]["content"]]
    if path == COMPLETE:
        return [token for choice in answer["choices"] for token in choice["logprobs"]["tokens"]]
    if path == RANK:
        return [row["index"] for row in answer["results"]]
    return [entry.get("text") for entry in answer["data"]]


def list_numbers(path: str, answer: Any) -> list[Any]:
    """Return what differs by rounding only."""
    if path == CHAT:
        return [entry["logprob"] for choice in answer["choices"] for entry in choice["logprobs"]["content"]]
    if path == COMPLETE:
        return [number for choice in answer["choices"] for number in choice["logprobs"]["token_logprobs"]]
    if path == RANK:
        return [row["relevance_score"] for row in answer["results"]]
    return [entry["embedding" if path == EMBED else "score"] for entry in answer["data"]]


@pytest.mark.parametrize("dialect", CPU_DIALECTS)
def test_requests_at_once_get_what_they_get_alone(
    dialect: str,
    demo_bundle: Path,
    llama_demo_bundle: Path,
    minilm_bundle: Path,
    dates_bundle: Path,
    head_bundle: Head,
    tmp_path: Path,
) -> None:
    """Token for token, also where tokens are drawn."""
    bundles = {"gpt": demo_bundle, "ranker": head_bundle("ranker"), "dates": dates_bundle}
    routes = {"gpt": COMPLETE, "ranker": RANK, "dates": TRANSLATE}
    if dialect == "ort":
        bundles |= {"llama": llama_demo_bundle, "minilm": minilm_bundle}
        routes |= {"llama": CHAT, "minilm": EMBED}
    requests = make_requests(routes, max_tokens=TOKENS, temperature=0.8)
    with serve_bundles(bundles, dialect, tmp_path) as server:
        alone, together = ask_alone_and_together(server, requests)
        steps, single = count_steps(server, "gpt")
    assert steps > single  # requests shared steps
    for (path, _), one, other in zip(requests, alone, together, strict=True):
        assert list_choices(path, other) == list_choices(path, one)
        np.testing.assert_allclose(list_numbers(path, other), list_numbers(path, one), rtol=0, atol=1e-4)


def test_int8_answers_at_once_differ_by_what_int8_rounds(
    llama_demo_bundle: Path, dates_bundle: Path, head_bundle: Head
) -> None:
    """ONNX Runtime multiplies one row by int8 weights otherwise than several, so a token may be another one.

    The bundle's gate lets a logit in int8 differ from PyTorch's by `max_error` times the logits' spread, so
    those of one text that is computed twice differ by at most twice that, and log-probabilities by at most
    four times. Answers have the same tokens up to a place where the two likeliest are as close as that.
    """
    with (
        load(llama_demo_bundle, backend="ort-cpu", precision="int8") as llama,
        load(dates_bundle, precision="fp32") as dates,
        load(head_bundle("ranker"), precision="fp32") as ranker,
        running_server({"llama": llama, "ranker": ranker, "dates": dates}) as server,
    ):
        assert isinstance(llama, TextGenerator)
        routes = {"llama": COMPLETE, "ranker": RANK, "dates": TRANSLATE}
        requests = make_requests(routes, max_tokens=TOKENS, temperature=0)
        alone, together = ask_alone_and_together(server, requests)
        steps, single = count_steps(server, "llama")
    assert steps > single
    bound = 4 * read_max_error(llama_demo_bundle) * measure_spread(llama_demo_bundle)
    texts = []
    for (path, _), one, other in zip(requests, alone, together, strict=True):
        if path == COMPLETE:
            texts.append((list_tops(one), list_tops(other)))
        else:
            assert list_choices(path, other) == list_choices(path, one)
            np.testing.assert_allclose(list_numbers(path, other), list_numbers(path, one), rtol=0, atol=1e-4)
    for number, (one, _) in enumerate(texts):
        for other_number, (_, other) in enumerate(texts):
            assert (find_difference(one, other) <= bound) == (number == other_number)


def read_max_error(bundle: Path) -> float:
    gate = Bundle.open(bundle).manifest.artifact("decoder.ort.int8").gate
    assert gate is not None
    return float(gate["measured"]["max_error"])


def measure_spread(bundle: Path) -> float:
    """Return the standard deviation of the model's logits in fp32."""
    with load(bundle, backend="ort-cpu", precision="fp32") as model:
        assert isinstance(model, TextGenerator)
        tokens = model.tokenizer.encode(" ".join(f"And he went into the {place}." for place in PLACES))
        return float(np.std(model.decoder.start(1, len(tokens)).prefill([tokens])[0]))


def list_tops(answer: Any) -> list[dict[str, float]]:
    """Return the log-probabilities of the likeliest tokens at each place of an answer."""
    tops: list[dict[str, float]] = answer["choices"][0]["logprobs"]["top_logprobs"]
    return tops


def find_difference(one: Sequence[dict[str, float]], other: Sequence[dict[str, float]]) -> float:
    """Return by how much the log-probabilities of two greedy answers differ up to where their tokens part.

    There it is by how much one prefers its own token; infinite if the other's is not among its likeliest.
    """
    largest = 0.0
    for tops, other_tops in zip(one, other, strict=True):
        token, other_token = max(tops, key=tops.__getitem__), max(other_tops, key=other_tops.__getitem__)
        largest = max(largest, abs(tops[token] - other_tops.get(token, -np.inf)))
        if token != other_token:
            return max(largest, tops[token] - tops.get(other_token, -np.inf))
    return largest
