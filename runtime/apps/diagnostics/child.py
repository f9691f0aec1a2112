"""A process that measures: it reads JSON lines, and answers each with one."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from ...errors import InputError, MemoryLimitError, PlanForgeError

# Python puts the current folder first on its path, where a stray random.py would be imported instead.
CHILD = "import sys; sys.path[:] = [p for p in sys.path if p]; from {} import main; main()"


class Child:
    """A module's `main` in a process of its own; `what` names in an error what it measures."""

    def __init__(self, module: str, what: str, work: dict[str, Any]) -> None:
        self.what = what
        self.child = subprocess.Popen(
            [sys.executable, "-c", CHILD.format(module)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            encoding="utf-8",
        )
        try:
            self.facts = self.ask(json.dumps(work))
        except BaseException:
            self.close()
            raise

    def ask(self, line: str) -> dict[str, Any]:
        """Send a line and wait for the answer."""
        assert self.child.stdin is not None and self.child.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.child.stdin.write(line + "\n")
            self.child.stdin.flush()
        answer = self.child.stdout.readline()
        if not answer:
            raise PlanForgeError(
                f"the process that measured {self.what} ended with exit code {self.child.wait()};"
                " -9 usually means that memory ran out"
            )
        value: dict[str, Any] = json.loads(answer)
        if "memory" in value:
            raise MemoryLimitError(value["error"], **value["memory"])
        if "error" in value:
            kind = InputError if value["wrong_input"] else PlanForgeError
            raise kind(value["error"])
        return value

    def close(self) -> None:
        assert self.child.stdin is not None and self.child.stdout is not None
        self.child.kill()
        with contextlib.suppress(BrokenPipeError):
            self.child.stdin.close()
        self.child.stdout.close()
        self.child.wait()


def answer(value: dict[str, Any]) -> None:
    """Send a line to the process that began this one."""
    print(json.dumps(value), flush=True)


def serve_parent(serve: Callable[[dict[str, Any]], None]) -> None:
    """Let `serve` do the work that the first line of stdin describes, and answer its errors."""
    try:
        serve(json.loads(sys.stdin.readline()))
    except MemoryLimitError as error:
        answer({"error": str(error), "memory": {"needed": error.needed, "limit": error.limit}})
    except PlanForgeError as error:
        answer({"error": str(error), "wrong_input": isinstance(error, InputError)})
    except KeyboardInterrupt:
        sys.exit(130)
