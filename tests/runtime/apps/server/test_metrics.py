"""What /metrics says, read by Prometheus' own parser."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import prometheus_client
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from planforge.runtime import TextGenerator, load
from planforge.runtime.apps.server.metrics import Metrics

from ....helpers.serving import running_server

COMPLETE = "/v1/completions"
Values = dict[tuple[str, frozenset[tuple[str, str]]], float]


def read_families(text: str) -> dict[str, Metric]:
    return {family.name: family for family in text_string_to_metric_families(text)}


def read_values(text: str) -> Values:
    return {
        (sample.name.removeprefix("planforge_"), frozenset(sample.labels.items())): sample.value
        for family in read_families(text).values()
        for sample in family.samples
    }


def find(values: Values, name: str, **labels: str) -> float:
    return values[name, frozenset(labels.items())]


def test_a_server_counts_what_it_does(demo_bundle: Path) -> None:
    with load(demo_bundle, backend="ort-cpu") as model:
        assert isinstance(model, TextGenerator)
        with running_server({"gpt": model}) as server:
            for _ in range(2):
                server.ask(COMPLETE, prompt="And it came to pass", max_tokens=5, ignore_eos=True)
            server.post(COMPLETE, prompt=7)
            response = server.client.get("/metrics")
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    values = read_values(response.text)
    assert find(values, "generated_tokens_total", model="gpt") == 10
    assert find(values, "time_to_first_token_seconds_count", model="gpt") == 2
    assert find(values, "time_between_tokens_seconds_count", model="gpt") == 8
    assert find(values, "batch_requests_bucket", model="gpt", le="1.0") == 8
    assert find(values, "context_tokens_bucket", model="gpt", le="+Inf") == 2
    assert find(values, "requests_waiting", model="gpt") == 0
    assert find(values, "requests_running", model="gpt") == 0
    assert find(values, "requests_total", route=COMPLETE, status="200") == 2
    assert find(values, "requests_total", route=COMPLETE, status="400") == 1


def test_families_are_described_before_anything_is_counted() -> None:
    families = read_families(Metrics(list).write().decode())
    counters = ["prompt_tokens", "reused_prompt_tokens", "generated_tokens", "requests"]
    histograms = ["time_to_first_token_seconds", "time_between_tokens_seconds", "request_seconds"]
    expected = dict.fromkeys(["requests_waiting", "requests_running"], "gauge")
    expected |= dict.fromkeys(counters, "counter")
    expected |= dict.fromkeys([*histograms, "context_tokens", "batch_requests"], "histogram")
    assert {name: family.type for name, family in families.items()} == {
        f"planforge_{name}": kind for name, kind in expected.items()
    }
    assert not any(family.samples for family in families.values())


def test_a_bucket_holds_what_is_at_most_its_bound() -> None:
    metrics = Metrics(list)
    for value in (1, 2, 3, 129):
        metrics.observe("gpt", "batch", value)
    metrics.observe("gpt", "nothing", 1)
    values = read_values(metrics.write().decode())
    counts = {"1.0": 1, "2.0": 2, "4.0": 3, "128.0": 3, "+Inf": 4}
    for bound, count in counts.items():
        assert find(values, "batch_requests_bucket", model="gpt", le=bound) == count
    assert find(values, "batch_requests_sum", model="gpt") == 135
    assert not any(name.endswith("_created") for name, _ in values)


def test_models_come_and_go() -> None:
    counts = [("first", 2, 1)]
    metrics = Metrics(lambda: counts)
    assert find(read_values(metrics.write().decode()), "requests_waiting", model="first") == 2
    counts[0] = ('a "second"\n', 0, 3)
    metrics.observe('a "second"\n', "prompt", 7)
    values = read_values(metrics.write().decode())
    assert find(values, "requests_running", model='a "second"\n') == 3
    assert find(values, "prompt_tokens_total", model='a "second"\n') == 7
    assert not any(("model", "first") in labels for _, labels in values)


def test_servers_in_one_process_share_no_counts() -> None:
    before = {family.name for family in prometheus_client.REGISTRY.collect()}
    one, other = Metrics(list), Metrics(list)
    one.count_request(COMPLETE, 200)
    assert find(read_values(one.write().decode()), "requests_total", route=COMPLETE, status="200") == 1
    assert not read_values(other.write().decode())
    assert {family.name for family in prometheus_client.REGISTRY.collect()} == before


def test_threads_lose_no_count_while_metrics_are_read() -> None:
    metrics = Metrics(list)
    done = threading.Event()

    def observe() -> None:
        for _ in range(2000):
            metrics.observe("gpt", "between_tokens", 0.01)

    def read() -> None:
        while not done.is_set():
            metrics.write()

    with ThreadPoolExecutor(5) as pool:
        reading = pool.submit(read)
        for observing in [pool.submit(observe) for _ in range(4)]:
            observing.result()
        done.set()
        reading.result()
    values = read_values(metrics.write().decode())
    assert find(values, "generated_tokens_total", model="gpt") == 8000
    assert find(values, "time_between_tokens_seconds_count", model="gpt") == 8000
