"""What an export needs of memory and of disk: said before it starts, and held against what is free."""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..runtime.backends.tensorrt_library import LIBRARIES, is_installed
from ..runtime.backends.threads import ROOT
from ..runtime.bundle.manifest import Artifact
from ..runtime.diagnostics.machine import read_free_memory
from ..runtime.progress import Notice
from .checkpoints.checkpoint import Checkpoint
from .errors import OutputError
from .precisions import PRECISIONS
from .request import Request
from .targets import find_target
from .tensorrt.plans import Progress

log = logging.getLogger("planforge")

FLOATS = ("F64", "F32", "F16", "BF16")  # types of weights, by safetensors' names
# Bits of a weight in a file, the scales of quantized blocks included.
BITS = {"fp32": 32.0, "fp16": 16.0, "int8": 9.0, "int4": 5.5}
PLAN_BITS = 22.0  # of a plan's in fp16, in which a table and the head that is tied to it are two
# Bytes of memory, measured: what Python, PyTorch and the process that traces a graph take whatever the model
# is, and how often the weights in fp32 are there at the same time.
BASE = 700_000_000
REFERENCE = 2.4  # with verification: the model in PyTorch, a session of ONNX Runtime, and results
CALIBRATED = 1.2  # more: the model's weights as another precision rounds them
PLAN = 2.4  # more: a plan that is built beside
SURELY = 0.9  # of the disk that is said: with less the export cannot end


@dataclass(frozen=True)
class Weights:
    """The weights of a checkpoint, by the headers of its files."""

    count: int  # numbers
    published: int  # bytes of the files

    @classmethod
    def read(cls, folder: Path) -> Weights | None:
        """Return the weights of a checkpoint's folder; None where it has no safetensors files."""
        from ..models.folder import read_headers, weight_files

        try:
            headers = read_headers(folder)
        except ValueError:  # loading the weights will say what is wrong
            return None
        count = sum(math.prod(tensor.shape) for tensor in headers.values() if tensor.dtype in FLOATS)
        return cls(count, sum(path.stat().st_size for path in weight_files(folder)))


@dataclass(frozen=True)
class Need:
    """About how many bytes an export needs.

    Attributes:
        memory: at most, of all of its processes together.
        disk: of the bundle's folder.
    """

    memory: int
    disk: int


def estimate_need(weights: Weights, artifacts: Sequence[Artifact], request: Request) -> Need:
    """Estimate what an export needs that writes these graphs."""
    fp32 = 4 * weights.count
    kinds = {PRECISIONS[artifact.precision].weights for artifact in artifacts}
    plans = [name for name in request.targets if builds_plan(name)]
    disk = sum(weights.count * BITS[kind] / 8 for kind in kinds) + len(plans) * weights.count * PLAN_BITS / 8
    if not request.needs_reference:
        memory = float(weights.published)  # which are mapped, and converted one by one
    else:
        calibrated = any(PRECISIONS[artifact.precision].calibrated for artifact in artifacts)
        memory = fp32 * (REFERENCE + (CALIBRATED if calibrated else 0.0))
    memory += PLAN * fp32 if plans else 0.0
    return Need(memory=BASE + round(memory), disk=round(disk))


def builds_plan(target: str) -> bool:
    """Tell whether an export for a target builds a plan here."""
    engine = find_target(target).engine
    return engine in LIBRARIES and is_installed(engine)


def announce_need(
    checkpoint: Checkpoint, artifacts: Sequence[Artifact], request: Request, progress: Progress
) -> None:
    """Say what an export needs; warn where the machine has less memory free.

    Raises:
        OutputError: the disk cannot hold the bundle; names what it needs, and what is free.
    """
    folders = (checkpoint.folder, checkpoint.source.folder)  # the former of what sentence-transformers wraps
    weights = next((found for folder in folders if (found := Weights.read(folder)) is not None), None)
    if weights is None:
        return
    need = estimate_need(weights, artifacts, request)
    progress(
        Notice(
            f"{weights.count:,} weights: the export needs about {format_bytes(need.memory)} of memory and"
            f" {format_bytes(need.disk)} of disk"
        )
    )
    free = read_free_memory(ROOT)
    if free is not None and free < need.memory:
        log.warning(
            "about %s of memory are needed, and %s are free: the export may be slow, or be ended by the"
            " system; %s",
            format_bytes(need.memory),
            format_bytes(free),
            name_way_out(weights, artifacts, request),
        )
    check_disk(request.output, need.disk)


def name_way_out(weights: Weights, artifacts: Sequence[Artifact], request: Request) -> str:
    """Return what a user can do who has too little memory."""
    unverified = replace(request, verify=False)
    if not request.verify or unverified.needs_reference:
        return "close other programs, or export on a larger machine"
    less = format_bytes(estimate_need(weights, artifacts, unverified).memory)
    return f"close other programs, or leave out the comparison with --no-verify (verify=False), for {less}"


def check_disk(output: Path, need: int) -> None:
    """Refuse an output whose disk cannot hold it; warn where it is close."""
    folder = output.absolute().parent
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free >= need:
        return
    short = f"{output} needs about {format_bytes(need)} of disk, and {folder} has {format_bytes(free)} free"
    if free < SURELY * need:
        raise OutputError(f"{short}: make room there, choose another folder, or fewer precisions")
    log.warning("%s: it may not fit", short)


def format_bytes(count: float) -> str:
    """Return a number of bytes as text, such as "1.5 GB"."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"
