"""All choices of an export, checked before any work is done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from ..runtime.backends.tensorrt_library import LIBRARIES, is_installed
from ..runtime.errors import InputError
from .bundle.writer import check_output
from .precisions import PRECISIONS, resolve_precisions
from .targets import find_target
from .tensorrt.build import resolve_architectures
from .tensorrt.plans import default_targets

if TYPE_CHECKING:
    from typing_extensions import Unpack


@dataclass(frozen=True)
class Request:
    """The choices of an export, checked.

    Attributes:
        output: the bundle's folder.
        targets: what it is to run on, such as "cpu" and "rtx".
        precisions: the first is what `load` runs unless told otherwise.
        sms: GPU architectures to build plans for; None: all that the engine has.
        max_batch: the largest batch; None: the usual one of the model's kind.
        max_length: context in tokens; None: the model's.
        prompts: a file of texts to verify with; None: the built-in ones.
        verify: compare every graph with the reference.
        force: replace the bundle that is there.
    """

    output: Path
    targets: tuple[str, ...]
    precisions: tuple[str, ...]
    sms: Sequence[str] | None = None
    max_batch: int | None = None
    max_length: int | None = None
    prompts: Path | None = None
    verify: bool = True
    force: bool = False

    @property
    def needs_reference(self) -> bool:
        """Whether anything needs the results of the model in PyTorch."""
        return self.verify or any(PRECISIONS[name].calibrated for name in self.precisions)

    @property
    def needs_shared_buffers(self) -> bool:
        """Whether a precision runs only in attention over shared buffers."""
        return any("portable" not in PRECISIONS[name].dialects for name in self.precisions)


class RequestOptions(TypedDict, total=False):
    """The options of an export and an import, as `export` describes them."""

    precision: Sequence[str] | None
    target: Sequence[str] | None
    sms: Sequence[str] | None
    max_batch: int | None
    max_length: int | None
    prompts: str | Path | None
    verify: bool
    force: bool


def parse_request(output: str | Path, **options: Unpack[RequestOptions]) -> Request:
    """Check the choices of an export, before any work is done.

    Raises:
        InputError: choices that cannot be carried out, or contradict each other.
        OutputError: there is something at `output` that must not be replaced.
    """
    sms = options.get("sms")
    max_batch = options.get("max_batch")
    prompts = options.get("prompts")
    targets, precisions = choose_targets_and_precisions(options.get("target"), options.get("precision"))
    check_choices(precisions, targets, sms, max_batch)
    request = Request(
        output=Path(output),
        targets=tuple(targets),
        precisions=tuple(precisions),
        sms=sms,
        max_batch=max_batch,
        max_length=options.get("max_length"),
        prompts=None if prompts is None else Path(prompts),
        verify=options.get("verify", True),
        force=options.get("force", False),
    )
    check_output(request.output, request.force)
    return request


def choose_targets_and_precisions(
    target: Sequence[str] | None, precision: Sequence[str] | None
) -> tuple[list[str], list[str]]:
    """Return targets and precisions, each once, the usual ones where none is named; a str is one name."""
    if isinstance(target, str):
        target = [target]
    if isinstance(precision, str):
        precision = [precision]
    targets = default_targets() if target is None else list(dict.fromkeys(target))
    if not targets:
        raise InputError("target=[] names none; leave it out for the usual ones")
    if target is None and precision is not None and "fp16" not in precision:
        targets = ["cpu"]  # plans are built from fp16
    return targets, resolve_precisions(default_precisions(targets) if precision is None else precision)


def default_precisions(targets: Sequence[str]) -> list[str]:
    """Return fp32, and fp16 where a target's dialect can have it."""
    takes_fp16 = any("fp16" not in find_target(name).without for name in targets)
    return ["fp32", "fp16"] if takes_fp16 else ["fp32"]


def check_choices(
    precision: Sequence[str], targets: Sequence[str], sms: Sequence[str] | None, max_batch: int | None
) -> None:
    """Refuse choices that cannot be carried out, before any work is done."""
    for name in targets:
        engine = find_target(name).engine
        if engine not in LIBRARIES:
            continue
        if is_installed(engine) or targets != default_targets():
            resolve_architectures(engine, sms or LIBRARIES[engine].sms)
        if "fp16" not in precision:
            raise InputError(f"target {name!r} builds its plan from fp16; add fp16 to the precisions")
    if sms and not any(find_target(name).plans for name in targets):
        raise InputError(f"--sm {','.join(sms)} is for plans, and target {', '.join(targets)} builds none")
    if max_batch is not None and max_batch < 1:
        raise InputError(f"max_batch={max_batch} must be at least 1")
