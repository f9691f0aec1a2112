"""The benchmarks' results as tables, as a plot and in the README."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import keep, resolve_cases
from benchmarks.case import Limit, Target
from benchmarks.common import environment
from benchmarks.comparison import comparisons
from benchmarks.machine import find_cache_mb, find_instruction_set
from benchmarks.measure import judge_target
from benchmarks.report import (
    BEGIN,
    BEST,
    END,
    WITHOUT_AMX,
    best_rows,
    case_section,
    name_files,
    summary,
    write_pages,
    write_section,
)

from ..helpers.paths import ROOT


def entry(system: str, precision: str, per_s: float, **more: Any) -> dict[str, Any]:
    did = {"precision": "fp32" if precision == "fp32" else "8-bit", "prefill_logit_rows": 1}
    return {
        **{"name": f"{system} {precision}", "system": system, "differences": {}, "differs": [], "did": did},
        **{"versions": {system.lower(): "1.2"}, "per_s": per_s, "file_mb": 140.4, "peak_rss_mb": 1234},
        **more,
    }


def case(entries: dict[str, Any], **more: Any) -> dict[str, Any]:
    machine = {"busy": 0.02, "read_gb_per_s": 33.7, "gflop_per_s": 150.0}
    return {
        **{"title": "Model: tokens/s", "group": "decode", "metric": "per_s", "date": "2026-01-02"},
        **{"machine": machine, "rounds": 5, "varies": {}, "entries": entries, "skipped": {}, "targets": []},
        **more,
    }


def side_by_side() -> dict[str, Any]:
    slow = entry("Peer", "fp32", 20.0, ttft_ms={"p50": 41.26, "p99": 50.0}, differs=["prefill_logit_rows"])
    slow |= {"differences": {"prefill_logit_rows": "it has to"}}
    slow["did"] = {**slow["did"], "prefill_logit_rows": 32}
    targets = [{"of": "ours", "to": "peer", "metric": "per_s", "at_least": 1.9, "found": 3.06, "met": True}]
    targets += [{"of": "ours", "metric": "peak_rss_mb", "at_most": 245, "found": 1234, "met": False}]
    targets += [{"of": "ours", "to": "x", "metric": "per_s", "at_least": 1, "found": None, "met": None}]
    entries = {"ours": entry("PlanForge", "fp32", 61.25), "peer": slow}
    return case(entries, skipped={"x": "no environment has x"}, targets=targets)


def test_a_case_shows_every_figure_difference_omission_and_target() -> None:
    text = case_section(side_by_side())
    assert "| PlanForge fp32 | 61.2 |  | 1,234 | 140 |" in text
    assert "| Peer fp32 | 20.0 | 41.3 | 1,234 | 140 |" in text
    assert "Peer fp32: prefill_logit_rows is 32 instead of 1: it has to" in text
    assert "without x: no environment has x" in text
    assert "ours over peer, per second: at least 1.9x, found 3.06: met" in text
    assert "ours, MB of memory: at most 245, found 1234: **missed**" in text
    assert "ours over x, per second: at least 1x: not measured" in text
    assert "33.7 GB/s" in text and "2% busy" in text


def test_the_summary_has_a_row_for_each_class_of_precision_and_the_best_of_variants() -> None:
    entries = {
        "a": entry("PlanForge", "fp32", 61.25),
        "b": entry("PlanForge", "int8", 173.4),
        "c": entry("Peer", "fp32", 20.0),
        "d": entry("Peer", "fp32", 25.04, label="variant"),
    }
    entries["b"] |= {"cosine_mean": 0.99951, "cosine_min": 0.991}
    lone = case({"a": entry("PlanForge", "int8", 5.0), "b": entry("PlanForge", "int4", 7.0)}, title="Alone")
    text = summary({"one": case(entries), "two": lone})
    assert "|  | PlanForge | Peer |" in text
    assert "| Model, fp32: tokens/s | 61.2 | 25 |" in text
    assert "| Model, 8-bit: tokens/s | 173 (cosine 0.9995, least 0.9910) |  |" in text
    assert "- Alone: int8 **5**; int4 **7**" in text


def test_a_case_of_encoders_shows_works_in_turns_and_in_a_row() -> None:
    entries = {
        "a": entry("PlanForge", "int8", 30.0, row_per_s=70.25, row_ms=114, ms={"p50": 267.0, "p99": 300.0}),
        "b": entry("Peer", "int8", 40.0, row_per_s=60.0, row_ms=133, ms={"p50": 200.0, "p99": 300.0}),
    }
    result = case(entries, group="encode", title="Encoder: texts/s")
    text = case_section(result)
    assert (
        "|  | per second in turns | per second in a row | whole ms p50 in turns | p99 | whole ms in a" in text
    )
    assert "| PlanForge int8 | 30.0 | 70.2 | 267 | 300 | 114 |" in text
    text = summary({"one": result})
    assert "| Encoder, in turns: texts/s | 30 | 40 |\n| Encoder, in a row: texts/s | 70.2 | 60 |" in text
    assert [row.title for row in comparisons({"one": result})] == ["Encoder: texts/s"]  # README and plot
    assert "in turns" not in case_section(side_by_side()) + summary({"one": side_by_side()})


def test_a_cosine_is_that_of_the_variant_that_is_shown() -> None:
    entries = {
        "slow": entry("PlanForge", "int8", 30.0, cosine_mean=1.0, cosine_min=1.0),
        "fast": entry("PlanForge", "w8a8", 40.0, cosine_mean=0.99, cosine_min=0.98),
        "peer": entry("Peer", "int8", 20.0, cosine_mean=0.97, cosine_min=0.96),
    }
    (row,) = comparisons({"one": case(entries)})
    assert row.labels["PlanForge"] == "40 (cosine 0.9900, least 0.9800)"
    assert row.labels["Peer"] == "20 (cosine 0.9700, least 0.9600)"


def test_of_times_the_best_variant_is_the_shortest() -> None:
    fast, slow = ({"start_s": {"p50": value, "p99": 9.0}} for value in (0.4, 0.7))
    entries = {"a": entry("PlanForge", "fp32", 1, **slow), "b": entry("Peer", "fp32", 1, **slow)}
    entries["c"] = entry("Peer", "fp32", 1, **fast)
    (row,) = comparisons({"one": case(entries, metric="start_s")})
    assert row.values == {"PlanForge": 0.7, "Peer": 0.4}


def test_results_go_into_the_pages_and_other_cases_keep_theirs(tmp_path: Path) -> None:
    page = tmp_path / "docs/benchmark.md"
    readme = tmp_path / "README.md"
    out = tmp_path / "results"
    out.mkdir()
    (page.parent / "pictures").mkdir(parents=True)
    for file in (page, readme):
        file.write_text(f"# Title\n\n{BEGIN}\nold\n{END}\n\nafter\n", encoding="utf-8")
    keep("later", side_by_side() | {"group": "translate", "title": "Second"}, out, tmp_path)
    keep(BEST[0], side_by_side(), out, tmp_path)
    text = page.read_text(encoding="utf-8")
    assert (
        text.startswith(f"# Title\n\n{BEGIN}\n") and text.endswith(f"{END}\n\nafter\n") and "old" not in text
    )
    assert text.index("| Model: tokens/s | 61.2 | 20 |") < text.index("| Second | 61.2 | 20 |")
    kind = environment()["instruction_set"]
    name = name_files(environment())
    picture = (out / f"{name}.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert f"(pictures/{name}.png)" in text and (page.parent / f"pictures/{name}.png").read_bytes() == picture
    assert "## Second" in (out / f"{name}.md").read_text(encoding="utf-8")
    best = readme.read_text(encoding="utf-8")
    assert "| Model: tokens/s | 61.2 | 20, Peer |" in best and "Second" not in best
    assert f"|  | {kind}: PlanForge | {kind}: best other |" in best
    keep(BEST[0], side_by_side() | {"title": "Again"}, out, tmp_path)
    assert "Model: tokens/s" not in page.read_text(encoding="utf-8") + readme.read_text(encoding="utf-8")


def make_suite(instruction_set: str, **cases: Any) -> dict[str, Any]:
    about = {"cpu": "A processor", "cores": 2, "instruction_set": instruction_set}
    return {"environment": about, "cases": cases, "left_out": {}}


def test_the_pages_have_each_kind_of_machine(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    for page in ("README.md", "docs/benchmark.md"):
        (tmp_path / page).write_text(f"{BEGIN}\n{END}\n", encoding="utf-8")
    fast = side_by_side()
    fast["entries"] = {
        **fast["entries"],
        "peer": entry("Peer", "fp32", 99.0),
        "best": entry("Best", "fp32", 101.0),
    }
    one = make_suite("AMX", **{BEST[0]: fast})
    other = make_suite("AVX2", **{BEST[0]: side_by_side(), BEST[1]: case({}, title="Nobody: tokens/s")})
    write_pages([one, other], tmp_path, tmp_path)
    readme = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "|  | AMX: PlanForge | AMX: best other | AVX2: PlanForge | AVX2: best other |" in readme
    assert "| Model: tokens/s | 61.2 | 101, Best | 61.2 | 20, Peer |" in readme
    page = (tmp_path / "docs/benchmark.md").read_text(encoding="utf-8")
    assert page.index("### 2 cores of A processor, AMX") < page.index("### 2 cores of A processor, AVX2")
    assert page.count("#### GPT-2 124M") == 2 and page.count(WITHOUT_AMX.strip()) == 1


def test_the_readme_says_that_llama_cpp_is_built_without_amx() -> None:
    entries = {"ours": entry("PlanForge", "int8", 200.0), "best": entry("llama.cpp", "q8_0", 163.0)}
    suites = [make_suite(kind, **{BEST[0]: case(entries)}) for kind in ("AMX", "AVX2")]
    assert "| 200 | 163, llama.cpp without AMX | 200 | 163, llama.cpp |" in best_rows(suites)


def test_weights_in_the_last_cache_have_no_share_of_the_memory_s_speed() -> None:
    shares = {"fp32": 0.93, "int8": 1.62}
    result = case({name: entry("PlanForge", name, 1, bandwidth_share=it) for name, it in shares.items()})
    result["machine"] = {**result["machine"], "last_cache_mb": 503.3}
    text = case_section(result)
    assert "| 93% |" in text and "| in the last cache |" in text and "162%" not in text
    assert "has a last cache of 503 MB" in text
    for size in (140.3, 0):  # too small for the files, or unknown
        result["machine"]["last_cache_mb"] = size
        assert "| 162% |" in case_section(result)


@pytest.mark.parametrize(
    ("flags", "machine", "found"),
    [
        ("avx2 avx512f avx512_vnni amx_int8", "x86_64", "AMX"),
        ("avx2 avx512f avx512_vnni", "x86_64", "AVX-512 VNNI"),
        ("avx2 avx_vnni", "x86_64", "AVX-VNNI"),
        ("avx2 avx512f", "AMD64", "AVX-512"),
        ("avx avx2", "x86_64", "AVX2"),
        ("sse2", "x86_64", "x86_64"),
        ("", "aarch64", "aarch64"),
    ],
)
def test_a_machine_is_known_by_its_instructions(flags: str, machine: str, found: str, tmp_path: Path) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text(f"flags : {flags}\n", encoding="utf-8")
    assert find_instruction_set(path, machine) == found


def test_the_last_cache_is_the_largest(tmp_path: Path) -> None:
    assert find_cache_mb(tmp_path / "none") == 0
    for number, size in enumerate(("48K", "2048K", "491520K")):
        (tmp_path / f"index{number}").mkdir()
        (tmp_path / f"index{number}/size").write_text(f"{size}\n", encoding="ascii")
    assert find_cache_mb(tmp_path) == pytest.approx(503.3, abs=0.1)


def test_a_page_without_the_place_for_results_is_refused(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(f"# Title\n{BEGIN}\n", encoding="utf-8")
    with pytest.raises(ValueError, match="benchmarks: end"):
        write_section(readme, "text")
    assert readme.read_text(encoding="utf-8") == f"# Title\n{BEGIN}\n"


@pytest.mark.parametrize("page", ["README.md", "docs/benchmark.md"])
def test_the_pages_have_the_place(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert text.count(BEGIN) == text.count(END) == 1 and text.index(BEGIN) < text.index(END)


@pytest.mark.parametrize(
    ("target", "found", "met"),
    [
        (Target("a", "b", "per_s", 2.0), 2.0, True),  # a rate: ours over theirs
        (Target("b", "a", "per_s", 0.6), 0.5, False),
        (Target("a", "b", "ttft_ms", 1.5), 1.6, True),  # a time: theirs over ours
        (Target("a", "c", "per_s", 1.0), None, None),
        (Target("a", "b", "start_s", 1.0), None, None),
        (Limit("a", "ttft_ms", 50.0), 50.0, True),
        (Limit("b", "ttft_ms", 50.0), 80.0, False),
        (Limit("c", "ttft_ms", 50.0), None, None),
    ],
)
def test_targets_are_judged_by_ratios_of_medians(
    target: Target | Limit, found: float | None, met: bool | None
) -> None:
    entries = {
        "a": {"per_s": 60.0, "ttft_ms": {"p50": 50.0, "p99": 1.0}},
        "b": {"per_s": 30.0, "ttft_ms": {"p50": 80.0, "p99": 1.0}},
    }
    verdict = judge_target(target, entries)
    assert (verdict["found"], verdict["met"]) == (found, met)


def test_cases_are_chosen_by_group_or_name(tmp_path: Path) -> None:
    names = [case.name for case in resolve_cases(["start", "decode-4bit-b1"], tmp_path)]
    starts = ["start-fp32", "start-fp32-prepared", "start-8bit", "start-8bit-prepared", "start-4bit"]
    assert names == [*starts, "decode-4bit-b1"]
    for unknown in ("speed", "start-1bit"):
        with pytest.raises(SystemExit, match=f"no case '{unknown}'; the groups are decode, prompt"):
            resolve_cases(["start", unknown], tmp_path)
