"""Tables of evidence, for `planforge prove`, `diff` and `inspect`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...runtime.apps.commands.tables import FittingTable, format_size

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ...runtime.apps.proof.changes import ProofPair
    from ...runtime.apps.proof.evidence import Proof
    from ...runtime.apps.proof.intervals import Interval
    from .evidence_sides import Side

MOST_LAYERS = 10  # of a profile, the slowest


def make_proof_tables(proofs: Sequence[Proof]) -> list[RenderableType]:
    """Return what was measured: a table for each graph or plan, and one for its slowest layers."""
    tables: list[RenderableType] = []
    for proof in proofs:
        title = f"{proof.artifact} on {proof.backend}: {proof.texts} texts of {proof.data['name']}"
        tables.append(FittingTable(title, ("", ""), list_rows(proof)))
        for profile, times in proof.layers.items():
            slowest = sorted(times.items(), key=lambda layer: -layer[1])[:MOST_LAYERS]
            rows = [(name, f"{ms:.4f}") for name, ms in slowest]
            title = f"slowest of {len(times)} layers of profile {profile}, {sum(times.values()):.4f} ms"
            tables.append(FittingTable(title, ("layer", "ms"), rows, ("ms",)))
    return tables


def list_rows(proof: Proof) -> list[tuple[str, str]]:
    """Return a proof's measures, and what it ran on, in words."""
    found = proof.intervals
    words = {
        "accuracy": "accuracy",
        "f1": "F1, macro",
        "perplexity": "perplexity",
        "reference_perplexity": "perplexity of the reference",
    }
    rows = [(words[name], describe_interval(interval)) for name, interval in found.items() if name in words]
    if "flips" in found:
        share = describe_interval(found["flips"], share=True)
        rows.append(("other labels than PyTorch", f"{proof.count_flips()} of {proof.texts}: {share}"))
    rows.append(("PyTorch's answers from", proof.compared_with))
    rows += list_costs(proof)
    return [*rows, ("machine", describe_machine(proof)), ("measured", proof.date)]


def list_costs(proof: Proof) -> list[tuple[str, str]]:
    """Return latency, memory and energy, in words."""
    rows = [("ms per text", describe_times(proof.latency_ms))]
    if proof.token_ms is not None:
        rows.append(("ms per new token", describe_times(proof.token_ms)))
    if proof.peak_rss_mb is not None:
        rows.append(("peak memory of the process", f"{proof.peak_rss_mb:.0f} MB"))
    if proof.gpu_memory_mb is not None:
        rows.append(("GPU memory of the process", f"{proof.gpu_memory_mb:.0f} MB"))
    if proof.joules is not None:
        joules = proof.joules
        what = f"{joules.per_text:.3g} ({joules.mean_watts:.1f} W, {joules.source})"
        rows.append(("joules per text", what))
    return rows


def describe_interval(interval: Interval, share: bool = False) -> str:
    """Return a value with its 95 % interval."""
    form = ".2%" if share else ".4f"
    return f"{interval.value:{form}} ({interval.low:{form}} to {interval.high:{form}})"


def describe_machine(proof: Proof) -> str:
    """Return what a proof was measured on, as in "Cortex-A78AE, Linux-5.15, 1 thread"."""
    threads = [] if proof.threads is None else [f"{proof.threads} thread{'' if proof.threads == 1 else 's'}"]
    return ", ".join([*proof.machine.values(), *threads])


def describe_times(times: Mapping[str, float]) -> str:
    return f"{times['p50']:.2f} median, {times['p99']:.2f} p99"


def make_short_rows(proofs: Sequence[Proof]) -> list[Sequence[str]]:
    """Return a line of each proof: what ran, on which texts, its result, median time, device and date."""
    rows: list[Sequence[str]] = []
    for proof in proofs:
        name = "perplexity" if "perplexity" in proof.intervals else "accuracy"
        result = f"{name} {proof.intervals[name].value:.4f}"
        device = proof.machine.get("board") or proof.machine.get("gpu") or proof.machine.get("cpu", "")
        what = (f"{proof.artifact} on {proof.backend}", f"{proof.texts} of {proof.data['name']}", result)
        rows.append((*what, f"{proof.latency_ms['p50']:.2f}", device, proof.date))
    return rows


def make_pair_tables(pairs: Sequence[ProofPair], advice: str = "") -> list[RenderableType]:
    """Return how the evidence of two bundles differs; `advice` where there is none on the same texts."""
    if not pairs and advice:
        return [advice]
    tables: list[RenderableType] = []
    for pair in pairs:
        if pair.refused:
            tables.append(FittingTable(f"NOT COMPARED: {pair.refused}", ("", ""), ()))
            continue
        verdict = "REGRESSION" if pair.is_regression else "no regression"
        new = pair.new
        title = (
            f"{verdict}: {new.artifact} against {pair.old.artifact}, {new.texts} texts of {new.data['name']}"
        )
        rows = [
            (
                change.measure,
                f"{change.old:.4f}",
                f"{change.new:.4f}",
                f"{change.chance:.3g}",
                "WORSE" if change.is_regression else "",
            )
            for change in pair.changes
        ]
        old = dict(list_costs(pair.old))
        rows += [(name, old.get(name, ""), text, "", "") for name, text in list_costs(new)]
        before, now = map(describe_machine, (pair.old, new))
        if before != now:
            rows.append(("machine", before, now, "", ""))
        tables.append(FittingTable(title, ("", "old", "new", "chance", ""), rows))
    return tables


def describe_side(side: Side) -> dict[str, Any]:
    """Return what a side holds, as JSON: bytes, and those of each precision's graphs with their weights."""
    manifest = side.bundle.manifest
    precisions: dict[str, set[str]] = {}
    artifacts = [a for a in manifest.artifacts if side.precision in (None, a.precision)]
    for artifact in artifacts:
        precisions.setdefault(artifact.precision, set()).update((artifact.file, *artifact.data))
    ids = {artifact.id for artifact in artifacts}
    plans = {plan.file: manifest.files[plan.file].bytes for plan in manifest.plans if plan.built_from in ids}
    return {
        "name": side.name,
        "bundle": str(side.bundle.folder),
        "precision": side.precision,
        "backend": side.backend,
        "export_id": manifest.export_id,
        "task": manifest.task,
        "bytes": sum(entry.bytes for entry in manifest.files.values()),
        "precisions": {
            name: sum(manifest.files[file].bytes for file in files) for name, files in precisions.items()
        },
        "plans": plans,
    }


def make_bundle_table(old: Mapping[str, Any], new: Mapping[str, Any]) -> RenderableType:
    """Return the sizes of two bundles, as `describe_side` has them, and of each precision."""
    rows = [["all files", format_size(old["bytes"]), format_size(new["bytes"])]]
    for name in dict.fromkeys((*old["precisions"], *new["precisions"])):
        sizes = [side["precisions"].get(name) for side in (old, new)]
        rows.append([name, *("" if size is None else format_size(size) for size in sizes)])
    if old["plans"] or new["plans"]:
        rows.append(["plans", *(format_size(sum(side["plans"].values())) for side in (old, new))])
    return FittingTable(f"{old['name']} and {new['name']}", ("", "old", "new"), rows)
