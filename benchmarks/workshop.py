"""Makes checkpoints, and converts them for each system, once."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from planforge.runtime.bundle.bundle import compute_sha256

from .alike import digest
from .case import Entry
from .checkpoints import DEMOS, demo
from .process import ROOT, Process
from .systems import system_named
from .systems.system import Skip, System

PACKAGES = """
import json
from importlib.metadata import distributions
print(json.dumps({d.name.lower().replace("_", "-"): d.version for d in distributions()}))
"""


@dataclass(frozen=True)
class Prepared:
    """The files that a system opens.

    Attributes:
        python: of the environment that has the system's packages.
        versions: of these packages there.
        checkpoint: the folder that it was made from.
        folder: the model in the system's own format, or the checkpoint.
        weights_sha256: of the checkpoint's safetensors files.
        file_bytes: all that it needs to run.
        read_bytes: of the weights that one decoding step reads.
    """

    python: Path
    versions: Mapping[str, str]
    checkpoint: Path
    folder: Path
    weights_sha256: str
    file_bytes: int
    read_bytes: int


class Workshop:
    """A store of checkpoints, and of systems' conversions of them in a folder, until either changes.

    Args:
        work: the folder.
        pythons: interpreters; a system runs in the first that has its packages.
        keep: what was converted stays when only the code that converts has changed.
        tiny: makes random checkpoints small, see `checkpoints.TINY`.
    """

    def __init__(
        self,
        work: Path,
        pythons: Sequence[Path] = (Path(sys.executable),),
        keep: bool = False,
        tiny: bool = False,
    ) -> None:
        self.work = work
        self.keep = keep
        self.tiny = tiny
        self.packages = {python: packages_of(python) for python in pythons if python.exists()}
        self.hashes: dict[str, str] = {}

    def environment(self, system: System) -> tuple[Path, dict[str, str]]:
        """Return the interpreter for a system, and the versions of its packages there.

        Raises:
            Skip: no environment has all of them.
        """
        wanted = [name.replace("_", "-") for name in system.packages]
        for python, packages in self.packages.items():
            if set(wanted) <= set(packages):
                return python, {name: packages[name] for name in wanted}
        names = " and ".join(wanted)
        raise Skip(f"no environment has {names}; `make bench` makes one that does, where it can")

    def checkpoint(self, name: str) -> Path:
        """Return a checkpoint's folder, which is made at the first call."""
        if name in DEMOS:
            return demo(name)
        folder = self.work / name / "checkpoint"
        if not (folder / "model.safetensors").exists():
            command = [sys.executable, "-m", "benchmarks.checkpoints", name, str(folder.resolve())]
            if self.tiny:
                command.append("--tiny")
            subprocess.run(command, check=True, cwd=ROOT)
        return folder

    def prepare(self, entry: Entry) -> Prepared:
        """Convert the entry's checkpoint for its system, unless that was done before.

        Raises:
            Skip: its packages are missing, or it can't do the precision.
            ProcessError: it failed.
        """
        system = system_named(entry.system)
        python, versions = self.environment(system)
        checkpoint = self.checkpoint(entry.checkpoint).resolve()
        weights = self.weights_sha256(entry.checkpoint, checkpoint)
        folder = checkpoint
        if type(system).prepare is not System.prepare:
            how = f"-{digest(dict(entry.prepare))[:8]}" if entry.prepare else ""
            how += f"-of-{entry.graphs}" if entry.graphs else ""
            folder = self.work / entry.checkpoint / f"{system.name}-{entry.precision}{how}"
            settings = dict(entry.prepare)
            stamp = {"weights": weights, **versions}
            if entry.graphs:
                of = replace(entry, system=entry.graphs, precision="fp32", graphs="", prepare={})
                given = self.prepare(of)
                settings["graphs"] = str(given.folder)
                stamp = {**given.versions, **stamp}
            self.convert(entry, system, python, checkpoint, folder, settings, stamp)
        size = file_bytes(folder, checkpoint)
        writer = system_named(entry.graphs) if entry.graphs else system
        gathered = gathered_bytes(checkpoint, writer.gathered_tables(entry.precision))
        return Prepared(
            python,
            versions,
            checkpoint,
            folder.resolve(),
            weights_sha256=weights,
            file_bytes=sum(size.values()),
            read_bytes=size["weights"] - gathered,
        )

    def weights_sha256(self, name: str, checkpoint: Path) -> str:
        """Return the hash of the weights in the one safetensors file that every checkpoint here has."""
        if name not in self.hashes:
            self.hashes[name] = compute_sha256(checkpoint / "model.safetensors")
        return self.hashes[name]

    def convert(
        self,
        entry: Entry,
        system: System,
        python: Path,
        checkpoint: Path,
        folder: Path,
        settings: Mapping[str, Any],
        stamp: dict[str, str],
    ) -> None:
        """Let the system write the folder, and record the sources in a file next to it."""
        stamp = {**stamp, "code": system.code_stamp()}
        stamp_file = folder.with_name(f"{folder.name}.json")
        if stamp_file.exists():
            found = json.loads(stamp_file.read_text(encoding="utf-8"))
            if {**found, "code": stamp["code"]} == stamp and (self.keep or found == stamp):
                return
        shutil.rmtree(folder, ignore_errors=True)
        stamp_file.unlink(missing_ok=True)
        folder.mkdir(parents=True)
        order = {
            "mode": "prepare",
            "system": entry.system,
            "checkpoint": str(checkpoint),
            "kind": entry.work.kind,
            "precision": entry.precision,
            "out": str(folder.resolve()),
            "settings": settings,
        }
        with Process(python, order, self.log(f"prepare-{system.name}-{entry.precision}")):
            stamp_file.write_text(json.dumps(stamp), encoding="utf-8")

    def log(self, name: str) -> Path:
        """Return a file for a process's output."""
        return self.work / "logs" / f"{name}.log"


def packages_of(python: Path) -> dict[str, str]:
    """Return the distributions that an interpreter sees, with versions."""
    done = subprocess.run([python, "-c", PACKAGES], check=True, capture_output=True, text=True)
    found: dict[str, str] = json.loads(done.stdout)
    return found


def file_bytes(folder: Path, checkpoint: Path) -> dict[str, int]:
    """Return the size of a model's weights with its graphs, and of its other files.

    Of a checkpoint's folder only what is read; a bundle's golden data is not.
    """
    sizes = {"weights": 0, "other": 0}
    for path in folder.rglob("*"):
        small = path.suffix in (".json", ".txt", ".py", ".md")
        if path.is_dir() or "checks" in path.relative_to(folder).parts[:-1]:
            continue
        if folder == checkpoint and path.suffix != ".safetensors" and not small:
            continue
        sizes["other" if small else "weights"] += path.stat().st_size
    return sizes


def gathered_bytes(checkpoint: Path, tables: int) -> int:
    """Return the bytes of a decoder's fp32 tables of which a decoding step reads only a row."""
    config: dict[str, Any] = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    if config.get("model_type") == "gpt2":
        return 4 * int(config["n_embd"]) * (int(config["n_positions"]) + tables * int(config["vocab_size"]))
    if "num_key_value_heads" in config:
        return 4 * int(config["hidden_size"]) * tables * int(config["vocab_size"])
    return 0
