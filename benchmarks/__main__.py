"""Measures PlanForge against its peers: python -m benchmarks [--cases decode,encode] [--rounds 5].

Writes results/suite-KIND.json, .md and .png, where KIND is the machine's instruction set, and the tables of
README.md and docs/benchmark.md. Cases that are not chosen keep the results that they have. A case that was
measured during other work is measured again, and left out where the machine stays busy.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .alike import UnlikeWorkError
from .case import Case
from .cases import GROUPS
from .common import RESULTS, environment
from .idle import BusyMachineError, measure_when_idle
from .machine import BUSY
from .measure import measure
from .process import ROOT
from .report import name_files, write_pages, write_report
from .smoke import shrink
from .workshop import Workshop


def main(arguments_given: Sequence[str] | None = None) -> None:
    """Run the command; exit with 1 where work was unlike, PlanForge failed, or the machine was too busy."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--cases", default=",".join(GROUPS), help="groups, or single cases by their names")
    parser.add_argument("--rounds", type=int, default=5, help="how often each system does the work")
    parser.add_argument("--work", type=Path, help="for converted models, instead of build/benchmarks")
    parser.add_argument("--out", type=Path, help="for results, instead of benchmarks/results and the pages")
    parser.add_argument(
        "--python",
        type=Path,
        action="append",
        default=[],
        help="of an environment with peers, besides this one, build/bench-venv and build/genai-venv",
    )
    parser.add_argument("--keep", action="store_true", help="bundles, though the exporter has changed since")
    parser.add_argument(
        "--smoke",
        action="store_true",
        help="tiny models and one round, to see that all runs; nothing is compared or published",
    )
    parser.add_argument("--list", action="store_true", help="the cases, and nothing else")
    arguments = parser.parse_args(arguments_given)
    work: Path = arguments.work or ROOT / "build" / ("benchmarks-smoke" if arguments.smoke else "benchmarks")
    work.mkdir(parents=True, exist_ok=True)
    cases = resolve_cases(arguments.cases.split(","), work)
    if arguments.list:
        print("".join(f"{case.name:24}{case.title}\n" for case in cases), end="")
        return
    peers = [ROOT / "build" / name / "bin" / "python" for name in ("bench-venv", "genai-venv")]
    pythons = [Path(sys.executable), *arguments.python, *peers]
    workshop = Workshop(work, pythons, arguments.keep, tiny=arguments.smoke)
    out: Path = arguments.out or (work / "results" if arguments.smoke else RESULTS)
    out.mkdir(parents=True, exist_ok=True)
    root = None if arguments.out or arguments.smoke else ROOT
    failures = []
    for case in cases:
        print(f"{case.name}: {case.title}", file=sys.stderr, flush=True)
        try:
            result = (
                smoke(case, workshop)
                if arguments.smoke
                else measure_undisturbed(case, workshop, arguments.rounds)
            )
        except UnlikeWorkError as error:
            if not arguments.smoke:
                sys.exit(f"{case.name}: {error}")
            failures.append(f"{case.name}: {error}")
            continue
        except BusyMachineError as error:
            failures.append(f"{case.name} is left out: {error}")
            leave_out(case, str(error), out, root)
            continue
        for name, reason in result["skipped"].items():
            print(f"  without {name}: {reason}", file=sys.stderr)
            ours = case.entries[name].system == "planforge"
            if reason.startswith("failed") and (ours or arguments.smoke):
                failures.append(f"{case.name}: {name} {reason}")
        keep(case.name, result, out, root)
    sys.exit("\n".join(failures) or 0)


def measure_undisturbed(case: Case, workshop: Workshop, rounds: int) -> dict[str, Any]:
    """Return a case's result, measured while the machine had nothing else to do.

    Raises:
        BusyMachineError: it never had.
    """
    return measure_when_idle(
        lambda: measure(case, workshop, rounds), say=lambda line: print(f"  {line}", file=sys.stderr)
    )


def smoke(case: Case, workshop: Workshop) -> dict[str, Any]:
    """Return the results of one round of a small case, on a machine that may be busy; nothing is judged."""
    result = measure(shrink(case), workshop, rounds=1)
    return {**result, "machine": {**result["machine"], "busy": 0.0}, "targets": []}


def resolve_cases(names: list[str], work: Path) -> list[Case]:
    """Return the cases of groups, or single ones by their names, which begin with their group's."""
    wanted: dict[str, Case] = {}
    for name in names:
        group = name.partition("-")[0]
        made = GROUPS[group](work) if group in GROUPS else []
        found = {case.name: case for case in made if name in (case.name, case.group)}
        if not found:
            sys.exit(f"there is no case {name!r}; the groups are {', '.join(GROUPS)}; --list names the cases")
        wanted |= found
    return list(wanted.values())


def keep(name: str, result: dict[str, Any], out: Path, root: Path | None) -> None:
    """Replace a case's last result, and write the report of all."""
    kept, left_out = read_results(out)
    kept[name] = result
    left_out.pop(name, None)
    write_results(kept, left_out, out, root)


def leave_out(case: Case, reason: str, out: Path, root: Path | None) -> None:
    """Remove a case's last result, which is outdated, and give the reason why it is missing."""
    kept, left_out = read_results(out)
    kept.pop(case.name, None)
    left_out[case.name] = f"{case.title}: {reason}"
    write_results(kept, left_out, out, root)


def read_results(out: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Return earlier results on this kind of machine by their cases' names, and why others are missing.

    Measurements that an earlier version made during other work do not count as results.
    """
    path = out / f"{name_files(environment())}.json"
    if not path.exists():
        return {}, {}
    suite = json.loads(path.read_text(encoding="utf-8"))
    kept = {name: case for name, case in suite["cases"].items() if case["machine"]["busy"] <= BUSY}
    return kept, suite.get("left_out", {})


def write_results(kept: dict[str, Any], left_out: dict[str, str], out: Path, root: Path | None) -> None:
    """Write this kind of machine's results by groups, their report, and the pages of all kinds."""
    groups = list(GROUPS)
    results = dict(sorted(kept.items(), key=lambda item: groups.index(item[1]["group"])))
    suite = {"environment": environment(), "cases": results, "left_out": left_out}
    path = out / f"{name_files(suite['environment'])}.json"
    path.write_text(json.dumps(suite, indent=1) + "\n", encoding="utf-8")
    write_report(suite, out)
    if root is not None:
        found = [json.loads(each.read_text(encoding="utf-8")) for each in sorted(out.glob("suite-*.json"))]
        write_pages(found, out, root)


if __name__ == "__main__":
    main()
