"""A job answers each row of its input once, and goes on where it was interrupted."""

from __future__ import annotations

import ctypes
import hashlib
import multiprocessing
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planforge.runtime import TextEncoder
from planforge.runtime.apps.batch import process_engine, run_batch
from planforge.runtime.apps.batch.engine import Lost, Outcome
from planforge.runtime.apps.batch.job import Counting, compute
from planforge.runtime.apps.batch.part_runner import Failure, JobSpec
from planforge.runtime.apps.batch.plan import Part, Source, make_parts
from planforge.runtime.apps.batch.result import PartResult
from planforge.runtime.apps.batch.table_file import RowRange
from planforge.runtime.errors import BatchError

from ....helpers.patience import wait_until
from .cluster_kills import compare_outputs
from .texts import TEXTS


def read(output: Path) -> pa.Table:
    return pq.read_table(output)


def test_every_row_of_every_file_is_answered_once(bundle: Path, source: Path, tmp_path: Path) -> None:
    result = run_batch(bundle, "embed", source, tmp_path / "out", rows_per_part=8, workers=1)
    table = read(tmp_path / "out")
    assert (result.rows, result.errors, result.computed) == (63, 3, 63)
    sizes = [len(pq.read_table(path)) for path in (tmp_path / "out").glob("part-*")]
    assert len(sizes) == result.parts and max(sizes) == 8
    assert len(table) == 63 and len(set(table["id"].to_pylist())) == 63
    rows = {(row["file"], row["row"]): row for row in table.to_pylist()}
    wanted = {("a.txt", number): text for number, text in enumerate(TEXTS[:20])}
    wanted |= {("b.jsonl", number): text for number, text in enumerate(TEXTS[20:30])}
    wanted |= {("c.csv", number): text for number, text in enumerate(TEXTS[30:40])}
    wanted |= {("below/d.parquet", number): text for number, text in enumerate(TEXTS[40:])}
    with TextEncoder.load(bundle, threads=1) as model:
        vectors = dict(zip(wanted, model.embed(list(wanted.values())), strict=True))
        tokens = sum(model.count_tokens(text) for text in wanted.values())
    for (file, number), vector in vectors.items():
        row = rows[file, number]
        np.testing.assert_allclose(row["embedding"], vector, atol=1e-6)
        assert row["error"] is None
        # As another program would make it: the first half of SHA-256 of the two, with a zero byte between.
        assert row["id"] == hashlib.sha256(f"{file}\0{number}".encode()).hexdigest()[:32]
    errors = [rows["b.jsonl", number]["error"] for number in (10, 11, 12)]
    assert errors[0] == "text is missing"
    assert errors[1] == "text must be a text, not int 7"
    assert "the line is not JSON" in errors[2]
    assert result.tokens == tokens


def test_ids_of_a_column(bundle: Path, tmp_path: Path) -> None:
    pq.write_table(pa.table({"key": ["x", None, "z"], "body": TEXTS[:3]}), tmp_path / "in.parquet")
    run_batch(
        bundle,
        "embed",
        tmp_path / "in.parquet",
        tmp_path / "out",
        columns={"text": "body"},
        id_column="key",
        workers=1,
    )
    table = read(tmp_path / "out")
    assert table["id"].to_pylist() == ["x", None, "z"]
    assert table["file"].to_pylist() == ["in.parquet"] * 3


def test_a_job_goes_on_with_the_parts_that_are_missing(bundle: Path, source: Path, tmp_path: Path) -> None:
    first = run_batch(bundle, "embed", source, tmp_path / "out", rows_per_part=8, workers=1)
    before = read(tmp_path / "out")
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("part-*")}
    removed = ["part-000001.parquet", "part-000005.parquet"]
    for name in removed:
        (tmp_path / "out" / name).unlink()
    left = tmp_path / "out" / "_job" / ".tmp-1-abc"
    left.write_text("what a writer left that was killed")
    again = run_batch(bundle, "embed", source, tmp_path / "out", workers=1)
    assert again.computed == sum(len(pq.read_table(tmp_path / "out" / name)) for name in removed)
    assert (again.rows, again.errors, again.tokens) == (first.rows, first.errors, first.tokens)
    assert read(tmp_path / "out").equals(before)
    changed = [path.name for path, time_ns in kept.items() if path.stat().st_mtime_ns != time_ns]
    assert sorted(changed) == removed
    assert not left.exists()
    assert run_batch(bundle, "embed", source, tmp_path / "out", workers=1).computed == 0


@settings(max_examples=60, deadline=None)
@given(counts=st.lists(st.integers(0, 12), min_size=1, max_size=6), rows=st.integers(1, 9))
def test_parts_have_every_row_once(
    tmp_path_factory: pytest.TempPathFactory, counts: list[int], rows: int
) -> None:
    folder = tmp_path_factory.mktemp("input")
    for number, count in enumerate(counts):
        (folder / f"{number}.txt").write_text("a\n" * count)
    source = Source.of(folder)
    parts = list(make_parts(source, source.list_files(), rows, lambda done, total: None))
    places = [
        (row_range.file, row_range.first + place)
        for part in parts
        for row_range in part.row_ranges
        for place in range(row_range.rows)
    ]
    assert places == [(f"{number}.txt", row) for number, count in enumerate(counts) for row in range(count)]
    assert all(0 < part.rows <= rows for part in parts)
    assert [Part.from_json(part.to_json()) for part in parts] == parts


class FakeEngine:
    """Loses parts as it is told, and never computes more than it may."""

    def __init__(self, outcomes: Callable[[Part], Outcome], slots: int = 3) -> None:
        self.outcomes = outcomes
        self.slots = slots
        self.started: list[int] = []
        self.running: list[Part] = []

    def count_slots(self) -> int:
        return self.slots

    def start(self, part: Part) -> None:
        self.started.append(part.number)
        self.running.append(part)
        assert len(self.running) <= self.slots

    def wait(self) -> list[tuple[Part, Outcome]]:
        part = self.running.pop()
        return [(part, self.outcomes(part))]

    def close(self) -> None:
        self.running.clear()


def run_fake(outcomes: Callable[[Part], Outcome], parts: int = 20) -> tuple[FakeEngine, Counting]:
    engine = FakeEngine(outcomes)
    counting = Counting(lambda line: None, 0, parts)
    row_range = RowRange("a.txt", 0, 1, 0, 2)
    compute(engine, (Part(number, (row_range,)) for number in range(parts)), counting)
    return engine, counting


def make_result(part: Part) -> PartResult:
    return PartResult(part.number, 1, 0, 5, 0.1, "worker")


def test_lost_parts_are_started_again() -> None:
    draw = random.Random(0)
    engine, counting = run_fake(lambda part: Lost("killed") if draw.random() < 0.4 else make_result(part))
    assert sorted(set(engine.started)) == list(range(20))
    assert len(engine.started) > 20
    assert counting.computed == 20


def test_a_part_that_kills_its_workers_ends_the_job() -> None:

    def outcome(one: Part) -> Outcome:
        return Lost("out of memory") if one.number == 3 else make_result(one)

    with pytest.raises(
        BatchError, match=r"part-000003.parquet.* died 10 times; the last reason: out of memory"
    ):
        run_fake(outcome)


def test_a_worker_that_cannot_go_on_ends_the_job() -> None:
    with pytest.raises(BatchError, match="no such bundle"):
        run_fake(lambda part: Failure("no such bundle"))


def hold_python_lock(began: Path, part: object) -> None:
    """Sleep as native code does that keeps Python's lock: no other thread of the process can run."""
    began.touch()
    ctypes.PyDLL(None).sleep(3600)


@pytest.mark.skipif(sys.platform == "win32", reason="calls C's sleep")
def test_a_worker_that_cannot_end_itself_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_engine, "run_part", hold_python_lock)
    monkeypatch.setattr(process_engine, "SECONDS_TO_END", 0.5)
    engine = process_engine.ProcessEngine(cast(JobSpec, tmp_path / "began"), 1)
    engine.start(Part(0, ()))
    wait_until((tmp_path / "began").exists)
    (worker,) = multiprocessing.active_children()
    engine.close()
    assert not worker.is_alive()


def test_a_worker_that_is_killed_is_replaced(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice, each time with all the parts that its pool was at."""
    (tmp_path / "in.txt").write_text("\n".join(TEXTS))
    start = process_engine.ProcessEngine.start
    started: list[int] = []

    def start_and_kill(self: process_engine.ProcessEngine, part: Part) -> None:
        start(self, part)
        started.append(part.number)
        if len(started) == 6 or len(started) == 14:
            for worker in multiprocessing.active_children():
                worker.kill()

    monkeypatch.setattr(process_engine.ProcessEngine, "start", start_and_kill)
    result = run_batch(bundle, "embed", tmp_path / "in.txt", tmp_path / "out", rows_per_part=5, workers=2)
    assert len(started) > 12
    assert result.rows == 60
    monkeypatch.undo()
    run_batch(bundle, "embed", tmp_path / "in.txt", tmp_path / "expected", rows_per_part=5, workers=1)
    assert compare_outputs(tmp_path / "out", tmp_path / "expected") == 60
