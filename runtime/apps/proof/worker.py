"""The process that `prove` measures: one bundle in one precision, one text at a time.

The first line that it reads is a `Work` in JSON, answered with facts of what was loaded. Every further line
is JSON {"texts": [...]}, or {"generate": [ids, ...]} of a generator, answered with what was measured.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ...backends.gpus import find_gpu
from ...backends.ort_backend import OrtCpuBackend
from ...errors import ContextLengthError, InputError
from ...load import load
from ..diagnostics.bench_work import TokenClock, measure_peak_rss, summarize_times
from ..diagnostics.child import answer, serve_parent
from .evidence import SCORE

if TYPE_CHECKING:
    from ...encode.text_encoder import TextEncoder
    from ...generate.text_generator import TextGenerator

PROMPT = 32  # tokens of a text that a generator continues
NEW_TOKENS = 32


@dataclass(frozen=True)
class Work:
    """What one process measures."""

    bundle: str
    task: str
    backend: str = "auto"
    precision: str | None = None
    device: int = 0
    threads: int | None = None


class Classifying:
    """Classifies texts, or pairs of texts."""

    def __init__(self, model: TextEncoder) -> None:
        self.model = model
        self.numbers = {label: number for number, label in enumerate(model.defaults.labels)}

    def measure(self, text: Sequence[str]) -> list[Any]:
        """Return the number of a text's label; refuse a text that is too long."""
        result = self.model.classify(text[0], *text[1:], truncation=None)
        return [self.numbers[result.label]]


class Scoring:
    """Reads texts, and tells how likely they are."""

    def __init__(self, model: TextGenerator) -> None:
        self.model = model

    def measure(self, text: Sequence[str]) -> list[Any]:
        """Return a text's loss in nats, how many tokens it is over, and its first tokens."""
        score = self.model.score(text[0])
        return [-score.total, len(score.logprobs), list(score.token_ids[:PROMPT])]

    def generate(self, ids: Sequence[int]) -> list[float]:
        """Return the milliseconds between tokens that are generated behind a prompt."""
        room = self.model.max_length - len(ids)
        clock = TokenClock(1)
        started = time.perf_counter()
        if room > 0:
            new = min(NEW_TOKENS, room)
            self.model.generate(ids, max_new_tokens=new, ignore_eos=True, on_token=clock.note)
        known = clock.known or [started]
        gaps: list[float] = summarize_times(started, known, time.perf_counter())["inter_token_ms"]
        return gaps


def serve(work: Work) -> None:
    """Load the model, answer with what was loaded, then measure what each line gives."""
    options: dict[str, Any] = {"device": work.device} if work.device else {}
    with load(
        work.bundle, backend=work.backend, precision=work.precision, threads=work.threads, **options
    ) as model:
        subject = Scoring(model) if work.task == SCORE else Classifying(model)  # type: ignore[arg-type]
        facts = {"backend": model.backend, "artifact": model.artifact.id, "file": model.file}
        gpu = None if model.backend == OrtCpuBackend.name else asdict(find_gpu(work.device))
        answer({**facts, "threads": model.threads, "gpu": gpu, "process": os.getpid()})
        for line in sys.stdin:
            asked = json.loads(line)
            if "generate" in asked:
                assert isinstance(subject, Scoring)
                gaps = [gap for ids in asked["generate"] for gap in subject.generate(ids)]
                answer({"ms": gaps, "peak_rss_mb": measure_peak_rss()})
                continue
            answer(measure_texts(subject, asked["texts"]))


def measure_texts(subject: Classifying | Scoring, texts: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Return each text's result and milliseconds; of one that is refused, its place and why."""
    results = []
    times = []
    for place, text in enumerate(texts):
        started = time.perf_counter()
        try:
            results.append(subject.measure(text))
        except ContextLengthError as error:
            why = (
                f"the text has {error.tokens} tokens, the model takes {error.limit}; shorten it, or split it"
            )
            return {"refused": place, "why": why}
        except InputError as error:
            return {"refused": place, "why": str(error)}
        times.append((time.perf_counter() - started) * 1e3)
    return {"results": results, "ms": times, "peak_rss_mb": measure_peak_rss()}


def main() -> None:
    """Serve the work that stdin describes."""
    serve_parent(lambda work: serve(Work(**work)))
