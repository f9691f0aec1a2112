"""Estimates the memory and disk space that an export needs, before it starts, and compares them."""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..runtime.apps.diagnostics.machine import read_free_memory
from ..runtime.apps.stage_progress import Notice
from ..runtime.backends.tensorrt_library import LIBRARIES, is_installed
from ..runtime.backends.threads import ROOT
from ..runtime.bundle.manifest import Artifact
from .checkpoints.checkpoint import Checkpoint
from .errors import OutputError
from .options import Request
from .precisions import PRECISIONS, Precision
from .targets import find_target
from .tensorrt.choices import explain_missing, has_kernels
from .tensorrt.plan_graphs import group_by_precision, list_plan_graphs
from .tensorrt.plans import Progress

log = logging.getLogger("planforge")

FLOATS = ("F64", "F32", "F16", "BF16")  # types of weights, by safetensors' names
# Bits of a weight in a file beyond those of its codes: scales of blocks, and tables that stay in fp16.
SCALES = {8: 1.0, 4: 1.5}
TABLES = 1.5
PLAN_BITS = 22.0  # of a plan's in fp16, in which a table and the head that is tied to it are two
# Bytes of kernels in a plan: the median of what plans of the demos have beside their weights, by
# benchmarks/results/plan_precisions.json. Models of half a billion weights have 50 MB, beside 500.
KERNELS = 10_000_000
# Bytes of memory, measured, whatever the model is: of this process, and of each that traces a graph.
PROCESS = 350_000_000
TRACER = 500_000_000
# The number of copies of all weights in fp32 that exist at the same time.
MODEL = 1.0  # in PyTorch, until graphs run
COMPARED = 1.3  # a session of ONNX Runtime, and the piece of a weight that it packs
BLOCKS = 1.5  # while PyTorch computes with weights in int8 or int4, of a model that generates
CALIBRATED = 2.5  # the same in fp16, and of an encoder, of which more rows of real text are kept
PLAN = 2.4  # more, while a plan is built at the same time
RESULT = 6000  # bytes of logits and their metrics, for each word of the vocabulary
SURELY = 0.9  # of the announced disk space: with less the export cannot finish


@dataclass(frozen=True)
class Weights:
    """The weights of a checkpoint, by the headers of its files."""

    count: int  # values
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
    """The approximate number of bytes that an export needs.

    Attributes:
        memory: at most, of all of its processes together.
        disk: of the bundle's folder.
    """

    memory: int
    disk: int


def estimate_need(
    weights: Weights, checkpoint: Checkpoint, artifacts: Sequence[Artifact], request: Request
) -> Need:
    """Estimate the memory and disk space of an export of a checkpoint that writes these graphs."""
    kinds = {(kind := PRECISIONS[artifact.precision]).weights: kind for artifact in artifacts}
    plans = list_plans(checkpoint, artifacts, request)
    bits = sum(map(estimate_bits, kinds.values()))
    bits += sum(estimate_plan_bits(PRECISIONS[together[0].precision]) for together in plans)
    return Need(
        memory=PROCESS + round(estimate_memory(weights, checkpoint, artifacts, request, bool(plans))),
        disk=round(weights.count * bits / 8) + KERNELS * sum(map(len, plans)),
    )


def estimate_bits(kind: Precision) -> float:
    """Estimate the bits of a weight in a precision's file."""
    if kind.weight_bits is None:
        return 16.0 if kind.is_half else 32.0
    return kind.weight_bits + SCALES[kind.weight_bits] + TABLES * kind.is_half


def estimate_plan_bits(kind: Precision) -> float:
    """Estimate the bits of a weight in a precision's plans, of all graphs together."""
    return PLAN_BITS if kind.weight_bits is None else estimate_bits(kind)


def list_plans(
    checkpoint: Checkpoint, artifacts: Sequence[Artifact], request: Request
) -> list[list[Artifact]]:
    """Return the graphs that an export builds plans of here, those of one target and precision together."""
    targets = [find_target(name) for name in request.targets if builds_plan(name)]
    return [
        together
        for target in targets
        for together in group_by_precision(
            list_plan_graphs(artifacts, "portable" if checkpoint.exporter else target.dialect)
        )
        if not explain_missing(target, together[0].precision)
        and has_kernels(together[0].precision, request.sms or ())
    ]


def estimate_memory(
    weights: Weights, checkpoint: Checkpoint, artifacts: Sequence[Artifact], request: Request, plans: bool
) -> float:
    """Estimate the memory at the worst of an export's stages, in addition to this process's own."""
    fp32 = 4 * weights.count
    tracers = TRACER * len({artifact.recipe_id for artifact in artifacts})
    plan_bytes = PLAN * fp32 if plans else 0.0
    if not request.needs_reference:
        return max(tracers, weights.published + plan_bytes)  # the files are mapped, and converted in pieces
    shares = COMPARED
    if checkpoint.traits.has_sources or checkpoint.exporter:
        shares += MODEL  # PyTorch's model stays loaded while graphs run
    calibrated = [kind for a in artifacts if (kind := PRECISIONS[a.precision]).calibrated]
    if calibrated:
        is_light = not checkpoint.traits.encodes and all(kind.is_quantized for kind in calibrated)
        shares = max(shares, BLOCKS if is_light else CALIBRATED)
    vocabulary = 0 if checkpoint.traits.encodes else checkpoint.config.vocab_size
    return max(MODEL * fp32 + tracers, shares * fp32 + plan_bytes + RESULT * vocabulary)


def builds_plan(target: str) -> bool:
    """Tell whether an export for a target builds a plan here."""
    engine = find_target(target).engine
    return engine in LIBRARIES and is_installed(engine)


def announce_need(
    checkpoint: Checkpoint, artifacts: Sequence[Artifact], request: Request, progress: Progress
) -> None:
    """Log an export's needs; warn where the machine has less memory free.

    Raises:
        OutputError: the disk cannot hold the bundle; names what it needs, and what is free.
    """
    folders = (checkpoint.folder, checkpoint.source.folder)  # the former of what sentence-transformers wraps
    weights = next((found for folder in folders if (found := Weights.read(folder)) is not None), None)
    if weights is None:
        return
    need = estimate_need(weights, checkpoint, artifacts, request)
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
            suggest_fix(weights, checkpoint, artifacts, request),
        )
    check_disk(request.output, need.disk)


def suggest_fix(
    weights: Weights, checkpoint: Checkpoint, artifacts: Sequence[Artifact], request: Request
) -> str:
    """Return advice for a user who has too little memory."""
    unverified = replace(request, level=None)
    if not request.verify or unverified.needs_reference:
        return "close other programs, or export on a larger machine"
    less = format_bytes(estimate_need(weights, checkpoint, artifacts, unverified).memory)
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
    if count < 1e6:
        return "less than 1 MB"
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"
