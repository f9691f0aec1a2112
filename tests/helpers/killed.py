"""Changes of bundles that are killed, or find the disk full, at every step that changes the disk."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from .patience import PATIENCE

STEPS = 40  # more than a change has
# Makes a change in folders, each in a process of its own. Before its N-th call that changes the disk, the
# N-th kills itself, or the call finds the disk full.
STOPPED = """
import errno, itertools, json, os, pathlib, signal, sys

exec(sys.argv[4])

def stop(folder, fatal):
    calls = itertools.count()

    def counted(real):
        def call(*arguments, **options):
            if next(calls) == fatal:
                if sys.argv[3] == "full":
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **options)
        return call

    for owner, name in [(os, "replace"), (os, "rename"), (os, "fsync"), (os, "unlink"), (os, "mkdir"),
                        (pathlib.Path, "write_text"), (pathlib.Path, "unlink")]:
        setattr(owner, name, counted(getattr(owner, name)))
    change(folder)

codes = []
for fatal in range(int(sys.argv[2])):
    child = os.fork()
    if child == 0:
        code = 1
        try:
            stop(pathlib.Path(sys.argv[1], str(fatal)), fatal)
            code = 0
        finally:
            os._exit(code)
    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(json.dumps(codes))
"""


def stop_at_every_step(change: str, folder: Path, how: str = "killed") -> list[int]:
    """Run code that defines `change`, for FOLDER/0, FOLDER/1, ...; the N-th is stopped at its N-th step.

    Return the exit codes of their processes. `how` is "killed", or "full" where the disk is.
    """
    command = [sys.executable, "-c", STOPPED, str(folder), str(STEPS), how, change]
    done = subprocess.run(command, timeout=PATIENCE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    codes: list[int] = json.loads(done.stdout)
    return codes
