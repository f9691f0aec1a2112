"""Runs a system in its own process: python -m benchmarks.child; asked and answering in lines of JSON.

The first line says what to prepare or open. Every later line is a piece of work, done once per line.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from .systems import system_named
from .systems.system import Session, Skip, System


def main() -> None:
    """Answer on the original stdout; whatever a library prints goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    order = json.loads(sys.stdin.readline())
    try:
        system = system_named(order["system"])
        if order["mode"] == "prepare":
            prepare(system, order)
            say(answers, {"prepared": True})
        else:
            serve(system, order, answers)
    except Skip as reason:
        say(answers, {"skip": str(reason)})
    except Exception as error:  # the parent shows it and goes on with the other systems
        say(answers, failure(error))
        raise


def failure(error: Exception) -> dict[str, str]:
    return {"failed": f"{type(error).__name__}: {error}"}


def say(answers: TextIO, message: Mapping[str, Any]) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()


def prepare(system: System, order: Mapping[str, Any]) -> None:
    checkpoint = Path(order["checkpoint"])
    out = Path(order["out"])
    system.prepare(checkpoint, order["kind"], order["precision"], out, order["settings"])


def serve(system: System, order: Mapping[str, Any], answers: TextIO) -> None:
    """Open the model, do the first work, report that at once, and then answer requests."""
    session, known = open_session(system, order)
    say(answers, {"first": True})
    for line in sys.stdin:
        try:
            say(answers, answer(session, json.loads(line), known))
        except Exception as error:  # others may share this process
            traceback.print_exc()
            say(answers, failure(error))


def open_session(system: System, order: Mapping[str, Any]) -> tuple[Session, dict[str, Any]]:
    """Return a session that has done its first work, and the facts that hold for all its work."""
    opener = getattr(system, order["kind"])
    precision = order["precision"]
    threads = order["threads"]
    session: Session = opener(Path(order["model"]), precision, threads, order["settings"])
    session.run(order["first"], lambda: None)
    known = {
        "weights_sha256": order["weights_sha256"],
        "precision": system.classes[precision],
        "threads": threads,
    }
    return session, known


def answer(session: Session, work: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """Do the work once, and measure its time."""
    stamps: list[float] = []
    clock = time.perf_counter
    start = clock()
    result = session.run(work, lambda: stamps.append(clock()))
    seconds = clock() - start
    did = {**known, **session.did(work)}
    if work["kind"] == "embed":
        did["vectors"] = list(result.shape)
        if work["save"]:
            import numpy as np

            np.save(work["save"], result)
        result = None
    else:
        did["new_tokens"] = [len(row) for row in result]
    return {
        "seconds": seconds,
        "stamps": [stamp - start for stamp in stamps],
        "result": result,
        "did": did,
        "peak_rss_mb": peak_rss() / 1e6,
        "figures": session.figures() if hasattr(session, "figures") else {},
    }


def peak_rss() -> int:
    """Return the most bytes that this process ever had resident (Linux; elsewhere 0).

    Not ru_maxrss, which a child inherits from the process that started it.
    """
    try:
        status = Path("/proc/self/status").read_text(encoding="utf-8")
    except OSError:
        return 0
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))


if __name__ == "__main__":
    main()
