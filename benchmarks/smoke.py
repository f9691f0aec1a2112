"""Makes cases small, to see that every one of them runs."""

from __future__ import annotations

from dataclasses import replace

from .case import Case, Entry

MAX_TEXTS = 40  # an encoder's case reads thousands


def shrink(case: Case) -> Case:
    """Return a case with fewer texts, whose bundles are not verified where they need not be."""
    entries = {name: shrink_entry(entry) for name, entry in case.entries.items()}
    return replace(case, entries=entries, warm_up=0, processes=1, in_a_row=min(1, case.in_a_row))


def shrink_entry(entry: Entry) -> Entry:
    work = entry.work
    if work.kind == "embed":
        work = replace(work, texts=work.texts[:MAX_TEXTS])
    prepare = {name: value for name, value in entry.prepare.items() if name != "verify"}
    return replace(entry, work=work, prepare=prepare)
