"""Keeps a set of cases in the arrays of a .npz file, as a bundle's golden data has it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from .case import CASES, Array, Case, CaseSet, Denoising, Known, Measure, Noise, Row, Searching, Text
from .files import Arrays

FORMAT = 3  # of the arrays that `to_arrays` makes; 2 called random cases drawn, 1 had names of each task


def to_arrays(case_set: CaseSet) -> dict[str, Array]:
    """Return a set as a .npz file keeps it: one text of JSON, and an array for each text and output."""
    plan = {
        "format": FORMAT,
        **{name: [asdict(case) for case in getattr(case_set, name)] for name in CASES},
        "texts": [{**asdict(text), "tokens": None} for text in case_set.texts],
        "columns": case_set.columns,
        "left_out": case_set.left_out,
        "search": case_set.search,
        "denoising": case_set.denoising,
    }
    arrays: dict[str, Array] = {"plan": np.array(json.dumps(plan))}
    arrays |= {f"text.{i}": np.array(text.tokens, np.int64) for i, text in enumerate(case_set.texts)}
    for output, by_text in case_set.answers.items():
        for text, known in by_text.items():
            arrays[f"{output}.{text}.positions"] = known.positions
            arrays[f"{output}.{text}.values"] = known.values
    return arrays


def from_arrays(arrays: Arrays) -> CaseSet:
    """Return the set that `to_arrays` stored.

    A KeyError names what is missing: an array, or this version of the format.
    """
    plan = json.loads(str(arrays["plan"]))
    if plan["format"] != FORMAT:
        raise KeyError(f"format {FORMAT}")
    texts = [read_text(text) for text in plan["texts"]]
    cases: dict[str, Any] = {name: tuple(map(read_case, plan[name])) for name in CASES}
    answers: dict[str, dict[int, Known]] = {}
    for name in arrays:
        if name.endswith(".positions"):
            output, number, _ = name.rsplit(".", 2)
            values = arrays[f"{output}.{number}.values"]
            answers.setdefault(output, {})[int(number)] = Known(arrays[name], values)
    return CaseSet(
        texts=tuple(
            replace(text, tokens=tuple(arrays[f"text.{i}"].tolist())) for i, text in enumerate(texts)
        ),
        **cases,
        answers=answers,
        columns=tuple(plan["columns"]),
        left_out=tuple(plan["left_out"]),
        search=None if plan.get("search") is None else Searching(*map(read_search, plan["search"])),
        denoising=None if plan.get("denoising") is None else Denoising(*plan["denoising"]),
    )


def read_text(fields: Mapping[str, Any]) -> Text:
    """Return the text whose fields JSON has; its tokens are an array of their own."""
    noise = fields.get("noise")
    known = {**fields, "tokens": (), "segments": tuple(fields["segments"])}
    return Text(**{**known, "noise": None if noise is None else Noise(*noise)})


def read_search(field: Any) -> Any:
    """Return a field of `Searching` as JSON has it."""
    return tuple(field) if isinstance(field, list) else field


def read_case(fields: Mapping[str, Any]) -> Case:
    """Return the case whose fields JSON has."""
    rows = tuple(Row(row["text"], tuple(row["ends"])) for row in fields["rows"])
    measures = tuple(
        Measure(kind, tuple(outputs), tuple(limited), *others)
        for kind, outputs, limited, *others in fields["measures"]
    )
    return Case(**{**fields, "rows": rows, "measures": measures})
