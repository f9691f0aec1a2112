"""The benchmarks' processes, with systems that are made up here: turns, figures, and what goes wrong."""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks import measure as measuring
from benchmarks.alike import UnlikeWorkError
from benchmarks.case import Case, Entry, Limit, Target, Work
from benchmarks.measure import measure, same_share
from benchmarks.process import Process, ProcessError
from benchmarks.workshop import Workshop

# Adds 1 to the last token, forever; its precision says what it does wrong.
FAKE = """
import os, time
from pathlib import Path
import numpy as np
from benchmarks.systems.system import MEAN, Skip, System

class Session:
    def __init__(self, name, how):
        self.name, self.how = name, how
    def run(self, work, tick):
        if self.how == "breaks at c" and work["texts"] == [" c d"]:
            raise RuntimeError("it broke at c")
        if work["new_tokens"] > 1:
            with Path(__file__).with_name("order").open("a") as file:
                file.write(f"{self.name}:{os.getpid()}\\n")
        if work["kind"] == "embed":
            vectors = np.eye(len(work["texts"]), 4, dtype=np.float32)
            return vectors[::-1] if self.how == "turned" else vectors
        count = work["new_tokens"] - (self.how == "ends early" and work["new_tokens"] > 1)
        self.runs = getattr(self, "runs", 0) + 1
        step = 2 if self.how == "counts by two" else 1
        rows = [[prompt[-1] + 1 + step * i for i in range(count)] for prompt in work["prompts"]]
        for _ in range(count):
            time.sleep(0.001)
            tick()
        return rows
    def did(self, work):
        if work["kind"] == "embed":
            return {"texts_sha256": "", "tokens": 9, **MEAN}
        did = {"prompts": work["prompts"], "beams": 1, "eos": "off", "cache": "fp32"}
        changed = self.how == "changes" and self.runs > 3
        return {**did, "prefill_logit_rows": 32 if self.how == "all rows" or changed else 1}

class Fake(System):
    name, packages = "NAME", PACKAGES
    classes = {"fp32": "fp32", "int8": "8-bit", "ends early": "fp32", "all rows": "fp32", "turned": "fp32",
               "broken": "fp32", "breaks at c": "fp32", "changes": "fp32", "unable": "fp32",
               "counts by two": "fp32"}
    differences = DIFFERENCES
    def prepare(self, checkpoint, kind, precision, out, settings):
        print("this goes to the log, not among the answers")
        if precision == "unable":
            raise Skip("it can't do this")
        (out / "model.bin").write_bytes(bytes(1000000))
    def generate(self, model, precision, threads, settings):
        if precision == "broken":
            raise RuntimeError("it broke")
        assert settings["batch"] == 1 and settings["tokens"] == 6
        return Session("NAME", precision)
    def embed(self, model, precision, threads, settings):
        return Session("NAME", precision)

SYSTEM = Fake()
"""
WORK = Work("generate", (" a b",), ((10, 20),), 4)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the systems one, two, declared and absent, and a machine that is not measured."""
    declared = '{"prefill_logit_rows": "it knows no better"}'
    for name, packages, differences in (
        ("one", '("numpy",)', "{}"),
        ("two", '("numpy",)', "{}"),
        ("declared", '("numpy",)', declared),
        ("absent", '("numpy", "no-such-package")', "{}"),
    ):
        code = FAKE.replace("NAME", name).replace("PACKAGES", packages).replace("DIFFERENCES", differences)
        (tmp_path / f"fake_{name}").mkdir()
        (tmp_path / f"fake_{name}" / "system.py").write_text(code, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(measuring, "PAUSE", 0)
    machine = {"busy": 0.0, "read_gb_per_s": 10.0, "gflop_per_s": 100.0}
    monkeypatch.setattr(measuring, "measure_machine", lambda threads: machine)
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("fake_")]:
        del sys.modules[name]


class OneCheckpoint(Workshop):
    """Every name is the same tiny checkpoint."""

    def checkpoint(self, name: str) -> Path:
        folder = self.work / "checkpoint"
        folder.mkdir(exist_ok=True)
        (folder / "model.safetensors").write_bytes(b"weights")
        config = {"model_type": "gpt2", "n_positions": 8, "n_embd": 4, "n_layer": 2, "vocab_size": 50}
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        return folder


def entry(system: str, precision: str = "fp32", work: Work = WORK) -> Entry:
    return Entry(f"fake_{system}.system", precision, "any", work)


def case(**entries: Entry) -> Case:
    return Case("fakes", "fakes", "Fakes", entries, warm_up=0)


def order_of(folder: Path, system: str) -> list[str]:
    return (folder / f"fake_{system}" / "order").read_text(encoding="utf-8").split()


def test_systems_are_measured_side_by_side(folder: Path) -> None:
    targets = (
        Target("one", "two", "per_s", 1e-9),
        Target("one", "two", "ttft_ms", 1e9),
        Limit("one", "file_mb", 2),
    )
    result = measure(
        replace(case(one=entry("one"), two=entry("two")), targets=targets), OneCheckpoint(folder), 3
    )
    assert result["skipped"] == {} and list(result["entries"]) == ["one", "two"]
    found = result["entries"]["two"]
    assert found["name"] == "two fp32" and found["versions"] == {"numpy": np.__version__}
    assert len(found["seconds"]) == 3 and found["per_s"] > 0 and found["same_tokens"] == 1
    assert "same_tokens" not in result["entries"]["one"]  # the one that it is compared with
    assert 0 <= found["ttft_ms"]["p50"] <= found["ttft_ms"]["p99"] and found["inter_token_ms"]["p99"] >= 0
    assert found["file_mb"] == 1.0 and found["peak_rss_mb"] > 5
    assert found["did"]["new_tokens"] == [4] and found["did"]["threads"] == 2
    assert [target["met"] for target in result["targets"]] == [True, False, True]


def test_each_runs_in_one_process_of_its_own_and_is_warmed_up_once(folder: Path) -> None:
    measure(case(one=entry("one"), two=entry("two")), OneCheckpoint(folder), 2)
    one = order_of(folder, "one")
    two = order_of(folder, "two")
    assert len(one) == len(two) == 3 and len({*one}) == len({*two}) == 1 and not {*one} & {*two}


def test_what_is_quick_is_warmed_up_for_a_time_in_each_of_its_processes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = itertools.count()
    clock = SimpleNamespace(monotonic=lambda: 0.04 * next(ticks), sleep=time.sleep)
    monkeypatch.setattr(measuring, "time", clock)
    repeated = replace(case(one=entry("one")), warm_up=0.2, processes=2)
    assert len(measure(repeated, OneCheckpoint(folder), 2)["entries"]["one"]["seconds"]) == 4
    processes = Counter(order_of(folder, "one"))
    assert len(processes) == 2 and min(processes.values()) > 3


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The systems that were asked to work, one after the other."""
    names: list[str] = []
    ask = Process.ask

    def noted(process: Process, message: Any) -> dict[str, Any]:
        if "mode" not in message:
            name = process.log.name.split("-")[1]
            names.append(name.removeprefix("fake_").removesuffix(".system"))
        return ask(process, message)

    monkeypatch.setattr(Process, "ask", noted)
    return names


def test_turns_move_on_by_one(folder: Path, asked: list[str]) -> None:
    measure(case(one=entry("one"), two=entry("two")), OneCheckpoint(folder), 3)
    assert asked == ["one", "two", "one", "two", "two", "one", "one", "two"]


def test_after_the_turns_each_system_works_in_a_row(folder: Path, asked: list[str]) -> None:
    turns = case(one=entry("one"), two=entry("two"))
    found = measure(replace(turns, in_a_row=3), OneCheckpoint(folder), 1)["entries"]["two"]
    assert asked == ["one", "two", "one", "two", *["one"] * 3, *["two"] * 3]
    assert found["row_per_s"] == pytest.approx(4e3 / found["row_ms"], rel=0.01) and found["row_ms"] >= 4
    assert len(found["seconds"]) == 1  # a work in a row is no turn
    assert "row_ms" not in measure(turns, OneCheckpoint(folder), 1)["entries"]["two"]


def test_who_fails_in_a_row_is_left_out_and_other_work_there_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UnlikeWorkError, match="of one is 1, of one at work 1 in a row 32"):
        measure(replace(case(one=entry("one", "changes")), in_a_row=2), OneCheckpoint(folder), 1)

    def fail(process: Process, run: measuring.Run, works: int) -> None:
        if run.entry.system == "fake_two.system":
            raise ProcessError("it broke")

    monkeypatch.setattr(measuring, "work_in_a_row", fail)
    both = replace(case(one=entry("one"), two=entry("two")), in_a_row=2)
    result = measure(both, OneCheckpoint(folder), 1)
    assert list(result["entries"]) == ["one"] and result["skipped"] == {"two": "failed: it broke"}


def test_entries_of_one_system_share_a_process_unless_they_start_afresh(folder: Path) -> None:
    other = replace(WORK, texts=(" c d",), prompts=((30, 40),))
    shared = replace(case(near=entry("one"), far=entry("one", work=other)), varies={"prompts": "on purpose"})
    measure(shared, OneCheckpoint(folder), 1)
    assert len({*order_of(folder, "one")}) == 1
    fresh = measure(replace(case(one=entry("two")), fresh=True), OneCheckpoint(folder), 2)
    assert len({*order_of(folder, "two")}) == 3  # the first is not counted
    assert len(fresh["entries"]["one"]["seconds"]) == 2
    assert fresh["entries"]["one"]["start_s"]["p50"] > 0


def test_unlike_work_is_refused(folder: Path) -> None:
    with pytest.raises(UnlikeWorkError, match="prefill_logit_rows of one is 1, of two 32"):
        measure(case(one=entry("one"), two=entry("two", "all rows")), OneCheckpoint(folder), 1)
    with pytest.raises(UnlikeWorkError, match="two made 3 new tokens in a row instead of 4"):
        measure(case(one=entry("one"), two=entry("two", "ends early")), OneCheckpoint(folder), 1)
    with pytest.raises(UnlikeWorkError, match=r"precision of one is 'fp32', of two '8-bit'"):
        measure(case(one=entry("one"), two=entry("two", "int8")), OneCheckpoint(folder), 1)
    with pytest.raises(UnlikeWorkError, match="prefill_logit_rows of one is 1, of one in round 2 32"):
        measure(case(one=entry("one", "changes")), OneCheckpoint(folder), 3)
    declared = measure(case(one=entry("one"), two=entry("declared", "all rows")), OneCheckpoint(folder), 1)
    assert declared["entries"]["two"]["differs"] == ["prefill_logit_rows"]


def test_other_tokens_than_the_references_are_refused_before_anything_is_timed(folder: Path) -> None:
    alike = replace(case(one=entry("one"), two=entry("two")), reference="fake_declared.system")
    assert measure(alike, OneCheckpoint(folder), 1)["skipped"] == {}
    unlike = replace(case(one=entry("one"), two=entry("two", "counts by two")), reference=alike.reference)
    timed = len(order_of(folder, "one"))
    with pytest.raises(
        UnlikeWorkError, match=r"two found other tokens than fake_declared\.system in fp32; 25% of them"
    ):
        measure(unlike, OneCheckpoint(folder), 1)
    assert len(order_of(folder, "one")) == timed + 1  # it was warmed up


def test_who_cannot_take_part_is_left_out_with_the_reason(folder: Path) -> None:
    entries = {
        "absent": entry("absent"),
        "unable": entry("one", "unable"),
        "broken": entry("two", "broken"),
        "one": entry("one"),
    }
    result = measure(case(**entries), OneCheckpoint(folder), 1)
    assert list(result["entries"]) == ["one"]
    assert result["skipped"]["absent"].startswith("no environment has numpy and no-such-package")
    assert result["skipped"]["unable"] == "it can't do this"
    assert result["skipped"]["broken"].startswith("failed: RuntimeError: it broke (see ")
    assert measure(case(absent=entry("absent")), OneCheckpoint(folder), 1)["entries"] == {}


def test_who_fails_at_one_work_goes_on_with_the_others(folder: Path) -> None:
    other = replace(WORK, texts=(" c d",), prompts=((30, 40),))
    entries = {"far": entry("one", "breaks at c", other), "near": entry("one", "breaks at c")}
    result = measure(replace(case(**entries), varies={"prompts": "on purpose"}), OneCheckpoint(folder), 2)
    assert list(result["entries"]) == ["near"] and len(result["entries"]["near"]["seconds"]) == 2
    assert "it broke at c" in result["skipped"]["far"]


def test_vectors_are_compared_by_their_cosine(folder: Path) -> None:
    texts = Work("embed", ("a", "b", "c"))
    found = measure(
        case(one=entry("one", work=texts), two=entry("two", "turned", texts)), OneCheckpoint(folder), 1
    )["entries"]
    assert (found["one"]["cosine_mean"], found["one"]["cosine_min"]) == (1.0, 1.0)
    assert (found["two"]["cosine_mean"], found["two"]["cosine_min"]) == (round(1 / 3, 5), 0.0)
    assert found["two"]["did"]["vectors"] == [3, 4] and "ttft_ms" not in found["two"]


def test_a_conversion_is_kept_until_the_weights_or_the_code_change(folder: Path) -> None:
    def again(keep: bool = False) -> int:
        return OneCheckpoint(folder, keep=keep).prepare(entry("one")).file_bytes

    def changed(part: str) -> None:
        """The folder is written by hand, and by its stamp from something else."""
        (folder / "any" / "one-fp32" / "model.bin").write_bytes(b"by hand")
        stamp = folder / "any" / "one-fp32.json"
        stamp.write_text(json.dumps({**json.loads(stamp.read_text(encoding="utf-8")), part: "other"}))

    assert again() == 1000000
    changed("code")
    assert again(keep=True) == len(b"by hand")
    assert again() == 1000000
    for part in ("weights", "numpy"):
        changed(part)
        assert again(keep=True) == 1000000


def test_a_process_that_ends_says_so(folder: Path) -> None:
    with pytest.raises(ProcessError, match=r"ModuleNotFoundError: .*no_such_system.* \(see .*log\)"):
        Process(Path(sys.executable), {"mode": "open", "system": "no_such_system.x"}, folder / "log")
    assert "Traceback" in (folder / "log").read_text(encoding="utf-8")


def test_the_share_of_tokens_before_the_first_other_one() -> None:
    assert same_share([[1, 2, 3, 4], [5, 6, 7, 8]], [[1, 2, 9, 4], [5, 6, 7, 8]]) == 0.75
    assert same_share([[1, 2]], [[1, 2]]) == 1
    assert same_share([[1, 2]], [[1]]) == 0.5
