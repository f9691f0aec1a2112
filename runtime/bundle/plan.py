"""A TensorRT plan of a bundle, as its entry in the manifest describes it."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ..errors import ManifestError
from .artifact import DTYPES, SLOTS, Artifact, Axis
from .json_reader import Reader, check_file_name

RTX_SMS = ("sm75", "sm80", "sm86", "sm89", "sm120", "sm121")  # that TensorRT-RTX builds plans for


def make_network_name(artifact: Artifact, hashes: Mapping[str, str]) -> str:
    """Return the name of a plan's network, which binds the plan to the bytes it was built from.

    TensorRT keeps the name inside the plan. The hashes are the sha256 of the bundle's files, by name.
    """
    digest = hashlib.sha256()
    for name in (artifact.file, *artifact.data):
        digest.update(f"{hashes[name]}\n".encode())
    return f"planforge {artifact.id} {digest.hexdigest()}"


@dataclass(frozen=True)
class PlanWeight:
    """A weight that a plan reads from the bundle, as an input."""

    name: str  # of the plan's input
    dtype: str
    shape: tuple[int, ...]
    file: str  # of the bundle, in which it begins at `offset`
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
            check_file_name(r.get("file", str)),
            r.get("offset", int),
        )


@dataclass(frozen=True)
class Plan:
    """A TensorRT plan as manifest.json has it: what made it, and where it runs."""

    built_from: str  # id of the artifact
    file: str
    engine: str  # "tensorrt-rtx" or "tensorrt"
    version: str  # of that library; another one does not read the plan
    sms: tuple[str, ...]  # the GPUs' compute capabilities; "sm80+" stands for sm80 and all later ones
    profiles: tuple[Mapping[str, Any], ...]  # the lengths that it takes, of every axis
    cuda: str | None = None  # the oldest version of CUDA whose driver runs it; None where not known
    weights: tuple[PlanWeight, ...] = ()  # that a stripped plan leaves out and reads from the bundle
    compatible: bool = False  # whether later versions, up to the next major one, read it too
    candidates: int = 0  # how many of the likeliest tokens it picks by itself; 0 if it gives all logits
    builder_level: int | None = None  # how long TensorRT searched for kernels; None for its own choice
    profiling: str | None = None  # what it keeps of its layers, such as "detailed"; None for their names
    layers: str | None = None  # a file with what the library told of its layers as it built it
    sources: Mapping[str, str] = field(default_factory=dict)  # sha256 of its graph's and tokenizers' files

    def __post_init__(self) -> None:
        looks = [
            ("version", self.version, r"\d+(\.\w+)+", "10.3.0"),
            ("cuda", self.cuda or "0.0", r"\d+\.\d+", "12.6"),
            *(("one of sms", sm, r"sm\d+\+?", "sm86") for sm in self.sms),
        ]
        for name, text, pattern, example in looks:
            if not re.fullmatch(pattern, text):
                raise ManifestError(
                    f"plan {self.file!r}: {name} is {text!r}, expected something like {example!r}"
                )
        for axes in self.read_axes():
            for name in axes.value:
                lengths = axes.list_of(name, int)
                if len(lengths) != 3 or list(lengths) != sorted(lengths) or lengths[0] < 0:
                    raise ManifestError(
                        f"plan {self.file!r}: a profile's lengths of {name!r} must be [least, best, most],"
                        f" not {list(lengths)}"
                    )
        if self.candidates < 0:
            raise ManifestError(f"plan {self.file!r}: candidates is {self.candidates}, must be 0 or more")

    def list_files(self) -> list[str]:
        """Return the names of the files that are its own: the plan, and what is known of its layers."""
        return [self.file] if self.layers is None else [self.file, self.layers]

    def read_axes(self) -> list[Reader]:
        """Return each profile's lengths of every axis."""
        return [Reader(Reader(p, "profile").get("axes", dict), "axes") for p in self.profiles]

    def find_longest(self, axis: str) -> int:
        """Return the largest length of an axis in any profile; 0 where no profile has that axis."""
        return max((max(profile["axes"].get(axis, (0,))) for profile in self.profiles), default=0)

    def estimate_memory(self) -> int:
        """Return the estimated bytes on the GPU at the largest shapes; 0 where the entry gives none."""
        return max(map(sum_profile_memory, self.profiles), default=0)

    def list_settings(self) -> tuple[Any, ...]:
        """Return the settings that it was built for; of plans with equal ones `build` keeps the last.

        Of lengths the least and the most count: of plans that take the same ones only the last would run.
        """
        limits = {
            (name, lengths[0], lengths[2])
            for profile in self.profiles
            for name, lengths in profile["axes"].items()
        }
        return self.built_from, self.engine, tuple(sorted(self.sms)), frozenset(limits)

    def narrow_artifact(self, artifact: Artifact) -> Artifact:
        """Return its artifact with the lengths that the profiles take; cache slots are fixed."""
        profiles = self.read_axes()

        def narrow_axis(axis: Axis | int) -> Axis | int:
            if isinstance(axis, int):
                return axis
            ranges = [Axis(axis.name, *lengths.list_of(axis.name, int)) for lengths in profiles]
            low = min(r.min for r in ranges)
            high = max(r.max for r in ranges)
            return high if axis.name == SLOTS else Axis(axis.name, low, max(low, min(axis.opt, high)), high)

        inputs = tuple(replace(s, axes=tuple(map(narrow_axis, s.axes))) for s in artifact.inputs)
        known = {a.name: narrow_axis(a) for s in artifact.inputs for a in s.axes if isinstance(a, Axis)}
        outputs = tuple(
            replace(s, axes=tuple(known.get(a.name, a) if isinstance(a, Axis) else a for a in s.axes))
            for s in artifact.outputs
        )
        narrowed = replace(artifact, inputs=inputs, outputs=outputs)
        return narrowed.add_candidates(self.candidates) if self.candidates else narrowed

    def to_json(self) -> dict[str, Any]:
        value: dict[str, Any] = {
            **vars(self),
            "sms": list(self.sms),
            "profiles": list(self.profiles),
            "weights": [asdict(weight) for weight in self.weights],
        }
        usual: dict[str, Any] = {"cuda": None, "weights": [], "compatible": False, "candidates": 0}
        usual |= {"sources": {}, "builder_level": None, "profiling": None, "layers": None}
        return {name: part for name, part in value.items() if name not in usual or part != usual[name]}

    @staticmethod
    def from_json(value: Any) -> Plan:
        r = Reader(value, "plan")
        return Plan(
            built_from=r.get("built_from", str),
            file=check_file_name(r.get("file", str)),
            engine=r.get("engine", str),
            version=r.get("version", str),
            sms=r.list_of("sms", str),
            profiles=r.list_of("profiles", dict),
            cuda=r.get("cuda", str, None),
            weights=tuple(PlanWeight.from_json(w) for w in r.get("weights", list, ())),
            compatible=r.flag("compatible", False),
            candidates=r.get("candidates", int, 0),
            builder_level=r.get("builder_level", int, None),
            profiling=r.get("profiling", str, None),
            layers=None if r.get("layers", str, None) is None else check_file_name(r.get("layers", str)),
            sources=r.texts("sources"),
        )


def sum_profile_memory(profile: Mapping[str, Any]) -> int:
    """Return the estimated bytes on the GPU at a profile's largest shapes; 0 where it gives none."""
    memory = profile.get("memory")
    if not isinstance(memory, dict) or not all(isinstance(size, int) for size in memory.values()):
        return 0
    return sum(memory.values())
