"""A TensorRT plan of a bundle, as its passport describes it."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ..errors import ManifestError
from .artifact import DTYPES, SLOTS, Artifact, Axis
from .json_reader import Reader, file_name


def network_name(artifact: Artifact, hashes: Mapping[str, str]) -> str:
    """Return the name of a plan's network, which binds the plan to the bytes it was built from.

    TensorRT keeps the name inside the plan and gives it back when it loads the plan.

    Args:
        artifact: graph that the plan is built from.
        hashes: sha256 of the bundle's files, by name.
    """
    digest = hashlib.sha256()
    for name in (artifact.file, *artifact.data):
        digest.update(f"{hashes[name]}\n".encode())
    return f"planforge {artifact.id} {digest.hexdigest()}"


@dataclass(frozen=True)
class PlanWeight:
    """A weight that a plan reads from the bundle, as an input.

    Attributes:
        name: name of the plan's input.
        file: file of the bundle in which it begins, at `offset`.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    offset: int

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES or self.offset < 0 or not all(length > 0 for length in self.shape):
            raise ManifestError(
                f"weight {self.name!r}: {self.dtype} {self.shape} at {self.offset} is not a valid weight"
            )

    @staticmethod
    def from_json(value: Any) -> PlanWeight:
        r = Reader(value, "weight")
        return PlanWeight(
            r.get("name", str),
            r.get("dtype", str),
            r.list_of("shape", int),
            file_name(r.get("file", str)),
            r.get("offset", int),
        )


@dataclass(frozen=True)
class Plan:
    """A TensorRT plan and its passport: what made it, and where it runs.

    Attributes:
        built_from: id of the artifact that it was built from.
        engine: "tensorrt-rtx" or "tensorrt".
        version: version of that library; another one does not read the plan.
        sms: the GPUs' compute capabilities, such as "sm86"; "sm80+" stands for it and all later ones.
        profiles: the lengths that it takes, of every axis.
        cuda: the oldest version of CUDA whose driver runs it; None where that is not known.
        weights: weights that a stripped plan leaves out and reads from the bundle.
        compatible: whether later versions of the library, up to the next major one, read it too.
        candidates: how many of the likeliest tokens it picks by itself; 0 if it gives all logits only.
        sources: the sha256 of each file that it was built from, and of the tokenizers that belong to it.
    """

    built_from: str
    file: str
    engine: str
    version: str
    sms: tuple[str, ...]
    profiles: tuple[Mapping[str, Any], ...]
    cuda: str | None = None
    weights: tuple[PlanWeight, ...] = ()
    compatible: bool = False
    candidates: int = 0
    sources: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        looks = [("version", self.version, r"\d+(\.\w+)+", "10.3.0")]
        looks += [("cuda", self.cuda or "0.0", r"\d+\.\d+", "12.6")]
        looks += [("one of sms", sm, r"sm\d+\+?", "sm86") for sm in self.sms]
        for name, text, pattern, example in looks:
            if not re.fullmatch(pattern, text):
                raise ManifestError(
                    f"plan {self.file!r}: {name} is {text!r}, expected something like {example!r}"
                )
        for profile in self.profiles:
            axes = Reader(Reader(profile, "profile").object("axes"), "axes")
            for name in axes.value:
                lengths = axes.list_of(name, int)
                if len(lengths) != 3 or list(lengths) != sorted(lengths) or lengths[0] < 0:
                    raise ManifestError(
                        f"plan {self.file!r}: a profile's lengths of {name!r} must be [least, best, most],"
                        f" not {list(lengths)}"
                    )
        if self.candidates < 0:
            raise ManifestError(f"plan {self.file!r}: candidates is {self.candidates}, must be 0 or more")

    def longest(self, axis: str) -> int:
        """Return the largest length of an axis in any profile; 0 where no profile has that axis."""
        return max((max(profile["axes"].get(axis, (0,))) for profile in self.profiles), default=0)

    def memory(self) -> int:
        """Return the estimated bytes on the GPU at the largest shapes; 0 where the passport gives none."""
        sizes = [profile.get("memory") for profile in self.profiles]
        known = [size.values() for size in sizes if isinstance(size, dict)]
        return max((sum(values) for values in known if all(isinstance(v, int) for v in values)), default=0)

    def configuration(self) -> tuple[Any, ...]:
        """Return the settings that it was built for; of plans with equal ones `build` keeps the last."""
        limits = tuple(
            (name, tuple(lengths))
            for profile in self.profiles
            for name, lengths in sorted(profile["axes"].items())
        )
        return self.built_from, self.engine, tuple(sorted(self.sms)), limits

    def narrow_artifact(self, artifact: Artifact) -> Artifact:
        """Return its artifact with the lengths that the profiles take; cache slots are fixed.

        Raises:
            ManifestError: the profiles are not those of this artifact.
        """
        profiles = [Reader(Reader(p, "profile").object("axes"), "axes") for p in self.profiles]

        def axis_of(axis: Axis | int) -> Axis | int:
            if isinstance(axis, int):
                return axis
            ranges = [Axis(axis.name, *lengths.list_of(axis.name, int)) for lengths in profiles]
            low = min(r.min for r in ranges)
            high = max(r.max for r in ranges)
            return high if axis.name == SLOTS else Axis(axis.name, low, max(low, min(axis.opt, high)), high)

        inputs = tuple(replace(s, axes=tuple(map(axis_of, s.axes))) for s in artifact.inputs)
        known = {a.name: axis_of(a) for s in artifact.inputs for a in s.axes if isinstance(a, Axis)}
        outputs = tuple(
            replace(s, axes=tuple(known.get(a.name, a) if isinstance(a, Axis) else a for a in s.axes))
            for s in artifact.outputs
        )
        narrowed = replace(artifact, inputs=inputs, outputs=outputs)
        return narrowed.with_candidates(self.candidates) if self.candidates else narrowed

    def to_json(self) -> dict[str, Any]:
        value: dict[str, Any] = {
            "built_from": self.built_from,
            "file": self.file,
            "engine": self.engine,
            "version": self.version,
            "sms": list(self.sms),
            "profiles": [dict(p) for p in self.profiles],
        }
        if self.cuda:
            value["cuda"] = self.cuda
        if self.weights:
            value["weights"] = [asdict(weight) for weight in self.weights]
        if self.compatible:
            value["compatible"] = True
        if self.candidates:
            value["candidates"] = self.candidates
        if self.sources:
            value["sources"] = dict(self.sources)
        return value

    @staticmethod
    def from_json(value: Any) -> Plan:
        r = Reader(value, "plan")
        return Plan(
            built_from=r.get("built_from", str),
            file=file_name(r.get("file", str)),
            engine=r.get("engine", str),
            version=r.get("version", str),
            sms=r.list_of("sms", str),
            profiles=r.list_of("profiles", dict),
            cuda=r.get("cuda", str, None),
            weights=tuple(PlanWeight.from_json(w) for w in r.get("weights", list, ())),
            compatible=r.flag("compatible", False),
            candidates=r.get("candidates", int, 0),
            sources=r.texts("sources"),
        )
