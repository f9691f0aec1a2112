"""The page's table of plans is the recorded run's."""

from __future__ import annotations

import json

from benchmarks.common import RESULTS
from benchmarks.plan_precisions import RESULT, describe, make_table

from ..helpers.paths import ROOT


def test_the_table_is_that_of_the_recorded_run() -> None:
    result = json.loads((RESULTS / f"{RESULT}.json").read_text(encoding="utf-8"))
    assert make_table(result) in (ROOT / "docs/quantize.md").read_text(encoding="utf-8")


def test_a_cell_has_the_size_and_the_loss() -> None:
    plan = {"plan_bytes": 12_600_000}
    assert describe({**plan, "measured": {"perplexity_change": 0.0123}}) == "13 MB, +1.23%"
    assert describe({**plan, "measured": {"sentence_embedding.mean_cosine_gap": 4e-4}}) == "13 MB, 0.9996"
    assert describe({**plan, "measured": {}}) == "13 MB"
    assert describe({"refused": "it loses too much"}) == "refused"
