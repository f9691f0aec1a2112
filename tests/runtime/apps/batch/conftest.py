"""A bundle that embeds, and an input of every kind of file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from .texts import TEXTS


@pytest.fixture(scope="module")
def bundle(head_bundle: Callable[[str], Path]) -> Path:
    return head_bundle("pretrained")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A file of each kind, and rows that cannot be answered."""
    folder = tmp_path / "input"
    (folder / "below").mkdir(parents=True)
    (folder / "a.txt").write_text("\n".join(TEXTS[:20]) + "\n")
    lines = [json.dumps({"text": text}) for text in TEXTS[20:30]]
    (folder / "b.jsonl").write_text("\n".join([*lines, '{"text": null}', '{"text": 7}', "{", ""]))
    (folder / "c.csv").write_text(
        "n,text\n" + "".join(f'{n},"{text}"\n' for n, text in enumerate(TEXTS[30:40]))
    )
    pq.write_table(pa.table({"text": TEXTS[40:]}), folder / "below" / "d.parquet", row_group_size=7)
    (folder / "README.md").write_text("no rows")
    (folder / ".hidden.txt").write_text("no rows")
    return folder
