"""A job answers each row once, whatever interrupts it, and refuses what it cannot go on with."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow.fs import FileSelector

from planforge.runtime import TextEncoder
from planforge.runtime.batch import process_engine, run_batch
from planforge.runtime.batch.engine import Lost, Outcome
from planforge.runtime.batch.formats import Stretch
from planforge.runtime.batch.job import Counting, compute
from planforge.runtime.batch.part_runner import Failure
from planforge.runtime.batch.plan import Part, Source, make_parts
from planforge.runtime.batch.result import PartResult
from planforge.runtime.batch.storage import Storage
from planforge.runtime.errors import BatchError, BundleNotFoundError, InputError

from ...helpers.cli import COMMAND, planforge
from .cluster_kills import compare_outputs, wait_for_none

TEXTS = [f"wings lift the plane {number} times" for number in range(60)]


@pytest.fixture(scope="module")
def bundle(head_bundle: Callable[[str], Path]) -> Path:
    return head_bundle("pretrained")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A file of each kind, and rows that cannot be answered."""
    folder = tmp_path / "input"
    (folder / "below").mkdir(parents=True)
    (folder / "a.txt").write_text("\n".join(TEXTS[:20]) + "\n")
    lines = [json.dumps({"text": text}) for text in TEXTS[20:30]]
    (folder / "b.jsonl").write_text("\n".join([*lines, '{"text": null}', '{"text": 7}', "{", ""]))
    (folder / "c.csv").write_text(
        "n,text\n" + "".join(f'{n},"{text}"\n' for n, text in enumerate(TEXTS[30:40]))
    )
    pq.write_table(pa.table({"text": TEXTS[40:]}), folder / "below" / "d.parquet", row_group_size=7)
    (folder / "README.md").write_text("no rows")
    (folder / ".hidden.txt").write_text("no rows")
    return folder


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
    for place, vector in vectors.items():
        np.testing.assert_allclose(rows[place]["embedding"], vector, atol=1e-6)
        assert rows[place]["error"] is None
    errors = [rows["b.jsonl", number]["error"] for number in (10, 11, 12)]
    assert errors[0] == "text is missing"
    assert errors[1] == "text must be a text, not int 7"
    assert "the line is not JSON" in errors[2]
    assert result.tokens == tokens


def test_ids_are_made_of_file_and_row(bundle: Path, source: Path, tmp_path: Path) -> None:
    """As another program would make them: the first half of SHA-256 of the two, with a zero byte between."""
    run_batch(bundle, "embed", source, tmp_path / "out", workers=1)
    for row in read(tmp_path / "out").to_pylist():
        assert row["id"] == hashlib.sha256(f"{row['file']}\0{row['row']}".encode()).hexdigest()[:32]


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
        (stretch.file, stretch.first + place)
        for part in parts
        for stretch in part.stretches
        for place in range(stretch.rows)
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
    stretch = Stretch("a.txt", 0, 1, 0, 2)
    compute(engine, (Part(number, (stretch,)) for number in range(parts)), counting)
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
        BatchError, match=r"part-000003.parquet.* died 10 times, the last time by: out of memory"
    ):
        run_fake(outcome)


def test_a_worker_that_cannot_go_on_ends_the_job() -> None:
    with pytest.raises(BatchError, match="no such bundle"):
        run_fake(lambda part: Failure("no such bundle"))


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
            for pid in self._pool._processes or ():
                os.kill(pid, signal.SIGKILL)

    monkeypatch.setattr(process_engine.ProcessEngine, "start", start_and_kill)
    result = run_batch(bundle, "embed", tmp_path / "in.txt", tmp_path / "out", rows_per_part=5, workers=2)
    assert len(started) > 12
    assert result.rows == 60
    monkeypatch.undo()
    run_batch(bundle, "embed", tmp_path / "in.txt", tmp_path / "expected", rows_per_part=5, workers=1)
    assert compare_outputs(tmp_path / "out", tmp_path / "expected") == 60


def start_in_group(command: list[str]) -> subprocess.Popen[str]:
    """Start a command whose processes get a terminal's signals together."""
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


@pytest.fixture
def running(bundle: Path, tmp_path: Path) -> Any:
    """A command that is amid a job of many parts."""
    (tmp_path / "in.txt").write_text("\n".join(TEXTS * 400))
    command = [*COMMAND, "batch", str(bundle), "--task", "embed", "--input", str(tmp_path / "in.txt")]
    command += ["--output", str(tmp_path / "out"), "--rows-per-part", "60", "--workers", "2"]
    process = start_in_group(command)
    deadline = time.monotonic() + 60
    while len(list((tmp_path / "out").glob("part-*"))) < 3:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    yield process
    process.kill()
    process.communicate()


def list_children(pid: int) -> list[int]:
    """The processes that a process started, and those that they started."""
    listed = subprocess.run(
        ["ps", "-e", "-o", "pid=,ppid="], capture_output=True, text=True, check=True
    ).stdout
    parents = {int(line.split()[0]): int(line.split()[1]) for line in listed.splitlines()}
    children = [child for child, parent in parents.items() if parent == pid]
    return children + [one for child in children for one in list_children(child)]


def exists(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_job_and_its_workers(
    running: subprocess.Popen[str], tmp_path: Path, number: signal.Signals
) -> None:
    children = list_children(running.pid)
    assert len(children) >= 2
    os.killpg(running.pid, number) if number == signal.SIGINT else running.send_signal(number)
    output, errors = running.communicate(timeout=20)
    assert running.returncode == 128 + number
    assert output == ""
    assert "what is computed stays, and the same command goes on with the rest" in errors
    assert "Traceback" not in errors
    wait_for_none(lambda: list(filter(exists, children)), "workers that are left")
    assert sorted(path.name for path in (tmp_path / "out" / "_job").iterdir()) == [
        "job.json",
        "lock",
        "plan.jsonl",
    ]


@pytest.mark.parametrize("seconds", [0.4, 0.8, 1.2])
def test_ctrl_c_while_workers_start(bundle: Path, tmp_path: Path, seconds: float) -> None:
    (tmp_path / "in.txt").write_text("\n".join(TEXTS * 400))
    command = [*COMMAND, "batch", str(bundle), "--task", "embed", "--input", str(tmp_path / "in.txt")]
    job = start_in_group([*command, "--output", str(tmp_path / "out"), "--workers", "2"])
    deadline = time.monotonic() + 60
    while not (tmp_path / "out" / "_job" / "job.json").exists():
        assert job.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(seconds)
    os.killpg(job.pid, signal.SIGINT)
    _, errors = job.communicate(timeout=20)
    assert job.returncode == 130
    assert "Traceback" not in errors


def test_a_driver_that_is_killed_leaves_no_worker(running: subprocess.Popen[str], tmp_path: Path) -> None:
    """And what it wrote is whole."""
    children = list_children(running.pid)
    running.kill()
    wait_for_none(lambda: list(filter(exists, children)), "workers that are left")
    for path in (tmp_path / "out").glob("part-*"):
        assert len(pq.read_table(path)) == 60


def test_two_jobs_do_not_write_to_one_folder(
    running: subprocess.Popen[str], bundle: Path, tmp_path: Path
) -> None:
    with pytest.raises(BatchError, match="another job writes there now"):
        run_batch(bundle, "embed", tmp_path / "in.txt", tmp_path / "out", workers=1)


def test_a_worker_that_cannot_load_says_why_once(bundle: Path, source: Path, tmp_path: Path) -> None:
    for options, message in (
        ({"pooling": "middle"}, "pooling='middle' is not one of"),
        ({"batch_size": 10**6}, "rows"),
    ):
        arguments = [f"--option={name}={value}" for name, value in options.items()]
        done = planforge(
            "batch", bundle, "--task", "embed", "--input", source, "-o", tmp_path / "out", *arguments
        )
        assert done.returncode == 1
        assert done.stderr.count(message) == 1
        assert "Traceback" not in done.stderr
        assert not list((tmp_path / "out").glob("part-*"))
        shutil.rmtree(tmp_path / "out")


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "task": ({"task": "embedd"}, "did you mean 'embed'"),
    "option": ({"options": {"poling": "cls"}}, "did you mean 'pooling'"),
    "column": ({"columns": {"body": "text"}}, "reads no 'body'"),
    "missing column": ({"columns": {"text": "body"}}, "has no column 'body'; it has: text"),
    "input": ({"input": "nowhere"}, "nowhere is not there"),
    "workers": ({"workers": 0}, "workers=0"),
    "rows": ({"rows_per_part": 0}, "rows_per_part=0"),
    "address": ({"input": "ftpx://a/b"}, "is no address of a folder"),
    "gpus": ({"gpus": -1}, "gpus=-1 must be a number of GPUs"),
    "gpus here": ({"gpus": 1}, "gpus=1 is of workers on a cluster"),
    "workers there": ({"workers": 2, "address": "local"}, "workers=2 is of this machine's processes"),
    "device": ({"input": "/dev/null"}, "is neither a file nor a folder"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_done_leaves_nothing(bundle: Path, source: Path, tmp_path: Path, name: str) -> None:
    changes, message = REFUSED[name]
    arguments: dict[str, Any] = {"task": "embed", "input": source, "output": tmp_path / "out", **changes}
    with pytest.raises(InputError, match=message):
        run_batch(bundle, **arguments)
    assert not (tmp_path / "out").exists()


def test_inputs_without_rows_are_refused(bundle: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    for content, message in (
        ({}, "no file of a kind that is read: .txt"),
        ({"a.md": "x"}, "no file of a kind that is read: .txt"),
        ({"a.txt": "\n\n"}, "has no rows"),
        ({"a.jsonl.gz": "x"}, "is compressed; decompress it first"),
    ):
        for name, text in content.items():
            (empty / name).write_text(text)
        with pytest.raises(InputError, match=message):
            run_batch(bundle, "embed", empty, tmp_path / "out")
        assert not (tmp_path / "out").exists()
    with pytest.raises(BundleNotFoundError):
        run_batch(tmp_path / "none", "embed", empty, tmp_path / "out")


def test_another_job_is_not_mixed_in(bundle: Path, source: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    run_batch(bundle, "embed", source, output, workers=1)
    before = read(output)
    with pytest.raises(InputError, match=r"another job, whose options is \{\}, not \{'pooling': 'cls'\}"):
        run_batch(bundle, "embed", source, output, options={"pooling": "cls"})
    with pytest.raises(InputError, match="another job, whose rows_per_part is 1000, not 5"):
        run_batch(bundle, "embed", source, output, rows_per_part=5)
    with (source / "a.txt").open("a") as file:
        file.write("one more\n")
    with pytest.raises(InputError, match="the input has changed"):
        run_batch(bundle, "embed", source, output)
    assert read(output).equals(before)


def test_a_folder_of_something_else_is_refused(bundle: Path, source: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    with pytest.raises(InputError, match=r"mine is not empty, and has no job: there is letter\.txt"):
        run_batch(bundle, "embed", source, tmp_path / "mine")
    with pytest.raises(InputError, match=r"letter\.txt is no folder"):
        run_batch(bundle, "embed", source, tmp_path / "mine" / "letter.txt")
    for place in (source, source / "out", source / "below" / "out", tmp_path):
        with pytest.raises(InputError, match="must be neither in the input nor around it"):
            run_batch(bundle, "embed", source, place)
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["letter.txt"]
    assert not list(source.rglob("_job"))


def test_an_empty_folder_of_the_users_stays(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "in.txt").write_text("\n")
    with pytest.raises(InputError, match="has no rows"):
        run_batch(bundle, "embed", tmp_path / "in.txt", tmp_path / "mine")
    assert list((tmp_path / "mine").iterdir()) == []


def test_links_to_folders_are_not_followed(tmp_path: Path) -> None:
    """A loop would multiply the rows; a link to a file is that file."""
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.txt").write_text("a\n")
    (folder / "loop").symlink_to(".")
    (folder / "b.txt").symlink_to(folder / "a.txt")
    source = Source.of(folder)
    assert [source.name(file.path) for file in source.list_files()] == ["a.txt", "b.txt"]


def test_a_name_that_is_not_utf8(tmp_path: Path) -> None:
    """It is refused where the file would be read, and passed over where it would not."""
    (tmp_path / "a.txt").write_text("a\n")
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.md")).write_text("x")
    assert len(Source.of(tmp_path).list_files()) == 1
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.txt")).write_text("x")
    with pytest.raises(InputError, match="has a name that is not UTF-8; rename it"):
        Source.of(tmp_path).list_files()


def test_an_input_that_changes_meanwhile_is_told(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines of the same length, of which some answers may be of the old and some of the new."""
    path = tmp_path / "in.txt"
    path.write_text("wings\n" * 20)
    start = process_engine.ProcessEngine.start

    def change_and_start(self: process_engine.ProcessEngine, part: Part) -> None:
        path.write_text("bread\n" * 20)
        start(self, part)

    monkeypatch.setattr(process_engine.ProcessEngine, "start", change_and_start)
    with pytest.raises(InputError, match="the input has changed since the job"):
        run_batch(bundle, "embed", path, tmp_path / "out", workers=1)


def test_a_plan_that_was_changed_is_refused(bundle: Path, source: Path, tmp_path: Path) -> None:
    """One that lost a line, and one that names a file elsewhere."""
    run_batch(bundle, "embed", source, tmp_path / "out", rows_per_part=8, workers=1)
    plan = tmp_path / "out" / "_job" / "plan.jsonl"
    whole = plan.read_text()
    (tmp_path / "secret.txt").write_text("secret\n")
    for text in (whole.rpartition("[")[0], whole + '[99, ["../secret.txt", 0, 1, 0, 7]]\n', ""):
        plan.write_text(text)
        with pytest.raises(BatchError, match=r"plan.jsonl is damaged; remove the folder, and begin anew"):
            run_batch(bundle, "embed", source, tmp_path / "out", workers=1)
    assert "secret" not in str(read(tmp_path / "out")["file"].to_pylist())


def test_a_password_in_an_address_is_not_shown() -> None:
    storage = Storage.of("s3://KEY:SECRET@bucket/folder?endpoint_override=here")
    assert str(storage) == "s3://bucket/folder"
    assert str(Storage.of("/some/../folder/")) == "/folder"


def test_a_file_of_an_object_store_is_there_when_it_is_whole() -> None:
    """In a file system that is no folder of this machine: Arrow's own stand-in."""
    storage = Storage.of("mock:///folder")
    storage.files.create_dir("folder/_job")
    storage.write("a", b"old")
    with pytest.raises(KeyboardInterrupt), storage.write_parts("a") as stream:
        stream.write(b"half")
        raise KeyboardInterrupt
    assert storage.read("a") == b"old"
    storage.write("a", b"new")
    assert storage.read("a") == b"new"
    with pytest.raises(FileNotFoundError), storage.write_parts("b"):
        storage.remove_temporary()  # as a job does that took this one's writer for dead
    assert [entry.base_name for entry in storage.files.get_file_info(FileSelector("folder/_job"))] == []


def test_workers_that_never_begin_end_the_job(tmp_path: Path, bundle: Path) -> None:
    """As of a program that calls run_batch without a guard, which each process would run again."""
    (tmp_path / "in.txt").write_text("a\n" * 10)
    program = tmp_path / "program.py"
    program.write_text(
        "from planforge.runtime.batch import run_batch\n"
        f"run_batch({str(bundle)!r}, 'embed', {str(tmp_path / 'in.txt')!r}, {str(tmp_path / 'out')!r})\n"
    )
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "the workers died 3 times before one of them had computed anything" in done.stderr
    assert "below `if __name__ == '__main__':`" in done.stderr


def test_a_part_that_fails_is_named(bundle: Path, tmp_path: Path) -> None:
    """A page of Parquet that is damaged: its footer is read, and the rows before it are not blamed."""
    path = tmp_path / "in.parquet"
    pq.write_table(
        pa.table({"text": TEXTS}), path, row_group_size=20, compression="none", use_dictionary=False
    )
    data = bytearray(path.read_bytes())
    offset = pq.ParquetFile(path).metadata.row_group(1).column(0).data_page_offset
    data[offset : offset + 40] = b"\xff" * 40
    path.write_bytes(data)
    with pytest.raises(
        BatchError, match=r"part-000001.parquet, which begins at row 20 of in.parquet, failed: "
    ):
        run_batch(bundle, "embed", path, tmp_path / "out", rows_per_part=20, workers=1)


def test_where_every_row_fails_the_command_does_too(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"txt": "a"}\n' * 3)
    done = planforge(
        "batch", bundle, "--task", "embed", "--input", tmp_path / "in.jsonl", "-o", tmp_path / "out"
    )
    assert done.returncode == 1
    assert "every row has an error; the column 'error' in" in done.stderr
    assert "errors        3" in done.stdout


@pytest.mark.parametrize("content", [b"", b"{}", b'{"format": 2, "job": {}, "plan": {}}', b"[1]"])
def test_a_description_that_is_damaged_says_so(
    bundle: Path, source: Path, tmp_path: Path, content: bytes
) -> None:
    run_batch(bundle, "embed", source, tmp_path / "out", workers=1)
    (tmp_path / "out" / "_job" / "job.json").write_bytes(content)
    with pytest.raises(BatchError, match="remove the folder, and begin anew"):
        run_batch(bundle, "embed", source, tmp_path / "out", workers=1)


def test_a_part_that_is_damaged_is_named(bundle: Path, source: Path, tmp_path: Path) -> None:
    run_batch(bundle, "embed", source, tmp_path / "out", workers=1)
    (tmp_path / "out" / "part-000000.parquet").write_bytes(b"")
    with pytest.raises(BatchError, match=r"part-000000.parquet cannot be read; remove it"):
        run_batch(bundle, "embed", source, tmp_path / "out", workers=1)


def test_an_address_names_a_folder(bundle: Path, source: Path, tmp_path: Path) -> None:
    """As s3://bucket/folder does; file:// is the one that is here."""
    result = run_batch(bundle, "embed", source.as_uri(), (tmp_path / "out").as_uri(), workers=1)
    assert result.rows == 63
    assert len(read(tmp_path / "out")) == 63


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    storage = Storage.of(tmp_path)
    with pytest.raises(RuntimeError), storage.write_parts("a") as stream:
        stream.write(b"half")
        raise RuntimeError
    assert not list(tmp_path.glob("[!_]*")) and not list((tmp_path / "_job").iterdir())


def test_the_command_says_what_it_did(bundle: Path, source: Path, tmp_path: Path) -> None:
    arguments: list[str | Path] = [
        "batch",
        bundle,
        "--task",
        "embed",
        "--input",
        source,
        "-o",
        tmp_path / "out",
    ]
    done = planforge(*arguments, "--workers", "1", "--column", "text", "--option", "pooling=cls")
    assert done.returncode == 0, done.stderr
    assert "rows          63" in done.stdout
    assert "errors        3" in done.stdout
    assert "looking at the input" in done.stderr
    again = json.loads(planforge(*arguments, "--json", "--option", "pooling=cls").stdout)
    assert (again["rows"], again["computed"], again["errors"], again["workers"]) == (63, 0, 3, {})
    bad = planforge(*arguments, "--option", "pooling")
    assert bad.returncode == 2 and "must be NAME=VALUE" in bad.stderr
    pair = planforge(
        "batch", bundle, "--task", "rank", "--input", source, "-o", tmp_path / "o", "--column", "text"
    )
    assert pair.returncode == 2 and "--column query=... --column text=..." in pair.stderr
