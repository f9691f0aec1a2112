"""Counts what a server does, for Prometheus."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
TOKENS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
REQUESTS = (1, 2, 4, 8, 16, 32, 64, 128)
# What the engines' threads observe: the histogram of each, what it is, and its buckets.
HISTOGRAMS: dict[str, tuple[str, str, Sequence[float]]] = {
    "first_token": ("time_to_first_token_seconds", "From a request to its first token.", SECONDS),
    "between_tokens": ("time_between_tokens_seconds", "Between two tokens of an answer.", SECONDS),
    "context": ("context_tokens", "Prompt and answer of a request that ended.", TOKENS),
    "batch": ("batch_requests", "Requests that a step computes together.", REQUESTS),
    "request": ("request_seconds", "From a request to the end of its answer.", SECONDS),
}
COUNTERS = {
    "prompt": ("prompt_tokens_total", "Tokens of prompts, those of a prefix that was computed included."),
    "reused": ("reused_prompt_tokens_total", "Tokens of prompts that earlier requests had computed."),
    "tokens": ("generated_tokens_total", "New tokens."),
}
Labels = tuple[tuple[str, str], ...]


class Histogram:
    """How often values were at most each of some bounds."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def list_buckets(self) -> list[tuple[str, int]]:
        """Return each bound with how many values were at most it."""
        below = 0
        buckets = []
        for bound, count in zip((*self.bounds, None), self.counts, strict=True):
            below += count
            buckets.append(("+Inf" if bound is None else f"{bound:g}", below))
        return buckets


class Metrics:
    """The counts of a server. Safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._histograms: dict[tuple[str, Labels], Histogram] = {}
        self._counters: dict[tuple[str, Labels], float] = {}

    def observe(self, model: str, measure: str, value: float) -> None:
        """Take a measure of a model's; what is not known here is passed over."""
        labels = (("model", model),)
        with self._lock:
            if measure in HISTOGRAMS:
                key = (measure, labels)
                if key not in self._histograms:
                    self._histograms[key] = Histogram(HISTOGRAMS[measure][2])
                self._histograms[key].observe(value)
            if measure in COUNTERS:
                self._add(measure, labels, value)
            if measure in ("first_token", "between_tokens"):
                self._add("tokens", labels, 1)

    def count_request(self, route: str, status: int) -> None:
        """Count an answer to a request."""
        with self._lock:
            self._add("requests", (("route", route), ("status", str(status))), 1)

    def _add(self, name: str, labels: Labels, value: float) -> None:
        self._counters[name, labels] = self._counters.get((name, labels), 0) + value

    def write(self, count_requests: Iterable[tuple[str, Callable[[], tuple[int, int]]]]) -> str:
        """Return all counts as text; `count_requests` says of each model how many requests wait and run."""
        lines: list[str] = []
        gauges: dict[str, list[tuple[Labels, float]]] = {"waiting": [], "running": []}
        for model, count in count_requests:
            waiting, running = count()
            gauges["waiting"].append(((("model", model),), waiting))
            gauges["running"].append(((("model", model),), running))
        texts = {"waiting": "Requests that wait for their turn.", "running": "Requests that are answered."}
        for name, rows in gauges.items():
            lines += write_family(f"requests_{name}", "gauge", texts[name], rows)
        with self._lock:
            described = {
                **COUNTERS,
                "requests": ("requests_total", "Answers to requests, by route and status."),
            }
            for name, (family, text) in described.items():
                rows = [(labels, value) for (key, labels), value in self._counters.items() if key == name]
                lines += write_family(family, "counter", text, rows)
            for name, (family, text, _) in HISTOGRAMS.items():
                found = [(labels, one) for (key, labels), one in self._histograms.items() if key == name]
                lines += write_histograms(family, text, found)
        return "\n".join(lines) + "\n"


def write_family(name: str, kind: str, text: str, rows: Iterable[tuple[Labels, float]]) -> list[str]:
    head = [f"# HELP planforge_{name} {text}", f"# TYPE planforge_{name} {kind}"]
    return head + [f"planforge_{name}{write_labels(labels)} {value:.15g}" for labels, value in rows]


def write_histograms(name: str, text: str, found: Iterable[tuple[Labels, Histogram]]) -> list[str]:
    lines = write_family(name, "histogram", text, [])
    for labels, histogram in found:
        buckets = histogram.list_buckets()
        for bound, count in buckets:
            lines.append(f"planforge_{name}_bucket{write_labels((*labels, ('le', bound)))} {count}")
        lines.append(f"planforge_{name}_sum{write_labels(labels)} {histogram.sum:.9g}")
        lines.append(f"planforge_{name}_count{write_labels(labels)} {buckets[-1][1]}")
    return lines


def write_labels(labels: Labels) -> str:
    escaped = (
        (name, value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")) for name, value in labels
    )
    return "{" + ",".join(f'{name}="{value}"' for name, value in escaped) + "}"
