"""Measures /health during the heaviest requests, which should take 50 ms at most."""

from __future__ import annotations

import http.client
import json
import statistics
import threading
import time
from collections.abc import Mapping
from typing import Any

MIN_LOOKS = 50  # at /health; what is answered sooner is asked again
PAUSE = 0.01  # seconds between two looks

Request = tuple[str, Mapping[str, Any]]  # a path and a body


def make_heavy_requests(generator: str, chat: str, embedder: str) -> dict[str, Request]:
    """Return requests to models of these names, by the reason why they are heavy."""
    said = [{"role": "user", "content": "The ark"}]
    answers = {"n": 32, "max_tokens": 490, "ignore_eos": True, "logprobs": True, "top_logprobs": 20}
    bias = {str(token): 1 for token in range(600_000)}
    return {
        "log_probabilities": ("/v1/chat/completions", {"model": chat, "messages": said, **answers}),
        "biases": ("/v1/completions", {"model": generator, "prompt": "a", "logit_bias": bias}),
        "vectors": ("/v1/embeddings", {"model": embedder, "input": ["a"] * 2048}),
        "token_ids": ("/v1/completions", {"model": generator, "prompt": [1] * 1_000_000}),
    }


def measure_health(port: int, request: Request) -> dict[str, float]:
    """Return how long /health takes while a request is answered, in milliseconds: the median and the largest.

    The client that asks has a process's interpreter in common with the one that looks, so the body is made
    before, and the answer is read without being parsed.
    """
    path, body = request
    content = json.dumps(body).encode()
    times: list[float] = []
    ended = threading.Event()

    def ask_until_looked() -> None:
        try:
            while True:
                ask(port, "POST", path, content)
                if len(times) >= MIN_LOOKS:
                    break
        finally:
            ended.set()

    asking = threading.Thread(target=ask_until_looked)
    asking.start()
    while not ended.wait(PAUSE):
        start = time.perf_counter()
        ask(port, "GET", "/health")
        times.append((time.perf_counter() - start) * 1e3)
    asking.join()
    return {"median_ms": statistics.median(times), "largest_ms": max(times)}


def ask(port: int, method: str, path: str, content: bytes | None = None) -> None:
    """Read an answer, which may be a refusal, but not a failure."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    try:
        connection.request(method, path, content, {"Content-Type": "application/json"})
        response = connection.getresponse()
        while response.read(1 << 20):
            pass
    finally:
        connection.close()
    if response.status >= 500:
        raise RuntimeError(f"{method} {path} was answered {response.status}")
