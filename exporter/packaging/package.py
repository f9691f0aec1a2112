"""Packages a bundle's verified graphs in the layout that another runtime reads, and runs them there once."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...runtime.apps.check.files import find_golden
from ...runtime.apps.check.outcome import Comparison
from ...runtime.bundle.artifact import Artifact
from ...runtime.bundle.bundle import Bundle
from ...runtime.errors import InputError
from ..errors import VerificationError
from ..tensorrt.plans import Progress
from .choice import choose_artifacts
from .folder import check_apart, check_target, describe, make_folder, measure_files
from .links import FilePlacer
from .recipes import Recipe, find_recipe
from .run import run_package
from .worker import Worker

log = logging.getLogger("planforge")


@dataclass(frozen=True)
class PackageResult:
    """A package, and the results of running it.

    Attributes:
        folder: what was written.
        runtime: "genai", "transformers.js", "optimum" or "triton".
        title: the runtime's own name.
        artifacts: ids of the bundle's graphs that are in it.
        version: of the runtime that ran them; None where it was not run.
        comparisons: one of each graph and case, with what was measured and what is allowed.
        bytes_written: of the files that share no blocks with the bundle's.
        shared: how many files do, as reflinks or hard links.
    """

    folder: Path
    runtime: str
    title: str
    artifacts: tuple[str, ...]
    version: str | None
    comparisons: tuple[Comparison, ...]
    bytes_written: int
    shared: int

    @property
    def verified(self) -> bool:
        """Return whether the runtime ran the package, and computed the same as PyTorch."""
        return self.version is not None and all(comparison.passed for comparison in self.comparisons)

    def to_json(self) -> dict[str, Any]:
        """Return the fields of `planforge package --json`."""
        return {
            "folder": str(self.folder),
            "runtime": self.runtime,
            "artifacts": list(self.artifacts),
            "version": self.version,
            "verified": self.verified,
            "comparisons": [comparison.to_json() for comparison in self.comparisons],
            "bytes_written": self.bytes_written,
            "shared": self.shared,
        }


def package(
    bundle: str | Path,
    output: str | Path,
    *,
    runtime: str,
    precision: Sequence[str] | None = None,
    hard_links: bool = False,
    verify: bool = True,
    runtime_at: str | Path | None = None,
    progress: Progress = lambda _: None,
) -> PackageResult:
    """Write the folder that another runtime reads, with a bundle's graphs, and run it there.

    The graphs compute the same; their inputs, outputs and names are those that the runtime knows. Weights are
    reflinks of the bundle's files where the file system has them, and copies elsewhere. Where the runtime is
    installed it runs the folder, and its logits, tokens and vectors are compared with the bundle's golden
    data: what PyTorch answered at export.

    Args:
        bundle: the folder that `export` or `import_folder` wrote.
        output: the package's folder, which must not exist, or be empty; not within the bundle's.
        runtime: "genai" (onnxruntime-genai), "transformers.js", "optimum" or "triton".
        precision: those of the graphs; a str is one. By default all that the runtime takes, or where a
            package has one alone the bundle's default.
        hard_links: whether weights are second names of the bundle's files. They take no disk on any file
            system, but Python's `onnx.load` then refuses the graphs of the package, and those of the bundle
            too.
        verify: whether the package is run in its runtime; it is not where that is not installed, and the
            result says so.
        runtime_at: a virtual environment that has the runtime, or its python; for transformers.js a folder
            whose node_modules has it. By default this python, and the current folder.
        progress: called with a line when a stage begins.

    Raises:
        BundleError: a file of the bundle is missing or has changed.
        InputError: the runtime takes no such task or precision, or is not at `runtime_at`.
        OutputError: the folder has something in it, or cannot be written.
        VerificationError: the runtime computes something else, or fails; nothing is left at `output`.
    """
    recipe = find_recipe(runtime)
    opened = Bundle.open(bundle)
    folder = Path(output)
    check_apart(folder, opened.folder)
    check_target(folder)
    artifacts = choose_artifacts(opened, recipe, precision)
    if runtime_at is not None and not verify:
        raise InputError("runtime_at is only for verification, which is turned off; leave it out")
    worker = find_worker(opened, recipe, runtime_at) if verify else None
    progress("checking files")
    opened.verify_files()
    with make_folder(folder) as staging:
        progress(f"writing graphs for {recipe.title}")
        placer = FilePlacer(hard_links)
        recipe.write(opened, artifacts, staging, placer)
        result = finish_package(opened, recipe, artifacts, worker, staging, placer, progress)
    return replace(result, folder=folder)


def finish_package(
    bundle: Bundle,
    recipe: Recipe,
    artifacts: Sequence[Artifact],
    worker: Worker | None,
    folder: Path,
    placer: FilePlacer,
    progress: Progress,
) -> PackageResult:
    """Run a package that is written, and describe it."""
    version: str | None = None
    comparisons: list[Comparison] = []
    if worker is not None:
        version, comparisons = run_package(bundle, recipe, worker, folder, artifacts, progress)
    refuse_failures(comparisons)
    describe(folder, bundle, recipe.title, artifacts, version, comparisons)
    return PackageResult(
        folder=folder,
        runtime=recipe.name,
        title=recipe.title,
        artifacts=tuple(artifact.id for artifact in artifacts),
        version=version,
        comparisons=tuple(comparisons),
        bytes_written=measure_files(folder, placer),
        shared=len(placer.shared),
    )


def find_worker(bundle: Bundle, recipe: Recipe, runtime_at: str | Path | None) -> Worker | None:
    """Return the runtime to run the package; warn where it is not installed, or has nothing to do."""
    if find_golden(bundle) is None:
        log.warning(
            "%s has no golden data, as with --no-verify or rounded activations: the package is not run",
            bundle.folder,
        )
        return None
    worker = recipe.find(None if runtime_at is None else Path(runtime_at))
    if worker is None:
        log.warning(
            "%s is not installed here, so the package is not run: install it (`%s`), or pass --runtime-at",
            recipe.title,
            recipe.install,
        )
    elif parse_version(worker.version) < parse_version(recipe.oldest):
        raise InputError(
            f"{recipe.title} {worker.version} is too old: packages need {recipe.oldest} or newer;"
            f" install it with `{recipe.install}`, or skip running the package with --no-verify"
        )
    return worker


def parse_version(text: str) -> tuple[int, ...]:
    """Return the numbers that a version begins with."""
    (begin,) = re.findall(r"^\d+(?:\.\d+)*", text) or ["0"]
    return tuple(map(int, begin.split(".")))


def refuse_failures(comparisons: Sequence[Comparison]) -> None:
    """Raise an error for results of the runtime that differ from PyTorch's."""
    failed = [comparison for comparison in comparisons if not comparison.passed]
    if not failed:
        return
    first = failed[0]
    precisions = sorted({comparison.artifact for comparison in failed})
    raise VerificationError(
        f"{first.artifact} in {first.backend}: {first.case}: {first.failures[0]}"
        f" ({len(failed)} of {len(comparisons)} cases failed); choose other precisions with --precision, or"
        " skip this check with --no-verify",
        frozenset(precisions),
    )
