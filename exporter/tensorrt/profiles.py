"""Derives optimization profiles, the shapes that a plan is tuned for, from an artifact's axes.

A profile gives every named axis a (min, opt, max). Tensors that share an axis share its lengths, so
a profile cannot contradict itself from one input to the next. A decoder has three profiles:

`prefill`  a whole prompt on top of nothing; logits of each sequence's last token.
`append`   some tokens on top of any past: the next part of a long prompt, tokens to verify, text to
           score. Any batch, and logits for one sequence's whole part.
`decode`   one token for each sequence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...runtime.bundle.artifact import SLOTS, Artifact, Axis, TensorSpec
from ..errors import BuildError

Range = tuple[int, int, int]  # min, opt, max
Shape = tuple[int, ...]

ONE: Range = (1, 1, 1)


@dataclass(frozen=True)
class Profile:
    """The lengths that one way of calling a graph may have."""

    name: str  # what it is for
    axes: Mapping[str, Range]  # (min, opt, max) of every named axis among the inputs

    def list_shapes(self, spec: TensorSpec) -> list[Shape]:
        """Return the smallest, the best and the largest shape of one input."""
        return [
            tuple(axis if isinstance(axis, int) else self.axes[axis][i] for axis in spec.axis_names())
            for i in range(3)
        ]

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "axes": {name: list(axis) for name, axis in self.axes.items()}}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Profile:
        axes = {name: (int(a), int(b), int(c)) for name, (a, b, c) in value["axes"].items()}
        return Profile(str(value["name"]), axes)


def derive_profiles(
    artifact: Artifact, *, max_batch: int | None = None, max_length: int | None = None
) -> tuple[Profile, ...]:
    """Return the profiles that cover every call of an artifact, up to maxima smaller than the graph's."""
    axes = limit_axes(artifact, max_batch, max_length)
    if not any(spec.role.startswith("past") for spec in artifact.inputs):  # an encoder: one way to call it
        return (complete_profile("encode", axes, artifact),)
    batch = axes["batch"]
    tokens = axes["tokens"]
    past = axes.get("past")
    # Longer parts run one after the other. Twice the usual prompt fills a GPU, and keeps tokens x
    # total in attention below what prefill needs, and rows x vocabulary of the logits in bounds.
    part = min(2 * tokens[1], tokens[2])
    usual = min(tokens[1], (tokens[2] + 1) // 2)  # such that as much past fits too
    last_tokens = (1, batch[1], batch[2])
    ways: dict[str, dict[str, Range]] = {
        "prefill": {"rows": last_tokens, "past": (0, 0, 0)},
        # From past 0, because text is scored from its first token on. Where the cache grows, past
        # and tokens each reach their maximum: the corner where both do is beyond the model's length
        # and never called, but without it a few tokens near the full context would fit no profile.
        "append": {"tokens": (1, usual, part), "rows": (1, usual, max(part, batch[2]))},
        "decode": {"tokens": ONE, "rows": last_tokens},
    }
    if past is not None:
        ways["append"]["past"] = (0, min(past[1], tokens[2] - usual), past[2])
        ways["decode"]["past"] = (1, past[1], past[2])
    return tuple(
        complete_profile(name, axes | {a: r for a, r in way.items() if a in axes}, artifact)
        for name, way in ways.items()
    )


def check_profile(profile: Profile, artifact: Artifact) -> None:
    """Refuse a profile that TensorRT would refuse, or only warn of, with its input, axis and values."""
    where = find_axes(artifact)
    if missing := sorted(set(where) - set(profile.axes)):
        name = missing[0]
        raise BuildError(
            f"profile {profile.name!r} has no lengths for axis {name!r} of input {where[name][0]!r}"
        )
    if unknown := sorted(set(profile.axes) - set(where)):
        raise BuildError(
            f"profile {profile.name!r} has an axis {unknown[0]!r}; the graph has {sorted(where)}"
        )
    sums = find_sums(artifact)
    for name, (spec_name, axis) in where.items():
        low, opt, high = profile.axes[name]
        what = f"profile {profile.name!r}, input {spec_name!r}, axis {name!r}: {(low, opt, high)}"
        if not low <= opt <= high:
            raise BuildError(f"{what} is not in the order min, opt, max")
        if name in sums:
            expected = add_ranges(profile.axes, sums[name])
            if expected != (low, opt, high):
                raise BuildError(f"{what} must be {' + '.join(sums[name])}, which is {expected}")
        elif not axis.min <= low <= high <= axis.max:
            raise BuildError(f"{what} is not within the graph's {axis.min}..{axis.max}")


def find_slots(profiles: Sequence[Profile]) -> int | None:
    """Return the one length of the slots axis in all profiles; None where a graph has none."""
    lengths = {length for profile in profiles for length in profile.axes.get(SLOTS, ())}
    if len(lengths) > 1:
        raise BuildError(
            f"axis {SLOTS!r} must have one length in all profiles of a plan, not {sorted(lengths)}"
        )
    return next(iter(lengths), None)


def limit_axes(artifact: Artifact, max_batch: int | None, max_length: int | None) -> dict[str, Range]:
    """Return every axis of the inputs within the given maxima; sums are left out, slots are frozen."""
    maxima: dict[str, int] = {}
    if max_batch is not None:
        maxima |= compute_batch_maxima(artifact, max_batch)
    if max_length is not None:
        length = check_maximum("length", max_length, 2, artifact.axis("tokens").max)
        maxima |= {"tokens": length, "source_tokens": length, SLOTS: length, "past": length - 1}
    ranges: dict[str, Range] = {}
    for name, (_, axis) in find_axes(artifact).items():
        high = min(axis.max, maxima.get(name, axis.max))
        ranges[name] = (high, high, high) if name == SLOTS else (axis.min, min(axis.opt, high), high)
    return {name: r for name, r in ranges.items() if name not in find_sums(artifact)}


def compute_batch_maxima(artifact: Artifact, max_batch: int) -> dict[str, int]:
    """Return the maximum of "batch" and, for a decoder with a source, whose rows are beams, of "sources"."""
    rows = artifact.axis("batch").max
    sources = artifact.axis("sources").max if "sources" in find_axes(artifact) else rows
    check_maximum("batch", max_batch, 1, sources)
    return {"sources": max_batch, "batch": max_batch * (rows // sources)}


def check_maximum(name: str, value: int, low: int, high: int) -> int:
    """Return a maximum that the user gave; refuse one that the graph does not allow."""
    if not low <= value <= high:
        more = f"; for more, export again with a larger --max-{name}" if value > high else ""
        raise BuildError(f"--max {name}={value} is outside of what the graph allows, {low} to {high}{more}")
    return value


def complete_profile(name: str, axes: Mapping[str, Range], artifact: Artifact) -> Profile:
    """Return a profile of `axes` and of the axes that are their sums."""
    sums = {total: add_ranges(axes, parts) for total, parts in find_sums(artifact).items()}
    return Profile(name, {**axes, **sums})


def find_sums(artifact: Artifact) -> dict[str, list[str]]:
    """Return the axes that are sums of others, from constraints such as "total = past + tokens"."""
    axes = find_axes(artifact)
    sides = [text.split(" = ", 1) for text in artifact.constraints if " = " in text]
    return {total: parts.split(" + ") for total, parts in sides if total in axes}


def add_ranges(axes: Mapping[str, Range], names: Sequence[str]) -> Range:
    """Return (min, opt, max) of a sum: each is the sum of its parts."""
    low, opt, high = (sum(axes[name][i] for name in names) for i in range(3))
    return low, opt, high


def find_axes(artifact: Artifact) -> dict[str, tuple[str, Axis]]:
    """Return every named axis among the inputs, with the name of the first input that has it."""
    found: dict[str, tuple[str, Axis]] = {}
    for spec in artifact.inputs:
        for axis in spec.axes:
            if isinstance(axis, Axis):
                found.setdefault(axis.name, (spec.name, axis))
    return found
