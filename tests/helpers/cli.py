"""Runs the `planforge` command as a user does: in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

COMMAND = [sys.executable, "-c", "from planforge.exporter.commands.app import main; main()"]


def planforge(
    *arguments: str | int | Path, stdin: str = "", **options: Any
) -> subprocess.CompletedProcess[str]:
    """The finished process, with its output as text."""
    command = [*COMMAND, *map(str, arguments)]
    return subprocess.run(command, input=stdin, capture_output=True, encoding="utf-8", timeout=600, **options)


def error_line(*arguments: str | int | Path, code: int = 2) -> str:
    """The one line on stderr of a command that must fail: with 2 where what was typed is wrong."""
    done = planforge(*arguments)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, done.stderr
    return lines[0]
