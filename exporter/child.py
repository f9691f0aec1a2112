"""How this package starts its own modules as child processes."""

from __future__ import annotations

import sys


def command_of(module: str) -> list[str]:
    """The command that calls `module`.main with the arguments that follow.

    Python puts the current folder first on its path for -m and -c alike, where a stray random.py would be
    imported, and run, instead of the real one; so it is taken off before anything is imported.
    """
    code = (
        f"import sys; sys.path[:] = [p for p in sys.path if p]; from {module} import main; main(sys.argv[1:])"
    )
    return [sys.executable, "-c", code]
