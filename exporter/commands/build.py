"""`planforge build`: more plans for a bundle."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from ...runtime.apps.commands.console import show, show_stages, split_names
from ...runtime.apps.commands.run_options import BundleArgument, JsonOption, make_option, read_max_memory
from .options import (
    BuilderLevelOption,
    CompatibleOption,
    MaximumOption,
    OptOption,
    PickOption,
    PlanPrecisionsOption,
    ProfilingOption,
    SmOption,
    parse_lengths,
    parse_opt,
)


def build(
    bundle: BundleArgument,
    target: Annotated[
        str | None,
        make_option(
            "rtx, jetpack6.0, jetpack6.2, jetpack7.2, tensorrt11, tensorrt (the installed version), ...",
            show_default="rtx",
        ),
    ] = None,
    engine: Annotated[str | None, make_option("Instead of a target: tensorrt-rtx or tensorrt.")] = None,
    sm: SmOption = None,
    precision: PlanPrecisionsOption = None,
    maximum: MaximumOption = None,
    opt: OptOption = None,
    builder_level: BuilderLevelOption = None,
    profiling: ProfilingOption = None,
    workspace: Annotated[
        int | None, make_option("TensorRT's workspace in MiB.", show_default="no limit", minimum=1)
    ] = None,
    timing_cache: Annotated[
        Path | None, make_option("A file that makes the next build faster; not for rtx.")
    ] = None,
    strip: Annotated[
        bool, make_option("Leave the weights out; the bundle's are used at load.", "--strip")
    ] = False,
    top_k: PickOption = None,
    max_memory: Annotated[
        str | None,
        make_option("Most memory on the GPU, such as 4GB: a larger plan is refused before it is built."),
    ] = None,
    compatible: CompatibleOption = False,
    as_json: JsonOption = False,
) -> None:
    """Build a TensorRT plan from a bundle's graph and add it. Needs no torch, and for rtx no GPU."""
    with show_stages() as progress:
        from ..tensorrt.build import Options
        from ..tensorrt.plans import build as build_plan
        from .summary import summarize_bundle

        result = build_plan(
            bundle,
            target=target,
            engine=engine,
            sms=split_names("--sm", sm),
            precisions=split_names("--precision", precision),
            limits=parse_lengths("--max", maximum or []),
            options=Options(
                workspace=None if workspace is None else workspace * 2**20,
                timing_cache=None if timing_cache is None else str(timing_cache.resolve()),
                strip=strip,
                compatible=compatible,
                candidates=top_k or 0,
                opt=parse_opt(opt),
                builder_level=builder_level,
                profiling=profiling,
                max_memory=read_max_memory(max_memory),
            ),
            progress=progress,
        )
    show(summarize_bundle(result.bundle), as_json)
