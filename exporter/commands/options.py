"""Options that several of the exporter's commands have."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

from ...runtime.apps.commands.console import split_names
from ...runtime.apps.commands.run_options import make_option
from ...runtime.backends.architectures import describe_sms
from ...runtime.backends.tensorrt_library import LIBRARIES
from ...runtime.errors import InputError
from ..levels import LEVELS, STANDARD

RTX_GPUS = describe_sms(LIBRARIES["tensorrt-rtx"].sms)

OutputOption = Annotated[Path, make_option("The bundle's folder.", "--output", "-o")]
PrecisionsOption = Annotated[
    str | None,
    make_option(
        "fp32, fp16, int8, int4, or with an int8 key-value cache fp32-kv8, int8-kv8, int4-kv8; for a GPU"
        " w8a16 and w4a16, weights in int8 or int4, and fp16-kv8, w8a16-kv8, w4a16-kv8; of plans fp8 and"
        " nvfp4, and of an encoder's plans w8a8 and fp8a8, whose products read int8 or fp8 too; several"
        " separated by commas. `run` uses the first.",
        show_default="fp32, and fp16 except for cpu",
    ),
]
TargetsOption = Annotated[
    str | None,
    make_option(
        "cpu, cuda (ONNX Runtime), portable (ONNX for any engine), rtx (a plan for RTX GPUs),"
        " jetpack6.2, tensorrt11, ... (for the GPU here), several separated by commas.",
        show_default="cpu,rtx",
    ),
]
SmOption = Annotated[
    str | None,
    make_option(
        f"GPU architectures, or names of these GPUs, separated by commas: {RTX_GPUS}.",
        show_default="all",
    ),
]
MaximumOption = Annotated[
    list[str] | None, make_option("batch=N,length=N: lower limits than the graph's.", "--max")
]
PlanPrecisionsOption = Annotated[
    str | None,
    make_option(
        "fp16, int8, int4, fp8, nvfp4, w8a8 or fp8a8; several separated by commas.", show_default="all"
    ),
]
PickOption = Annotated[
    int | None,
    make_option(
        "Pick the K likeliest tokens on the GPU: greedy decoding and --top-k up to K copy less.",
        minimum=1,
    ),
]
CompatibleOption = Annotated[
    bool, make_option("For later GPUs and versions too; not for rtx, nor on Jetson.", "--compatible")
]
OptOption = Annotated[
    list[str] | None,
    make_option(
        "batch=N,length=N, of pictures height=N,width=N in pixels: the shapes that plans are optimized for."
        " Give it again to optimize for more.",
        "--opt",
        show_default="one sequence, the usual length or size; of an encoder also eight",
    ),
]
BuilderLevelOption = Annotated[
    int | None,
    make_option("How long TensorRT searches for kernels, 0 (shortest) to 5.", show_default="TensorRT's, 3"),
]
ProfilingOption = Annotated[
    str | None,
    make_option(
        "What a plan keeps of its layers, for `inspect --layers`: layer_names_only, none or detailed.",
        show_default="layer_names_only",
    ),
]
MaxBatchOption = Annotated[
    int | None, make_option("The largest batch.", show_default="8 for a decoder, 32 for an encoder")
]
MaxLengthOption = Annotated[
    int | None,
    make_option("Context in tokens.", show_default="the model's, at most 4,096"),
]
ExtrapolateOption = Annotated[
    bool,
    make_option(
        "Let --max-length be beyond the model's context: computed positions, but not learned.",
        "--extrapolate",
    ),
]
LEVELS_HELP = "; ".join(f"{level.name}, {level.meaning}" for level in LEVELS.values()) + "."
VerifyOption = Annotated[
    str | None, make_option(f"Compare every graph with PyTorch: {LEVELS_HELP}", show_default=STANDARD.name)
]
NoVerifyOption = Annotated[bool, make_option("Compare no graph with PyTorch.", "--no-verify")]
OutputsOption = Annotated[
    str | None,
    make_option(
        "More outputs, several separated by commas. For an encoder: hidden_states (of all layers),"
        " hidden_states.3, pooler_output. For an encoder-decoder: cross_attentions. For any model that"
        " `explain` supports: explain."
    ),
]
PromptsOption = Annotated[
    Path | None, make_option("A file of prompts to verify with, one per line.", show_default="built-in texts")
]
QuantizerOption = Annotated[
    str,
    make_option(
        "How weights are quantized to int4, and an encoder's to int8: gptq, which has a small error on real"
        " text, or rtn, which rounds to nearest and takes almost no time.",
        show_default=True,
    ),
]
AcceptOption = Annotated[
    list[str] | None,
    make_option(
        "METRIC=VALUE, as in top1_changes=0.03: accept so large an error of any precision but fp32, if"
        " PyTorch rounded the same way has it too; the bundle records it.",
        show_default="the usual caps",
    ),
]
ForceOption = Annotated[bool, make_option("Replace the bundle at OUTPUT.", "--force")]


def choose_level(verify: str | None, no_verify: bool) -> str | bool:
    """Return the level that --verify names, or False for --no-verify; refuse both."""
    if not no_verify:
        return STANDARD.name if verify is None else verify
    if verify is not None:
        raise InputError(f"--verify {verify} and --no-verify exclude each other; give one of them")
    return False


def parse_adapters(texts: Sequence[str] | None) -> str | dict[str, str] | None:
    """Return the adapter to merge, or those to keep beside the model by their names, from NAME=FOLDER."""
    if not texts:
        return None
    if len(texts) == 1 and ("=" not in texts[0] or Path(texts[0]).is_dir()):
        return texts[0]
    found: dict[str, str] = {}
    for text in texts:
        name, is_named, folder = text.partition("=")
        if not is_named:
            raise InputError(
                f"--adapter {text!r}: one adapter is merged; several are kept beside the model, each as"
                " NAME=FOLDER"
            )
        if not folder:
            raise InputError(f"--adapter {text!r} has no folder behind '='; give NAME=FOLDER")
        if name in found:
            raise InputError(f"--adapter {text!r}: {name} is given already; give it once")
        found[name] = folder
    return found


def parse_metrics(texts: Sequence[str] | None, option: str) -> dict[str, float]:
    """Return metrics and their numbers from texts such as max_error=0.001."""
    found = {}
    for text in texts or ():
        name, _, value = text.partition("=")
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not name or not 0 <= number < math.inf:
            raise InputError(f"{option} {text!r} must be METRIC=VALUE, as in max_error=0.001")
        if name in found:
            raise InputError(f"{option} {text!r}: {name} is given already; give it once")
        found[name] = number
    return found


def parse_opt(texts: Sequence[str] | None) -> tuple[Mapping[str, int], ...]:
    """Return the shapes of each --opt, from texts such as "batch=8,length=128"."""
    return tuple(parse_lengths("--opt", [text]) for text in texts or ())


def parse_lengths(option: str, texts: Sequence[str]) -> dict[str, int]:
    """Return the numbers by their axes, from texts such as "batch=4,length=128"."""
    lengths: dict[str, int] = {}
    for text in texts:
        for part in split_names(option, text) or []:
            name, _, number = part.partition("=")
            if not number.isdecimal():
                raise InputError(f"{option} {part!r} must be NAME=N, as in batch=8")
            if name in lengths:
                raise InputError(f"{option} {part!r}: {name} is given already; give it once")
            lengths[name] = int(number)
    return lengths
