"""The summaries that commands print of a bundle: what was made or removed, and what to do next."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from ...runtime.apps.commands.tables import FittingTable, format_size
from ...runtime.apps.diagnostics.bench_work import SUBJECTS
from ...runtime.backends.architectures import describe_sms
from ...runtime.bundle.bundle import Bundle
from ...runtime.bundle.manifest import Artifact, Manifest
from ...runtime.tasks import USES
from ..levels import describe_quick
from ..task_traits import TRAITS
from .findings import Inspection
from .inspection import describe_extras, describe_memory, describe_ranges, find_worst, sum_sizes

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ..packaging.package import PackageResult
    from ..pruning import PruneResult


def summarize_bundle(folder: Path) -> Inspection:
    """Summarize a bundle that was just written, in a screenful."""
    manifest = Bundle.open(folder).manifest
    source = str(manifest.source.get("argument"))
    if manifest.source.get("kind") == "folder":
        source = Path(source).name
    size = sum_sizes(manifest, *manifest.files)
    title = f"Bundle written to {folder}: {source} ({manifest.family}), {size}"
    graphs = list_graph_rows(manifest)
    sections = [(title, ("graph", "size", "compared with the original model"), graphs)]
    if manifest.plans:
        sections.append(("plans for TensorRT", ("plan", "size", "built"), list_plan_rows(manifest)))
    return Inspection(json.loads(manifest.to_json()), sections, list_next_steps(folder, manifest))


def list_graph_rows(manifest: Manifest) -> list[tuple[str, str, str]]:
    """Return a row of each graph with the size of what it alone reads, and one of the weights of several."""
    graphs = (*manifest.artifacts, *manifest.explanations)
    readers = Counter(name for graph in graphs for name in {graph.file, *graph.data})
    rows = []
    for graph in graphs:
        own = [name for name in (graph.file, *graph.data) if readers[name] == 1]
        rows.append((graph.id, sum_sizes(manifest, *own), describe_verdict(graph)))
    if shared := [name for name, count in readers.items() if count > 1]:
        rows.append(("weights of several", sum_sizes(manifest, *shared), ""))
    return rows


def describe_verdict(artifact: Artifact) -> str:
    """Return in words how close a graph came to the original model."""
    if not artifact.gate:
        return "not compared (--no-verify)"
    worst = find_worst(artifact)
    words = []
    if "top1_changes" in worst:
        changes = worst["top1_changes"]
        share = f"{min(1 - changes, 0.999):.1%}" if changes else "100%"  # which is where nothing changed
        words.append(f"next token the same in {share}")
    if worst.get("perplexity_change", 0.0) >= 0.0005:
        words.append(f"perplexity {worst['perplexity_change']:+.1%}")
    roles = {spec.role for spec in artifact.outputs}
    if "cosine_gap" in worst and not any(role.startswith("question_answering") for role in roles):
        words.append(f"cosine of vectors at least {1 - worst['cosine_gap']:.4f}")
    if "rank_changes" in worst:
        words.append(f"{1 - worst['rank_changes']:.1%} of the ten most similar texts are the same")
    if "probability_error" in worst:
        words += list_flips(artifact)
        words.append(f"probabilities within {worst['probability_error']:.2g}")
        words.append(f"logits within {worst.get('max_error', 0.0):.2g} of their spread")
    if not words and "mean_kl" in worst and "sequence_classification" not in roles:  # an older regression's
        what = "a masked word" if "masked_lm" in roles else "the next token"
        words.append(f"KL of {what} {worst['mean_kl']:.2g} nats")
    if "rms_error" in worst:
        what, whose = ("noise", "its") if "noise" in roles else ("values", "their")
        words.append(f"{what} within {worst['rms_error']:.2g} of {whose} size")
    if "path_error" in worst:
        words.append(f"pictures from noise within {worst['path_error']:.2g}")
    if not words and "max_error" in worst:
        words.append(f"largest error {worst['max_error']:.2g} of the spread")
    verdict = "passed" if artifact.passed else "FAILED"
    return f"{verdict}{describe_quick(artifact.gate.get('level', ''))}: {', '.join(words)}"


def list_flips(artifact: Artifact) -> list[str]:
    """Return for each head how many of a classifier's labels differ from the original model's."""
    flips = artifact.gate.get("flips")
    counts = flips.values() if isinstance(flips, dict) else ()
    return [f"{count} of {rows} labels flip{'s' if count == 1 else ''}" for count, rows in counts]


def list_plan_rows(manifest: Manifest) -> list[tuple[str, str, str]]:
    """Return a row for each plan, and one for the GPU memory of each of its profiles."""
    rows = []
    for plan in manifest.plans:
        sms = describe_sms(plan.sms) or "the GPU here"
        built = f"from {plan.built_from} for {sms}{describe_extras(plan)}"
        rows.append((plan.file, sum_sizes(manifest, plan.file), built))
        rows += [
            (f"  {describe_ranges(profile)}", memory, "of GPU memory at its largest shapes")
            for profile in plan.profiles
            if (memory := describe_memory(profile))
        ]
    return rows


def list_next_steps(folder: Path, manifest: Manifest) -> list[str]:
    """Return how the bundle was verified, and the commands to type next."""
    bundle = shlex.quote(str(folder))
    if any(artifact.gate for artifact in manifest.artifacts):
        steps = [
            "Each graph and the original model ran on the same texts;"
            f" `planforge inspect {bundle}` shows the figures"
        ]
    else:
        steps = [f"No graph was compared with the original model: planforge verify {bundle} does"]
    heads = manifest.encoder.heads if manifest.encoder else ()
    example = "Once upon a time" if TRAITS[manifest.task].continues_texts else "your text"
    question = ' --question "your question"' if "question_answering" in heads else ""
    chat = "--chat " if "chat_template" in manifest.tokenizer else ""
    _, arguments = USES.get(manifest.task, ("", f'{chat}"{example}"{question}'))
    steps.append(f"Next:  planforge run {bundle} {arguments}")
    if manifest.plans:
        steps.append(
            f"       planforge selftest {bundle}   # on a machine with a GPU: does a plan give the same?"
        )
    if manifest.explanations:
        steps.append(f'       planforge explain {bundle} "{example}" --html page.html   # which words count')
    if len({artifact.precision for artifact in manifest.artifacts}) > 1 and manifest.task in SUBJECTS:
        steps.append(f"       planforge bench {bundle} --set-default   # which precision is fastest here?")
    return steps


def describe_shared(count: int) -> str:
    """Return in words how many files of a package share the bundle's disk space; "" if none does."""
    return f" plus {count} file{'s' if count > 1 else ''} shared with the bundle" if count else ""


def make_package_tables(result: PackageResult) -> list[RenderableType]:
    """Return the content of a package, and the results of running it, as tables."""
    from ..reports.tables import make_comparison_table

    rows = [
        ("for", result.title),
        ("graphs", ", ".join(result.artifacts)),
        ("written", format_size(result.bytes_written) + describe_shared(result.shared)),
        ("run with", result.version or "nothing: it was not run"),
    ]
    tables: list[RenderableType] = [FittingTable(f"Package written to {result.folder}", ("", ""), rows)]
    if result.comparisons:
        tables.append(
            make_comparison_table("compared with PyTorch's answers", result.comparisons, by_engine=True)
        )
    return tables


def make_prune_tables(result: PruneResult) -> list[RenderableType]:
    """Return what is left of a pruned bundle, and the files that are gone, as tables."""
    head = [
        ("graphs", ", ".join(result.kept)),
        ("before", f"{format_size(result.bytes_before)} ({result.bytes_before:,} bytes)"),
        ("after", f"{format_size(result.bytes_after)} ({result.bytes_after:,} bytes)"),
    ]
    title = f"{result.bundle}: {'pruned' if result.removed else 'nothing to remove'}"
    tables: list[RenderableType] = [FittingTable(title, ("", ""), head)]
    if result.removed:
        rows = [(name, format_size(entry.bytes)) for name, entry in result.removed.items()]
        tables.append(FittingTable("removed", ("file", "size"), rows))
    return tables
