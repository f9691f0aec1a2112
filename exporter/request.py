"""All choices of an export, checked before any work is done."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..runtime.backends.tensorrt_library import LIBRARIES, is_installed
from ..runtime.bundle.export_again import TARGETS
from ..runtime.errors import InputError
from ..runtime.suggest import did_you_mean
from .bundle.writer import check_output
from .levels import STANDARD, Level, parse_verify
from .limits import TABLE, Accepted
from .precisions import PRECISIONS, resolve_precisions
from .targets import find_target
from .tensorrt.build import resolve_architectures
from .tensorrt.plans import USUAL_TARGETS, is_elsewhere, make_board_error

QUANTIZERS = ("gptq", "rtn")  # how weights become int4, and an encoder's int8


@dataclass(frozen=True, kw_only=True)
class Request:
    """The choices of an export, as `export` describes them, which `parse_request` has checked."""

    output: Path
    targets: tuple[str, ...]
    precisions: tuple[str, ...]
    sms: tuple[str, ...] | None = None
    max_batch: int | None = None
    max_length: int | None = None
    prompts: str | Path | None = None
    quantizer: str = "gptq"
    accept: Mapping[str, float] = field(default_factory=dict)
    level: Level | None = STANDARD  # of the verification; None does without
    force: bool = False

    @property
    def verify(self) -> bool:
        """Whether the graphs are compared with the model."""
        return self.level is not None

    @property
    def accepted(self) -> dict[str, Accepted]:
        """What each precision may lose; fp32 loses nothing."""
        return {name: self.accept for name in self.precisions if name != "fp32" and self.accept}

    @property
    def needs_reference(self) -> bool:
        """Whether anything needs the results of the model in PyTorch."""
        return self.verify or any(PRECISIONS[name].calibrated for name in self.precisions)

    @property
    def needs_shared_buffers(self) -> bool:
        """Whether a precision runs only in attention over shared buffers."""
        return any("portable" not in PRECISIONS[name].dialects for name in self.precisions)


def parse_request(
    *,
    output: str | Path,
    precision: Sequence[str] | None,
    target: Sequence[str] | None,
    sms: Sequence[str] | None,
    max_batch: int | None,
    max_length: int | None,
    verify: bool | str,
    force: bool,
    prompts: str | Path | None,
    quantizer: str,
    accept: Mapping[str, float] | None,
) -> Request:
    """Return the choices of an export, checked; an output that must not be replaced is refused too."""
    targets, precisions = choose_targets_and_precisions(target, precision)
    request = Request(
        output=Path(output),
        targets=tuple(targets),
        precisions=tuple(precisions),
        sms=None if sms is None else tuple(sms),
        max_batch=max_batch,
        max_length=max_length,
        prompts=prompts,
        quantizer=quantizer,
        accept=dict(accept or {}),
        level=parse_verify(verify),
        force=force,
    )
    check_request(request)
    return request


def choose_targets_and_precisions(
    target: Sequence[str] | None, precision: Sequence[str] | None
) -> tuple[list[str], list[str]]:
    """Return targets and precisions, each once, the usual ones where none is named; a str is one name."""
    if isinstance(target, str):
        target = [target]
    if isinstance(precision, str):
        precision = [precision]
    targets = list(USUAL_TARGETS if target is None else dict.fromkeys(target))
    if not targets:
        raise InputError("target=[] names none; leave it out for the usual ones")
    if target is None and precision is not None and "fp16" not in precision:
        targets = ["cpu"]  # plans are built from fp16
    return targets, resolve_precisions(list_usual_precisions(targets) if precision is None else precision)


def check_accepted(request: Request) -> None:
    """Refuse losses that no cap limits, or that nothing is held to."""
    for name, value in request.accept.items():
        if name not in TABLE:
            hint = did_you_mean(name, list(TABLE))
            raise InputError(f"accept of {name!r}: what is capped is {', '.join(TABLE)}{hint}")
        if not 0 <= value < math.inf:
            raise InputError(f"accept of {name!r} must be a number of 0 or more, not {value!r}")
    if request.accept and not request.verify:
        raise InputError("accept says what verification lets pass, and --no-verify does without it")
    if request.accept and not request.accepted:
        raise InputError("accept is for precisions that lose something, and fp32 alone does not")


def list_usual_precisions(targets: Sequence[str]) -> list[str]:
    """Return fp32, and fp16 where a target's dialect can have it."""
    takes_fp16 = any("fp16" not in find_target(name).without for name in targets)
    return ["fp32", "fp16"] if takes_fp16 else ["fp32"]


def advise_for_board(request: Request) -> str:
    """Return the options that export the graphs which a board builds its plan from, beside what was asked."""
    here = [name for name in request.targets if not is_elsewhere(name)] or ["cpu"]
    dialects = [find_target(name).dialect for name in request.targets if is_elsewhere(name)]
    targets = dict.fromkeys([*here, *(TARGETS[dialect] for dialect in dialects)])
    precisions = dict.fromkeys([*request.precisions, "fp16"])
    return f"export with --target {','.join(targets)} --precision {','.join(precisions)}"


def check_request(request: Request) -> None:
    """Refuse choices that cannot be carried out, and an output that must not be replaced."""
    targets = request.targets
    sms = request.sms
    for name in targets:
        engine = find_target(name).engine
        if engine not in LIBRARIES:
            continue
        if is_elsewhere(name):
            raise make_board_error(name, f"{advise_for_board(request)}, copy the bundle", request.output.name)
        if is_installed(engine) or targets != USUAL_TARGETS:
            resolve_architectures(engine, sms or LIBRARIES[engine].sms)
        if "fp16" not in request.precisions:
            raise InputError(f"target {name!r} builds its plan from fp16; add fp16 to the precisions")
    if sms and not any(find_target(name).plans for name in targets):
        raise InputError(f"--sm {','.join(sms)} is for plans, and target {', '.join(targets)} builds none")
    if request.quantizer not in QUANTIZERS:
        hint = did_you_mean(request.quantizer, QUANTIZERS)
        raise InputError(f"quantizer {request.quantizer!r} is not one of {', '.join(QUANTIZERS)}{hint}")
    check_accepted(request)
    if request.max_batch is not None and request.max_batch < 1:
        raise InputError(f"max_batch={request.max_batch} must be at least 1")
    check_output(request.output, request.force)
