"""The command, as a user types it."""

from __future__ import annotations

import json
import os
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from planforge.exporter.commands.summary import summarize_bundle
from planforge.exporter.verification.golden_answers import GOLDEN
from planforge.runtime.apps.check.texts import FILES
from planforge.runtime.apps.commands.tables import format_size

from ..helpers.cli import error_line, planforge, planforge_process
from ..helpers.models import random_gpt2, tiny_gpt2
from ..helpers.text import write_gpt2

AWKWARD = [
    "Once upon a time",
    "Hello",
    "The quick brown fox jumps over the lazy dog.",
    "  two spaces before, and after  ",
    "\ttab and\nnewline\r\n",
    "\n\n\n",
    "def f(x):\n    return x ** 2  # square\n",
    "for (int i = 0; i < 10; ++i) { a[i] += 1; }",
    "SELECT * FROM t WHERE a != 'b';",
    "道可道，非常道。",
    "こんにちは世界",
    "안녕하세요",
    "Привет, мир!",
    "مرحبا بالعالم",
    "🙂",
    "👩‍👩‍👧‍👦 family 🇫🇷 flag",
    "naïve café Straße ﬁ",
    "e\u0301 combining",
    "x = 3.14159e-10; y = 1,000,000",
    "(((([[[{{{}}}]]]))))!!??...",
    "<|endoftext|> is text here",
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random GPT-2 with the published vocabulary, written by transformers."""
    folder = tmp_path_factory.mktemp("commands") / "checkpoint"
    tiny_gpt2(folder, vocab_size=50257, n_positions=128, bos_token_id=50256, eos_token_id=50256)
    return write_gpt2(folder)


def transformers_greedy(model: Any, tokenizer: Any, prompt: str) -> list[int]:
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    mask = torch.ones_like(ids)
    out = model.generate(ids, attention_mask=mask, max_new_tokens=40, do_sample=False, pad_token_id=50256)
    return out[0, ids.shape[1] :].tolist()  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def bundle(checkpoint: Path) -> Path:
    """The checkpoint as the command exports it, with a folder for temporary files beside it."""
    bundle = checkpoint.parent / "B"
    temporary = checkpoint.parent / "temporary"
    temporary.mkdir()
    options = ["--target", "portable", "--verify", "quick", "--json"]
    environment = {**os.environ, "TMPDIR": str(temporary)}
    exported = planforge_process("export", checkpoint, "-o", bundle, *options, env=environment)
    assert exported.returncode == 0, exported.stderr
    assert json.loads(exported.stdout)["family"] == "gpt2"
    return bundle


def test_an_export_leaves_nothing_in_the_folder_for_temporary_files(bundle: Path) -> None:
    """Neither ONNX Runtime's telemetry nor PyTorch's compiler, which nothing here needs."""
    assert list(bundle.with_name("temporary").iterdir()) == []


def test_export_and_run_give_transformers_greedy_tokens(
    checkpoint: Path, bundle: Path, tmp_path: Path
) -> None:
    lines = tmp_path / "prompts.jsonl"
    lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in AWKWARD), encoding="utf-8")
    done = planforge_process("run", bundle, "--input", lines, "--max-new-tokens", "40", "--json")
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert [answer["prompt"] for answer in answers] == AWKWARD
    model = transformers.GPT2LMHeadModel.from_pretrained(checkpoint).eval()
    tokenizer = transformers.GPT2Tokenizer.from_pretrained(checkpoint)
    seen = set()
    assert len(answers[:-1]) == 20
    for answer in answers[:-1]:  # the last would be a special token to transformers
        expected = transformers_greedy(model, tokenizer, answer["prompt"])
        assert answer["token_ids"] == expected
        seen |= set(expected)
    assert len(seen) >= 50  # the reference is no constant
    assert set(answers[0]) >= {"prompt", "text", "token_ids", "finish_reason", "timings"}


@pytest.mark.slow
def test_a_124m_checkpoint_of_transformers_gives_its_greedy_tokens(tmp_path: Path) -> None:
    model: Any = random_gpt2(initializer_range=0.06, bos_token_id=50256, eos_token_id=50256)
    model.save_pretrained(tmp_path / "checkpoint")
    write_gpt2(tmp_path / "checkpoint")
    prompts = tmp_path / "prompts.txt"  # few, and verified quickly: long texts show nothing of the size
    prompts.write_text("\n".join(AWKWARD[:3]), encoding="utf-8")
    command = ("export", tmp_path / "checkpoint", "-o", tmp_path / "B", "--target", "cpu")
    verify = ("--precision", "fp32", "--prompts", prompts, "--verify", "quick", "--json")
    exported = planforge(*command, *verify)
    assert exported.returncode == 0, exported.stderr
    weights = next(f for name, f in json.loads(exported.stdout)["files"].items() if name.endswith(".data"))
    assert weights["bytes"] <= 500e6
    done = planforge("run", tmp_path / "B", *AWKWARD[:3], "--max-new-tokens", "40", "--json")
    tokenizer = transformers.GPT2Tokenizer.from_pretrained(tmp_path / "checkpoint")
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(answers) == 3
    for answer in answers:
        expected = transformers_greedy(model, tokenizer, answer["prompt"])
        assert answer["token_ids"] == expected
        assert len(set(expected)) >= 10


def test_run_prints_prompt_and_answer(demo_bundle: Path) -> None:
    done = planforge("run", demo_bundle, "In the beginning", "--max-new-tokens", "8")
    assert done.returncode == 0
    assert done.stdout.startswith("In the beginning")
    assert len(done.stdout) > len("In the beginning") + 8
    assert done.stderr == ""  # quiet when not a terminal


def test_no_texts_and_unreadable_ones_are_errors(demo_bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    assert "no texts" in error_line("run", demo_bundle, code=1)
    assert "no texts" in error_line("run", demo_bundle, "--input", tmp_path / "empty.jsonl", code=1)
    assert "cannot be read" in error_line("run", demo_bundle, "--input", tmp_path / "none.jsonl")
    assert "cannot be read" in error_line("run", demo_bundle, "--input", tmp_path)


def test_a_package_that_is_missing_is_named_with_its_extra(demo_bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "onnx_ir.py").write_text("raise ModuleNotFoundError('gone', name='onnx_ir')")
    graph = next((demo_bundle / "onnx").glob("*.onnx"))
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = planforge_process("inspect", graph, env=environment)
    assert done.returncode == 1
    assert done.stderr.strip() == "error: this command needs onnx_ir: pip install 'planforge[verify]'"


def test_verify_compares_with_the_recorded_source(demo_bundle: Path) -> None:
    done = planforge("verify", demo_bundle, "--level", "quick", "--json")
    assert re.search(r"^verifying decoder\.ort\.fp32 \(\d+\.\d s\)$", done.stderr, re.MULTILINE)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["passed"] is True
    assert report["with_pytorch"] is True
    artifacts = {c["artifact"] for c in report["comparisons"]}
    both = {f"decoder.{d}.{p}" for d in ("portable", "inplace") for p in ("fp32", "fp16")}
    assert artifacts == both | {"decoder.ort.fp32", FILES, GOLDEN}
    assert all(c["passed"] and c["metrics"] for c in report["comparisons"])
    graphs = [c for c in report["comparisons"] if c["artifact"] not in (FILES, GOLDEN)]
    without = {c["case"] for c in graphs if not c["limits"]}
    assert without == {
        "weights and modules",
        "every result of prefill of 2 rows and decode of 2 rows, padded, is finite",
    }


def test_inspect_shows_axes_ranges_and_architectures(demo_bundle: Path) -> None:
    text = planforge("inspect", demo_bundle).stdout
    for word in ("decoder.portable.fp32", "decoder.inplace.fp16", "batch 1..8", "past 0..255"):
        assert word in text
    for sm in ("sm75", "sm80", "sm86", "sm89", "sm120", "sm121"):
        assert sm in text
    manifest = json.loads(planforge("inspect", demo_bundle, "--json").stdout)
    assert manifest.pop("checks") == {"plans": "not run"}
    assert sum(manifest.pop("bytes").values()) == sum(
        p.stat().st_size for p in demo_bundle.rglob("*") if p.is_file()
    )
    assert manifest == json.loads((demo_bundle / "manifest.json").read_text(encoding="utf-8"))


def test_a_checkpoint_in_place_of_a_bundle_is_told_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    line = error_line("run", tmp_path, "x")
    assert f"is a checkpoint, not a bundle; first: planforge export {tmp_path} -o BUNDLE" in line
    (tmp_path / "model.onnx").touch()
    assert f"first: planforge import {tmp_path} -o BUNDLE" in error_line("inspect", tmp_path)


def test_inspect_counts_weights_that_graphs_share_once(demo_bundle: Path) -> None:
    told = json.loads(planforge("inspect", demo_bundle, "--json").stdout)["bytes"]
    on_disk: dict[str, int] = {}
    for path in demo_bundle.rglob("*"):
        if path.is_file():
            part = path.relative_to(demo_bundle).parts[0]
            on_disk[part] = on_disk.get(part, 0) + path.stat().st_size
    assert told == on_disk
    text = planforge("inspect", demo_bundle).stdout
    assert f"size {format_size(sum(on_disk.values()))}: " in re.sub(" +", " ", text)
    units = {"kB": 1e3, "MB": 1e6}
    rows = re.findall(r"^(decoder\.\S+) +\d+ +\w+ +([\d.]+) (kB|MB) +(decoder\.\S+)?", text, re.MULTILINE)
    assert [(name, owner) for name, *_, owner in rows] == [
        ("decoder.ort.fp32", ""),
        ("decoder.portable.fp32", "decoder.ort.fp32"),
        ("decoder.inplace.fp32", "decoder.ort.fp32"),
        ("decoder.portable.fp16", ""),
        ("decoder.inplace.fp16", "decoder.portable.fp16"),
    ]
    assert sum(float(size) * units[unit] for _, size, unit, _ in rows) == pytest.approx(
        on_disk["onnx"], rel=0.01
    )


def test_inspect_suggests_what_has_almost_this_name(demo_bundle: Path) -> None:
    wrong = demo_bundle.with_name(f"{demo_bundle.name}x")
    assert f"did you mean {demo_bundle.name!r}" in error_line("inspect", wrong)


def test_the_summary_says_what_was_made_and_the_next_command(demo_bundle: Path) -> None:
    found = summarize_bundle(demo_bundle)
    (title, columns, graphs), (_, _, plans) = found.sections
    assert title.startswith(f"Bundle written to {demo_bundle}: ")
    assert columns == ("graph", "size", "compared with the original model")
    assert all(verdict.startswith("passed: ") for name, _, verdict in graphs if name != "weights of several")
    assert any("from decoder.inplace.fp16 for sm75" in built for _, _, built in plans)
    assert any(f'planforge run {demo_bundle} "Once upon a time"' in line for line in found.notes)
    assert any(f"planforge selftest {demo_bundle}" in line for line in found.notes)


def test_the_next_command_of_a_bundle_that_chats_is_a_chat(llama_demo_bundle: Path) -> None:
    notes = summarize_bundle(llama_demo_bundle).notes
    assert any(f'planforge run {llama_demo_bundle} --chat "Once upon a time"' in line for line in notes)


def test_inspect_reads_an_onnx_file_and_a_plan(demo_bundle: Path) -> None:
    graph = next((demo_bundle / "onnx").glob("decoder.inplace.fp16*.onnx"))
    shown = json.loads(planforge("inspect", graph, "--json").stdout)
    assert shown["opsets"]["ai.onnx"] == 24
    assert shown["operators"]["TensorScatter"] == shown["operators"]["Attention"] * 2
    assert "cache.0.key" in planforge("inspect", graph).stdout
    plan = next((demo_bundle / "plans").glob("*.plan"))
    summary = json.loads(planforge("inspect", plan, "--json").stdout)
    assert summary["bytes"] == plan.stat().st_size
    assert summary["entry"]["built_from"] == "decoder.inplace.fp16"
    assert "tensorrt-rtx" in planforge("inspect", plan).stdout


def test_version_is_printed() -> None:
    assert planforge("--version").stdout == f"planforge {version('planforge')}\n"


@pytest.mark.parametrize(("given", "kept"), [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_torchs_threads_sleep_while_they_wait_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch, given: str | None, kept: str
) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", given or "")  # so that it is put back afterwards
    if given is None:
        monkeypatch.delenv("OMP_WAIT_POLICY")
    planforge("--version")
    assert os.environ["OMP_WAIT_POLICY"] == kept


def test_wrong_usage_exits_with_2() -> None:
    done = planforge("export")
    assert done.returncode == 2
    assert "Usage" in done.stderr


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    done = planforge("--debug", "run", tmp_path / "none", "x")
    assert done.returncode != 0
    assert "Traceback" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "none", "x"], "none is not a folder.*planforge export"),
        (["inspect", "none.onnx"], "none.onnx does not exist; give a bundle"),
        (["verify", "none"], "none is not a folder"),
        (["build", "none"], "none is not a folder"),
        (["export", "./none", "-o", "B"], "'./none' does not exist"),
        (["export", "gpt2-demo", "-o", "B", "--precision", "fp7"], "fp7.*fp32, fp16"),
        (["export", "gpt2-demo", "-o", "B", "--target", "toaster"], "toaster.*cpu"),
        (["export", "gpt2-demo", "-o", "B", "--max-length", "1"], "max_length=1"),
        (["export", "gpt2-demo", "-o", "B", "--quantizer", "awq"], "'awq' is not one of gptq, rtn"),
    ],
)
def test_errors_are_one_line(
    arguments: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert re.search(words, error_line(*arguments))
    assert list(tmp_path.iterdir()) == []  # nothing is left behind


def test_a_hub_that_cannot_be_reached_is_no_wrong_usage(tmp_path: Path) -> None:
    line = error_line("export", "someone/some-model", "-o", tmp_path / "B", code=1)
    assert "cannot be reached" in line


def test_what_to_install_is_told_to_the_letter(own_bundle: Path) -> None:
    line = error_line("build", own_bundle, "--engine", "tensorrt", code=1)
    assert "pip install 'planforge[tensorrt]'" in line


def test_an_engine_that_cannot_run_here_is_no_wrong_usage(demo_bundle: Path) -> None:
    line = error_line("run", demo_bundle, "hello", "--backend", "tensorrt-rtx", code=1)
    assert "cannot run on tensorrt-rtx: no NVIDIA driver was found" in line
