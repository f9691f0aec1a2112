"""`planforge doctor`: what this machine has, which backends run on it, and what the next one needs."""

from __future__ import annotations

import json

import typer

from .console import print_tables, running
from .run_options import JsonOption


def doctor(as_json: JsonOption = False) -> None:
    """Say which backends run on this machine, and what to install for the next. Needs no bundle, no torch."""
    with running():
        from ..runtime.doctor import diagnose
        from .doctor_tables import diagnosis_tables

        found = diagnose()
        if as_json:
            typer.echo(json.dumps(found.to_json(), ensure_ascii=False))
        else:
            print_tables(diagnosis_tables(found))
            typer.echo("\n".join(("", *found.advice, found.summary)))  # commands to copy, so never folded
