"""Doors that do what none may, and what a run says of each."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # before numpy is imported: what forks must have one thread

from .child import run_kind
from .doors import ENCODER, Kind


def crash(folder: Path) -> None:
    os.abort()


def eat(folder: Path) -> None:
    bytearray(1_200_000_000)


def leave(folder: Path) -> None:
    (folder.parent.parent / "outside/secret.txt").read_text()


def say_two_lines(folder: Path) -> None:
    raise OSError("one\ntwo")


def raise_another(folder: Path) -> None:
    raise KeyError("limits")


def main(material: Path) -> None:
    """Print what is found of a case of each door."""
    for door in (crash, eat, leave, say_two_lines, raise_another):
        doors = (door,)
        kind = Kind("planted", "bundle", ("manifest.json",), lambda mutator, data: data, doors, (ENCODER,))
        for finding in run_kind(kind, 1, 0, material).findings:
            print(f"{door.__name__}: {finding}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
