"""`planforge export` and `planforge import`: a model in, a verified bundle out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ...runtime.apps.commands.console import show, show_stages, split_names
from ...runtime.apps.commands.run_options import JsonOption, make_option
from .options import (
    AcceptOption,
    BuilderLevelOption,
    ExtrapolateOption,
    ForceOption,
    MaxBatchOption,
    MaxLengthOption,
    NoVerifyOption,
    OptOption,
    OutputOption,
    OutputsOption,
    PrecisionsOption,
    ProfilingOption,
    PromptsOption,
    QuantizerOption,
    SmOption,
    TargetsOption,
    VerifyOption,
    choose_level,
    parse_adapters,
    parse_metrics,
    parse_opt,
)


def export(
    model: Annotated[str, typer.Argument(help="A demo, a folder in Hugging Face's layout, or a hub id.")],
    output: OutputOption,
    precision: PrecisionsOption = None,
    target: TargetsOption = None,
    sm: SmOption = None,
    opt: OptOption = None,
    builder_level: BuilderLevelOption = None,
    profiling: ProfilingOption = None,
    max_batch: MaxBatchOption = None,
    max_length: MaxLengthOption = None,
    extrapolate: ExtrapolateOption = False,
    outputs: OutputsOption = None,
    adapter: Annotated[
        list[str] | None,
        make_option(
            "A folder that peft wrote (LoRA, DoRA, IA3), to merge into the weights; or NAME=FOLDER, more than"
            " once, to keep LoRAs beside a decoder, of which each request chooses one."
        ),
    ] = None,
    exporter: Annotated[
        str,
        make_option(
            "planforge, transformers, optimum, or auto: transformers' own models where PlanForge has none.",
            show_default=True,
        ),
    ] = "auto",
    optimum_python: Annotated[
        str | None, make_option("The python of an environment with optimum-onnx.", show_default="this one")
    ] = None,
    verify: VerifyOption = None,
    no_verify: NoVerifyOption = False,
    prompts: PromptsOption = None,
    quantizer: QuantizerOption = "gptq",
    accept: AcceptOption = None,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Export a checkpoint to ONNX, build its plans, verify it, and write a bundle."""
    with show_stages() as progress:
        from ..exporting import export as export_bundle
        from .summary import summarize_bundle

        result = export_bundle(
            model,
            output,
            precision=split_names("--precision", precision),
            target=split_names("--target", target),
            sms=split_names("--sm", sm),
            opt=parse_opt(opt),
            builder_level=builder_level,
            profiling=profiling,
            max_batch=max_batch,
            max_length=max_length,
            extrapolate=extrapolate,
            outputs=split_names("--outputs", outputs) or (),
            adapter=parse_adapters(adapter),
            exporter=exporter,
            optimum_python=optimum_python,
            verify=choose_level(verify, no_verify),
            prompts=prompts,
            quantizer=quantizer,
            accept=parse_metrics(accept, "--accept"),
            force=force,
            progress=progress,
        )
    show(summarize_bundle(result.bundle), as_json)


def import_bundle(
    folder: Annotated[Path, typer.Argument(help="The folder that optimum wrote.", show_default=False)],
    output: OutputOption,
    source: Annotated[
        str | None,
        make_option(
            "The checkpoint, to compare with.",
            show_default="FOLDER; without weights in it, the bundle is compared with FOLDER's own graphs",
        ),
    ] = None,
    precision: PrecisionsOption = None,
    target: TargetsOption = None,
    sm: SmOption = None,
    opt: OptOption = None,
    builder_level: BuilderLevelOption = None,
    profiling: ProfilingOption = None,
    max_batch: MaxBatchOption = None,
    max_length: MaxLengthOption = None,
    verify: VerifyOption = None,
    no_verify: NoVerifyOption = False,
    prompts: PromptsOption = None,
    quantizer: QuantizerOption = "gptq",
    accept: AcceptOption = None,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Make a bundle of what optimum exported: decoders, encoders, encoder-decoders."""
    with show_stages() as progress:
        from ..exporting import import_folder
        from .summary import summarize_bundle

        result = import_folder(
            folder,
            output,
            source=source,
            precision=split_names("--precision", precision),
            target=split_names("--target", target),
            sms=split_names("--sm", sm),
            opt=parse_opt(opt),
            builder_level=builder_level,
            profiling=profiling,
            max_batch=max_batch,
            max_length=max_length,
            verify=choose_level(verify, no_verify),
            prompts=prompts,
            quantizer=quantizer,
            accept=parse_metrics(accept, "--accept"),
            force=force,
            progress=progress,
        )
    show(summarize_bundle(result.bundle), as_json)
