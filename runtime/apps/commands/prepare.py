"""`planforge prepare`: keeps a bundle's graphs as the engine opens them here, so that it starts sooner."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from .console import print_json, print_lines, show_stages
from .run_options import BundleArgument, JsonOption, PrecisionOption, make_option

if TYPE_CHECKING:
    from pathlib import Path

    from ...bundle.bundle import Bundle

ClearOption = Annotated[
    bool, make_option("Delete the prepared graphs of the bundle, in all precisions.", "--clear")
]


def prepare(
    bundle: BundleArgument,
    precision: PrecisionOption = None,
    clear: ClearOption = False,
    as_json: JsonOption = False,
) -> None:
    """Store the graphs with weights packed for this processor by ONNX Runtime, for a faster start on the CPU.

    They go to the user's cache folder, or to PLANFORGE_CACHE, and take more than twice the weights' size.
    """
    from ...bundle.bundle import Bundle

    opened = Bundle.open(bundle)
    if clear:
        removed = clear_prepared(opened)
        if as_json:
            print_json({"removed": [str(folder) for folder in removed]})
        else:
            print_lines([f"deleted {folder}" for folder in removed] or ["this bundle has no prepared graphs"])
        return
    with show_stages() as stages:
        kept = prepare_graphs(opened, precision, stages)
    if as_json:
        print_json({"prepared": kept})
    else:
        print_lines([f"{row['id']}  {row['bytes'] / 1e6:.1f} MB  {row['folder']}" for row in kept])


def prepare_graphs(bundle: Bundle, precision: str | None, stages: Any) -> list[dict[str, Any]]:
    """Prepare every graph that `load` would open in a precision, unless it is already."""
    from ...backends.dialects import choose_artifact
    from ...backends.ort_prepared import find_prepared, make_prepared

    kept = []
    for graph in dict.fromkeys(artifact.graph for artifact in bundle.manifest.artifacts):
        artifact = choose_artifact(bundle, graph, precision)
        prepared = find_prepared(bundle, artifact)
        if not (prepared.is_current() and prepared.check_data(verify=True)):
            stages(f"preparing {artifact.id}")
            prepared.remove()
            make_prepared(bundle, artifact, prepared)
        kept.append({"id": artifact.id, "bytes": prepared.count_bytes(), "folder": str(prepared.folder)})
    return kept


def clear_prepared(bundle: Bundle) -> list[Path]:
    """Delete what is kept of a bundle; return the folders."""
    from ...backends.ort_prepared import find_all_prepared

    found = [prepared for prepared in find_all_prepared(bundle) if prepared.exists()]
    return [prepared.folder for prepared in found if prepared.remove()]
