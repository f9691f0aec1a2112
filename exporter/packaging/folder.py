"""The folder of a package: written under a temporary name next to its place, then renamed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path

import onnx_ir as ir

from ...runtime.apps.check.outcome import Comparison
from ...runtime.bundle.artifact import Artifact
from ...runtime.bundle.bundle import Bundle
from ..bundle.writer import check_parent, open_staging_folder
from ..errors import OutputError
from ..passes.weight_files import list_external_tensors, move_weights
from .hugging_face import write_json
from .links import FilePlacer

MOST = 0.9  # of a file of weights: where a graph reads less, a package to be fetched has no more of it
DESCRIPTION = "planforge.json"  # what was packaged, and what was run with it


def check_apart(folder: Path, bundle: Path) -> None:
    """Refuse a folder within the bundle's, and one that the bundle is in."""
    own = folder.resolve()
    other = bundle.resolve()
    if own == other or own.is_relative_to(other):
        raise OutputError(f"{folder} is in the bundle {bundle}; name a folder outside of it")
    if other.is_relative_to(own):
        raise OutputError(f"{folder} has the bundle {bundle} in it; name another folder")


def check_target(folder: Path) -> None:
    """Refuse a folder that has anything in it, or that cannot be written."""
    if folder.is_symlink():
        raise OutputError(f"{folder} is a symbolic link; name the folder that it leads to, or another one")
    if folder.exists() and not folder.is_dir():
        raise OutputError(f"{folder} exists and is not a folder; choose another one")
    if folder.exists() and any(folder.iterdir()):
        raise OutputError(f"{folder} is not empty; name another folder, or empty this one")
    check_parent(folder)


@contextlib.contextmanager
def make_folder(folder: Path) -> Iterator[Path]:
    """Yield a folder to write in that becomes `folder` when all went well, and vanishes otherwise."""
    check_target(folder)
    with open_staging_folder(folder) as staging:
        yield staging
        check_target(folder)
        if folder.exists():
            folder.rmdir()
        os.rename(staging, folder)


def measure_files(folder: Path, placer: FilePlacer) -> int:
    """Return the number of bytes in a package's files that share no blocks with the bundle's."""
    files = {path for path in folder.rglob("*") if path.is_file()}
    return sum(path.stat().st_size for path in files - placer.shared)


def write_graph(
    bundle: Bundle,
    artifact: Artifact,
    model: ir.Model,
    path: Path,
    weights: str,
    placer: FilePlacer,
    *,
    fetched: bool = False,
) -> None:
    """Write a graph, and put the file of its weights next to it under the name `weights`.

    `fetched` is of a package that is read over a network: where a graph reads little of the file, as one of
    a translator's two does, what it reads is copied instead.
    """
    if fetched and measure_share_read(bundle, artifact, model) < MOST:
        path.parent.mkdir(parents=True, exist_ok=True)
        ir.save(model, path, external_data=weights)
        return
    names: dict[str, str] = {}
    for number, data in enumerate(artifact.data):
        source = bundle.path(data)
        names[source.name] = weights if number == 0 else f"{weights}_{number}"
        placer.place(source, path.with_name(names[source.name]))
    move_weights(model, names)
    path.parent.mkdir(parents=True, exist_ok=True)
    ir.save(model, path)


def measure_share_read(bundle: Bundle, artifact: Artifact, model: ir.Model) -> float:
    """Return the share of its weights files that a graph reads."""
    tensors = list_external_tensors(model)
    read = sum({(tensor.location, tensor.offset): tensor.nbytes for tensor in tensors}.values())
    return read / sum(bundle.path(name).stat().st_size for name in artifact.data)


def describe(
    folder: Path,
    bundle: Bundle,
    runtime: str,
    artifacts: Sequence[Artifact],
    version: str | None,
    comparisons: Sequence[Comparison],
) -> None:
    """Write planforge.json: the export and the graphs in the package, and the version that ran it."""
    write_json(
        folder / DESCRIPTION,
        {
            "runtime": runtime,
            "planforge": metadata.version("planforge"),
            "export_id": bundle.manifest.export_id,
            "artifacts": [artifact.id for artifact in artifacts],
            "run_with": version,
            "comparisons": [comparison.to_json() for comparison in comparisons],
        },
    )
