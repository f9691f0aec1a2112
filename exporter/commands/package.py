"""`planforge package`: writes a bundle's graphs in the layout that another runtime reads."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from ...runtime.apps.commands.console import print_json, print_tables, show_stages, split_names
from ...runtime.apps.commands.run_options import BundleArgument, JsonOption, make_option


def package(
    bundle: BundleArgument,
    runtime: Annotated[str, make_option("The runtime: genai, transformers.js, optimum or triton.", "--for")],
    output: Annotated[Path, make_option("The package's folder; new, or empty.", "--output", "-o")],
    precision: Annotated[
        str | None,
        make_option(
            "fp32, fp16, int8 or int4, several separated by commas.",
            show_default="all for transformers.js, else the bundle's default",
        ),
    ] = None,
    hard_links: Annotated[
        bool,
        make_option(
            "Make weights hard links to the bundle's: they take no disk, but `onnx.load` refuses them.",
            "--hard-links",
        ),
    ] = False,
    no_verify: Annotated[bool, make_option("Do not run the package in its runtime.", "--no-verify")] = False,
    runtime_at: Annotated[
        Path | None,
        make_option(
            "An environment that has the runtime, or its python; for transformers.js a folder that has"
            " node_modules.",
            show_default="this python, the current folder",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Write a bundle's graphs for another runtime, and compare its results with PyTorch's."""
    with show_stages() as progress:
        from ..packaging.package import package as write_package
        from .summary import make_package_tables

        result = write_package(
            bundle,
            output,
            runtime=runtime,
            precision=split_names("--precision", precision),
            hard_links=hard_links,
            verify=not no_verify,
            runtime_at=runtime_at,
            progress=progress,
        )
    if as_json:
        print_json(result.to_json())
    else:
        print_tables(make_package_tables(result))
