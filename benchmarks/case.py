"""A case to measure: a piece of work, the systems that do it, and PlanForge's targets."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

THREADS = 2


@dataclass(frozen=True)
class Work:
    """A piece of work that a system does once.

    Attributes:
        kind: "generate", "embed" or "translate": a method of `systems.system.System`.
        texts: one of each row, for systems that read text.
        prompts: the token ids of the same rows, for systems that read ids; none for "embed".
        new_tokens: of each row, greedy or by beam search; the end token never ends a row.
        beams: 1 is greedy.
        options: of PlanForge's `generate`.
        dictated: what a random model is made to answer: it computes all it would, and then this text's
            next token has the highest score.
    """

    kind: str
    texts: tuple[str, ...]
    prompts: tuple[tuple[int, ...], ...] = ()
    new_tokens: int = 0
    beams: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)
    dictated: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def units(self) -> int:
        """Return the number of units of a rate: new tokens of the batch, or texts."""
        return len(self.texts) * (self.new_tokens or 1)


@dataclass(frozen=True)
class Entry:
    """One system at one piece of work; entries that differ in work, label and varies alone share a process.

    Attributes:
        system: the name of a module in systems/.
        precision: one of the system's own names for them, `System.classes`.
        checkpoint: a name in `checkpoints.CHECKPOINTS`.
        prepare: settings of `System.prepare`, which says what there is.
        settings: of the session; a text generator is told "tokens" and "batch", the most of any work.
        graphs: a system whose files this one is prepared from, in addition to the checkpoint.
        label: put behind the system's name and precision.
        varies: as of a case, in this entry alone.
    """

    system: str
    precision: str
    checkpoint: str
    work: Work
    threads: int = THREADS
    prepare: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    graphs: str = ""
    label: str = ""
    varies: Mapping[str, str] = field(default_factory=dict)

    @property
    def process(self) -> str:
        """Return a key that is equal for entries that share a process."""
        settings = [dict(self.prepare), dict(self.settings), self.graphs]
        return json.dumps(
            [self.system, self.precision, self.checkpoint, self.threads, self.work.kind, settings],
            sort_keys=True,
        )


@dataclass(frozen=True)
class Target:
    """A target for PlanForge's lead: `of` and `to` are entries by their `Case.entries` key.

    Attributes:
        metric: "per_s" (of rates, higher is better), "ttft_ms", "inter_token_ms", "ms" (lower is better).
        at_least: the ratio of medians that counts as reached.
    """

    of: str
    to: str
    metric: str
    at_least: float


@dataclass(frozen=True)
class Limit:
    """The highest or lowest value allowed for a figure of one entry, as "peak_rss_mb" or "cosine_min"."""

    of: str
    metric: str
    at_most: float | None = None
    at_least: float | None = None


@dataclass(frozen=True)
class Case:
    """Entries that are measured side by side, in turns.

    Attributes:
        name: on the command line and in the results.
        group: of cases that are chosen together.
        title: in tables.
        entries: by a short name that targets use; the first is the one that others are compared with.
        varies: parts of a description that differ on purpose, and why; all others must be equal.
        fresh: every round starts each process anew, to measure its start.
        metric: what the table of all cases and the plot show.
        rounds: at most so many, whatever the command line says.
        in_a_row: how many works each system does after the rounds, alone and without a pause.
        warm_up: seconds of work before the first round, of which one piece is always done. PlanForge moves
            weights into huge pages meanwhile.
        processes: how often each process is started, for all rounds: where its memory lies makes one some
            percent faster than the next.
        reference: a system whose tokens in fp32 every entry must find before anything is timed.
    """

    name: str
    group: str
    title: str
    entries: Mapping[str, Entry]
    varies: Mapping[str, str] = field(default_factory=dict)
    targets: tuple[Target | Limit, ...] = ()
    fresh: bool = False
    metric: str = "per_s"
    rounds: int = 99
    in_a_row: int = 0
    warm_up: float = 5.0
    processes: int = 1
    reference: str = ""
