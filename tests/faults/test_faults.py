"""A short run of `make fuzz`, the same each time: damaged files, killed commands, work under load."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from planforge.exporter.checkpoints.source import find_demo

from ..helpers.paths import ROOT
from .doors import KINDS
from .material import LABELLED, PROMPT, TEMPLATE, make_import

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks, and asks /proc and inotify")
# Without those that need minutes, or a graph that was traced before.
COMMANDS = "import,prune,bench --set-default,prepare"


@pytest.fixture(scope="module")
def material(
    demo_bundle: Path,
    head_bundle: Callable[[str], Path],
    dates_bundle: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """The tests' own bundles, as `make_material` lays out others."""
    folder = tmp_path_factory.mktemp("material")
    encoder = head_bundle("classifier")
    plain = head_bundle("pretrained")
    found = {
        "decoder": (find_demo("gpt2-demo"), demo_bundle),
        "encoder": (encoder.with_name("classifier"), encoder),
        "plain": (plain.with_name("pretrained"), plain),
        "translator": (find_demo("transformer-demo"), dates_bundle),
    }
    for name, (checkpoint, bundle) in found.items():
        (folder / name).mkdir()
        (folder / name / "checkpoint").symlink_to(checkpoint)
        if name != "decoder":
            (folder / name / "bundle").symlink_to(bundle)
    add_template(shutil.copytree(demo_bundle, folder / "decoder/bundle"))
    (folder / "decoder/prompt").mkdir()
    (folder / "decoder/prompt/prompt.txt").write_text(PROMPT)
    make_import(folder / "encoder")
    (folder / "plain/labelled.tsv").write_text(LABELLED)
    (folder / "done").touch()
    return folder


def add_template(bundle: Path) -> None:
    manifest = json.loads((bundle / "manifest.json").read_text())
    name = "tokenizer/chat_template-0.jinja"
    (bundle / name).write_text(TEMPLATE)
    sha256 = hashlib.sha256(TEMPLATE.encode()).hexdigest()
    manifest["files"][name] = {"sha256": sha256, "bytes": len(TEMPLATE)}
    manifest["tokenizer"]["chat_template"] = {"file": name, "tokens": {"bos_token": "<s>"}}
    (bundle / "manifest.json").write_text(json.dumps(manifest))


def run_faults(material: Path, *arguments: str) -> str:
    """What the run printed; an error, with all that was found, where it found anything."""
    command = [sys.executable, "-m", "tests.faults", *arguments, "--material", str(material), "--seed", "25"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert "FOUND" not in done.stdout
    return done.stdout


def test_damaged_files_end_in_one_line(material: Path) -> None:
    kinds = [name for name, kind in KINDS.items() if not kind.slow]
    said = run_faults(material, "files", "--count", "12", "--only", ",".join(kinds))
    assert said.count(": 12 cases in") == len(kinds)
    assert "ManifestError" in said and "TokenizerError" in said and "CheckpointError" in said


def test_killed_commands_and_full_disks_leave_a_whole_bundle(material: Path) -> None:
    said = run_faults(material, "kills", "--points", "2", "--commands", COMMANDS)
    assert said.count(", killed: ") == said.count(", full disk: ") == 4


def test_threads_and_processes_get_the_answers_that_they_get_alone(material: Path) -> None:
    said = run_faults(material, "work", "--minutes", "0.04")
    assert said.count(" calls; memory ") == 5


def test_what_the_run_looks_for_it_finds(material: Path) -> None:
    """Doors that do what none may: each is found, and named by what it does."""
    command = [sys.executable, "-m", "tests.faults.planted", str(material)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    wanted = {
        "crash": "killed by SIGABRT",
        "eat": "took 12",
        "leave": "opened ['secret.txt'] outside",
        "say_two_lines": "unprintable",
        "raise_another": "KeyError at planted.py",
    }
    found = dict(line.split(": ", 1) for line in done.stdout.splitlines())
    assert found.keys() == wanted.keys()
    assert not [name for name, words in wanted.items() if words not in found[name]], found
