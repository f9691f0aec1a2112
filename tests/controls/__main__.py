"""`make controls`: sound checkpoints of random shapes and weights, none of which is to be called faulty."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

from ..helpers.traces import trace_each_graph_once
from .judging import FALSE_ALARM, PASSED, format_table, judge_control

CONTROLS = 60


def main() -> None:
    """Export and verify controls; print the table, and end with 1 where there was a false alarm."""
    parser = argparse.ArgumentParser(prog="python -m tests.controls", description=__doc__)
    parser.add_argument("--first", type=int, default=0, help="the number of the first control")
    parser.add_argument("--count", type=int, default=CONTROLS)
    parser.add_argument("--record", type=Path, help="a file of JSON that gets the verdicts")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    os.environ["PLANFORGE_ANSWERS_MB"] = "0"  # PyTorch answers anew; the cache folder stays as it is
    records: dict[int, Any] = {}
    if options.record is not None and options.record.exists():
        records = {record["number"]: record for record in json.loads(options.record.read_text())["controls"]}
    with trace_each_graph_once():
        for number in range(options.first, options.first + options.count):
            work = Path(tempfile.mkdtemp(prefix="controls-"))
            try:
                records[number] = judge_control(number, work)
            finally:
                shutil.rmtree(work)
            tell(records[number])
            if options.record is not None:
                ordered = [records[number] for number in sorted(records)]
                options.record.write_text(json.dumps({"controls": ordered}, indent=1) + "\n")
    print(format_table(records.values()), end="")
    verdicts = [verdict for record in records.values() for verdict in record["verdicts"].values()]
    sys.exit(any(verdict["verdict"] == FALSE_ALARM for verdict in verdicts))


def tell(record: dict[str, Any]) -> None:
    """Print a line about a control, and one for each precision that did not pass."""
    words = f"{record['number']}: {record['kind']}, spread {record['spread']}, outliers {record['outliers']}"
    print(f"{words}, {record['cpu_seconds']} s", file=sys.stderr, flush=True)
    for precision, verdict in record["verdicts"].items():
        if verdict["verdict"] != PASSED:
            failures = verdict["failures"]
            print(f"  {precision}: {verdict['verdict']}: {len(failures)}: {failures[0]}", file=sys.stderr)


if __name__ == "__main__":
    main()
