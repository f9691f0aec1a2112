"""`planforge selftest`: its exit codes, its JSON and its table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from planforge.runtime.apps.check.cases import Skipped
from planforge.runtime.apps.check.outcome import Comparison
from planforge.runtime.apps.check.selftest import SelftestResult
from planforge.runtime.apps.commands.selftest import list_remarks, make_row

from ..helpers.cli import error_line, planforge
from ..helpers.selftest import change_weight


def test_a_bundle_that_passes(demo_bundle: Path) -> None:
    done = planforge("selftest", demo_bundle, "--backend", "ort-cpu", "--precision", "fp16")
    assert done.returncode == 0, done.stderr
    assert [line.rpartition(" (")[0] for line in done.stderr.splitlines()] == [
        "checking files",
        "comparing how texts are read",
        "loading it",
        "decoder.portable.fp16",
        "texts to texts",
    ]
    title, texts, graph, untested = done.stdout.strip().split("\n\n")
    name, _, *text_rows = texts.splitlines()
    assert name == "manifest and tokenizer"
    assert [row.split()[-1] for row in text_rows] == ["passed"] * 5
    graph, header, *rows = graph.splitlines()
    assert title.startswith(f"passed: {demo_bundle.name} on ort-cpu against PyTorch's answers, ")
    assert graph == "decoder.portable.fp16"
    assert header.split()[:3] == ["case", "closest", "metric"]
    assert len(rows) == 10
    assert all(row.split()[-1] == "passed" for row in rows)
    way = f"planforge selftest {demo_bundle} --precision fp32"
    assert untested == f"tested: fp16; left out: fp32 ({way})"
    assert sum("17 of 17" in row for row in rows) == 2


FIELDS = ["passed", "backend", "artifacts", "texts", "comparisons", "skipped", "nodes", "seconds"]


def test_json_has_every_comparison(demo_bundle: Path) -> None:
    done = planforge("selftest", demo_bundle, "--backend", "ort-cpu", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert list(found) == FIELDS
    assert (found["passed"], found["backend"], found["skipped"]) == (True, "ort-cpu", [])
    assert found["artifacts"] == ["decoder.ort.fp32"]
    for comparison in found["comparisons"]:
        assert {"artifact", "backend", "case", "metrics", "limits", "passed"} <= set(comparison)
        assert comparison["limits"].keys() <= comparison["metrics"].keys()


def test_an_engine_that_gives_other_answers_exits_with_1(own_bundle: Path) -> None:
    change_weight(own_bundle, "decoder.ort.fp32", "h.2.mlp.c_proj.weight.transposed", 1.01)
    done = planforge("selftest", own_bundle)
    assert (done.returncode, "error" in done.stderr) == (1, False)
    assert done.stdout.startswith(f"FAILED: {own_bundle.name} on ort-cpu")
    lines = [line for line in done.stdout.splitlines() if line.startswith("FAILED: decoder.ort.fp32, ")]
    told = [line for line in lines if "prefill and decode, batch 1: max_error is " in line]
    assert told and told[0].endswith(" at most 0.0001 is allowed")
    as_json = planforge("selftest", own_bundle, "--json")
    assert as_json.returncode == 1
    assert json.loads(as_json.stdout)["passed"] is False


def test_what_cannot_be_tested_is_one_line(own_bundle: Path, whole_bundle: Path) -> None:
    assert "has no golden data to test with" in error_line("selftest", whole_bundle, "--json", code=1)
    line = error_line("selftest", own_bundle, "--backend", "tensorrt-rtx", code=1)
    assert "no NVIDIA driver was found" in line
    assert "device=-2 must be" in error_line("selftest", own_bundle, "--device", "-2")
    (own_bundle / "manifest.json").write_text("{", encoding="utf-8")
    assert "is not valid JSON" in error_line("selftest", own_bundle, code=1)
    assert "is not a folder" in error_line("selftest", own_bundle / "nothing")


def compared(value: float | None, **others: object) -> Comparison:
    fields = {"artifact": "decoder.ort.int8", "backend": "ort-cpu", "case": "greedy, batch 2, padded"}
    limits = {"max_error": 0.5, "mean_kl": 0.001, "exact": 0.0}
    metrics = {"max_error": 0.1, "mean_kl": value, "exact": 0.0}
    return Comparison(**{**fields, "metrics": metrics, "limits": limits, **others})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.0001, ["max_error", "0.1", "0.5"]),
        (0.0009, ["mean_kl", "0.0009", "0.001"]),
        (None, ["mean_kl", "not finite", "0.001"]),
    ],
)
def test_a_row_shows_what_is_closest_to_its_limit(value: float | None, shown: list[str]) -> None:
    assert make_row(compared(value))[1:4] == shown


def test_what_the_table_has_no_room_for_is_told() -> None:
    flip = {"prompt": "a", "common": "b", "common_tokens": 4, "want": "\x1b[31m", "got": " the"}
    flip |= {"margin": 0.00005, "allowed": 0.01}
    comparisons = (compared(0.1, failures=("mean_kl is 0.1",)), compared(0.0, divergence=flip))
    skipped = (Skipped("decoder.ort.int8", "full context", "256 tokens are needed, it takes 40"),)
    result = SelftestResult("ort-cpu", ("decoder.ort.int8",), comparisons, skipped, 1.0)
    assert list(list_remarks(result)) == [
        "FAILED: decoder.ort.int8, greedy, batch 2, padded: mean_kl is 0.1",
        "rounding: decoder.ort.int8, greedy, batch 2, padded: behind 4 tokens ' the' instead of '\\x1b[31m',"
        " by a margin of 5e-05 (at most 0.01 is rounding)",
        "skipped: decoder.ort.int8, full context: 256 tokens are needed, it takes 40",
    ]
    nothing = SelftestResult("ort-cpu", ("decoder.ort.int8",), (), skipped, 1.0)
    assert next(list_remarks(nothing)) == "nothing was compared, which is no pass"
