"""manifest.json: what a bundle holds, as frozen dataclasses that read and write plain JSON.

Every field is checked while reading: a manifest is data from elsewhere.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..errors import ManifestError
from .defaults import EncoderDefaults, GenerationDefaults
from .json_reader import FILE_NAME, Reader, file_name

FORMAT = 1
MAX_BYTES = 16 * 2**20
SLOTS = "slots"  # the axis of a cache's capacity, which a plan has as a number
DTYPES = ("float32", "float16", "int64", "int32", "bool", "int8", "uint8")


@dataclass(frozen=True)
class Axis:
    """A dynamic axis: its name and the lengths a graph was made for."""

    name: str
    min: int
    opt: int
    max: int

    def __post_init__(self) -> None:
        if not 0 <= self.min <= self.opt <= self.max:
            raise ManifestError(
                f"axis {self.name!r}: min {self.min}, opt {self.opt}, max {self.max} are not in order"
            )


@dataclass(frozen=True)
class TensorSpec:
    """An input or output of a graph. An axis is an `Axis`, or a whole number where it is fixed."""

    name: str
    role: str
    dtype: str
    axes: tuple[Axis | int, ...]

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ManifestError(f"tensor {self.name!r}: dtype {self.dtype!r} is not one of {DTYPES}")

    def axis_names(self) -> tuple[str | int, ...]:
        return tuple(a.name if isinstance(a, Axis) else a for a in self.axes)

    def to_json(self) -> dict[str, Any]:
        axes = [[a.name, a.min, a.opt, a.max] if isinstance(a, Axis) else a for a in self.axes]
        return {"name": self.name, "role": self.role, "dtype": self.dtype, "axes": axes}

    @staticmethod
    def from_json(value: Any) -> TensorSpec:
        r = Reader(value, "tensor")
        return TensorSpec(
            r.get("name", str),
            r.get("role", str),
            r.get("dtype", str),
            tuple(_axis(axis) for axis in r.values("axes")),
        )


@dataclass(frozen=True)
class FileEntry:
    sha256: str
    bytes: int


@dataclass(frozen=True)
class Artifact:
    """One ONNX graph: `graph` in a `dialect` and a `precision`."""

    graph: str
    dialect: str
    precision: str
    opset: int
    file: str
    data: tuple[str, ...]
    padding_side: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    aliases: Mapping[str, str] = field(default_factory=dict)  # output name -> input at its address
    constraints: tuple[str, ...] = ()
    quantization: Mapping[str, Any] = field(default_factory=dict)  # how its whole numbers were chosen
    gate: Mapping[str, Any] = field(default_factory=dict)

    @property
    def id(self) -> str:
        return f"{self.graph}.{self.dialect}.{self.precision}"

    @property
    def passed(self) -> bool:
        """Whether it was compared with PyTorch and found to be the same."""
        return self.gate.get("passed") is True

    def input(self, role: str) -> TensorSpec:
        return _by_role(self.inputs, role, self.id)

    def output(self, role: str) -> TensorSpec:
        return _by_role(self.outputs, role, self.id)

    def axis(self, name: str) -> Axis:
        """The dynamic axis of that name, wherever it occurs among the inputs."""
        for spec in self.inputs:
            for axis in spec.axes:
                if isinstance(axis, Axis) and axis.name == name:
                    return axis
        raise ManifestError(f"artifact {self.id} has no axis {name!r}")

    def to_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "graph": self.graph,
            "dialect": self.dialect,
            "precision": self.precision,
            "opset": self.opset,
            "file": self.file,
            "data": list(self.data),
            "padding_side": self.padding_side,
            "inputs": [t.to_json() for t in self.inputs],
            "outputs": [t.to_json() for t in self.outputs],
            "aliases": dict(self.aliases),
            "constraints": list(self.constraints),
            **({"quantization": dict(self.quantization)} if self.quantization else {}),
            "gate": dict(self.gate),
        }

    @staticmethod
    def from_json(value: Any) -> Artifact:
        r = Reader(value, "artifact")
        return Artifact(
            graph=r.get("graph", str),
            dialect=r.get("dialect", str),
            precision=r.get("precision", str),
            opset=r.get("opset", int),
            file=file_name(r.get("file", str)),
            data=tuple(file_name(name) for name in r.list_of("data", str)),
            padding_side=r.get("padding_side", str),
            inputs=tuple(TensorSpec.from_json(t) for t in r.values("inputs")),
            outputs=tuple(TensorSpec.from_json(t) for t in r.values("outputs")),
            aliases=r.texts("aliases"),
            constraints=r.list_of("constraints", str, ()),
            quantization=r.object("quantization") if "quantization" in r.value else {},
            gate=r.object("gate"),
        )


@dataclass(frozen=True)
class Plan:
    """A TensorRT plan and its passport: what made it, and where it runs.

    Attributes:
        built_from: the id of an artifact.
        engine: "tensorrt-rtx" or "tensorrt".
        version: of that library; another one does not read the plan.
        sms: the GPUs' compute capabilities, such as "sm86"; "sm80+" stands for it and all later ones.
        profiles: the lengths of every axis that it takes.
        cuda: the oldest version of CUDA whose driver runs it; None where that is not known.
        stripped: whether its weights are left out, and are filled in from the bundle's when it is loaded.
        sources: the sha256 of each file that it was built from.
    """

    built_from: str
    file: str
    engine: str
    version: str
    sms: tuple[str, ...]
    profiles: tuple[Mapping[str, Any], ...]
    cuda: str | None = None
    stripped: bool = False
    sources: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for text, meant in ((self.cuda or "0.0", r"\d+\.\d+"), *((sm, r"sm\d+\+?") for sm in self.sms)):
            if not re.fullmatch(meant, text):
                raise ManifestError(f"plan {self.file!r}: {text!r} does not look like {meant!r}")

    def narrowed(self, artifact: Artifact) -> Artifact:
        """The artifact it was built from, with the lengths that its profiles take; cache slots are fixed.

        Raises:
            ManifestError: the profiles are not those of this artifact.
        """
        profiles = [Reader(Reader(p, "profile").object("axes"), "axes") for p in self.profiles]

        def axis_of(axis: Axis | int) -> Axis | int:
            if isinstance(axis, int):
                return axis
            ranges = [Axis(axis.name, *lengths.list_of(axis.name, int)) for lengths in profiles]
            low, high = min(r.min for r in ranges), max(r.max for r in ranges)
            return high if axis.name == SLOTS else Axis(axis.name, low, max(low, min(axis.opt, high)), high)

        inputs = tuple(replace(s, axes=tuple(map(axis_of, s.axes))) for s in artifact.inputs)
        known = {a.name: axis_of(a) for s in artifact.inputs for a in s.axes if isinstance(a, Axis)}
        outputs = tuple(
            replace(s, axes=tuple(known.get(a.name, a) if isinstance(a, Axis) else a for a in s.axes))
            for s in artifact.outputs
        )
        return replace(artifact, inputs=inputs, outputs=outputs)

    def to_json(self) -> dict[str, Any]:
        return {
            "built_from": self.built_from,
            "file": self.file,
            "engine": self.engine,
            "version": self.version,
            "sms": list(self.sms),
            "profiles": [dict(p) for p in self.profiles],
            **({"cuda": self.cuda} if self.cuda else {}),
            **({"stripped": True} if self.stripped else {}),
            **({"sources": dict(self.sources)} if self.sources else {}),
        }

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
            stripped=r.flag("stripped", False),
            sources=r.texts("sources"),
        )


@dataclass(frozen=True)
class Manifest:
    """Everything manifest.json says; `generation` of a decoder, `encoder` of an encoder."""

    family: str
    task: str
    export_id: str
    config: Mapping[str, Any]
    tokenizer: Mapping[str, Any]
    files: Mapping[str, FileEntry]
    artifacts: tuple[Artifact, ...]
    generation: GenerationDefaults | None = None
    encoder: EncoderDefaults | None = None
    plans: tuple[Plan, ...] = ()
    default_precision: str | None = None  # what load() takes; the first artifact's where it is None
    source: Mapping[str, Any] = field(default_factory=dict)
    tools: Mapping[str, str] = field(default_factory=dict)

    @property
    def max_length(self) -> int:
        """The most tokens of one sequence."""
        defaults = self.generation or self.encoder
        assert defaults is not None  # from_json sees to it
        return defaults.max_length

    def artifact(self, artifact_id: str) -> Artifact:
        for artifact in self.artifacts:
            if artifact.id == artifact_id:
                return artifact
        raise ManifestError(
            f"the bundle has no artifact {artifact_id!r}; it has {[a.id for a in self.artifacts]}"
        )

    def to_json(self) -> str:
        value = {
            "format": FORMAT,
            "family": self.family,
            "task": self.task,
            "export_id": self.export_id,
            "config": dict(self.config),
            **({"generation": self.generation.to_json()} if self.generation else {}),
            **({"encoder": self.encoder.to_json()} if self.encoder else {}),
            "tokenizer": dict(self.tokenizer),
            "files": {
                name: {"sha256": entry.sha256, "bytes": entry.bytes}
                for name, entry in sorted(self.files.items())
            },
            "artifacts": [a.to_json() for a in self.artifacts],
            "plans": [p.to_json() for p in self.plans],
            **({"default_precision": self.default_precision} if self.default_precision else {}),
            "source": dict(self.source),
            "tools": dict(self.tools),
        }
        return json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n"

    @staticmethod
    def from_json(text: str) -> Manifest:
        try:
            r = Reader(json.loads(text), "manifest")
        except (ValueError, RecursionError) as error:  # the latter: nested thousands deep
            raise ManifestError(f"{FILE_NAME} is not valid JSON: {error}") from error
        if r.get("format", int) != FORMAT:
            raise ManifestError(
                f"{FILE_NAME} has format {r.get('format', int)}; this version of PlanForge reads"
                f" format {FORMAT}. Use the version that wrote it, or export again."
            )
        files = {
            file_name(name): FileEntry(
                Reader(entry, f"file {name!r}").get("sha256", str),
                Reader(entry, f"file {name!r}").get("bytes", int),
            )
            for name, entry in r.object("files").items()
        }
        is_encoder = "encoder" in r.value
        manifest = Manifest(
            family=r.get("family", str),
            task=r.get("task", str),
            export_id=r.get("export_id", str),
            config=r.object("config"),
            generation=None if is_encoder else GenerationDefaults.from_json(r.object("generation")),
            encoder=EncoderDefaults.from_json(r.object("encoder")) if is_encoder else None,
            tokenizer=r.object("tokenizer"),
            files=files,
            artifacts=tuple(Artifact.from_json(a) for a in r.values("artifacts")),
            plans=tuple(Plan.from_json(p) for p in r.values("plans")),
            default_precision=r.get("default_precision", str, None),
            source=r.object("source"),
            tools=r.texts("tools"),
        )
        manifest.check_files_are_listed()
        for plan in manifest.plans:
            manifest.artifact(plan.built_from)
        precisions = list(dict.fromkeys(a.precision for a in manifest.artifacts))
        if manifest.default_precision not in (None, *precisions):
            raise ManifestError(
                f"{FILE_NAME}: default_precision {manifest.default_precision!r} is not one of {precisions}"
            )
        return manifest

    def check_files_are_listed(self) -> None:
        """Every file that an artifact, plan or tokenizer names must have an entry with its hash."""
        named = [*(name for a in self.artifacts for name in (a.file, *a.data))]
        named += [p.file for p in self.plans]
        if self.encoder is not None and self.encoder.fitted is not None:
            named.append(self.encoder.fitted.file)
        tokenizer_files = Reader(self.tokenizer, "tokenizer").list_of("files", str)
        if not tokenizer_files:
            raise ManifestError(f"{FILE_NAME}: tokenizer.files is empty")
        named += tokenizer_files
        for name in named:
            if name not in self.files:
                raise ManifestError(f"{FILE_NAME} uses {name!r} without listing its hash under 'files'")


def _axis(value: Any) -> Axis | int:
    if type(value) is int and value >= 0:
        return value
    if isinstance(value, list) and [type(v) for v in value] == [str, int, int, int]:
        return Axis(*value)
    raise ManifestError(f"{FILE_NAME}: axis must be [name, min, opt, max] or a number, not {value!r:.60}")


def _by_role(specs: Sequence[TensorSpec], role: str, owner: str) -> TensorSpec:
    for spec in specs:
        if spec.role == role:
            return spec
    raise ManifestError(f"artifact {owner} has no tensor with role {role!r}")
