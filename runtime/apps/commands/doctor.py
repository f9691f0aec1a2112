"""`planforge doctor`: what this machine has, which backends run on it, and what the next one needs."""

from __future__ import annotations

from .console import print_json, print_lines, print_tables, show_stages
from .run_options import JsonOption


def doctor(as_json: JsonOption = False) -> None:
    """Say which backends run on this machine, and what to install for the next. Needs no bundle, no torch."""
    with show_stages():
        from ..diagnostics.doctor import diagnose
        from .doctor_tables import tabulate_diagnosis

        diagnosis = diagnose()
        if as_json:
            print_json(diagnosis.to_json())
        else:
            print_tables(tabulate_diagnosis(diagnosis))
            print_lines(("", *diagnosis.advice, diagnosis.summary))  # commands to copy, so never folded
