"""The table of GPU architectures: its names are those of the documentation, of boards and of options."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from planforge.exporter.tensorrt.build import resolve_architectures
from planforge.runtime.apps.diagnostics.jetson import ARCHITECTURES
from planforge.runtime.backends.architectures import (
    GPUS,
    JETSON,
    describe_sm,
    describe_sms,
    find_sm,
    suggest_series,
)
from planforge.runtime.backends.tensorrt_library import LIBRARIES

DOCS = Path(__file__).parents[3] / "docs/deploy"
ROW = re.compile(r"^\| (?:GeForce )?([^|]+?) \| (sm\d+) \|", re.MULTILINE)


def test_every_gpu_that_plans_are_built_for_has_a_name() -> None:
    assert set(LIBRARIES["tensorrt-rtx"].sms) <= set(GPUS)
    assert set(JETSON) == {"sm72", "sm87", "sm101", "sm110"}  # whose plans run on no other GPUs
    for sm, names in ARCHITECTURES.items():
        assert names[0] in describe_sm(sm).lower()


@pytest.mark.parametrize("page", ["rtx.md", "datacentre.md"])
def test_the_documentation_calls_gpus_alike(page: str) -> None:
    rows = ROW.findall((DOCS / page).read_text(encoding="utf-8"))
    assert len(rows) > 3
    for names, sm in rows:
        words = set(re.split(r"[ ,]+", names))
        assert any(set(name.split()) <= words for name in GPUS[sm]), (sm, names)


def test_a_gpu_is_named_in_each_form_that_people_use() -> None:
    assert [find_sm(text) for text in ("86", "SM86", "RTX 30", "rtx30", "a10")] == ["sm86"] * 5
    assert find_sm("Jetson Orin") == "sm87" and find_sm("GTX 9") == "gtx 9"
    models = ("RTX 3060", "geforce rtx 4090 Ti", "RTX5070")
    assert [suggest_series(text) for text in models] == [
        "; did you mean RTX 30 (sm86)?",
        "; did you mean RTX 40 (sm89)?",
        "; did you mean RTX 50 (sm120)?",
    ]
    assert not any(map(suggest_series, ("RTX 5000 Ada", "RTX 9060", "GTX 1080", "rtx", "A1000")))
    assert len({name for names in GPUS.values() for name in names}) == sum(map(len, GPUS.values()))
    assert describe_sms(["sm80+", "sm999"]) == "sm80+ (A100, A30 and later), sm999"
    pytest.importorskip("tensorrt_rtx")
    assert resolve_architectures("tensorrt-rtx", ["RTX 40", "l4", "sm120"]) == ["sm89", "sm120"]
