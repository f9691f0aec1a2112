"""The soak runs, and finds answers that are mixed up, lost requests and memory that grows."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import soak as soaking
from benchmarks.soak import WEIGHTS, Tally, count_unfinished, measure_growth, run_client, soak
from benchmarks.soak_requests import Answer, Request, answer_alone
from planforge.runtime import load

from ..helpers.patience import wait_until
from ..helpers.serving import running_server


@pytest.fixture(scope="module")
def port(
    demo_bundle: Path,
    llama_demo_bundle: Path,
    minilm_bundle: Path,
    dates_bundle: Path,
    head_bundle: Callable[[str], Path],
) -> Iterator[int]:
    bundles = {
        "gpt": demo_bundle,
        "llama": llama_demo_bundle,
        "bert": minilm_bundle,
        "dates": dates_bundle,
        "ranker": head_bundle("ranker"),
    }
    with ExitStack() as stack:
        models = {
            name: stack.enter_context(load(bundle, backend="ort-cpu", precision="fp32"))
            for name, bundle in bundles.items()
        }
        yield stack.enter_context(running_server(models)).port


@pytest.fixture(scope="module")
def requests(port: int) -> Sequence[Request]:
    return answer_alone(port)


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The soak's clock: a second is over when sixty requests were answered."""
    answered = itertools.count(1)
    now = 0.0
    count = Tally.count

    def count_and_go_on(tally: Tally, kind: str, fault: str) -> None:
        nonlocal now
        count(tally, kind, fault)
        now = next(answered) / 60

    clock = SimpleNamespace(monotonic=lambda: now, sleep=lambda seconds: time.sleep(0.01))
    monkeypatch.setattr(Tally, "count", count_and_go_on)
    monkeypatch.setattr(soaking, "time", clock)
    return clock


def test_a_soak_of_sixty_requests_finds_nothing(port: int, requests: Sequence[Request]) -> None:
    tally, samples = soak(port, os.getpid(), requests, clients=4, seconds=1.0)
    assert tally.faults == []
    assert len(set(tally.answered) & set(WEIGHTS)) > 5 and tally.answered.total() >= 60
    assert samples[0]["rss"] > samples[0]["anonymous"] > 10
    wait_until(lambda: not count_unfinished(port))  # of streams that were left


def test_answers_that_are_mixed_up_are_found(port: int, requests: Sequence[Request], clock: Any) -> None:
    for kind in set(WEIGHTS) - {"stream left"}:
        answers = [one.answer for one in requests if one.kind == kind]
        assert any(one.differs_from(other) for one, other in pairwise(answers)), kind
    mixed = [replace(one, answer=Answer(("another's",))) for one in requests]
    tally = Tally()
    run_client(port, mixed, 1, clock.monotonic() + 0.3, tally)
    assert len(tally.faults) == tally.answered.total() - tally.answered["stream left"] > 0


def test_requests_to_nobody_are_lost(clock: Any) -> None:
    tally = Tally()
    requests = [Request(kind, "/v1/completions", {}) for kind in WEIGHTS]
    run_client(1, requests, 1, clock.monotonic() + 0.1, tally)  # nobody listens at port 1
    assert tally.faults and "lost" in tally.faults[0]


def test_growth_is_measured_after_the_warm_up() -> None:
    steady = [{"rss": 10.0 if second < 10 else 100.0} for second in range(60)]
    assert measure_growth(steady, "rss") == 0
    growing = [{"rss": 100.0 + second} for second in range(60)]
    assert measure_growth(growing, "rss") > 0.1
