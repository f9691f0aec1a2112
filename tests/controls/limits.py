"""What each limit of a graph may be at most, and the smallest real fault that it catches.

The bounds are computed here, from what rounding does to the model in PyTorch and from the length of sums, so
that a limit that is too loose is told from them.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from planforge.runtime.apps.check.judge import list_comparisons
from planforge.runtime.apps.check.metrics import LabelMetrics, measure_scale
from planforge.runtime.apps.check.outcome import Outcome
from planforge.runtime.bundle.bundle import Bundle
from planforge.runtime.bundle.manifest import Artifact

from ..helpers.faults import Fault, Plant, change_weight
from ..helpers.ground import Ground
from ..helpers.reading_faults import SCALE

Numbers: TypeAlias = "npt.NDArray[np.float64]"
SLOW = ("greedy", "full", "parts", "prompts", "single steps")  # cases of limits that others have too
PRODUCTS = ("MatMul", "Gemm", "MatMulNBits", "MatMulIntegerToFloat")
TIMES = 3.0  # a fault that is so many times as large as what is allowed has to be caught
SQUARES = ("mean_kl", "cosine_gap", "mean_cosine_gap", "text_kl")  # grow with the square of an error
# A sum of n products in another order may differ by n half units in the last place: here of 2,000 in fp32.
ROUNDING = 2000 * 2.0**-24
ENGINE = 5.0  # PyTorch, which rounds every result, loses at most so many times what an engine does
FEW = 8  # texts whose labels are counted, where it is not known how many there are
# Promised whatever the model is: shares of real text that a precision may change.
CHANGED = 0.005
PERPLEXITY = {"fp32": 1e-4, "fp16": 0.002, "int8": 0.01, "int4": 0.08}
PERPLEXITY |= {"fp32-kv8": PERPLEXITY["int8"], "int8-kv8": PERPLEXITY["int8"]}


@dataclass
class Limit:
    """A limit of a graph, and what it catches.

    Attributes:
        artifact: the graph's id.
        name: of the limit.
        sound: what the sound graph measures.
        least: what is allowed however little rounding does.
        bound: what may be allowed at most.
        allowed: the limit.
        caught: what the smallest fault that is caught measures.
        fault: which that is.
    """

    artifact: str
    name: str
    sound: float
    least: float
    bound: float
    allowed: float
    caught: float = math.inf
    fault: str = "none"

    @property
    def metric(self) -> str:
        return self.name.rpartition(".")[2]

    @property
    def power(self) -> int:
        return 2 if self.metric in SQUARES else 1

    def take(self, outcomes: Sequence[Outcome], fault: str) -> bool:
        """Tell whether this limit catches a fault; keep it if none before was as small."""
        is_caught = False
        words = (f"{self.metric} is ", f"{self.name} is ")
        for outcome in outcomes:
            value = outcome.metrics.get(self.name)
            is_told = any(word in failure for failure in outcome.failures for word in words)
            if value is None or not is_told or not value > self.allowed:
                continue
            is_caught = True
            if value < self.caught:
                self.caught = value
                self.fault = fault
        return is_caught

    def list_faults(self) -> Iterator[str]:
        """Yield what is wrong with this limit."""
        if not self.sound <= self.allowed:
            yield "refuses the sound graph"
        if not self.allowed <= self.bound:
            yield f"is {self.allowed:.3g}, and at most {self.bound:.3g} follows from rounding"
        if not self.caught <= TIMES**self.power * self.bound:
            yield f"lets pass what is {TIMES:g} times the {self.bound:.3g} that follow from rounding"
        is_counted = self.metric in ("top1_changes", "label_changes", "rank_changes", "perplexity_change")
        if not is_counted and self.allowed > max(self.least, (TIMES * ENGINE) ** self.power * self.sound):
            yield f"is {self.allowed:.3g}, where a sound graph measures {self.sound:.3g}"


@dataclass
class Rounded:
    """What rounding does to a model in PyTorch, in a precision."""

    precision: str
    losses: Mapping[str, float] = field(default_factory=dict)
    tokens: int = 0  # of real text
    scale: float = 0.0  # the standard deviation of a translator's logits
    labels: Mapping[str, int] = field(default_factory=dict)  # how many real texts have one, by output

    @classmethod
    def measure(cls, ground: Ground, precision: str) -> Rounded:
        gaps = ground.gaps(precision)
        expected = ground.verifier.expected
        logits = [] if expected.search is None else [a.values for a in expected.answers["logits"].values()]
        return cls(
            precision,
            ground.verifier.name_precision_errors(gaps),
            gaps["text"].rows if "text" in gaps else 0,
            max(map(measure_scale, logits), default=0.0),
            {name.removesuffix("."): gap.rows for name, gap in gaps.items() if isinstance(gap, LabelMetrics)},
        )

    def bound(self, name: str) -> tuple[float, float]:
        """Return what a limit is at least, and what it may be at most."""
        output, _, metric = name.rpartition(".")
        if metric == "perplexity_change":
            return PERPLEXITY[self.precision], PERPLEXITY[self.precision]
        if metric == "mean_cosine_gap":  # of few vectors it may be as large as the largest
            metric = "cosine_gap"
        own = self.losses.get(f"{output}.{metric}" if output else metric, 0.0)
        if metric in ("top1_changes", "label_changes"):
            share = max(CHANGED, TIMES * own)
            count = self.labels.get(output, FEW) if metric == "label_changes" else self.tokens
            chance = 3 * math.sqrt(share / count) + 9 / count if count else 0.0
            return CHANGED, share + chance
        if metric == "rank_changes":
            return CHANGED, max(CHANGED, TIMES * own)
        power = 2 if metric in SQUARES else 1
        least = 2 * ROUNDING * self.scale if metric == "score_error" else ROUNDING**power
        return least, max(least, TIMES**power * own)


@dataclass(frozen=True)
class Graded:
    """A fault of any size.

    Attributes:
        words: what it is; its size goes in.
        find: gives the constant that it changes; None where a graph has none.
        change: gives the constant's numbers at a size.
        most: the largest size.
        growth: from a size to the next.
    """

    words: str
    find: Callable[[ir.Model], ir.Value | None]
    change: Callable[[Numbers, float], Numbers]
    most: float
    growth: float = 4.0

    def list_sizes(self, least: float) -> list[float]:
        count = 1 + math.floor(math.log(self.most / least, self.growth))
        return [least * self.growth**step for step in range(count)]

    def make(self, size: float) -> Plant:
        def plant(model: ir.Model) -> None:
            value = self.find(model)
            assert value is not None
            change_weight(value, lambda array: self.change(array, size))

        return plant


def list_weights(model: ir.Model) -> list[ir.Value]:
    """Return the matrices of a graph's products, or their scales, in order."""
    products = [node for node in model.graph if node.op_type in PRODUCTS]
    values = [node.inputs[SCALE.get(node.op_type, 1)] for node in products]
    return [value for value in values if value is not None and value.const_value is not None]


def find_weight(model: ir.Model) -> ir.Value:
    weights = list_weights(model)
    return weights[len(weights) // 2]


def find_last_weight(model: ir.Model) -> ir.Value:
    return list_weights(model)[-1]


def enlarge(array: Numbers, size: float) -> Numbers:
    return array * (1 + size)


def find_positions(model: ir.Model) -> ir.Value | None:
    """Return the table of positions."""
    names = ("wpe.weight", "embeddings.positions.weight")
    tables = [node.inputs[0] for node in model.graph if node.op_type == "Gather"]
    return next((table for table in tables if table is not None and str(table.name).startswith(names)), None)


def find_mask(model: ir.Model) -> ir.Value | None:
    """Return the number that lowers scores of what is masked."""
    for node in model.graph:
        low = node.inputs[2] if node.op_type == "Where" else None
        if low is not None and low.const_value is not None and low.const_value.numpy().min() < -1e4:
            return low
    return None


def shift(table: Numbers, size: float) -> Numbers:
    before = np.concatenate([table[:1], table[:-1]])
    return table + size * (before - table)


FAULTS = (
    Graded("the last weight {:.2g} too large", find_last_weight, enlarge, 30.0, growth=2.0),
    Graded("a weight {:.2g} too large", find_weight, enlarge, 1.0),
    Graded("positions {:.2g} late", find_positions, shift, 1.0),
    Graded("a mask lets {:.2g} pass", find_mask, lambda a, size: np.full_like(a, math.log(size)), 1.0),
)


def run_cases(
    ground: Ground, bundle: Bundle, artifact: Artifact, only: Container[str] | None = None
) -> dict[str, Outcome]:
    """Return the outcome of every quick case of a graph, or of some of them, by name."""
    engine = dataclasses.replace(ground.verifier, bundle=bundle).open_beside_model(artifact)
    try:
        cases = list_comparisons(
            engine, ground.verifier.expected, artifact, ground.limits(artifact.precision)
        )
        quick = {name: run for name, run in cases.items() if not name.startswith(SLOW)}
        return {name: run() for name, run in quick.items() if only is None or name in only}
    finally:
        engine.close()


def run_damaged(
    ground: Ground, artifact: Artifact, plant: Plant, only: Container[str] | None = None
) -> dict[str, Outcome]:
    with ground.damaged(artifact.id, Fault("", plant, "", ())) as bundle:
        return run_cases(ground, bundle, bundle.manifest.artifact(artifact.id), only)


def try_sizes(
    ground: Ground,
    artifact: Artifact,
    fault: Graded,
    least: float,
    limits: Sequence[tuple[Limit, tuple[str, ...]]],
) -> None:
    """Find the smallest size of a fault that each limit catches in its cases, by bisection."""

    @functools.cache
    def run(size: float, cases: tuple[str, ...]) -> list[Outcome]:
        return list(run_damaged(ground, artifact, fault.make(size), cases).values())

    def take(limit: Limit, cases: tuple[str, ...], size: float) -> bool:
        return limit.take(run(size, cases), fault.words.format(size))

    for limit, cases in limits:
        bisect.bisect_left(fault.list_sizes(least), True, key=functools.partial(take, limit, cases))


def measure_limits(ground: Ground, artifact: Artifact) -> list[Limit]:
    """Return every limit of a graph's quick cases, with the smallest fault that it catches."""
    sound = run_cases(ground, ground.bundle, artifact)
    loud = run_damaged(ground, artifact, FAULTS[0].make(FAULTS[0].most))
    # What stays 0 is not measured: mean_cosine_gap, where there are too few texts.
    measured = {name for o in loud.values() for name in o.limits if o.metrics.get(name) != 0}
    rounded = Rounded.measure(ground, artifact.precision)
    allowed = {name: limit for o in sound.values() for name, limit in o.limits.items() if name in measured}
    limits = [
        Limit(
            artifact.id,
            name,
            max(o.metrics[name] for o in sound.values() if name in o.metrics),
            *rounded.bound(name),
            limit,
        )
        for name, limit in allowed.items()
    ]
    graph = ir.load(ground.bundle.path(artifact.file))
    least = min(limit.allowed ** (1 / limit.power) for limit in limits)
    cases = [tuple(name for name, o in sound.items() if limit.name in o.limits) for limit in limits]
    for fault in FAULTS:
        if fault.find(graph) is not None:
            try_sizes(ground, artifact, fault, least / 2, list(zip(limits, cases, strict=True)))
    return limits


def format_limits(limits: Sequence[Limit]) -> str:
    head = ["graph", "limit", "without a fault", "allowed", "at most", "smallest fault caught", "it measures"]
    rows = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    rows += [
        f"| {one.artifact} | {one.name} | {one.sound:.2g} | {one.allowed:.2g} | {one.bound:.2g} | {one.fault}"
        f" | {one.caught:.2g} |"
        for one in limits
    ]
    return "".join(f"{row}\n" for row in rows)
