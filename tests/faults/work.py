"""Eight threads and four processes on one bundle: answers as alone, memory flat, no file handle left."""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

THREADS = 8
PROCESSES = 4
GROWTH = 1.02  # of memory between the second quarter of the time and the last
MIN_SECONDS = 120  # below this, memory is still being warmed up: it is told, not judged
PROMPTS = ("And it came to pass", "In the beginning", "Hello", "The king said unto him, ", "a b c d e f g")


def list_requests(model: Any) -> list[Callable[[], Any]]:
    """Return calls of every kind that a decoder's bundle answers, each with one right answer."""
    requests: list[Callable[[], Any]] = []
    for number, prompt in enumerate(PROMPTS):
        sampled = {"temperature": 0.8, "seed": number, "max_new_tokens": 8 + number}
        requests += [
            partial(generate, model, prompt, max_new_tokens=12),
            partial(generate, model, prompt, **sampled),
            partial(generate, model, prompt, num_beams=2, max_new_tokens=5),
            partial(generate, model, [prompt, *PROMPTS], max_new_tokens=6),
            partial(stream, model, prompt),
            partial(model.count_tokens, prompt),
            partial(score, model, prompt),
        ]
    return requests


def generate(model: Any, prompts: Any, **options: Any) -> Any:
    found = model.generate(prompts, **options)
    return [one.token_ids for one in found] if isinstance(found, list) else found.token_ids


def stream(model: Any, prompt: str) -> str:
    return "".join(chunk.text for chunk in model.stream(prompt, max_new_tokens=9))


def score(model: Any, prompt: str) -> float:
    """Return a score, to the digits that do not depend on who else is in the batch."""
    return round(float(model.score(prompt + " and more").total), 3)


def count_handles() -> int:
    return len(os.listdir("/proc/self/fd"))


def read_memory() -> int:
    """Return this process's resident memory in bytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def work(bundle: Path, threads: int, seconds: float) -> dict[str, Any]:
    """Answer in so many threads for some time; return what differed, memory, handles and calls."""
    from planforge.runtime import load

    options: dict[str, Any] = {"backend": "ort-cpu", "threads": 1, "prepared": False}
    with load(bundle, **options) as model:
        right = [request() for request in list_requests(model)]
    handles = count_handles()
    wrong: list[str] = []
    memory: list[int] = []
    calls = itertools.count()
    end = time.monotonic() + seconds
    with load(bundle, **options) as model:
        requests = list_requests(model)

        def answer(first: int) -> None:
            for number in itertools.count(first * 7):
                if time.monotonic() > end:
                    return
                index = number % len(requests)
                try:
                    got = requests[index]()
                except Exception as error:
                    got = repr(error)
                next(calls)
                if got != right[index]:
                    wrong.append(f"request {index}: {got!r:.200}, alone {right[index]!r:.200}")

        workers = [threading.Thread(target=answer, args=(number,)) for number in range(threads)]
        for worker in workers:
            worker.start()
        while any(worker.is_alive() for worker in workers):
            memory.append(read_memory())
            time.sleep(seconds / 200)
        for worker in workers:
            worker.join()
    quarter = max(1, len(memory) // 4)
    return {
        "wrong": wrong[:5],
        "calls": next(calls),
        "handles": count_handles() - handles,
        "early_bytes": statistics.median(memory[quarter : 2 * quarter] or memory),
        "late_bytes": statistics.median(memory[-quarter:]),
    }


def run_all(bundle: Path, seconds: float) -> list[str]:
    """Run one process of eight threads and four others beside it; return what is wrong."""
    command = [sys.executable, "-m", "tests.faults.work", str(bundle), str(seconds)]
    counts = [THREADS] + [1] * PROCESSES
    children = [
        subprocess.Popen([*command, str(count)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for count in counts
    ]
    findings = []
    for number, child in enumerate(children):
        output, errors = child.communicate(timeout=seconds + 120)
        name = f"process {number} of {counts[number]} threads"
        if child.returncode != 0:
            findings.append(f"{name}: ended with {child.returncode}: {errors[-500:]}")
            continue
        found = json.loads(output)
        growth = found["late_bytes"] / found["early_bytes"]
        megabytes = found["late_bytes"] / 1e6
        print(f"{name}: {found['calls']} calls; memory {megabytes:.0f} MB, {growth:.3f} of before")
        findings += [f"{name}: {line}" for line in found["wrong"]]
        if found["handles"]:
            findings.append(f"{name}: {found['handles']} file handles are left")
        if seconds >= MIN_SECONDS and growth > GROWTH:
            findings.append(f"{name}: memory grew to {growth:.3f} of what it was")
    return findings


if __name__ == "__main__":
    print(json.dumps(work(Path(sys.argv[1]), int(sys.argv[3]), float(sys.argv[2]))))
