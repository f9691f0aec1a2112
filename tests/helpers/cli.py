"""Runs the `planforge` command as a user does: in a process of its own, or, which is quicker, in this one."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from planforge.exporter.commands.app import main
from planforge.runtime.apps.commands.console import Settings

COMMAND = [sys.executable, "-c", "from planforge.exporter.commands.app import main; main()"]
# The same where whoever runs the tests ignores Ctrl-C, as for a job in the background.
INTERRUPTIBLE = [
    sys.executable,
    "-c",
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler);"
    "from planforge.exporter.commands.app import main; main()",
]


def planforge(*arguments: str | int | Path, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """The finished command, run in this process, with its output as text and no terminal anywhere."""
    command = ["planforge", *map(str, arguments)]
    written = {"stdout": io.BytesIO(), "stderr": io.BytesIO()}
    files = {"stdin": io.BytesIO(stdin.encode()), **written}
    streams = {name: io.TextIOWrapper(file, encoding="utf-8") for name, file in files.items()}
    with pytest.MonkeyPatch.context() as patch, fresh_logging():
        patch.setattr(sys, "argv", command)
        patch.setattr(Settings, "debug", False)
        for name, stream in streams.items():
            patch.setattr(sys, name, stream)
        try:
            main()
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        except Exception:
            traceback.print_exc()
            code = 1
        for name in written:
            streams[name].flush()
    output, errors = (read_text(file) for file in written.values())
    return subprocess.CompletedProcess(command, code, output, errors)


def read_text(file: io.BytesIO) -> str:
    """Return all that was written, with line breaks as subprocess gives them."""
    return file.getvalue().decode().replace("\r\n", "\n").replace("\r", "\n")


@contextmanager
def fresh_logging() -> Iterator[None]:
    """Logging as a new process finds it, without pytest's handlers; afterwards all is as it was."""
    loggers = [logging.getLogger(name) for name in ("root", "planforge", "onnxscript")]
    levels = [logger.level for logger in loggers]
    root = logging.getLogger()
    handlers = root.handlers[:]
    root.handlers.clear()
    try:
        yield
    finally:
        root.handlers[:] = handlers
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def planforge_process(
    *arguments: str | int | Path, stdin: str = "", **options: Any
) -> subprocess.CompletedProcess[str]:
    """The finished process of the command, with its output as text; its imports take seconds."""
    command = [*COMMAND, *map(str, arguments)]
    return subprocess.run(command, input=stdin, capture_output=True, encoding="utf-8", timeout=600, **options)


def error_line(*arguments: str | int | Path, code: int = 2) -> str:
    """The one line on stderr of a command that must fail: with 2 where what was typed is wrong."""
    done = planforge(*arguments)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, done.stderr
    if "--json" in arguments:
        assert json.loads(done.stdout)["error"]["exit_code"] == code
    else:
        assert done.stdout == ""
    return lines[0]
