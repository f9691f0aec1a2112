"""Weights of a model that GPTQ rounds: which go together, and what is said of it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from planforge.exporter.calibration import run_gptq
from planforge.exporter.calibration.run_gptq import map_in_threads, round_weights
from planforge.exporter.number_formats import INT4
from planforge.exporter.passes.quantize import QuantizedWeights, quantize
from planforge.runtime.apps.stage_progress import CountedLine, Notice

from ...helpers.graphs import normal

Array = npt.NDArray[np.float32]
SIZE = 32


def make_weights() -> tuple[dict[str, Callable[[], Array]], dict[str, torch.Tensor]]:
    """Three weights, of which two read the same rows, and those rows."""
    shapes = {"q": (24, 64), "up": (40, 96), "k": (8, 64)}
    read: dict[str, Callable[[], Array]] = {
        name: partial(normal, *shape, seed=i) for i, (name, shape) in enumerate(shapes.items())
    }
    shared = torch.from_numpy(normal(50, 64, seed=8)).bfloat16()
    return read, {"q": shared, "up": torch.from_numpy(normal(50, 96, seed=9)).bfloat16(), "k": shared}


def test_each_weight_is_rounded_for_the_rows_that_it_reads() -> None:
    read, rows = make_weights()
    lines: list[str] = []
    shapes = {name: weight().shape for name, weight in read.items()}
    left = dict(rows)
    given = QuantizedWeights(4, SIZE, dict.fromkeys(read, 4), {**read, "table": read["q"]})
    found = round_weights(given, shapes, left, lines.append, "int4: GPTQ")
    assert set(found) == set(rows)
    assert not left, "rows of weights that are done take no memory"
    for name, blocks in found.items():
        alone = quantize(read[name](), INT4, SIZE, rows[name].float().numpy())
        np.testing.assert_array_equal(blocks.scale, alone.scale)
        np.testing.assert_array_equal(blocks.codes, alone.codes)
    last = lines[-1]
    assert isinstance(last, CountedLine)
    assert (last.done, last.total, last) == (3, 3, "int4: GPTQ: 3 of 3 weights")
    assert not any(isinstance(line, Notice) for line in lines)  # it takes no time


def test_what_takes_long_is_said_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_gptq, "LONG_SECONDS", 0.0)
    lines: list[str] = []
    read, rows = make_weights()
    shapes = {name: weight().shape for name, weight in read.items()}
    given = QuantizedWeights(4, SIZE, dict.fromkeys(read, 4), read)
    round_weights(given, shapes, rows, lines.append, "int4: GPTQ")
    (notice,) = [line for line in lines if isinstance(line, Notice)]
    assert notice.startswith("GPTQ takes about ") and "--quantizer rtn" in notice
    assert lines.index(notice) == 0


def test_each_thread_computes_alone_and_the_main_one_as_before() -> None:
    before = torch.get_num_threads()
    counts = list(map_in_threads(lambda _: torch.get_num_threads(), range(4), threads=2))
    assert counts == [1, 1, 1, 1]
    with ThreadPoolExecutor(1) as later:
        assert later.submit(torch.get_num_threads).result() == torch.get_num_threads() == before


def test_an_error_ends_what_waits() -> None:
    begun: list[int] = []

    def work(item: int) -> Any:
        begun.append(item)
        raise ValueError(f"item {item}")

    with pytest.raises(ValueError, match="item 0"):
        list(map_in_threads(work, range(1000), threads=1))
    assert len(begun) < 1000
