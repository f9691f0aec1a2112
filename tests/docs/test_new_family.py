"""The script that begins a family's row: for Seed-OSS it finds what the row in the source has."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import transformers

from planforge.models.llama_families import FAMILIES

from ..helpers.llamas import LLAMAS
from ..helpers.paths import ROOT


def test_the_row_has_the_defaults_and_the_unknown_settings(tmp_path: Path) -> None:
    config = transformers.SeedOssConfig(attention_out_bias=True)
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict(), default=str), encoding="utf-8")
    script = ROOT / "docs/examples/new_family.py"
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "config.json")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    row = FAMILIES["seed_oss"]
    assert f'class_name="{row.class_name}"' in done.stdout
    for name, value in row.defaults.items():
        if name != "head_dim":  # which transformers computes where config.json leaves it out
            assert f'"{name}": {value!r},' in done.stdout
    for name in row.settings:
        assert f'"{name}": "a field of LlamaConfig?"' in done.stdout
    assert f'"seed-oss": ("{LLAMAS["seed-oss"][0]}", {{' in done.stdout
    assert "-k seed-oss" in done.stdout
