"""Measures tables of rows on one machine and on Ray: rates, Ray's cost, the driver's memory, and limits.

python -m benchmarks.scale BUNDLE [--only rates,driver,limits] [--rounds 3] [--work FOLDER]

BUNDLE is one that embeds, such as build/bert-demo. Results go to benchmarks/results/scale.json; what --only
leaves out stays there as it was.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from ..common import RESULTS, write_result
from .driver import measure_drivers, measure_resume
from .limits import measure_limits
from .rates import measure_rates

MEASURES = ("rates", "driver", "limits")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--only", default=",".join(MEASURES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", default="10000,100000,1000000,10000000", help="of the driver's jobs")
    parser.add_argument("--work", type=Path)
    given = parser.parse_args()
    path = RESULTS / "scale.json"
    result: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    result.pop("environment", None)
    with tempfile.TemporaryDirectory(dir=given.work) as name:
        work = Path(name)
        wanted = given.only.split(",")
        if "rates" in wanted:
            result["rates"] = measure_rates(given.bundle, work, given.rounds)
        if "driver" in wanted:
            result["driver"] = measure_drivers([int(rows) for rows in given.rows.split(",")], work)
            result["resume_100001_rows"] = measure_resume(given.bundle.absolute(), work)
        if "limits" in wanted:
            result["limits"] = measure_limits(work)
    write_result("scale", result)


if __name__ == "__main__":
    main()
