"""Chooses what an export begins with: who traces the model, its adapters, and precisions that keep codes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..runtime.errors import InputError
from ..runtime.suggest import did_you_mean
from .checkpoints.source import Source, keep_beside, merge_into
from .imported.architectures import has_reference_model
from .options import Request
from .targets import find_target
from .tensorrt.plans import Progress
from .tracing.recipes.explanations import EXPLAIN

EXPORTERS = ("auto", "planforge", "transformers", "optimum")


def check_adapters(
    adapters: Mapping[str, str | Path], request: Request, exporter: str, outputs: Sequence[str]
) -> None:
    """Refuse adapters that are to stay beside a model where nothing can run them."""
    plans = [name for name in request.targets if find_target(name).plans]
    if plans:
        raise InputError(
            f"target {plans[0]!r}: plans take no adapters beside a model; merge one (--adapter FOLDER), or"
            " export for cpu"
        )
    if exporter != "planforge":
        raise InputError(
            f"{exporter} keeps no adapters beside a model: only decoders that PlanForge has itself do; merge"
            " one: --adapter FOLDER"
        )
    if EXPLAIN in outputs:
        raise InputError(f"output {EXPLAIN!r} explains the model alone; merge an adapter: --adapter FOLDER")
    if not adapters:
        raise InputError("adapter={} names no adapter; leave it out")


def add_adapters(
    source: Source, adapter: str | Path | Mapping[str, str | Path], verify: bool, progress: Progress
) -> Source:
    """Return a checkpoint with an adapter merged into it, or with several beside it; see `export`."""
    if isinstance(adapter, Mapping):
        progress(f"keeping {len(adapter)} adapters beside the model: {', '.join(adapter)}")
        found = keep_beside(source, adapter)
    else:
        progress("merging the adapter")
        found = merge_into(source, adapter)
    if verify:
        from .imported.adapter_check import compare_tables, compare_with_peft

        compare = compare_tables if isinstance(adapter, Mapping) else compare_with_peft
        compare(found)
    return found


def keep_codes_by_default(request: Request, source: Source, named: Sequence[str] | None) -> Request:
    """Return a request that keeps codes of weights that others quantized, where a user names no precision."""
    if named is not None or not source.kept_bits:
        return request
    kept = f"int{source.kept_bits}"
    precisions = tuple(kept if name == "fp32" else name for name in request.precisions)
    return dataclasses.replace(request, precisions=precisions)


def choose_exporter(exporter: str, folder: Path, outputs: Sequence[str]) -> str:
    """Return the exporter that "auto" stands for; refuse an unknown one, and outputs that it cannot add."""
    if exporter not in EXPORTERS:
        hint = did_you_mean(exporter, EXPORTERS)
        raise InputError(f"exporter {exporter!r} is not one of {', '.join(EXPORTERS)}{hint}")
    if exporter == "auto":
        exporter = "planforge" if has_reference_model(folder) else "transformers"
    if exporter != "planforge" and outputs:
        raise InputError(
            f"outputs {list(outputs)}: {exporter} cannot add outputs to a graph; leave outputs out"
        )
    return exporter
