"""PlanForge beside its peers: python -m benchmarks [--cases decode,encode] [--rounds 5].

Writes results/suite.json, suite.md and suite.png, and the section of the README. Cases that are not chosen
keep the results that they have.
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
from .measure import measure
from .process import ROOT
from .report import write_readme, write_report
from .workshop import Workshop

BUSY = 0.1  # of the processors' time; figures beside that much other work mean little


def main(arguments_given: Sequence[str] | None = None) -> None:
    """Exits with 1 where work was unlike, or where PlanForge failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--cases", default=",".join(GROUPS), help="groups, or single cases by their names")
    parser.add_argument("--rounds", type=int, default=5, help="how often each system does the work")
    parser.add_argument(
        "--work", type=Path, default=ROOT / "build" / "benchmarks", help="for converted models"
    )
    parser.add_argument("--out", type=Path, help="for results, instead of benchmarks/results and the README")
    parser.add_argument(
        "--python",
        type=Path,
        action="append",
        default=[],
        help="of an environment with peers, beside this one and build/bench-venv",
    )
    parser.add_argument("--keep", action="store_true", help="bundles, though the exporter has changed since")
    parser.add_argument("--list", action="store_true", help="the cases, and nothing else")
    arguments = parser.parse_args(arguments_given)
    arguments.work.mkdir(parents=True, exist_ok=True)
    cases = chosen(arguments.cases.split(","), arguments.work)
    if arguments.list:
        print("".join(f"{case.name:20}{case.title}\n" for case in cases), end="")
        return
    pythons = [Path(sys.executable), *arguments.python, ROOT / "build" / "bench-venv" / "bin" / "python"]
    workshop = Workshop(arguments.work, pythons, arguments.keep)
    out: Path = arguments.out or RESULTS
    out.mkdir(parents=True, exist_ok=True)
    failures = []
    for case in cases:
        print(f"{case.name}: {case.title}", file=sys.stderr, flush=True)
        try:
            result = measure(case, workshop, arguments.rounds)
        except UnlikeWorkError as error:
            sys.exit(f"{case.name}: {error}")
        if (busy := result["machine"]["busy"]) > BUSY:
            print(f"  the machine was {busy:.0%} busy with other things: do this again", file=sys.stderr)
        for name, reason in result["skipped"].items():
            print(f"  without {name}: {reason}", file=sys.stderr)
            if reason.startswith("failed") and case.entries[name].system == "planforge":
                failures.append(f"{case.name}: {name} {reason}")
        keep(case.name, result, out, readme=None if arguments.out else ROOT / "README.md")
    sys.exit("\n".join(failures) or 0)


def chosen(names: list[str], work: Path) -> list[Case]:
    """The cases of groups, or single ones by their names, which begin with their group's."""
    wanted: dict[str, Case] = {}
    for name in names:
        group = name.partition("-")[0]
        made = GROUPS[group](work) if group in GROUPS else []
        found = {case.name: case for case in made if name in (case.name, case.group)}
        if not found:
            sys.exit(f"there is no case {name!r}; the groups are {', '.join(GROUPS)}; --list names the cases")
        wanted |= found
    return list(wanted.values())


def keep(name: str, result: dict[str, Any], out: Path, readme: Path | None) -> None:
    """Puts a case's result in the place of its last one, and writes the report of all."""
    path = out / "suite.json"
    kept = json.loads(path.read_text(encoding="utf-8"))["cases"] if path.exists() else {}
    kept[name] = result
    groups = list(GROUPS)
    results = dict(sorted(kept.items(), key=lambda item: groups.index(item[1]["group"])))
    about = environment()
    path.write_text(json.dumps({"environment": about, "cases": results}, indent=1) + "\n", encoding="utf-8")
    text = write_report(results, about, out)
    if readme is not None:
        image = (out / "suite.png").relative_to(readme.parent).as_posix()
        write_readme(readme, f"{text}![The same as bars]({image})\n")


if __name__ == "__main__":
    main()
