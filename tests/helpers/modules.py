"""Which modules a process has loaded."""

from __future__ import annotations

import json
import subprocess
import sys


def modules_after(code: str, whole: bool = False) -> set[str]:
    """The modules that a new process has loaded after `code`: top-level ones, or their whole names."""
    report = "import json, sys; print('\\n' + json.dumps(list(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{report}"], capture_output=True, text=True, check=True
    )
    names = json.loads(done.stdout.splitlines()[-1])
    return {name if whole else name.split(".")[0] for name in names}
