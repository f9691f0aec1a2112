"""`planforge bench`, and the default that it sets."""

from __future__ import annotations

import errno
import io
import json
import os
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from planforge.exporter.commands.bench import make_bench_tables, record_default
from planforge.exporter.errors import OutputError
from planforge.runtime import load
from planforge.runtime.apps.commands.console import print_tables
from planforge.runtime.apps.diagnostics.bench import BenchResult, Case
from planforge.runtime.apps.diagnostics.plots import draw_bench
from planforge.runtime.bundle.bundle import Bundle
from planforge.runtime.errors import InputError, ManifestError

from ..helpers.cli import error_line, planforge

WHERE = {"cpu": "A processor", "threads": 2, "threads_reason": "2 physical cores", "read_gb_per_s": 30.0}


def result(fp32: float, fp16: float, passed: bool = True, **changes: Any) -> BenchResult:
    """A measurement that found these speeds in every round."""
    numbers = {"p50": 1.0, "p99": 2.0}
    fields: dict[str, Any] = {
        **{"backend": "ort-cpu", "gate_passed": passed, "batch": 1, "prompt": 32, "new_tokens": 64},
        **{"ttft_ms": 5.0, "inter_token_ms": numbers, "latency_ms": numbers, "texts_per_s": 1.0},
        **{"load_ms": 100.0, "peak_rss_mb": 90.0, "bandwidth_share": 0.5, **changes},
    }
    cases = [
        Case(
            precision=name,
            artifact=f"decoder.portable.{name}",
            tokens_per_s=speed,
            **{"tokens_per_s_range": {"p25": speed, "p75": speed}, **fields},
        )
        for name, speed in (("fp32", fp32), ("fp16", fp16))
    ]
    return BenchResult(WHERE, tuple(cases))


def change_manifest(bundle: Path, change: Any) -> None:
    manifest = json.loads((bundle / "manifest.json").read_text(encoding="utf-8"))
    change(manifest)
    (bundle / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")


def test_a_bundle_is_measured_drawn_and_given_a_default(own_bundle: Path, tmp_path: Path) -> None:
    before = Bundle.open(own_bundle).manifest
    files = {path: path.read_bytes() for path in own_bundle.rglob("*.*") if path.name != "manifest.json"}
    settings = ("--new-tokens", 2, "--prompt-tokens", 4, "--threads", 1)
    done = planforge(
        *("bench", own_bundle, *settings, "--set-default"),
        *("--output", tmp_path / "out.json", "--plot", tmp_path / "out.png"),
    )
    assert done.returncode == 0, done.stderr
    cases = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))["cases"]
    assert [(c["precision"], c["prompt"], c["new_tokens"]) for c in cases] == [("fp32", 4, 2), ("fp16", 4, 2)]
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    after = Bundle.open(own_bundle)
    chosen = after.manifest.default_precision
    fp32, fp16 = cases
    fp16_is_faster = fp16["tokens_per_s_range"]["p25"] > fp32["tokens_per_s_range"]["p75"]
    assert chosen == "fp32" or fp16_is_faster
    assert f"load() and `planforge run` now take {chosen}: " in done.stdout
    assert after.manifest.export_id == before.export_id and after.manifest.files == before.files
    after.verify_files()
    assert {path: path.read_bytes() for path in files} == files
    shown = planforge("inspect", own_bundle).stdout
    assert f"{chosen} by default (set by `planforge bench`); also " in shown


def test_json_goes_to_stdout_too(dates_bundle: Path) -> None:
    done = planforge("bench", dates_bundle, "--precision", "fp32", "--new-tokens", 2, "--json")
    assert [case["precision"] for case in json.loads(done.stdout)["cases"]] == ["fp32"]
    assert Bundle.open(dates_bundle).manifest.default_precision is None


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_load_takes_the_default_unless_told_otherwise(own_bundle: Path, precision: str) -> None:
    found = result(*(2.0, 1.0) if precision == "fp32" else (1.0, 2.0))
    assert record_default(own_bundle, found).precision == precision
    with load(own_bundle) as model:
        assert model.artifact.precision == precision
    with load(own_bundle, precision="fp32") as model:
        assert model.artifact.precision == "fp32"


def test_a_default_is_replaced_by_the_next(own_bundle: Path) -> None:
    record_default(own_bundle, result(1.0, 2.0))
    record_default(own_bundle, result(2.0, 1.0))
    assert Bundle.open(own_bundle).manifest.default_precision == "fp32"


def test_what_has_not_passed_its_gate_is_no_default(own_bundle: Path) -> None:
    before = (own_bundle / "manifest.json").read_bytes()
    with pytest.raises(InputError, match="has passed verification"):
        record_default(own_bundle, result(1.0, 2.0, passed=False))
    assert (own_bundle / "manifest.json").read_bytes() == before


@pytest.mark.parametrize("gate", [{}, {"passed": False}, {"passed": "yes"}])
def test_load_refuses_a_default_whose_gate_has_not_passed(own_bundle: Path, gate: dict[str, Any]) -> None:
    def change(manifest: dict[str, Any]) -> None:
        manifest["default_precision"] = "fp16"
        for artifact in manifest["artifacts"]:
            artifact["gate"] = gate if artifact["precision"] == "fp16" else artifact["gate"]

    change_manifest(own_bundle, change)
    with pytest.raises(ManifestError, match=r"its default, decoder\.portable\.fp16, has not passed"):
        load(own_bundle)
    load(own_bundle, precision="fp16").close()  # asked for by name it is the user's to know


@pytest.mark.parametrize("call", ["write", "fsync", "replace"])
def test_a_default_that_cannot_be_written_leaves_the_bundle_as_it_was(
    own_bundle: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    files = {path: path.read_bytes() for path in own_bundle.parent.rglob("*") if path.is_file()}

    def full(*given: object, **options: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    opens = Path.open

    def half_full(path: Path, mode: str = "r", **options: Any) -> Any:
        if mode != "x":
            return opens(path, mode, **options)
        path.write_bytes(b"{")
        return full()

    if call == "write":
        monkeypatch.setattr(Path, "open", half_full)
    else:
        monkeypatch.setattr(os, call, full)
    with pytest.raises(OutputError, match=r"manifest\.json cannot be written: No space left"):
        record_default(own_bundle, result(1.0, 2.0))
    monkeypatch.undo()
    assert {path: path.read_bytes() for path in own_bundle.parent.rglob("*") if path.is_file()} == files
    Bundle.open(own_bundle).verify_files()


def test_kernels_that_were_compiled_for_a_gpu_outlive_a_new_default(own_bundle: Path) -> None:
    (own_bundle / "plans").mkdir(exist_ok=True)
    cache = own_bundle / "plans" / "decoder.plan.sm89.cache"
    cache.write_bytes(b"compiled here")
    record_default(own_bundle, result(1.0, 2.0))
    assert cache.read_bytes() == b"compiled here"


def test_errors_are_one_line(own_bundle: Path, tmp_path: Path) -> None:
    assert "precision='int3'" in error_line("bench", own_bundle, "--precision", "fp32,int3")
    assert "needs a file extension" in error_line("bench", own_bundle, "--plot", tmp_path / "picture")
    assert "batch=99" in error_line("bench", own_bundle, "--batch", 99)
    assert "is not a folder" in error_line("bench", tmp_path / "nowhere")
    target = tmp_path / "missing" / "out.json"
    settings = ("--precision", "fp32", "--new-tokens", 1)
    assert "cannot be written" in error_line("bench", own_bundle, *settings, "-o", target, code=1)


def test_nodes_that_compute_on_the_cpu_beside_a_gpu_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    nodes = {"gpu": 200, "cpu_shapes": 3, "cpu_others": 12, "captured": 2, "captured_bytes": 1_234_567}
    none: dict[str, Any] = {"bandwidth_share": None, "peak_rss_mb": None}
    file = io.StringIO()
    found = result(3.0, 4.0, backend="ort-cuda", nodes=nodes, **none)
    Console(width=80, file=file).print(*make_bench_tables(found, None))
    text = file.getvalue()
    assert "on CPU" in text and text.count("12 of 215") == 2 and "On CPU: nodes that compute there" in text
    assert "CUDA graphs captured: fp32 2 (1.2 MB), fp16 2 (1.2 MB)." in text
    assert max(map(len, text.splitlines())) <= 80
    print_tables(make_bench_tables(result(3.0, 4.0), None))
    assert "on CPU" not in capsys.readouterr().out


def test_the_table_leaves_out_what_no_case_has(capsys: pytest.CaptureFixture[str]) -> None:
    nothing: dict[str, Any] = {"ttft_ms": None, "inter_token_ms": None, "bandwidth_share": None}
    print_tables(make_bench_tables(result(3.0, 4.0, new_tokens=0, peak_rss_mb=None, **nothing), None))
    title, header, *lines = capsys.readouterr().out.splitlines()
    assert title == "32 tokens, batch 1, on ort-cpu"
    assert header.split() == ["precision", "tokens/s", "spread", "texts/s", "load", "ms", "verified"]
    assert "Measured on A processor with 2 threads (2 physical cores)." in lines
    assert "Memory speed" not in "".join(lines)


def test_the_table_fits_80_columns_and_says_why_a_precision_is_the_default() -> None:
    large: dict[str, Any] = {
        "inter_token_ms": {"p50": 123.45, "p99": 234.56},
        "peak_rss_mb": 12345.0,
        "load_ms": 12345.0,
    }
    wide: dict[str, Any] = {"tokens_per_s_range": {"p25": 900.0, "p75": 1100.0}, "ttft_ms": 1234.5, **large}
    found = result(1000.0, 1010.0, **wide)
    file = io.StringIO()
    Console(width=80, file=file).print(*make_bench_tables(found, found.best_default()))
    lines = file.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    row = next(line for line in lines if line.startswith("fp32"))
    assert row.split() == [
        *(
            "fp32",
            "1000.0",
            "±10.0%",
            "1234.5",
            "123.45",
            "234.56",
            "50%",
            "12345",
            "12345",
            "yes",
        )
    ]
    assert " ".join(map(str.strip, lines[-2:])).split("now take ")[1] == (
        "fp32: fp16 measured 1.0% faster, which is within the spread, and fp32 is more exact."
    )


@pytest.mark.parametrize(
    ("fp16", "why"),
    [
        (2000.0, "fp16: it is the fastest."),
        (1010.0, "fp32: fp16 is only 1.0% faster, and fp32 is more exact."),
        (900.0, "fp32: it is the fastest."),
    ],
)
def test_why_a_precision_became_the_default(fp16: float, why: str) -> None:
    found = result(1000.0, fp16)
    assert str(make_bench_tables(found, found.best_default())[-1]).endswith(f"now take {why}")


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_a_picture_has_a_panel_for_each_figure_that_all_have(tmp_path: Path, ending: str) -> None:
    draw_bench(result(3.0, 4.5), tmp_path / f"all.{ending}")
    draw_bench(result(3.0, 4.5, ttft_ms=None, peak_rss_mb=None), tmp_path / f"speed.{ending}")
    if ending == "svg":
        titles = [(tmp_path / f"{n}.svg").read_text(encoding="utf-8") for n in ("all", "speed")]
        assert ["peak memory, MB" in text for text in titles] == [True, False]
        assert ["tokens/s" in text for text in titles] == [True, True]
    with pytest.raises(InputError, match="cannot be written"):
        draw_bench(result(1.0, 1.0), tmp_path / "missing" / f"x.{ending}")
