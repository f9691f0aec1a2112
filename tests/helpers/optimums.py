"""optimum in an environment of its own; what it makes of equal checkpoints is kept for later runs."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from .paths import DEMOS, ROOT

OPTIMUM_PYTHON = ROOT / "build/optimum-venv/bin/python"
KEPT = ROOT / "build/optimum-exports"
SCRIPTS = [ROOT / f"tests/helpers/{name}.py" for name in ("optimum_exports", "random_checkpoints")]
READ = (*SCRIPTS, ROOT / "tests/optimum_requirements.txt", DEMOS / "gpt2-demo/tokenizer.json")


def write_optimums_exports(folder: Path, *names: str) -> None:
    """Let optimum export checkpoints of a folder by their names; without names, random ones of its own."""
    if not OPTIMUM_PYTHON.exists():
        pytest.skip("needs make build/optimum-venv/.ready")
    folder.mkdir(exist_ok=True)
    digest = hashlib.sha256()
    for path in (*READ, *sorted(folder.rglob("*"))):
        digest.update(path.name.encode())
        digest.update(path.read_bytes() if path.is_file() else b"")
    kept = KEPT / digest.hexdigest()[:16]
    if not kept.exists():
        command = [str(OPTIMUM_PYTHON), "-m", "tests.helpers.optimum_exports", str(folder), *names]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
        assert done.returncode == 0, done.stderr[-2000:]
        partial = Path(shutil.copytree(folder, kept.with_suffix(f".{os.getpid()}")))
        partial.rename(kept)
    shutil.copytree(kept, folder, dirs_exist_ok=True)
