"""Bundles with plans, changed for a test, and what their graphs answer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

import pytest

from planforge.runtime import TextGenerator

PROMPT = "Now therefore"  # the demo's greedy answer has 27 different tokens of 40
PROMPTS = ["Now therefore", "In the beginning God created the heaven", "And"]
Change = Callable[[dict[str, Any]], None]


def with_manifest(bundle: Path, change: Change) -> Path:
    """Edits a bundle's manifest."""
    path = bundle / "manifest.json"
    value = json.loads(path.read_text(encoding="utf-8"))
    change(value)
    path.write_text(json.dumps(value), encoding="utf-8")
    return bundle


def of_tensorrt(value: dict[str, Any]) -> None:
    """As if TensorRT had built the plans, on a machine with an RTX 3090."""
    for plan in value["plans"]:
        plan |= {"engine": "tensorrt", "version": "10.15.1.29", "sms": ["sm86"], "cuda": "12.0"}


def answers(bundle: Path, backend: str, **options: Any) -> list[tuple[Any, ...]]:
    """Tokens of batches, of a long prompt, of draws; and the text of two caches that are used in turns."""
    with TextGenerator.load(bundle, backend=backend, precision="fp16") as model:
        found = model.generate(PROMPTS, max_new_tokens=24, **options)
        found += [model.generate(PROMPT * 60, max_new_tokens=8)]  # longer than one step's tokens
        found += model.generate(PROMPTS, max_new_tokens=24, seed=5, temperature=1.2, **options)
        first, second = (model.stream(prompt, max_new_tokens=16) for prompt in PROMPTS[:2])
        texts = [tuple(islice(first, 4)), tuple(islice(second, 4)), *zip_longest(first, second)]
    return [*(one.token_ids for one in found), *texts]


def only(bundle: Path, copy: Path, *ids: str) -> Path:
    """A copy of a bundle that has no graphs but these."""

    def change(value: dict[str, Any]) -> None:
        value["artifacts"] = [a for a in value["artifacts"] if a["id"] in ids]
        value["plans"] = [p for p in value["plans"] if p["built_from"] in ids]

    return with_manifest(Path(shutil.copytree(bundle, copy)), change)


@contextmanager
def without_plans() -> Iterator[None]:
    """Let an export to TensorRT write graphs for plans, and build none, which is slow."""
    from planforge.exporter import exporting

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exporting, "build_plans", lambda *arguments: [])
        yield
