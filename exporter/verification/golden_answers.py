"""Compares an export's golden data with PyTorch's answers now, and its limits with today's.

Who has no checkpoint trusts golden data alone: `selftest`, and `verify` without it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ...runtime.apps.check.case_arrays import from_arrays
from ...runtime.apps.check.files import Arrays, find_golden, name_damage, read_golden
from ...runtime.apps.check.judge import ENOUGH, Limits
from ...runtime.apps.check.outcome import Comparison
from ...runtime.bundle.bundle import Bundle
from ...runtime.bundle.manifest import Manifest
from ...runtime.errors import BundleError
from ..errors import shorten_error
from ..levels import QUICK
from ..limits import CAPS, NOTHING_ACCEPTED, Accepted, find_factor, find_upper_bound
from ..reference_model import OnnxGraphs, is_module
from ..tasks.base import Progress
from ..tasks.random_cases import RANDOM_PREFIX
from ..tasks.verifier import Verifier

if TYPE_CHECKING:
    from ..reference_model import ReferenceModel


GOLDEN = "golden data"  # in the place of a graph's id
READING = "reading the file"  # in the place of an engine
# Of an array's root mean square: ten times what engines in fp32 may be off. Another machine's PyTorch is
# nearer than that, unless the model amplifies rounding; then fp32's own limit counts.
NEAR = 10 * CAPS["fp32"]["max_error"]
MOST = 3  # arrays or limits that are told
ADVICE = "selftest, and verify without the checkpoint, rest on this file: export the checkpoint again"
OLDER = (
    "its format is that of an earlier PlanForge, so it is not compared here, and selftest cannot read it:"
    " export the checkpoint again"
)
GONE = (
    "the manifest's gates say that the export was verified, and it lists no checks/golden-*.npz:"
    " without it nothing tests the bundle where the checkpoint is not at hand; export the checkpoint again"
)


def is_older(arrays: Arrays) -> bool:
    """Tell whether golden data has an old format, in which cases are not data."""
    return "plan" not in arrays and any(name.startswith("sample.") for name in arrays)


def note_older_golden(bundle: Bundle) -> tuple[str, ...]:
    """Return a report's note that golden data of an older format is not compared."""
    file = find_golden(bundle)
    with contextlib.suppress(BundleError, KeyError):  # which `compare_golden` tells of
        if file is not None and is_older(read_golden(file)[0]):
            return (f"{file.relative_to(bundle.folder).as_posix()}: {OLDER}",)
    return ()


def compare_golden(
    verifier: Verifier,
    model: ReferenceModel,
    limits: Mapping[str, Limits],
    accepted: Mapping[str, Accepted],
    progress: Progress,
) -> list[Comparison]:
    """Compare golden answers with PyTorch's, and golden limits with those that verification sets itself."""
    bundle = verifier.bundle
    file = find_golden(bundle)
    if file is None:
        has_none = isinstance(model, OnnxGraphs) and model.rounds
        return [make_report("file", 0, [GONE])] if was_verified(bundle.manifest) and not has_none else []
    progress("comparing golden data")
    name = file.relative_to(bundle.folder).as_posix()
    near = max(NEAR, limits.get("fp32", {}).get("max_error", 0.0))
    try:
        with name_damage(bundle):
            arrays, usual = read_golden(file)
            if is_older(arrays):
                return []  # see `note_older_golden`
            expected = answer_again(verifier, arrays, model)
            answers = [f"{name}: {fault}" for fault in compare_arrays(arrays, expected, near)]
    except (BundleError, RuntimeError) as error:  # the latter is PyTorch's, of shapes that do not fit
        return [make_report("file", 0, [f"{name} cannot be compared: {shorten_error(error)}"])]
    caps = CAPS if verifier.level is QUICK else {}  # its own limits rest on two texts
    loose = list(list_loose_limits(usual, limits, accepted, caps))
    if any(precision == "fp32" for precision, _ in loose) and is_module(model):
        limits = {**limits, "fp32": verifier.choose_limits("fp32", verifier.measure_fp32_gaps(model))}
        loose = list(list_loose_limits(usual, limits, accepted, caps))
    told = [f"{name}: {fault}" for _, fault in loose]
    return [
        make_report("answers", len(expected), answers),
        make_report("limits", sum(map(len, usual.values())), told),
    ]


def was_verified(manifest: Manifest) -> bool:
    """Tell whether the export verified the graphs, so that there must be golden data."""
    return any(artifact.gate for artifact in manifest.artifacts)


def make_report(case: str, count: int, faults: Sequence[str]) -> Comparison:
    more = [f"and {len(faults) - MOST} more like it"] if len(faults) > MOST else []
    failures = (*faults[:MOST], *more, ADVICE) if faults else ()
    return Comparison({case: count}, {}, failures, artifact=GOLDEN, backend=READING, case=case)


def compare_arrays(got: Arrays, expected: Arrays, near: float) -> Iterator[str]:
    """Yield the arrays that are missing or differ from PyTorch's."""
    for name, array in expected.items():
        if name not in got:
            yield f"{name} is missing"
        elif got[name].shape != array.shape:
            yield f"{name} is {got[name].shape}, PyTorch's is {array.shape}"
        elif array.dtype.kind != "f":
            if not np.array_equal(got[name], array):
                yield f"{name} has other tokens or places than PyTorch's answers"
        elif array.size:
            spread = max(float(np.sqrt(np.square(array, dtype=np.float64).mean())), 1e-12)
            off = float(np.abs(got[name].astype(np.float64) - array).max()) / spread
            if not off <= near:  # NaN is not
                yield f"{name} is {off:.3g} of its spread off from PyTorch's, at most {near:.3g} is allowed"


def list_loose_limits(
    usual: Mapping[str, Limits],
    limits: Mapping[str, Limits],
    accepted: Mapping[str, Accepted],
    caps: Mapping[str, Limits],
) -> Iterator[tuple[str, str]]:
    """Yield limits that are looser than those of verification, with their precision.

    Those of another level, or of other random texts, are a little larger: as much as an engine may lose more
    than PyTorch. Where there are caps, those of their own metric count too.
    """
    for precision, own in limits.items():
        if precision not in usual:
            yield precision, f"there are no limits of {precision}"
            continue
        missing = [
            name for name in own if name not in usual[precision] and not name.startswith(RANDOM_PREFIX)
        ]
        if missing:  # of random cases earlier versions have none
            yield precision, f"there is no limit of {precision}'s {missing[0]}"
        for name, limit in usual[precision].items():
            allowed = find_largest_limit(name, own, accepted.get(precision, NOTHING_ACCEPTED))
            cap = caps.get(precision, {}).get(name.rpartition(".")[2], 0.0)
            if allowed is not None and not limit <= max(allowed, cap):  # NaN is not
                yield (
                    precision,
                    f"{precision}'s {name} is limited to {limit:.3g}, verify's limit is {own[name]:.3g}",
                )


def find_largest_limit(name: str, own: Limits, accepted: Accepted) -> float | None:
    """Return the highest allowed limit in golden data; None for metrics without a limit here."""
    if name not in own:
        return None
    metric = name.rpartition(".")[2]
    limit = own[name]
    if metric == "top1_changes":  # fewer tokens have a wider interval
        limit = find_upper_bound(min(1.0, limit), ENOUGH)
    return max(find_factor(metric) * limit, accepted.get(metric, 0.0))


def answer_again(verifier: Verifier, arrays: Arrays, model: ReferenceModel) -> Arrays:
    """Return the golden data that is expected.

    Where this run has asked PyTorch the same, that is the answer. Else PyTorch is asked once more: at the
    level quick for the samples alone.
    """
    own = verifier.collect_golden()
    if own.keys() == arrays.keys() and all(
        np.array_equal(own[name], arrays[name]) for name in own if own[name].dtype.kind != "f"
    ):
        return own
    golden = from_arrays(arrays)
    longest = max(text.count() for text in golden.texts)
    room = verifier.bundle.manifest.max_length
    if longest > room + 1:  # a translator's targets begin with a token more
        raise ValueError(f"it has texts of {longest} tokens, and the model takes {room}")
    if verifier.level is QUICK:
        costly = {row.text for case in golden.cases if case.is_costly for row in case.rows}
        golden = golden.restrict([number for number in range(len(golden.texts)) if number not in costly])
    found = verifier.answer_again(model, golden)
    return {name: array for name, array in found.items() if name != "plan"}
