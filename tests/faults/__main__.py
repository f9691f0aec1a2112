"""`make fuzz`: damages files, kills commands, and works under load, each for long."""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time
from pathlib import Path

os.environ["PLANFORGE_ANSWERS_MB"] = "0"  # PyTorch answers anew; the cache folder stays as it is
os.environ["OPENBLAS_NUM_THREADS"] = "1"  # before numpy is imported: what forks must have one thread
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["JE_ARROW_MALLOC_CONF"] = "background_thread:false"  # before pyarrow is, for the same reason

from ..helpers.paths import ROOT
from .child import Tally, run_kind
from .doors import DECODER, KINDS
from .kills import COMMANDS, Outcome, fill_disk, kill_command
from .work import run_all


def load_modules() -> None:
    """Import what the doors need, so that no child does; ONNX Runtime would begin a thread."""
    import planforge.exporter.commands.bench
    import planforge.exporter.commands.inspection
    import planforge.exporter.exporting
    import planforge.exporter.fitting.fitting
    import planforge.exporter.fitting.labelled_texts
    import planforge.exporter.linting
    import planforge.exporter.tracing.trace
    import planforge.models.checkpoint
    import planforge.runtime.apps.check.selftest
    import planforge.runtime.encode.text_encoder
    import planforge.runtime.generate.text_generator
    import planforge.runtime.text.chat_template
    import planforge.runtime.translate.translator  # noqa: F401


def fuzz_files(options: argparse.Namespace, material: Path) -> list[str]:
    """Damage files of each kind, print a line about each, and return what was found."""
    findings = []
    for name in options.only.split(","):
        began = time.monotonic()
        kind = KINDS[name]
        count = max(1, options.count // 10) if kind.slow else options.count
        tally = run_kind(kind, count, options.seed, material, options.start)
        ends = ", ".join(f"{end} {count}" for end, count in tally.ends.most_common())
        print(
            f"{name}: {tally.cases} cases in {time.monotonic() - began:.0f} s; slowest {tally.slowest:.1f} s;"
            f" most memory {tally.max_bytes / 1e6:.0f} MB; {ends}",
            flush=True,
        )
        record(options, "files", name, tally)
        findings += tally.findings
        for finding in tally.findings:
            print(f"  FOUND {finding}", flush=True)
    return findings


def kill_all(options: argparse.Namespace, material: Path) -> list[str]:
    """Kill every command at random points, and fill its disk; return what was found."""
    findings = []
    for name in options.commands.split(","):
        for what, run in (("killed", kill_command), ("full disk", fill_disk)):
            outcome = run(COMMANDS[name], material, options.points, options.seed)
            print(
                f"{name}, {what}: {outcome.killed} times ended early, {outcome.finished} times done; the old"
                f" bundle {outcome.old} times, the new one {outcome.new} times",
                flush=True,
            )
            record(options, what, name, outcome)
            findings += outcome.findings
            for finding in outcome.findings:
                print(f"  FOUND {finding}", flush=True)
    return findings


def record(options: argparse.Namespace, part: str, name: str, result: Tally | Outcome) -> None:
    """Write what became of a part, beside what a file has of others."""
    if options.record is None:
        return
    kept = json.loads(options.record.read_text()) if options.record.exists() else {}
    kept.setdefault(part, {})[name] = {"seed": options.seed, "start": options.start, **vars(result)}
    options.record.write_text(json.dumps(kept, indent=1) + "\n")


def main() -> None:
    """Damage files, kill commands, work under load; end with 1 where anything was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("parts", nargs="*", default=["files", "kills", "work"], help="files, kills, work")
    parser.add_argument("--count", type=int, default=8000, help="damaged files of each kind")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--start", type=int, default=0, help="the number of the first case")
    parser.add_argument("--only", default=",".join(KINDS), help="kinds of files, by commas")
    parser.add_argument("--points", type=int, default=100, help="at which each command is killed")
    parser.add_argument("--commands", default=",".join(COMMANDS), help="those that are killed, by commas")
    parser.add_argument("--minutes", type=float, default=10, help="of work in threads and processes")
    parser.add_argument("--record", type=Path, help="a file of JSON that gets the numbers")
    parser.add_argument("--material", type=Path, default=ROOT / "build/fuzz", help="sound bundles to damage")
    options = parser.parse_args()
    material = options.material.resolve()
    os.environ["PLANFORGE_FAULTS_MATERIAL"] = str(material)
    if not (material / "done").exists():
        print(f"exporting sound bundles to {material}", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "tests.faults.material", material], cwd=ROOT, check=True)
    load_modules()
    gc.freeze()  # what was imported is nobody's litter, in no child
    print(
        f"seed {options.seed}; a case again: files --seed {options.seed} --only KIND --start NUMBER --count 1"
    )
    findings = []
    if "files" in options.parts:
        findings += fuzz_files(options, material)
    if "kills" in options.parts:
        findings += kill_all(options, material)
    if "work" in options.parts:
        found = run_all(material / DECODER / "bundle", options.minutes * 60)
        print("\n".join(f"  FOUND {line}" for line in found) or "work: answers as alone, nothing left")
        findings += found
    sys.exit(bool(findings))


if __name__ == "__main__":
    main()
