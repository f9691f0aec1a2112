"""Measures the server under load, and llama.cpp's, on this machine's loopback.

python -m benchmarks.serving [--llama-server PATH] [--rounds 3] [--work FOLDER]

GPT-2 124M with random weights, 8-bit: 8 clients that ask again as soon as they are answered, prompts of 32
tokens and answers of 64; a prompt of 900 tokens that arrives while 4 answers stream; a prefix of 500 tokens
that requests share; the cost of HTTP for a streamed token; /health during the heaviest requests, which is to
take 50 ms at most; and 64 clients of an embedder. Writes results/serving.json.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import re
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from planforge.runtime import TextEncoder, TextGenerator

from .case import Entry, Work
from .common import write_result
from .machine import measure_machine
from .process import ROOT
from .serving_health import make_heavy_requests, measure_health
from .texts import sentences
from .workshop import Workshop

CLIENTS = 8
PROMPT = 32
ANSWER = 64
VOCABULARY = 50_000
START_PATIENCE = 120.0  # seconds


@dataclass
class Stream:
    """The times when the tokens of one streamed answer came, in seconds since the request."""

    times: list[float] = field(default_factory=list)

    @property
    def gaps(self) -> list[float]:
        return list_gaps(self.times)


def list_gaps(times: Sequence[float]) -> list[float]:
    return [later - earlier for earlier, later in pairwise(times)]


@contextmanager
def run_server(command: Sequence[str | Path], port: int, log: Path, ready: str) -> Iterator[int]:
    """Run a server until the block ends; yield its port when the path `ready` answers."""
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    with log.open("wb") as output:
        process = subprocess.Popen(list(map(str, command)), stdout=output, stderr=output, env=environment)
    try:
        deadline = time.monotonic() + START_PATIENCE
        while not is_ready(port, ready):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server did not start; see {log}")
            time.sleep(0.1)
        yield port
    finally:
        process.terminate()
        process.wait(30)


def is_ready(port: int, path: str) -> bool:
    """Return whether a server answers that its models are loaded."""
    try:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
        connection.request("GET", path)
        return connection.getresponse().status == 200
    except OSError:
        return False


def find_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


class Client:
    """A minimal client's connection, as it takes its time from the server's cores."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=120)

    def send(self, path: str, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        self.socket.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)

    def read_head(self) -> tuple[int, bytes]:
        """Return the length that an answer's head tells, 0 if none, and the part of the body read with it."""
        data = b""
        while b"\r\n\r\n" not in data:
            data += self.socket.recv(65536)
        head, _, rest = data.partition(b"\r\n\r\n")
        if b" 200 " not in head[:16]:
            raise RuntimeError(f"{data[:500]!r}")
        length = re.search(rb"content-length: (\d+)", head.lower())
        return int(length[1]) if length else 0, rest

    def ask(self, path: str, body: dict[str, Any]) -> None:
        """Read an answer whose length its head tells."""
        self.send(path, body)
        length, data = self.read_head()
        left = length - len(data)
        while left > 0:
            left -= len(self.socket.recv(65536))

    def stream(self, path: str, body: dict[str, Any]) -> Stream:
        """Read an answer's events; each that has text is a token."""
        stream = Stream()
        start = time.perf_counter()
        self.send(path, body)
        _, rest = self.read_head()
        data = b""
        while b"data: [DONE]" not in rest + data:
            *lines, rest = (rest + data).split(b"\n")
            tokens = sum(line.startswith(b"data: {") and b'"text"' in line for line in lines)
            stream.times += [time.perf_counter() - start] * tokens
            data = self.socket.recv(65536)
        return stream


def complete(port: int, prompt: Sequence[int], new_tokens: int) -> Stream:
    """Stream the answer to a prompt."""
    body = {
        "model": "gpt2",
        "prompt": list(prompt),
        "max_tokens": new_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    client = Client(port)
    with client.socket:
        return client.stream("/v1/completions", body)


def run_clients(count: int, work: Callable[[int], None]) -> float:
    """Run a function in as many threads; return the seconds until all are done."""
    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - start


class Prompts:
    """Prompts of random tokens, no two alike."""

    def __init__(self) -> None:
        self.random = random.Random(1)

    def make(self, length: int = PROMPT) -> list[int]:
        return [self.random.randrange(VOCABULARY) for _ in range(length)]


def measure_load(port: int, prompts: Prompts, requests: int = 3) -> dict[str, float]:
    """Measure clients that ask again as soon as they are answered."""
    streams: list[Stream] = []
    texts = [[prompts.make() for _ in range(requests)] for _ in range(CLIENTS)]

    def ask(number: int) -> None:
        for prompt in texts[number]:
            streams.append(complete(port, prompt, ANSWER))

    seconds = run_clients(CLIENTS, ask)
    gaps = sorted(gap for stream in streams for gap in stream.gaps)
    return {
        "tokens_per_s": CLIENTS * requests * ANSWER / seconds,
        "gap_ms": statistics.median(gaps) * 1e3,
        "gap_p99_ms": gaps[int(len(gaps) * 0.99)] * 1e3,
        "first_token_ms": statistics.median(stream.times[0] for stream in streams) * 1e3,
    }


def measure_long_prompt(port: int, prompts: Prompts) -> dict[str, float]:
    """Measure a prompt of 900 tokens that arrives while four answers stream."""
    streams: list[Stream] = []

    def read(number: int) -> None:
        if number == 4:
            time.sleep(0.5)
            streams.insert(0, complete(port, prompts.make(900), 2))
        else:
            streams.append(complete(port, prompts.make(), 200))

    run_clients(5, read)
    gaps = [gap for stream in streams[1:] for gap in stream.gaps]
    return {
        "gap_ms": statistics.median(gaps) * 1e3,
        "longest_gap_ms": max(gaps) * 1e3,
        "first_token_ms": streams[0].times[0] * 1e3,
    }


def measure_prefix(port: int, prompts: Prompts) -> dict[str, float]:
    """Measure the first tokens of requests that begin with the same 500 tokens."""
    shared = prompts.make(500)
    cold = complete(port, shared + prompts.make(8), 2).times[0]
    warm = [complete(port, shared + prompts.make(8), 2).times[0] for _ in range(3)]
    return {"cold_ms": cold * 1e3, "warm_ms": statistics.median(warm) * 1e3}


def measure_one_stream(port: int, prompts: Prompts) -> float:
    """Measure the milliseconds of a token that one client streams."""
    return statistics.median(complete(port, prompts.make(), 200).gaps) * 1e3


def measure_offline(model: TextGenerator, prompts: Prompts) -> dict[str, float]:
    """Measure the same work without a server: a batch of eight, and one stream."""
    start = time.perf_counter()
    model.generate([prompts.make() for _ in range(CLIENTS)], max_new_tokens=ANSWER, ignore_eos=True)
    batch = CLIENTS * ANSWER / (time.perf_counter() - start)
    times = []
    for _ in model.submit(prompts.make(), max_new_tokens=200, ignore_eos=True):
        times.append(time.perf_counter())
    return {"tokens_per_s": batch, "stream_ms": statistics.median(list_gaps(times)) * 1e3}


def measure_embeddings(port: int, texts: Sequence[str], clients: int = 64) -> float:
    """Measure the texts per second of clients that ask for one embedding at a time."""
    shares = [texts[number::clients] for number in range(clients)]

    def ask(number: int) -> None:
        client = Client(port)
        with client.socket:
            for text in shares[number]:
                body = {"model": "embedder", "input": text, "encoding_format": "base64"}
                client.ask("/v1/embeddings", body)

    return len(texts) / run_clients(clients, ask)


def serve_planforge(bundles: Sequence[str], port: int) -> list[str | Path]:
    planforge = Path(sys.executable).with_name("planforge")
    return [planforge, "serve", *bundles, "--port", str(port), "--parallel", str(CLIENTS), "--no-page"]


def serve_llama(server: Path, model: Path, port: int) -> list[str | Path]:
    threads = str(len(os.sched_getaffinity(0)))
    return [
        server, "--model", model, "--port", str(port), "--parallel", str(CLIENTS), "--threads", threads,
        "--ctx-size", str(1024 * CLIENTS), "--no-webui",
    ]  # fmt: skip


def measure_server(port: int, prompts: Prompts, rounds: int) -> dict[str, Any]:
    """Measure all requests that both servers get."""
    complete(port, prompts.make(), 4)  # warm
    return {
        "load": [measure_load(port, prompts) for _ in range(rounds)],
        "long_prompt": [measure_long_prompt(port, prompts) for _ in range(rounds)],
        "prefix": [measure_prefix(port, prompts) for _ in range(rounds)],
        "stream_ms": [measure_one_stream(port, prompts) for _ in range(rounds)],
    }


def write_gguf(work: Path) -> Path:
    """Return GPT-2 124M as llama.cpp's server reads it; the package gguf writes it at the first call."""
    from .systems.llama_cpp import FILE, LlamaCpp

    folder = work / "gpt2-124m" / "llama-server-q8_0"
    if not (folder / FILE).exists():
        folder.mkdir(parents=True, exist_ok=True)
        checkpoint = Workshop(work).checkpoint("gpt2-124m")
        LlamaCpp().prepare(checkpoint, "generate", "q8_0", folder, {"vocabulary": True})
    return folder / FILE


def middle(rounds: Sequence[Any]) -> Any:
    """Return the medians of several rounds."""
    if isinstance(rounds[0], dict):
        return {name: middle([one[name] for one in rounds]) for name in rounds[0]}
    return round(statistics.median(rounds), 3)


def prepare_bundles(work: Path) -> dict[str, Path]:
    """Return the bundles of a generator, an embedder and a chat, 8-bit; exported at the first call."""
    nothing = Work("generate", ())
    entries = {"gpt2": Entry("planforge", "int8", "gpt2-124m", nothing)}
    for name, demo in (("embedder", "bert-demo"), ("chat", "llama-demo")):
        trained = {"source": demo, "verify": True}
        entries[name] = Entry("planforge", "int8", demo, nothing, prepare=trained)
    workshop = Workshop(work)
    return {name: workshop.prepare(entry).folder for name, entry in entries.items()}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving", description=__doc__)
    parser.add_argument("--llama-server", type=Path, help="llama.cpp's server; left out unless given")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "benchmarks")
    arguments = parser.parse_args()
    work: Path = arguments.work
    rounds: int = arguments.rounds
    bundles = prepare_bundles(work)
    texts = sentences(2000, work)
    results: dict[str, Any] = {"machine": measure_machine(len(os.sched_getaffinity(0)))}

    with TextGenerator.load(bundles["gpt2"]) as model:
        model.generate("warm", max_new_tokens=4)
        prompts = Prompts()
        results["offline"] = middle([measure_offline(model, prompts) for _ in range(rounds)])
    with TextEncoder.load(bundles["embedder"]) as encoder:
        encoder.embed(texts[:64])
        start = time.perf_counter()
        encoder.embed(texts)
        results["offline"]["texts_per_s"] = round(len(texts) / (time.perf_counter() - start), 1)

    port = find_port()
    command = serve_planforge([f"{name}={bundle}" for name, bundle in bundles.items()], port)
    with run_server(command, port, work / "logs" / "serving-planforge.log", "/ready"):
        results["planforge"] = {
            name: middle(values) for name, values in measure_server(port, Prompts(), rounds).items()
        }
        heavy = make_heavy_requests("gpt2", "chat", "embedder")
        results["planforge"]["health_ms"] = {  # the largest are to be 50 at most
            name: middle([measure_health(port, request) for _ in range(rounds)])
            for name, request in heavy.items()
        }
        measure_embeddings(port, texts[:256])
        results["planforge"]["texts_per_s"] = round(measure_embeddings(port, texts), 1)
    if arguments.llama_server is not None:
        port = find_port()
        command = serve_llama(arguments.llama_server, write_gguf(work), port)
        with run_server(command, port, work / "logs" / "serving-llama.log", "/health"):
            results["llama.cpp"] = {
                name: middle(values) for name, values in measure_server(port, Prompts(), rounds).items()
            }
    write_result("serving", results)


if __name__ == "__main__":
    main()
