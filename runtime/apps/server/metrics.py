"""Counts what a server does, for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

NAMESPACE = "planforge"

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
# Returns for each loaded model its name, how many requests wait, and how many run.
CountRequests: TypeAlias = Callable[[], Iterable[tuple[str, int, int]]]


class MetricsRegistry(CollectorRegistry):
    """Leaves out the series _created; prometheus_client itself has a switch for the whole process only."""

    def collect(self) -> Iterable[Metric]:
        for family in super().collect():
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            yield family


class RequestGauges(Collector):
    """How many requests wait and run, counted anew at each scrape."""

    def __init__(self, count_requests: CountRequests) -> None:
        self.count_requests = count_requests

    def collect(self) -> Iterable[Metric]:
        waiting = make_gauge("requests_waiting", "Requests that wait for their turn.")
        running = make_gauge("requests_running", "Requests that are answered.")
        for model, waiting_count, running_count in self.count_requests():
            waiting.add_metric([model], waiting_count)
            running.add_metric([model], running_count)
        return [waiting, running]


def make_gauge(name: str, text: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"{NAMESPACE}_{name}", text, labels=["model"])


class Metrics:
    """The metrics of a server, in a registry of their own. Safe to use from any thread.

    Args:
        count_requests: called at each scrape.
    """

    def __init__(self, count_requests: CountRequests) -> None:
        self._registry = MetricsRegistry()
        self._registry.register(RequestGauges(count_requests))
        self._counters = {
            measure: self._make_counter(name, text, ["model"]) for measure, (name, text) in COUNTERS.items()
        }
        self._requests = self._make_counter(
            "requests_total", "Answers to requests, by route and status.", ["route", "status"]
        )
        self._histograms = {
            measure: Histogram(
                name, text, ["model"], namespace=NAMESPACE, registry=self._registry, buckets=buckets
            )
            for measure, (name, text, buckets) in HISTOGRAMS.items()
        }
        self._recorders: dict[tuple[str, str], list[Callable[[float], None]]] = {}

    def _make_counter(self, name: str, text: str, labels: Sequence[str]) -> Counter:
        return Counter(name, text, labels, namespace=NAMESPACE, registry=self._registry)

    def observe(self, model: str, measure: str, value: float) -> None:
        """Take a measure of a model's; what is not known here is passed over."""
        recorders = self._recorders.get((model, measure))
        if recorders is None:
            recorders = self._list_recorders(model, measure)
            self._recorders[model, measure] = recorders
        for record in recorders:
            record(value)

    def _list_recorders(self, model: str, measure: str) -> list[Callable[[float], None]]:
        """Return what takes a measure; it is kept, because `labels` costs more than to observe."""
        recorders: list[Callable[[float], None]] = []
        if measure in self._histograms:
            recorders.append(self._histograms[measure].labels(model).observe)
        if measure in self._counters:
            recorders.append(self._counters[measure].labels(model).inc)
        if measure in ("first_token", "between_tokens"):
            tokens = self._counters["tokens"].labels(model)
            recorders.append(lambda _: tokens.inc())
        return recorders

    def count_request(self, route: str, status: int) -> None:
        """Count an answer to a request."""
        self._requests.labels(route, status).inc()

    def write(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)
