"""The options of `export` and `import_folder`, checked before any work is done."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypedDict

from ..runtime.backends.tensorrt_library import LIBRARIES, is_installed
from ..runtime.bundle.export_again import TARGETS
from ..runtime.errors import InputError
from ..runtime.option_checks import check_options
from ..runtime.suggest import did_you_mean
from .bundle.writer import check_output
from .levels import STANDARD, Level, parse_verify
from .limits import TABLE, Accepted
from .precisions import PRECISIONS, expand_names, resolve_precisions
from .targets import find_target
from .tensorrt.build import USUAL, Options, check_build_options, resolve_architectures
from .tensorrt.choices import (
    check_kernels,
    check_target,
    explain_missing,
    is_elsewhere,
    make_board_error,
)
from .tensorrt.plans import USUAL_TARGETS

QUANTIZERS = ("gptq", "rtn")  # how coarse weights are rounded, such as int4


class ExportOptions(TypedDict, total=False):
    """The options that `export` shares with imports.

    Attributes:
        precision: "fp32", "fp16", "int8", "int4", and with keys and values in int8 "fp32-kv8", "int8-kv8",
            "int4-kv8"; the first is `load`'s own choice. By default fp32, and fp16 where a target has it. On
            a GPU "w8a16" and "w4a16", and of plans "fp8" and "nvfp4", with products in fp16; where every
            target runs on GPUs, "int8" and "int4" mean the first two. Of an encoder's plans also "w8a8" and
            "fp8a8", with products in int8 and fp8.
        target: "cpu", "rtx", ...; by default cpu and rtx, without a plan where tensorrt-rtx is missing.
        sms: GPU architectures to build plans for, such as "sm86"; by default all that the engine has.
        opt: shapes that plans are optimized for, such as [{"batch": 8, "length": 128}].
        builder_level: how long TensorRT searches for kernels, from 0 to 5; by default its own, 3.
        profiling: what plans keep of their layers: "layer_names_only", the default, "none" or "detailed".
        max_batch: the largest batch of plans and of a step; by default 8 for a decoder, 32 for an encoder.
        max_length: context in tokens; by default the model's, up to 4,096, or sentence-transformers' own.
        extrapolate: let max_length be beyond the model's context, and compute positions there, of sines or
            rotary ones; the model has not learned from such texts.
        verify: compare every graph with PyTorch, and keep nothing if one differs: "quick", a smoke test;
            "standard", or True, the default, what the model's size allows; "full", every case; False compares
            nothing.
        force: replace the bundle that is at the output; it stays as it is until the new one is whole.
        prompts: a file with one prompt per line to verify with, instead of the built-in ones.
        quantizer: "gptq", the default, keeps products with real text close; "rtn" rounds to the nearest, in
            no time.
        accept: losses above the usual caps to let pass, such as {"top1_changes": 0.03}, of every precision
            but fp32, where PyTorch rounded the same way loses as much. The bundle keeps them.
    """

    precision: Sequence[str] | None
    target: Sequence[str] | None
    sms: Sequence[str] | None
    opt: Sequence[Mapping[str, int]]
    builder_level: int | None
    profiling: str | None
    max_batch: int | None
    max_length: int | None
    extrapolate: bool
    verify: bool | str
    force: bool
    prompts: str | Path | None
    quantizer: str
    accept: Mapping[str, float] | None


@dataclass(frozen=True, kw_only=True)
class Request:
    """The options of an export, which `parse_request` has checked."""

    output: Path
    targets: tuple[str, ...]
    precisions: tuple[str, ...]
    sms: tuple[str, ...] | None = None
    plans: Options = USUAL  # how plans are built
    max_batch: int | None = None
    max_length: int | None = None
    extrapolate: bool = False
    prompts: str | Path | None = None
    quantizer: str = "gptq"
    accept: Mapping[str, float] = field(default_factory=dict)
    level: Level | None = STANDARD  # of the verification; None does without
    force: bool = False

    @property
    def verify(self) -> bool:
        """Return whether the graphs are compared with the model."""
        return self.level is not None

    @property
    def accepted(self) -> dict[str, Accepted]:
        """Return the losses that each precision may have; fp32 may lose nothing."""
        return {name: self.accept for name in self.precisions if name != "fp32" and self.accept}

    @property
    def needs_reference(self) -> bool:
        """Return whether anything needs the results of the model in PyTorch."""
        return self.verify or any(PRECISIONS[name].calibrated for name in self.precisions)

    @property
    def needs_shared_buffers(self) -> bool:
        """Return whether any precision runs only in attention over shared buffers."""
        return any("portable" not in PRECISIONS[name].dialects for name in self.precisions)


def parse_request(output: str | Path, options: ExportOptions) -> Request:
    """Return the choices of an export, checked; an output that must not be replaced is refused too."""
    check_options(options, ExportOptions)
    targets, precisions = choose_targets_and_precisions(options.get("target"), options.get("precision"))
    sms = options.get("sms")
    request = Request(
        output=Path(output),
        targets=tuple(targets),
        precisions=tuple(precisions),
        sms=None if sms is None else tuple(sms),
        plans=Options(
            opt=tuple(options.get("opt") or ()),
            builder_level=options.get("builder_level"),
            profiling=options.get("profiling"),
        ),
        max_batch=options.get("max_batch"),
        max_length=options.get("max_length"),
        extrapolate=options.get("extrapolate", False),
        prompts=options.get("prompts"),
        quantizer=options.get("quantizer", "gptq"),
        accept=dict(options.get("accept") or {}),
        level=parse_verify(options.get("verify", True)),
        force=options.get("force", False),
    )
    check_request(request)
    return request


def choose_targets_and_precisions(
    target: Sequence[str] | None, precision: Sequence[str] | None
) -> tuple[list[str], list[str]]:
    """Return targets and precisions, each once, with defaults where none is named; a str is one name."""
    if isinstance(target, str):
        target = [target]
    if isinstance(precision, str):
        precision = [precision]
    targets = list(USUAL_TARGETS if target is None else dict.fromkeys(target))
    if not targets:
        raise InputError("target=[] is empty; leave it out for the default targets")
    if precision is None:
        return targets, list_usual_precisions(targets)
    in_half = all(find_target(name).multiplies_in_half for name in targets)
    names = resolve_precisions(expand_names(precision, in_half))
    if target is None and not any(PRECISIONS[name].is_half for name in names):
        targets = sorted({PRECISIONS[name].engine or "cpu" for name in names})  # plans compute in fp16
    elif target is None and any(PRECISIONS[name].quantizes_in_half for name in names):
        targets = [name for name in targets if find_target(name).plans]  # a CPU gets no such graph
    return targets, names


def check_accepted(request: Request) -> None:
    """Refuse accepted losses that no cap limits, or that no metric has."""
    for name, value in request.accept.items():
        if name not in TABLE:
            hint = did_you_mean(name, list(TABLE))
            raise InputError(f"accept of {name!r}: the metric is not one of {', '.join(TABLE)}{hint}")
        if not 0 <= value < math.inf:
            raise InputError(f"accept of {name!r} must be a number of 0 or more, not {value!r}")
    if request.accept and not request.verify:
        raise InputError("accept relaxes verification, which --no-verify turns off; give one of them")


def list_usual_precisions(targets: Sequence[str]) -> list[str]:
    """Return fp32, and fp16 where a target's dialect can have it."""
    takes_fp16 = any("fp16" not in find_target(name).without for name in targets)
    return ["fp32", "fp16"] if takes_fp16 else ["fp32"]


def advise_for_board(request: Request) -> str:
    """Return the options that export the graphs for a board's plan, in addition to those asked for."""
    here = [name for name in request.targets if not is_elsewhere(name)]
    boards = [find_target(name) for name in request.targets if is_elsewhere(name)]
    targets = dict.fromkeys([*(here or ["cpu"]), *(TARGETS[board.dialect] for board in boards)])
    wanted = [p for p in request.precisions if here or not all(explain_missing(board, p) for board in boards)]
    halves = [name for name in wanted if PRECISIONS[name].is_half]
    precisions = dict.fromkeys([*wanted, *([] if halves else ["fp16"])])
    return f"export with --target {','.join(targets)} --precision {','.join(precisions)}"


def check_request(request: Request) -> None:
    """Refuse choices that cannot be carried out, and an output that must not be replaced."""
    targets = request.targets
    sms = request.sms
    for name in targets:
        engine = find_target(name).engine
        if engine not in LIBRARIES:
            continue
        check_target(name, request.precisions)
        if is_elsewhere(name):
            raise make_board_error(name, f"{advise_for_board(request)}, copy the bundle", request.output.name)
        if is_installed(engine) or targets != USUAL_TARGETS:
            named = resolve_architectures(engine, sms or LIBRARIES[engine].sms)
            check_kernels(name, request.precisions, named if sms else ())
        check_build_options(engine, request.plans)
        if not any(PRECISIONS[precision].is_half for precision in request.precisions):
            raise InputError(f"target {name!r} builds its plan from fp16; add fp16 to the precisions")
    for option, value in list_plan_options(request):
        if value and not any(find_target(name).plans for name in targets):
            raise InputError(f"{option} {value} is for plans, and target {', '.join(targets)} builds none")
    if request.quantizer not in QUANTIZERS:
        hint = did_you_mean(request.quantizer, QUANTIZERS)
        raise InputError(f"quantizer {request.quantizer!r} is not one of {', '.join(QUANTIZERS)}{hint}")
    check_accepted(request)
    if request.max_batch is not None and request.max_batch < 1:
        raise InputError(f"max_batch={request.max_batch} must be at least 1")
    check_output(request.output, request.force)


def list_plan_options(request: Request) -> list[tuple[str, str]]:
    """Return the options that are of use for plans alone, with the values that were given, or ""."""
    plans = request.plans
    shapes = [",".join(f"{name}={length}" for name, length in lengths.items()) for lengths in plans.opt]
    level = "" if plans.builder_level is None else str(plans.builder_level)
    values = (",".join(request.sms or ()), " --opt ".join(shapes), level, plans.profiling or "")
    return list(zip(("--sm", "--opt", "--builder-level", "--profiling"), values, strict=True))
