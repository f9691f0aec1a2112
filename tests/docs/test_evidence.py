"""The page of evidence quotes the figures of the files that it names."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from ..helpers.fault_table import escape
from ..helpers.paths import ROOT

RESULTS = ROOT / "benchmarks" / "results"
PAGE = (ROOT / "docs" / "evidence.md").read_text(encoding="utf-8")
NAMED = sorted(set(re.findall(r"`benchmarks/results/([\w.]+)`", PAGE)))
QUOTED = {
    "Faults that few batches show": "rare_faults",
    "Faults beside the graphs": "text_faults",
    "What each limit catches": "limits",
}


def read_record(subject: str) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((RESULTS / f"evidence_{subject}.json").read_text(encoding="utf-8"))
    return record


def read_table(heading: str) -> list[dict[str, str]]:
    """Return the rows of a section's table; its columns are named as a file's keys are."""
    (section,) = re.findall(rf"^## {heading}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    lines = [line[2:-2].split(" | ") for line in section.splitlines() if line.startswith("| ")]
    head = [name.lower().replace(" ", "_") for name in lines[0]]
    return [dict(zip(head, line, strict=True)) for line in lines[1:]]


def write_cells(row: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for key, value in row.items():
        yield key, f"{value:.2g}" if isinstance(value, float) else escape(str(value))


def find_result(subject: str) -> str:
    """Return what the summary says of a file: how it was tried, and the result."""
    (line,) = re.findall(rf"^\| \[.+\| `benchmarks/results/evidence_{subject}\.json` \|$", PAGE, re.MULTILINE)
    _, tried, result, _ = line[2:-2].split(" | ")
    return f"{tried}: {result}"


def test_every_file_is_named_and_has_what_its_columns_say() -> None:
    assert set(NAMED) == {"controls.json", *(path.name for path in RESULTS.glob("evidence_*.json"))}
    assert json.loads((RESULTS / "controls.json").read_text(encoding="utf-8"))
    for name in NAMED:
        if name != "controls.json":
            record = read_record(name.removeprefix("evidence_").removesuffix(".json"))
            assert record.keys() >= {"what", "command", "reference", "columns", "rows"}
            assert all(row.keys() == record["columns"].keys() for row in record["rows"]), name
            assert record["command"].removeprefix("pytest ") in PAGE


@pytest.mark.parametrize("heading", QUOTED)
def test_quoted_rows_are_those_of_the_file(heading: str) -> None:
    rows = [set(write_cells(row)) for row in read_record(QUOTED[heading])["rows"]]
    quoted = read_table(heading)
    assert 4 <= len(quoted) <= 10
    assert [row for row in quoted if not any(set(row.items()) <= own for own in rows)] == []


def test_counts_of_faults_are_those_of_the_files() -> None:
    record = read_record("graph_faults")
    totals = [dict(write_cells(row)) for row in record["totals"]]
    assert read_table("Faults in graphs that run") == totals
    counted = [row["graph"].rpartition(".")[2] for row in record["rows"] if row["in_totals"]]
    assert {row["graphs"]: row["planted"] for row in totals[1:-1]} == {
        name: str(count) for name, count in Counter(counted).items()
    }
    planted, caught, named = (totals[0][key] for key in ("planted", "caught", "named_rightly"))
    assert int(planted) == len(counted)
    result = find_result("graph_faults")
    assert result.startswith(f"{planted} faults ")
    assert result.endswith(f": {caught} caught, {named} named rightly")

    read = [(row["graph"].rpartition(".")[2], row["missed_before"]) for row in read_record("reading")["rows"]]
    for row in read_table("Faults that reading finds"):
        own = [missed for precision, missed in read if precision == row["precision"]]
        assert (row["planted"], row["found"], row["missed_by_results_alone"]) == (
            str(len(own)),
            str(len(own)),
            str(sum(own)),
        )
    missed = sum(missed for _, missed in read)
    assert find_result("reading").endswith(f": {len(read)} found; results alone miss {missed}")

    rare = len(read_record("rare_faults")["rows"])
    assert find_result("rare_faults").endswith(f": {rare} caught and named")
    texts = read_record("text_faults")["rows"]
    assert find_result("text_faults").endswith(f": {len(texts)} named by verify and by selftest")
    assert f"both commands miss {sum(row['missed_before'] for row in texts)} of them" in PAGE


def test_the_summary_of_the_limits_is_that_of_the_file() -> None:
    rows = read_record("limits")["rows"]
    assert all(row["without_a_fault"] <= row["allowed"] <= row["at_most"] for row in rows)
    most = max(row["it_measures"] / row["allowed"] for row in rows)
    result = find_result("limits")
    assert f"against {len(rows)} limits" in result
    assert f"at most {most:.1f} times" in result
