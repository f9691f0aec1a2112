"""Evidence in bundles: kept by `prove`, compared by `--against` and `diff`; other commands go on."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from planforge.exporter import export, prune, verify
from planforge.exporter.bundle.evidence import record_proof
from planforge.exporter.checkpoints.source import resolve_source
from planforge.exporter.commands import prove as prove_command
from planforge.exporter.commands.evidence_sides import Side
from planforge.exporter.commands.evidence_tables import make_proof_tables
from planforge.exporter.tensorrt.layers import Layer, PlanLayers, ProfileLayers
from planforge.runtime.apps.check.selftest import selftest
from planforge.runtime.apps.commands.console import print_tables
from planforge.runtime.apps.proof import evidence
from planforge.runtime.apps.proof.changes import pair_proofs
from planforge.runtime.apps.proof.evidence import Joules, Proof, read_evidence
from planforge.runtime.bundle.bundle import Bundle
from planforge.runtime.errors import BackendUnavailableError, BundleError

from ....helpers.cli import error_line, planforge
from ....helpers.paths import ROOT
from .conftest import LABELS, draw_texts, make_proof, make_scores, write_lines, write_table


@pytest.fixture
def own(classifier: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(classifier, tmp_path / "own"))


@pytest.fixture
def table(expected: Callable[[list[str]], list[int]], tmp_path: Path) -> Path:
    texts = draw_texts(40)
    return write_table(tmp_path / "eval.tsv", texts, [LABELS[number] for number in expected(texts)])


def test_evidence_is_kept_and_the_bundle_stays_whole(classifier: Path, own: Path, table: Path) -> None:
    """The export's own files and its id stay; verify, selftest and prune read the bundle as before."""
    before = Bundle.open(classifier).manifest
    done = planforge("prove", own, "--data", table, "--json")
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)["proof"]
    assert printed["intervals"]["accuracy"]["value"] == 1.0
    assert "answers" not in printed
    planforge("prove", own, "--data", table, "--precision", "fp16")
    planforge("prove", own, "--data", table, "--precision", "fp16")  # takes the earlier one's place
    opened = Bundle.open(own)
    proofs = read_evidence(opened)
    assert [proof.precision for proof in proofs] == ["fp32", "fp16"]
    assert proofs[1].compared_with.startswith("encoder.ort.fp32 on ort-cpu, as measured on ")
    (name,) = set(opened.manifest.files) - set(before.files)
    assert opened.manifest.files.items() >= before.files.items()
    assert dataclasses.replace(opened.manifest, files=before.files) == before
    assert [path.name for path in (own / "checks").glob("evidence*")] == [Path(name).name]
    assert verify(own, source=classifier.parent / "checkpoint").passed
    assert verify(own).passed and selftest(own).passed  # by golden data, as the folder is another one
    pruned = prune(own, keep=["fp16"])
    assert name in pruned.removed
    left = Bundle.open(own)
    assert [proof.precision for proof in read_evidence(left)] == ["fp16"]
    left.verify_files()
    alone = Path(shutil.copytree(classifier, own.parent / "alone"))
    prune(alone, keep=["fp16"])
    assert Bundle.open(alone).manifest.export_id == left.manifest.export_id
    prune(own, keep=["fp16"])
    assert len(read_evidence(Bundle.open(own))) == 1


def test_diff_and_against_exit_1_on_a_regression(own: Path, table: Path, tmp_path: Path) -> None:
    """20 of 40 labels are wrong in the new bundle, as a coarse precision could make them."""
    worse = Path(shutil.copytree(own, tmp_path / "worse"))
    assert "first: planforge prove" in error_line("prove", own, "--data", table, "--against", worse)
    nothing = planforge("diff", own, worse)
    commands = [f"planforge prove {folder} --data FILE" for folder in (own, worse)]
    assert f"no evidence on the same texts; first: {' '.join(commands)}" in " ".join(nothing.stdout.split())
    assert nothing.returncode == 2
    assert planforge("prove", own, "--data", table).returncode == 0
    (proof,) = read_evidence(Bundle.open(own))
    answers = tuple((answer + number % 2) % 3 for number, answer in enumerate(proof.answers))
    record_proof(worse, dataclasses.replace(proof, answers=answers))
    done = planforge("diff", own, worse)
    assert done.returncode == 1
    assert "REGRESSION: encoder.ort.fp32 against encoder.ort.fp32, 40 texts of eval.tsv" in done.stdout
    assert re.search(r"accuracy +1\.0000 +0\.5000 .* WORSE", done.stdout)
    assert re.search(r"fp16 +\d+", done.stdout)
    told = json.loads(planforge("diff", own, worse, "--json").stdout)
    assert told["compared"][0]["regression"] is True
    assert told["old"]["precisions"].keys() == {"fp32", "fp16"}
    assert told["old"]["bytes"] == sum(entry.bytes for entry in Bundle.open(own).manifest.files.values())
    assert planforge("diff", worse, own).returncode == 0  # better is no regression
    better = planforge("prove", own, "--data", table, "--against", worse)
    assert better.returncode == 0 and "no regression: " in better.stdout
    again = planforge("prove", worse, "--data", table, "--against", own)
    assert again.returncode == 0  # what it answers in truth


def test_precisions_and_backends_of_one_bundle_are_compared(own: Path, table: Path) -> None:
    """A copy with the other precision alone, as it was done before, is compared in the same way."""
    planforge("prove", own, "--data", table)
    first = planforge("prove", own, "--data", table, "--precision", "fp16", "--against-precision", "fp32")
    assert first.returncode == 0, first.stderr
    assert "no regression: encoder.portable.fp16 against encoder.ort.fp32, 40 texts" in first.stdout
    half = read_evidence(Bundle.open(own))[1]
    wrong = tuple((answer + number % 2) % 3 for number, answer in enumerate(half.answers))
    record_proof(own, dataclasses.replace(half, answers=wrong))  # takes the earlier one's place
    on_gpu = dataclasses.replace(half, backend="ort-cuda", threads=None)
    record_proof(own, on_gpu)

    def compare(*options: str, code: int) -> dict[str, Any]:
        done = planforge("diff", own, *options, "--json")
        assert done.returncode == code, done.stderr
        told: dict[str, Any] = json.loads(done.stdout)
        return told

    told = compare("--precision", "fp32,fp16", "--backend", "ort-cpu", code=1)
    (pair,) = told["compared"]
    assert [pair[side]["artifact"].rpartition(".")[2] for side in ("old", "new")] == ["fp32", "fp16"]
    assert pair["changes"][0]["old"] == 1.0 and pair["changes"][0]["new"] == 0.5
    sides = {side: (told[side]["precision"], list(told[side]["precisions"])) for side in ("old", "new")}
    assert sides == {"old": ("fp32", ["fp32"]), "new": ("fp16", ["fp16"])}
    copy = Path(shutil.copytree(own, own.parent / "half"))
    prune(copy, keep=["fp16"])
    (same,) = compare(str(copy), "--precision", "fp32,fp16", "--backend", "ort-cpu", code=1)["compared"]
    assert same == pair
    assert compare("--precision", "fp16,fp32", "--backend", "ort-cpu", code=0)["compared"][0]["changes"]
    (pair,) = compare("--backend", "ort-cpu,ort-cuda", "--precision", "fp16", code=0)["compared"]
    assert [pair[side]["backend"] for side in ("old", "new")] == ["ort-cpu", "ort-cuda"]
    assert (pair["changes"][0]["old"], pair["changes"][0]["new"]) == (0.5, 1.0)
    shown = planforge("diff", own, "--precision", "fp32,fp16", "--backend", "ort-cpu,tensorrt")
    command = f"planforge prove {own} --data FILE --precision fp16 --backend tensorrt"
    assert command in " ".join(shown.stdout.split()) and shown.returncode == 2


def test_sides_that_there_are_not_are_refused(own: Path, table: Path) -> None:
    planforge("prove", own, "--data", table)
    assert "in --precision fp16,int8; measured are fp32 on ort-cpu" in error_line("diff", own)
    one = error_line("diff", own, "--precision", "fp32")
    assert "is the only bundle, and has one side" in one
    assert "--precision 'int8': " in error_line("diff", own, "--precision", "fp32,int8")
    assert "it has some in fp32, fp16" in error_line("diff", own, own, "--precision", "int8")
    assert "has 3 names" in error_line("diff", own, own, "--precision", "fp32,fp16,int8")
    assert "--backend 'ort-cpy' is not one of" in error_line("diff", own, "--backend", "ort-cpu,ort-cpy")
    prove = ("prove", own, "--data", table)
    missing = error_line(*prove, "--against-precision", "fp16")
    assert missing.endswith(f"first: planforge prove {own} --data {table} --precision fp16")
    assert "--against-precision 'int8': " in error_line(*prove, "--against-precision", "int8")
    planforge(*prove, "--precision", "fp16")
    assert "; measured are fp32 on ort-cpu and fp16 on ort-cpu" in error_line("diff", own)


def test_a_model_with_noise_on_its_weights_is_a_regression(demo_bundle: Path, tmp_path: Path) -> None:
    checkpoint = Path(shutil.copytree(resolve_source("gpt2-demo").folder, tmp_path / "noisy"))
    weights = load_file(checkpoint / "model.safetensors")
    random = np.random.default_rng(0)
    noisy = {
        name: w + random.normal(0, 0.3 * w.std(), w.shape).astype(w.dtype) for name, w in weights.items()
    }
    save_file(noisy, checkpoint / "model.safetensors")
    export(checkpoint, tmp_path / "new", precision=["fp32"], target=["cpu"], verify=False)
    words = (ROOT / "models/demos/gpt2-demo/prompts.txt").read_text(encoding="utf-8").split()
    lines = [" ".join(words[start : start + 40]) for start in range(0, len(words), 40)]
    texts = write_lines(tmp_path / "t.txt", lines)
    old = Path(shutil.copytree(demo_bundle, tmp_path / "old"))
    assert planforge("prove", old, "--data", texts, "--precision", "fp32").returncode == 0
    done = planforge("prove", tmp_path / "new", "--data", texts, "--against", old)
    assert done.returncode == 1, done.stdout
    assert f"REGRESSION: decoder.ort.fp32 against decoder.ort.fp32, {len(lines)} texts of" in done.stdout
    assert len(read_evidence(Bundle.open(tmp_path / "new"))) == 1  # kept all the same


def read_stored(own: Path) -> list[dict[str, Any]]:
    """The entries of a bundle's evidence."""
    (path,) = (own / "checks").glob("evidence*")
    proofs: list[dict[str, Any]] = json.loads(path.read_text())["proofs"]
    return proofs


def test_what_was_measured_before_stays_as_it_was_written(own: Path, table: Path) -> None:
    """Its intervals too, which another version may have drawn otherwise; a changed copy has its own."""
    planforge("prove", own, "--data", table)
    damage(own, lambda value: value["proofs"][0]["intervals"]["f1"].update(low=0.125))
    (before,) = read_stored(own)
    planforge("prove", own, "--data", table, "--precision", "fp16")
    after = read_stored(own)
    assert len(after) == 2 and after[0] == before
    proof = read_evidence(Bundle.open(own))[0]
    assert proof.intervals["f1"].low == 0.125
    wrong = dataclasses.replace(proof, answers=tuple((answer + 1) % 3 for answer in proof.answers))
    assert wrong.intervals["f1"].value == wrong.intervals["f1"].low == 0.0


def test_measurements_with_other_threads_are_others(own: Path, table: Path) -> None:
    for threads in (1, 2, 2):
        planforge("prove", own, "--data", table, "--threads", threads)
    proofs = read_evidence(Bundle.open(own))
    assert [proof.threads for proof in proofs] == [1, 2]
    for proof in proofs:  # each is compared with its like
        (pair,) = pair_proofs(proofs, [proof])
        assert pair.old is proof
    assert ", 1 thread\n" in planforge("prove", own, "--data", table, "--threads", 1).stdout


def test_a_reference_of_other_texts_is_not_taken(own: Path, table: Path) -> None:
    """Evidence on the same file with fewer texts, as another version of the reader may have left it."""
    planforge("prove", own, "--data", table)
    damage(own, cut)
    done = planforge("prove", own, "--data", table, "--precision", "fp16")
    assert done.returncode == 0, done.stderr
    proof = read_evidence(Bundle.open(own))[1]
    assert proof.compared_with == "encoder.ort.fp32 on ort-cpu, run here"
    assert len(proof.reference) == 40


def cut(value: dict[str, Any]) -> None:
    """Leave 9 texts."""
    proof = value["proofs"][0]
    for name in ("truth", "answers"):
        proof[name] = proof[name][:9]


def test_what_cannot_be_compared_is_one_line_and_nothing_is_lost(
    own: Path, table: Path, tmp_path: Path
) -> None:
    old = Path(shutil.copytree(own, tmp_path / "old"))
    planforge("prove", old, "--data", table)
    damage(old, cut)
    done = planforge("prove", own, "--data", table, "--against", old)
    lines = [line for line in done.stdout.splitlines() if line.startswith("NOT COMPARED: ")]
    assert lines == [
        "NOT COMPARED: encoder.ort.fp32 on 9 texts of eval.tsv and encoder.ort.fp32 on 40 texts of eval.tsv"
        " were measured on other texts, or with other labels of them"
    ]
    assert (done.returncode, done.stderr.count("Traceback")) == (2, 0)
    assert re.search(r"^accuracy +1\.0000 ", done.stdout, re.MULTILINE)
    assert len(read_evidence(Bundle.open(own))) == 1
    done = planforge("diff", old, own, "--json")
    told = json.loads(done.stdout)["compared"]
    assert done.returncode == 2 and "on 9 texts of eval.tsv" in told[0]["refused"]
    assert planforge("diff", old, own).stdout.count("NOT COMPARED: ") == 1
    damage(old, lambda value: value["proofs"][0].update(truth=[2] * 9))  # other labels of as many texts
    damage(own, cut)
    assert planforge("diff", old, own).returncode == 2
    assert "is not a folder" in error_line("prove", own, "--data", table, "--against", table)


def test_inspect_shows_a_line_of_each_measurement(own: Path, table: Path) -> None:
    assert "evidence" not in planforge("inspect", own).stdout
    planforge("prove", own, "--data", table, "--threads", 1)
    (proof,) = read_evidence(Bundle.open(own))
    board = dataclasses.replace(
        proof,
        machine={**proof.machine, "board": "Jetson Orin Nano"},
        date="2026-01-02",
        latency_ms={"p50": 3.25, "p99": 4.5},
    )
    scores = make_scores([30.0, 10.0], file=proof.file, machine={"cpu": "c", "gpu": "RTX 4090"})
    record_proof(own, board)
    record_proof(own, scores)
    shown = planforge("inspect", own).stdout
    line = r"fp32 on ort-cpu +40 of eval\.tsv +accuracy 1\.0000 +3\.25 +Jetson Orin Nano +2026-01-02"
    assert re.search(line, shown)
    assert re.search(rf"2 of e\.tsv +perplexity {np.exp(2):.4f} +1\.00 +RTX 4090 +2026-01-01", shown)
    told = json.loads(planforge("inspect", own, "--json").stdout)["evidence"]
    assert [one["texts"] for one in told] == [40, 40, 2] and "answers" not in told[0]
    assert told[1]["intervals"]["accuracy"]["value"] == 1.0
    damage(own, lambda value: value.update(format=9))
    done = planforge("inspect", own)
    assert done.returncode == 0 and "has another format than 1; prove again; it is left out" in done.stderr
    assert "accuracy 1.0000" not in done.stdout


def damage(own: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Write a stranger's evidence, whose hash the manifest has."""
    opened = Bundle.open(own)
    (name,) = evidence.list_evidence_files(opened)
    value = json.loads((own / name).read_text())
    change(value)
    data = json.dumps(value).encode()
    (own / name).write_bytes(data)
    manifest = json.loads((own / "manifest.json").read_text())
    manifest["files"][name] = {"sha256": sha256(data).hexdigest(), "bytes": len(data)}
    (own / "manifest.json").write_text(json.dumps(manifest))


STRANGE: list[tuple[str, Callable[[dict[str, Any]], Any], str]] = [
    ("format", lambda v: v.update(format=9), "has another format than 1"),
    ("list", lambda v: v.update(proofs=3), "evidence.proofs must be list"),
    ("entry", lambda v: v.update(proofs=[3]), "proof must be an object"),
    ("missing", lambda v: v["proofs"][0].pop("backend"), "proof.backend must be str, but is missing"),
    ("label", lambda v: v["proofs"][0]["answers"].append(0), "does not fit together"),
    ("index", lambda v: v["proofs"][0].update(answers=[7] * 40), "does not fit together"),
    ("negative", lambda v: v["proofs"][0].update(answers=[-1] * 40), "does not fit together"),
    ("none", lambda v: v["proofs"][0].update(answers=[], truth=[]), "does not fit together"),
    ("task", lambda v: v["proofs"][0].update(task="x"), "does not fit together"),
    ("times", lambda v: v["proofs"][0].update(latency_ms={}), "does not fit together"),
    ("text", lambda v: v["proofs"][0].update(latency_ms={"p50": "1", "p99": 2}), "must be a number"),
    ("data", lambda v: v["proofs"][0].update(data={}), "does not fit together"),
    ("intervals", lambda v: v["proofs"][0].pop("intervals"), "proof.intervals must be dict, but is missing"),
    ("f1", lambda v: v["proofs"][0]["intervals"].pop("f1"), "proof.intervals does not fit together"),
    ("end", lambda v: v["proofs"][0]["intervals"]["f1"].pop("low"), "proof.intervals does not fit together"),
    ("threads", lambda v: v["proofs"][0].update(threads="2"), "proof.threads must be int"),
]


def test_strange_evidence_is_named(own: Path, table: Path) -> None:
    planforge("prove", own, "--data", table)
    kept = {path: path.read_bytes() for path in [own / "manifest.json", *(own / "checks").glob("evidence*")]}
    for name, change, words in STRANGE:
        damage(own, change)
        with pytest.raises(BundleError, match=words):
            read_evidence(Bundle.open(own))
        assert "checks/evidence-" in error_line("diff", own, own, code=1), name
        for path, content in kept.items():
            path.write_bytes(content)
    next((own / "checks").glob("evidence*")).write_text("{")
    assert "has 1 bytes, the manifest says" in error_line("diff", own, own, code=1)
    again = planforge("prove", own, "--data", table)  # which takes its place
    assert again.returncode == 0 and "it is left out" in again.stderr
    assert len(read_evidence(Bundle.open(own))) == 1


def test_large_evidence_is_not_read(own: Path, table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planforge("prove", own, "--data", table)
    monkeypatch.setattr(evidence, "MAX_BYTES", 100)
    monkeypatch.setattr(Bundle, "path", None)
    with pytest.raises(BundleError, match=r"has \d+ bytes; evidence may have 100"):
        read_evidence(Bundle.open(own))


def test_the_layers_of_a_plan_are_kept(
    demo_bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the inspector says is emulated: no plan runs here."""
    bundle = Bundle.open(demo_bundle)
    (plan,) = bundle.manifest.plans
    proof = make_scores([1.0, 2.0], file=plan.file, artifact=plan.built_from, backend="tensorrt-rtx")
    layers = (
        Layer("a", "Gemm", (), ("h.0.mlp",), time_ms=0.5),
        Layer("b", "Gemm", (), ("h.0.mlp",), time_ms=0.25),
        Layer("c", "Copy", (), (), time_ms=0.125),
    )
    found = PlanLayers(plan, "A GPU", (ProfileLayers("decode", {}, layers),))
    asked: list[Any] = []

    def read(*args: Any) -> PlanLayers:
        asked.extend(args)
        return found

    monkeypatch.setattr("planforge.exporter.tensorrt.layers.read_plan_layers", read)
    measured, note = prove_command.add_layers(demo_bundle, proof, 3)
    assert asked[-1] == 3  # the GPU
    assert (measured.layers, note) == ({"decode": {"h.0.mlp": 0.75, "c": 0.125}}, "")
    joules = Joules("tegrastats", 0.1, 5.0)
    measured = dataclasses.replace(measured, joules=joules, token_ms={"p50": 1.0, "p99": 2.0})
    assert Proof.from_json(json.loads(json.dumps(measured.to_json())), "a file") == measured
    print_tables(make_proof_tables([measured]))
    shown = capsys.readouterr().out
    assert "0.7500" in shown and "0.1 (5.0 W, tegrastats)" in shown

    def refuse(*args: Any) -> Any:
        raise BackendUnavailableError("no GPU")

    monkeypatch.setattr("planforge.exporter.tensorrt.layers.read_plan_layers", refuse)
    assert prove_command.add_layers(demo_bundle, proof) == (proof, "the layers were not measured: no GPU")


@pytest.mark.parametrize(
    ("asked", "precision", "backend", "is_of"),
    [
        ("int8", "int8", "ort-cpu", True),
        ("int8", "w8a16", "ort-cuda", True),  # which is what int8 means on a GPU
        ("int4", "w4a16", "tensorrt-rtx", True),
        ("int8", "w8a16", "ort-cpu", False),
        ("int8", "w4a16", "ort-cuda", False),
        ("w8a16", "int8", "ort-cpu", False),
        (None, "fp16", "ort-cuda", True),
    ],
)
def test_a_side_has_evidence_of_its_precision(
    asked: str | None, precision: str, backend: str, is_of: bool, demo_bundle: Path
) -> None:
    proof = make_proof([0, 1], [0, 1], artifact=f"encoder.ort.{precision}", backend=backend)
    assert Side(Bundle.open(demo_bundle), asked).has_precision(proof) is is_of
