"""Every case of the benchmarks runs with PlanForge, on tiny models, as the suite runs it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from benchmarks import cases as all_cases
from benchmarks import measure as measuring
from benchmarks.case import Case, Entry, Work
from benchmarks.cases import GROUPS
from benchmarks.checkpoints import TINY
from benchmarks.child import answer, open_session
from benchmarks.measure import measure
from benchmarks.process import Process, ProcessError
from benchmarks.smoke import shrink
from benchmarks.systems import system_named
from benchmarks.systems.planforge import MAX_BATCH
from benchmarks.workshop import Prepared, Workshop
from planforge.exporter import export

from ..conftest import Once


class ProcessHere:
    """A `Process` that answers in this one, so that a case takes a second."""

    def __init__(self, python: Path, order: Mapping[str, Any], log: Path) -> None:
        order = json.loads(json.dumps(order))
        self.start_seconds = 0.1
        self.session, self.known = open_session(system_named(order["system"]), order)

    def ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads(
                json.dumps(answer(self.session, json.loads(json.dumps(message)), self.known))
            )
        except Exception as error:
            raise ProcessError(f"{type(error).__name__}: {error}") from error
        return found

    def close(self) -> None:
        session: Any = self.session
        session.model.close()

    def __enter__(self) -> ProcessHere:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class TinyWorkshop(Workshop):
    """Has one bundle for each kind of work.

    Args:
        work: a folder.
        bundles: by `Work.kind`, or by a checkpoint's name; that for "generate" has every precision, those of
            other kinds fp32.
        checkpoint: a folder with a config.json of GPT-2.
    """

    def __init__(self, work: Path, bundles: Mapping[str, Path], checkpoint: Path) -> None:
        super().__init__(work, pythons=())
        self.bundles = bundles
        self.gpt2 = checkpoint

    def prepare(self, entry: Entry) -> Prepared:
        return Prepared(
            python=Path(sys.executable),
            versions={},
            checkpoint=self.gpt2,
            folder=self.bundles.get(entry.checkpoint) or self.bundles[entry.work.kind],
            weights_sha256=f"of {entry.checkpoint}",
            file_bytes=1_000_000,
            read_bytes=100_000_000,
        )


@pytest.fixture(scope="session")
def tiny_gpt2(once: Callable[[str], Once]) -> Path:
    """A random GPT-2 with the published vocabulary in the precisions of the cases, and its checkpoint."""
    with once("benchmarks-gpt2") as (folder, first):
        if first:
            TINY["gpt2-124m"](folder / "checkpoint")
            export(
                folder / "checkpoint",
                folder / "bundle",
                precision=["fp32", "int8", "int4", "int8-kv8"],
                target=["cpu"],
                max_batch=MAX_BATCH,
                verify=False,
            )
    return folder


@pytest.fixture(scope="session")
def tiny_windowed(once: Callable[[str], Once]) -> Path:
    """The bundle of a model of windows, which takes longer texts than the GPT-2."""
    with once("benchmarks-windowed") as (folder, first):
        if first:
            TINY["windowed-0.5b-sure"](folder / "checkpoint")
            export(
                folder / "checkpoint",
                folder / "bundle",
                precision=["fp32", "int8"],
                target=["cpu"],
                verify=False,
            )
    return folder / "bundle"


@pytest.fixture
def workshop(
    tmp_path: Path, tiny_gpt2: Path, tiny_windowed: Path, minilm_bundle: Path, marian_bundle: Path
) -> TinyWorkshop:
    bundles = {"generate": tiny_gpt2 / "bundle", "embed": minilm_bundle, "translate": marian_bundle}
    bundles["windowed-0.5b-sure"] = tiny_windowed
    return TinyWorkshop(tmp_path, bundles, tiny_gpt2 / "checkpoint")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No pauses, a machine that is not measured, and two sentences instead of those that are downloaded."""
    monkeypatch.setattr(measuring, "PAUSE", 0)
    monkeypatch.setattr(measuring, "Process", ProcessHere)
    machine = {"busy": 0.0, "read_gb_per_s": 10.0, "gflop_per_s": 100.0}
    monkeypatch.setattr(measuring, "measure_machine", lambda threads: machine)
    monkeypatch.setattr(all_cases.encode, "sentences", lambda count, work: ("One.", "Two."))


def own_entries(case: Case) -> Case:
    """The case with PlanForge alone, on one thread, at work that the bundles can do, without a warm-up."""
    small = shrink(case)
    entries = {
        name: replace(entry, threads=1)
        if entry.work.kind == "generate"
        else replace(entry, threads=1, precision="fp32", work=short(entry.work))
        for name, entry in small.entries.items()
        if entry.system == "planforge"
    }
    return replace(small, entries=entries, reference="")


def short(work: Work) -> Work:
    """A translation for a model with another vocabulary and a short context."""
    if work.kind != "translate":
        return work
    return replace(work, texts=("a b",) * len(work.texts), new_tokens=5)


@pytest.mark.parametrize("group", GROUPS)
def test_every_case_of_a_group_runs(group: str, workshop: TinyWorkshop) -> None:
    for case in GROUPS[group](workshop.work):
        own = own_entries(case)
        result = measure(own, workshop, rounds=1)
        assert result["skipped"] == {}, case.name
        assert list(result["entries"]) == list(own.entries), case.name
        for name, entry in own.entries.items():
            found = result["entries"][name]
            if entry.settings.get("engine_clock"):
                assert 0 < found["outside_ms"] < found["cpu_ms"], f"{case.name}: {name}"
            elif entry.work.kind == "generate":
                assert 0 < found["ttft_ms"]["p50"] <= found["ms"]["p99"], f"{case.name}: {name}"
                assert found["did"]["new_tokens"] == [entry.work.new_tokens] * len(entry.work.texts)


def dictated_cases(work: Path) -> list[Case]:
    found = [case for case in GROUPS["lookup"](work) if next(iter(case.entries.values())).work.dictated]
    assert len(found) >= 4
    return found


@pytest.mark.parametrize("entry_name", ["fp32 plain", "int8 prompt-lookup"])
def test_a_dictated_answer_is_the_dictated_text(workshop: TinyWorkshop, entry_name: str) -> None:
    for case in dictated_cases(workshop.work):
        entry = case.entries[entry_name]
        bundle = workshop.prepare(entry).folder
        session: Any = system_named("planforge").generate(bundle, entry.precision, 1, {})
        asked = json.loads(json.dumps({**entry.work.to_json(), "save": ""}))
        tokens = session.model.tokenizer.encode(entry.work.dictated)
        for _ in range(2):
            (found,) = session.run(asked, lambda: None)
            assert found == tokens[: entry.work.new_tokens]
            assert entry.work.dictated.startswith(session.model.tokenizer.decode(found))
        assert (session.answers[0].accepted_tokens > 0) == bool(entry.work.options)  # edits repeat the prompt
        (free,) = session.run({**asked, "dictated": ""}, lambda: None)
        assert free != found  # nothing is left of it afterwards
        session.model.close()


def test_a_dictated_case_runs_in_its_own_processes(
    workshop: TinyWorkshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "Process", Process)
    case = own_entries(dictated_cases(workshop.work)[0])
    entries = {name: entry for name, entry in case.entries.items() if entry.precision == "fp32"}
    result = measure(replace(case, entries=entries), workshop, rounds=1)
    assert result["skipped"] == {}
    assert result["entries"]["fp32 prompt-lookup"]["same_tokens"] == 1.0
