"""What a job, and each part of it, came to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class PartResult:
    """A part that is written.

    Attributes:
        number: the part's.
        tokens: that its rows have, those of answers included.
        seconds: that a worker took for it.
        worker: whose name that is: its machine and process.
        example: the error of one of its rows.
    """

    number: int
    rows: int
    errors: int
    tokens: int
    seconds: float
    worker: str
    example: str | None = None


@dataclass
class WorkerTotal:
    """What a worker did."""

    rows: int = 0
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        """Rows per second."""
        return self.rows / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class BatchResult:
    """What a job came to.

    Attributes:
        output: the folder's path or address.
        parts: how many files its rows are in.
        rows: all of them, those included that earlier runs computed.
        errors: rows without an answer; their column "error" says why.
        example: one of the errors of this run.
        tokens: that all rows have, those of answers included.
        computed: the rows of this run.
        seconds: that this run took.
        workers: what each did in this run, by its name.
    """

    output: str
    parts: int
    rows: int
    errors: int
    example: str | None
    tokens: int
    computed: int
    seconds: float
    workers: Mapping[str, WorkerTotal] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the fields of `planforge batch --json`."""
        workers = {name: {**asdict(total), "rows_per_s": total.rate} for name, total in self.workers.items()}
        return {**asdict(self), "workers": workers}
