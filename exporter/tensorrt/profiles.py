"""Derives optimization profiles, the shapes that a plan is tuned for, from an artifact's axes.

A profile gives every named axis a (min, opt, max). Tensors that share an axis share its lengths, so
a profile cannot contradict itself from one input to the next. An encoder has two profiles of one range, for
one text and for eight: a step runs in the one that is optimized for the nearest shapes. A graph that reads
pictures or their latents has one of the usual size, whose kernels are chosen for it alone, and one of any
size. A decoder has three:

`prefill`  a whole prompt on top of nothing; logits of each sequence's last token.
`append`   some tokens on top of any past: the next part of a long prompt, tokens to verify, text to
           score. Any batch, and logits for one sequence's whole part.
`decode`   one token for each sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...runtime.backends.plan_compatibility import find_sides, name_option_axes
from ...runtime.bundle.artifact import SLOTS, Artifact, Axis, TensorSpec
from ..errors import BuildError, BuildOptionError

Range = tuple[int, int, int]  # min, opt, max
Shape = tuple[int, ...]

ONE: Range = (1, 1, 1)
NONE: Mapping[str, int | None] = {}


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
    artifact: Artifact,
    *,
    max_batch: int | None = None,
    max_length: int | None = None,
    max_height: int | None = None,
    max_width: int | None = None,
    opt: Sequence[Mapping[str, int]] = (),
) -> tuple[Profile, ...]:
    """Return the profiles that cover every call of an artifact, up to maxima smaller than the graph's.

    Each of `opt` has some of "batch", "length" in tokens, "height" and "width" in pixels; the profiles are
    there once for each. Without any, an encoder is optimized for one text and for eight.

    Raises:
        BuildOptionError: a length is outside of what the graph, or a maximum, allows.
    """
    has_sides = bool(find_sides(artifact))
    has_one = artifact.keeps_cache or artifact.keeps_state or has_sides
    usual: Sequence[Mapping[str, int]] = ({},) if has_one else ({"batch": 1}, {})
    limits = {"batch": max_batch, "length": max_length, "height": max_height, "width": max_width}
    profiles: list[Profile] = []
    for lengths in opt or usual:
        axes = limit_axes(artifact, limits, lengths)
        new = list_ways(artifact, axes)
        completed = [complete_profile(name, way, artifact) for name, way in new.items()]
        profiles += [profile for profile in completed if profile not in profiles]
    return tuple(profiles)


def list_ways(artifact: Artifact, axes: dict[str, Range]) -> dict[str, dict[str, Range]]:
    """Return the axes of each way of calling a graph, by the profile's name."""
    if artifact.keeps_cache:
        return list_ways_of_decoder(artifact, axes)
    if artifact.keeps_state:
        return {"decode": axes}
    fixed = {axis: (axes[axis][1],) * 3 for axis, _ in find_sides(artifact).values()}
    if not fixed:
        return {"encode": axes}
    if "tokens" in axes:  # of prompts, which are always as long
        fixed["tokens"] = (axes["tokens"][2],) * 3
    return {"usual size": {**axes, **fixed}, "any size": axes}


def list_ways_of_decoder(artifact: Artifact, axes: Mapping[str, Range]) -> dict[str, dict[str, Range]]:
    """Return the axes of each way of calling a decoder, by the profile's name."""
    batch = axes["batch"]
    tokens = axes["tokens"]
    past = axes.get("past")
    # Longer parts run one after the other. Twice the usual prompt fills a GPU, and keeps tokens x
    # total in attention below what prefill needs, and rows x vocabulary of the logits in bounds.
    # From the graph's own usual prompt: whatever a plan is optimized for, it takes the same calls.
    part = min(2 * artifact.axis("tokens").opt, tokens[2])
    usual = min(tokens[1], part, (tokens[2] + 1) // 2)  # such that as much past fits too
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
    return {name: {**axes, **{a: r for a, r in way.items() if a in axes}} for name, way in ways.items()}


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


def limit_axes(
    artifact: Artifact, limits: Mapping[str, int | None], opt: Mapping[str, int]
) -> dict[str, Range]:
    """Return every axis of the inputs within the given maxima; sums are left out, slots are frozen."""
    axes = {name: axis for name, (_, axis) in find_axes(artifact).items()}
    rows = axes["batch"]
    sources = axes.get("sources", rows)  # of a decoder with a source, whose rows are beams
    maxima = dict(read_sides("--max", artifact, limits))
    best = dict(read_sides("--opt", artifact, opt, limits))
    max_batch = limits["batch"]
    measured = name_option_axes(artifact).get("length")  # the axis of "length"
    max_length = None if measured is None else limits["length"]
    if max_batch is not None:
        check_length("--max", "batch", max_batch, 1, sources.max)
        maxima |= {"sources": max_batch, "batch": max_batch * (rows.max // sources.max)}
    if measured is not None and max_length is not None:
        check_length("--max", "length", max_length, 2, artifact.axis(measured).max)
        maxima |= {**dict.fromkeys(("tokens", "source_tokens", SLOTS), max_length), "past": max_length - 1}
    if (batch := opt.get("batch")) is not None:
        check_length("--opt", "batch", batch, 1, sources.max, max_batch)
        best |= {"sources": batch, "batch": batch * (rows.opt // sources.opt)}
    if measured is not None and (length := opt.get("length")) is not None:
        check_length("--opt", "length", length, 1, artifact.axis(measured).max, max_length)
        # Of a translation the source has this length; its prefill is one token.
        best |= {"past": length, measured: length}
    ranges: dict[str, Range] = {}
    for name, axis in axes.items():
        high = min(axis.max, maxima.get(name, axis.max))
        ranges[name] = (axis.min, min(best.get(name, axis.opt), high), high)
        if name == SLOTS:
            ranges[name] = (high, high, high)
    return {name: r for name, r in ranges.items() if name not in find_sums(artifact)}


def read_sides(
    option: str,
    artifact: Artifact,
    lengths: Mapping[str, int | None],
    maxima: Mapping[str, int | None] = NONE,
) -> Iterator[tuple[str, int]]:
    """Yield the axes of a picture's sides with their lengths; refuse pixels that the graph does not take.

    `maxima` are smaller ones in pixels that the user gave.
    """
    for side, (axis, ratio) in find_sides(artifact).items():
        pixels = lengths.get(side)
        if pixels is None:
            continue
        own = artifact.axis(axis)
        low = ratio * own.min
        high = maxima.get(side) or ratio * own.max
        if pixels % ratio or not low <= pixels <= high:
            raise BuildOptionError(
                f"{option} {side}={pixels} must be a multiple of {ratio} from {low} to {high}"
            )
        yield axis, pixels // ratio


def check_length(option: str, name: str, value: int, low: int, high: int, maximum: int | None = None) -> None:
    """Refuse a length that the graph, or a `maximum` that the user gave, does not allow."""
    what = "the graph allows" if maximum is None else f"--max {name}={maximum} allows"
    way_out = f"export again with a larger --max-{name}" if maximum is None else f"give a larger --max {name}"
    high = high if maximum is None else maximum
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        more = f"; for more, {way_out}" if isinstance(value, int) and value > high else ""
        raise BuildOptionError(f"{option} {name}={value} is outside of what {what}, {low} to {high}{more}")


def complete_profile(name: str, axes: Mapping[str, Range], artifact: Artifact) -> Profile:
    """Return a profile of `axes` and of the axes that are their sums."""
    sums = {total: add_ranges(axes, parts) for total, parts in find_sums(artifact).items()}
    return Profile(name, {**axes, **sums})


def find_sums(artifact: Artifact) -> dict[str, list[str]]:
    """Return the axes that are sums of others, from constraints such as "total = past + tokens"."""
    axes = find_axes(artifact)
    sides = [text.split(" = ", 1) for text in artifact.constraints if " = " in text]
    sums = {total: parts.split(" + ") for total, parts in sides if total in axes}
    return {total: parts for total, parts in sums.items() if all(part in axes for part in parts)}


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
