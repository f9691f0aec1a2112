"""`planforge export` and `planforge import`: a model in, a verified bundle out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ...runtime.commands.console import names, running, show
from ...runtime.commands.run_options import JsonOption

SM_HELP = (
    "GPU architectures: sm75 (RTX 20), sm80 (A100), sm86 (RTX 30), sm89 (RTX 40), sm120 (RTX 50), sm121."
)
Output = Annotated[Path, typer.Option("--output", "-o", help="The bundle's folder.", show_default=False)]
Precision = Annotated[
    str | None,
    typer.Option(
        help="fp32, fp16, int8, int4, and with keys and values in int8 fp32-kv8, int8-kv8, int4-kv8; the"
        " first is what run takes.",
        show_default="fp32, and fp16 but for cpu",
    ),
]
Target = Annotated[
    str | None,
    typer.Option(
        help="cpu, cuda (ONNX Runtime), portable (ONNX for any engine), rtx (a plan for RTX GPUs),"
        " jetpack6.2, tensorrt11, ... (for the GPU here).",
        show_default="cpu,rtx",
    ),
]
Sm = Annotated[str | None, typer.Option(help=SM_HELP, show_default="all")]
MaxBatch = Annotated[
    int | None, typer.Option(help="The largest batch.", show_default="8 of a decoder, 32 of an encoder")
]
MaxLength = Annotated[
    int | None,
    typer.Option(
        help="Context in tokens.", show_default="the model's; of a decoder from optimum at most 4,096"
    ),
]
Verify = Annotated[bool, typer.Option(help="Compare every graph with PyTorch.")]
Prompts = Annotated[
    Path | None, typer.Option(help="A prompt a line, to verify with.", show_default="built-in texts")
]
Force = Annotated[bool, typer.Option("--force", help="Replace the bundle at OUTPUT.")]


def export(
    model: Annotated[str, typer.Argument(help="A demo, a folder in Hugging Face's layout, or a hub id.")],
    output: Output,
    precision: Precision = None,
    target: Target = None,
    sm: Sm = None,
    max_batch: MaxBatch = None,
    max_length: MaxLength = None,
    outputs: Annotated[
        str | None,
        typer.Option(
            help="Of an encoder, beside its last hidden state and heads: hidden_states (of all layers),"
            " hidden_states.3, pooler_output. Of an encoder-decoder: cross_attentions.",
            show_default=False,
        ),
    ] = None,
    exporter: Annotated[
        str,
        typer.Option(help="planforge, optimum, or auto: optimum for all but GPT-2, BERT and Transformers."),
    ] = "auto",
    optimum_python: Annotated[
        str | None,
        typer.Option(help="The python of an environment with optimum-onnx.", show_default="this one"),
    ] = None,
    verify: Verify = True,
    prompts: Prompts = None,
    force: Force = False,
    as_json: JsonOption = False,
) -> None:
    """Export a checkpoint to ONNX, build its plans, verify it, and write a bundle."""
    with running() as progress:
        from ..export_checkpoint import export as export_bundle
        from .inspection import summarize_bundle

        result = export_bundle(
            model,
            output,
            **parse_choices(precision, target, sm),
            max_batch=max_batch,
            max_length=max_length,
            outputs=names(outputs) if outputs else (),
            exporter=exporter,
            optimum_python=optimum_python,
            verify=verify,
            prompts=prompts,
            force=force,
            progress=progress,
        )
    show(summarize_bundle(result.bundle), as_json)


def import_bundle(
    folder: Annotated[Path, typer.Argument(help="What optimum wrote.", show_default=False)],
    output: Output,
    source: Annotated[
        str | None,
        typer.Option(
            help="The checkpoint, to compare with.",
            show_default="FOLDER; without weights in it, the bundle is compared with FOLDER's own graphs",
        ),
    ] = None,
    precision: Precision = None,
    target: Target = None,
    sm: Sm = None,
    max_batch: MaxBatch = None,
    max_length: MaxLength = None,
    verify: Verify = True,
    prompts: Prompts = None,
    force: Force = False,
    as_json: JsonOption = False,
) -> None:
    """Make a bundle of what optimum exported: decoders, encoders, encoder-decoders."""
    with running() as progress:
        from ..import_folder import import_folder
        from .inspection import summarize_bundle

        result = import_folder(
            folder,
            output,
            source=source,
            **parse_choices(precision, target, sm),
            max_batch=max_batch,
            max_length=max_length,
            verify=verify,
            prompts=prompts,
            force=force,
            progress=progress,
        )
    show(summarize_bundle(result.bundle), as_json)


def parse_choices(precision: str | None, target: str | None, sm: str | None) -> dict[str, Any]:
    """Return the names in the comma-separated options."""
    given = {"precision": precision, "target": target, "sms": sm}
    return {name: names(text) if text else None for name, text in given.items()}
