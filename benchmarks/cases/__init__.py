"""All cases, group by group."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ..case import Case
from . import decode, encode, growth, imported, llama, lookup, overhead, package, prompt, start, translate

# Each makes the cases of its group; some read texts that are kept in the folder given to it.
GROUPS: dict[str, Callable[[Path], list[Case]]] = {
    "decode": decode.cases,
    "prompt": prompt.cases,
    "position": prompt.position_cases,
    "start": start.cases,
    "overhead": overhead.cases,
    "lookup": lookup.cases,
    "encode": encode.cases,
    "translate": translate.cases,
    "llama": llama.cases,
    "imported": imported.cases,
    "growth": growth.cases,
    "package": package.cases,
}
