"""What a prepared model answers, and damage to what is kept of it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from planforge.runtime import TextGenerator
from planforge.runtime.backends.prepared import DATA

PROMPT = "And it came to pass"


def generate(folder: Path, **options: Any) -> tuple[list[int], list[float]]:
    """The tokens of an answer, and the log-probabilities of its prompt."""
    with TextGenerator.load(folder, backend="ort-cpu", **options) as model:
        answer = model.generate(PROMPT, max_new_tokens=12)
        score = model.score(PROMPT)
    return list(answer.token_ids), list(score.logprobs)


def edit_without_a_trace(folder: Path) -> None:
    """Write zeros over the weights, which have the same size and time afterwards."""
    path = folder / DATA
    state = path.stat()
    path.write_bytes(bytes(state.st_size))
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
