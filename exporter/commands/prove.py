"""`planforge prove`: evidence of a bundle on this machine, kept in the bundle."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...runtime.apps.commands.console import print_json, print_lines, print_tables, show_stages
from ...runtime.apps.commands.run_options import (
    BackendOption,
    BundleArgument,
    DeviceOption,
    JsonOption,
    PrecisionOption,
    ThreadsOption,
    make_option,
)
from ...runtime.errors import InputError, PlanForgeError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ...runtime.apps.proof.changes import ProofPair
    from ...runtime.apps.proof.evidence import Proof
    from ...runtime.bundle.bundle import Bundle


def prove(
    bundle: BundleArgument,
    data: Annotated[
        Path,
        make_option(
            "Columns text and label, maybe pair and pytorch; of a generator text alone: .tsv, .csv, .jsonl,"
            " .ndjson, .parquet, .txt."
        ),
    ],
    against: Annotated[
        Path | None, make_option("Another bundle with evidence on the same texts; exit 1 if worse.")
    ] = None,
    against_precision: Annotated[
        str | None,
        make_option("The precision whose evidence to compare with; of this bundle without --against."),
    ] = None,
    backend: BackendOption = "auto",
    precision: PrecisionOption = None,
    device: DeviceOption = 0,
    threads: ThreadsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure accuracy or perplexity, latency, memory and energy here, and keep them in the bundle.

    Needs no torch. `planforge diff` compares the evidence of two bundles.
    """
    with show_stages() as progress:
        from ...runtime.apps.proof.changes import pair_proofs, summarize
        from ...runtime.apps.proof.prove import prove as measure
        from ..bundle.evidence import record_proof
        from .evidence_tables import make_pair_tables, make_proof_tables

        is_compared = against is not None or against_precision is not None
        old = read_old(bundle if against is None else against, data, against_precision) if is_compared else []
        proof = measure(
            bundle,
            data,
            backend=backend,
            precision=precision,
            device=device,
            threads=threads,
            progress=progress,
        )
        proof, note = add_layers(bundle, proof, device)
        record_proof(bundle, proof)
        pairs = pair_proofs(old, [proof])
    if as_json:
        print_json({"proof": summarize(proof), "compared": [pair.to_json() for pair in pairs]})
    else:
        print_tables([*make_proof_tables([proof]), *make_pair_tables(pairs)])
        print_lines(["", note] if note else [])
    exit_by_comparison(pairs)


def read_old(folder: Path, data: Path, precision: str | None) -> list[Proof]:
    """Return a bundle's evidence in a precision, or in any, on a file of texts; refuse one that has none."""
    from ...runtime.bundle.bundle import Bundle, compute_sha256
    from .evidence_sides import Side, find_precision

    opened = Bundle.open(folder)
    side = Side(opened, find_precision("--against-precision", opened, precision))
    proofs = side.read_proofs()
    if not data.is_file():
        raise InputError(f"--data {data}: there is no such file")
    digest = compute_sha256(data)
    found = [proof for proof in proofs if proof.data["sha256"] == digest]
    if not found:
        raise InputError(f"{side.name} has no evidence on {data}; first: {side.make_command(data)}")
    return found


def exit_by_comparison(pairs: list[ProofPair]) -> None:
    """End with exit code 1 if a measure is worse by more than chance explains, 2 if one was not compared."""
    if any(pair.is_regression for pair in pairs):
        raise typer.Exit(1)
    if any(pair.refused for pair in pairs):
        raise typer.Exit(2)


def add_layers(folder: Path, proof: Proof, device: int = 0) -> tuple[Proof, str]:
    """Return a plan's proof with the time of each layer, or why there is none."""
    from ...runtime.bundle.bundle import Bundle

    bundle = Bundle.open(folder)
    plan = next((plan for plan in bundle.manifest.plans if plan.file == proof.file), None)
    if plan is None:
        return proof, ""
    from ..tensorrt.layers import RUNS, read_plan_layers

    try:
        found = read_plan_layers(bundle, plan, map_modules(bundle, proof.artifact), RUNS, device)
    except PlanForgeError as error:
        return proof, f"the layers were not measured: {error}"
    layers: dict[str, dict[str, float]] = {}
    for profile in found.profiles:
        times = layers.setdefault(profile.name, {})
        for layer in profile.layers:
            if layer.time_ms is not None:
                name = ", ".join(layer.modules) or layer.name
                times[name] = round(times.get(name, 0.0) + layer.time_ms, 6)
    return dataclasses.replace(proof, layers=layers), ""


def map_modules(bundle: Bundle, artifact: str) -> Mapping[str, str]:
    """Return the module of each node; none where the package that reads graphs is not installed."""
    from .layers import map_modules as read_modules

    try:
        return read_modules(bundle.path(bundle.manifest.artifact(artifact).file))
    except ModuleNotFoundError:  # a board has onnx alone
        return {}
