"""PlanForge's targets on a GPU, and whether it met them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..measure import TIMES, value_of
from .cases import COMPILED, COPIES, EAGER, ORT_CUDA, PLANS, add_precision

H200_CLASS = 3000.0  # GB/s that such a GPU copies at least, read and written
Cases = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Target:
    """The lead that one entry of a case must have.

    Attributes:
        metric: a figure of `measure.figures`.
        value: what is allowed of it, or of how many times as fast it is as `against`.
        against: the case and entry that it is a multiple of.
        most: whether `value` is the most that is allowed; else the least.
        for_h200: whether it is expected for a GPU of the H200's class only.
    """

    case: str
    entry: str
    metric: str
    value: float
    against: tuple[str, str] | None = None
    most: bool = False
    for_h200: bool = False


ONE = "gpt2-124m-b1"
EIGHT = "gpt2-124m-b8"
MANY = "gpt2-124m-b64"
LONG = "gpt2-124m-long"
XL = "gpt2-xl-b1"
TEXT = "bert-base-b1"
TEXTS = "bert-base-b32"
SENTENCE = "marian-b1"
POINTS = {ONE: "inter_token_ms", EIGHT: "inter_token_ms", MANY: "inter_token_ms", XL: "inter_token_ms"}
POINTS |= {LONG: "inter_token_ms", SENTENCE: "inter_token_ms", TEXT: "ms", TEXTS: "ms"}
# The most that an H200 may take, in ms: what its captured graphs took, and a margin.
MOST = (
    *((ONE, "inter_token_ms", 0.8), (EIGHT, "inter_token_ms", 0.9), (MANY, "inter_token_ms", 1.4)),
    *((XL, "inter_token_ms", 2.5), (SENTENCE, "inter_token_ms", 0.8)),
    *((ONE, "ttft_ms", 3.0), (MANY, "ttft_ms", 12.0)),
    *((TEXT, "ms", 1.1), (TEXTS, "ms", 3.7)),
)
TARGETS = (
    *(Target(case, ORT_CUDA, metric, value, most=True, for_h200=True) for case, metric, value in MOST),
    *(Target(case, ORT_CUDA, "inter_token_ms", 1.5, (case, COMPILED)) for case in (ONE, EIGHT, MANY)),
    Target(ONE, ORT_CUDA, "inter_token_ms", 4.0, (ONE, EAGER)),
    Target(ONE, ORT_CUDA, "inter_token_ms", 1.5, (ONE, COPIES)),
    Target(XL, ORT_CUDA, "bandwidth_share", 0.5),
    Target(XL, add_precision(ORT_CUDA, "int4"), "inter_token_ms", 1.3, (XL, ORT_CUDA)),
    Target(MANY, ORT_CUDA, "tokens_per_s", 10.0, (ONE, ORT_CUDA)),
    Target(TEXTS, ORT_CUDA, "matrix_share", 0.6),
    *(Target(case, plan, metric, 1.0, (case, ORT_CUDA)) for case, metric in POINTS.items() for plan in PLANS),
)


def judge_target(target: Target, cases: Cases) -> dict[str, Any]:
    """Return a target with its result.

    Returns:
        The target's fields, "found" and "met", both None where that was not measured, and "why" it was not.
    """
    verdict: dict[str, Any] = {**vars(target), "found": None, "met": None, "why": None}
    if (why := next(obstacles(target, cases), None)) is not None:
        return {**verdict, "why": why}
    found = value_of(cases[target.case]["entries"][target.entry], target.metric)
    assert found is not None
    if target.against is not None:
        case, entry = target.against
        other = value_of(cases[case]["entries"][entry], target.metric)
        assert other is not None
        found = other / found if target.metric in TIMES else found / other
    met = found <= target.value if target.most else found >= target.value
    return {**verdict, "found": round(found, 3), "met": met}


def obstacles(target: Target, cases: Cases) -> Iterator[str]:
    """Return the reasons why a target can't be judged; nothing if it can."""
    for name, entry in ((target.case, target.entry), *filter(None, (target.against,))):
        case = cases.get(name)
        if case is None:
            yield f"{name} was not run"
        elif case["refused"]:
            yield f"{name}: {case['refused']}"
        elif entry not in case["entries"]:
            yield f"{entry}: {case['skipped'].get(entry, 'it took no part')}"
        elif not case["entries"][entry]["alike"]:
            yield f"{entry}: its results are not the model's"
        elif value_of(case["entries"][entry], target.metric) is None:
            yield f"{entry}: {target.metric} could not be told"
    if target.for_h200 and target.case in cases:
        speed = cases[target.case]["bounds"]["copy_gb_per_s"]
        if speed < H200_CLASS:
            wanted = f"GPUs of the H200's class, which copy {H200_CLASS:g} GB/s and more"
            yield f"it is for {wanted}; this one copies {speed:g}"


def verdicts(cases: Cases) -> list[dict[str, Any]]:
    """Return all targets, judged."""
    return [judge_target(target, cases) for target in TARGETS]
