"""Runs a server under mixed load for minutes: nothing may be lost or mixed up, and memory must not grow.

python -m benchmarks.soak [--minutes 10] [--clients 16] [--work FOLDER]

Serves the bundles that `make demo` made, and a cross-encoder, in fp32. Clients choose among requests of all
kinds, and each answer is compared with the one that the same request got alone before. Meanwhile others open
connections by the hundred and send half a header: 10,000 in ten minutes. Writes results/soak.json.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from .checkpoints import demo
from .common import write_result
from .machine import measure_machine
from .process import ROOT
from .serving import find_port, is_ready
from .soak_requests import Client, Request, answer_alone

BUNDLES = {"llama": "llama-demo", "gpt": "gpt2-demo", "bert": "bert-demo", "dates": "transformer-demo"}
CONNECTIONS = 512  # at a time, the server's limit
WAVE = 300  # connections that send half a header at a time
SLOW_PER_MINUTE = 1000
HEADER_SECONDS = 10.0  # which the server gives a header
WARM_UP = 0.2  # of the time, after which memory is to stay
GROWTH = 0.02  # that is allowed from then on
SAMPLE_SECONDS = 2.0
# How often a kind is asked for; a kind's requests are equally likely.
WEIGHTS = {
    "chat": 4,
    "chat streamed": 4,
    "completion": 3,
    "completion streamed": 3,
    "stream left": 2,
    "structured": 2,
    "embeddings": 4,
    "rank": 3,
    "translation": 3,
    "wrong": 2,
}


@dataclass
class Tally:
    """The counts of all clients together."""

    answered: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, kind: str, fault: str) -> None:
        with self.lock:
            self.answered[kind] += 1
            if fault:
                self.faults.append(f"{kind}: {fault}")
                print(self.faults[-1], file=sys.stderr)


def prepare_ranker(work: Path) -> Path:
    """Return the bundle of a cross-encoder: bert-demo's encoder with a random head; made once."""
    bundle = work / "ranker"
    if not (bundle / "manifest.json").exists():
        import torch
        import transformers

        torch.manual_seed(0)
        checkpoint = work / "ranker-checkpoint"
        checkpoint.mkdir(exist_ok=True)
        for name in ("vocab.txt", "tokenizer_config.json"):
            shutil.copy(demo("bert-demo") / name, checkpoint)
        model = transformers.AutoModelForSequenceClassification.from_pretrained(
            demo("bert-demo"), num_labels=1
        )
        torch.nn.init.normal_(model.classifier.weight)  # so that scores differ
        model.save_pretrained(checkpoint)
        command = [find_command(), "export", checkpoint, "-o", bundle, "--target", "cpu"]
        subprocess.run([str(part) for part in command], check=True)
    return bundle


def find_command() -> Path:
    return Path(sys.executable).with_name("planforge")


@contextmanager
def serve(bundles: Sequence[str], port: int, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run the server until the block ends; it must then end cleanly."""
    options = ["--port", str(port), "--precision", "fp32", "--max-connections", str(CONNECTIONS)]
    with log.open("wb") as output:
        command = [str(find_command()), "serve", *bundles, *options]
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        end = time.monotonic() + 120
        while not is_ready(port, "/ready"):
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"the server did not start; see {log}")
            time.sleep(0.1)
        yield process
        process.send_signal(signal.SIGTERM)
        if process.wait(60) != 0 or "Traceback" in log.read_text(encoding="utf-8"):
            raise RuntimeError(f"the server did not end in order; see {log}")
    finally:
        process.kill()
        process.wait()


def run_client(port: int, requests: Sequence[Request], seed: int, end: float, tally: Tally) -> None:
    """Ask one request after the other until the time is over."""
    chance = random.Random(seed)
    by_kind = {kind: [one for one in requests if one.kind == kind] for kind in WEIGHTS}
    client = Client(port)
    while time.monotonic() < end:
        (kind,) = chance.choices(list(WEIGHTS), list(WEIGHTS.values()))
        request = chance.choice(by_kind[kind])
        try:
            status, answer = client.ask(request)
            fault = "" if status == request.status else f"{status} {answer.texts}"
            if not fault and not request.leaves_after:
                fault = answer.differs_from(request.answer)
        except Exception as error:  # whatever it is, the request is lost
            fault = f"lost: {error!r}"
            client.close()
        tally.count(kind, fault and f"{request.body!r:.200}: {fault}")
    client.close()


def open_slow(port: int, count: int) -> list[socket.socket]:
    """Return connections that have sent half a header."""
    slow = []
    for _ in range(count):
        connection = socket.create_connection(("127.0.0.1", port), timeout=2 * HEADER_SECONDS)
        with contextlib.suppress(OSError):  # one too many is closed at once
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Le")
        slow.append(connection)
    return slow


def is_closed(connection: socket.socket) -> bool:
    """Wait until the server closes a connection, twice as long as it lets headers take."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False


def run_slow_clients(port: int, count: int, end: float, tally: Tally) -> None:
    """Open waves of connections that send half a header; the server has to close each in time."""
    while count > 0 and time.monotonic() < end - HEADER_SECONDS:
        wave = open_slow(port, min(count, WAVE))
        count -= len(wave)
        for connection in wave:
            tally.count("slow header", "" if is_closed(connection) else "the connection was left open")
            connection.close()


def check_connection_limit(port: int) -> dict[str, int]:
    """Open more connections than the server takes; return how many it kept, and see that it answers again."""
    wave = open_slow(port, CONNECTIONS + 100)
    time.sleep(1)
    kept = 0
    for connection in wave:
        connection.setblocking(False)
        try:
            connection.recv(1)
        except BlockingIOError:
            kept += 1
        except ConnectionResetError:
            pass
    end = time.monotonic() + 2 * HEADER_SECONDS
    while not is_ready(port, "/ready"):
        if time.monotonic() > end:
            raise RuntimeError("the server answers no more after too many connections")
        time.sleep(0.1)
    for connection in wave:
        connection.close()
    return {"opened": len(wave), "kept": kept}


def count_unfinished(port: int) -> int:
    """Return how many requests the server says that it still answers, or lets wait; there should be none."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as response:
        lines = response.read().decode().splitlines()
    names = ("planforge_requests_running{", "planforge_requests_waiting{")
    return sum(round(float(line.rpartition(" ")[2])) for line in lines if line.startswith(names))


def read_memory(pid: int) -> dict[str, int]:
    """Return the kilobytes of a process: all that is resident, and all that belongs to no file (Linux)."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8").splitlines()[1:]
    sizes = {name: int(value.split()[0]) for name, value in (line.split(":") for line in lines)}
    return {"rss": sizes["Rss"], "anonymous": sizes["Anonymous"]}


def watch_memory(pid: int, start: float, end: float) -> list[dict[str, float]]:
    """Return the memory over time, in megabytes."""
    samples = []
    while time.monotonic() < end:
        memory = read_memory(pid)
        sample = {name: round(kilobytes / 1024, 2) for name, kilobytes in memory.items()}
        samples.append({"seconds": round(time.monotonic() - start, 1), **sample})
        time.sleep(SAMPLE_SECONDS)
    return samples


def measure_growth(samples: Sequence[dict[str, float]], name: str) -> float:
    """Return the growth of memory from the first third after the warm-up to the last, as a share."""
    warm = [one[name] for one in samples][int(len(samples) * WARM_UP) :]
    third = max(1, len(warm) // 3)
    return statistics.median(warm[-third:]) / statistics.median(warm[:third]) - 1


def soak(
    port: int, pid: int, requests: Sequence[Request], clients: int, seconds: float
) -> tuple[Tally, list[dict[str, float]]]:
    """Let clients ask until the time is over; return their counts, and the memory meanwhile."""
    tally = Tally()
    start = time.monotonic()
    end = start + seconds
    threads = [
        threading.Thread(target=run_client, args=(port, requests, seed, end, tally))
        for seed in range(clients)
    ]
    slow = round(SLOW_PER_MINUTE * seconds / 60)
    threads.append(threading.Thread(target=run_slow_clients, args=(port, slow, end, tally)))
    for thread in threads:
        thread.start()
    samples = watch_memory(pid, start, end)
    for thread in threads:
        thread.join()
    return tally, samples


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "soak")
    arguments = parser.parse_args()
    folders = {name: ROOT / "build" / folder for name, folder in BUNDLES.items()}
    for folder in folders.values():
        if not (folder / "manifest.json").exists():
            sys.exit(f"{folder} is not there: make demo comes first")
    work: Path = arguments.work
    work.mkdir(parents=True, exist_ok=True)
    folders["ranker"] = prepare_ranker(work)
    machine = measure_machine(len(os.sched_getaffinity(0)))
    port = find_port()
    bundles = [f"{name}={folder}" for name, folder in folders.items()]
    with serve(bundles, port, work / "server.log") as process:
        requests = answer_alone(port)
        tally, samples = soak(port, process.pid, requests, arguments.clients, arguments.minutes * 60)
        unfinished = count_unfinished(port)
        limit = check_connection_limit(port)
    growth = {name: round(measure_growth(samples, name), 4) for name in ("rss", "anonymous")}
    write_result(
        "soak",
        {
            "machine": machine,
            "minutes": arguments.minutes,
            "clients": arguments.clients,
            "answered": dict(sorted(tally.answered.items())),
            "faults": tally.faults[:20],
            "unfinished": unfinished,
            "connections": limit,
            "memory_growth": growth,
            "memory_mb": samples[:: max(1, len(samples) // 60)],
        },
    )
    if tally.faults:
        sys.exit(f"{len(tally.faults)} of {tally.answered.total()} requests were lost or mixed up")
    if unfinished:
        sys.exit(f"the server still answers {unfinished} requests that nobody waits for")
    if limit["kept"] > CONNECTIONS:
        sys.exit(f"the server kept {limit['kept']} connections, more than {CONNECTIONS}")
    if max(growth.values()) > GROWTH:
        sys.exit(f"memory grew by {max(growth.values()):.1%}, more than {GROWTH:.0%}")


if __name__ == "__main__":
    main()
