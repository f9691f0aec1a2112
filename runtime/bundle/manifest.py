"""manifest.json: what a bundle holds, as frozen dataclasses that read and write plain JSON.

Every field is checked while reading: a manifest is data from elsewhere.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, TypeVar

from ..errors import IntegrityError, ManifestError

FORMAT = 1
FILE_NAME = "manifest.json"
MAX_BYTES = 16 * 2**20
DTYPES = ("float32", "float16", "int64", "int32", "bool", "int8", "uint8")

T = TypeVar("T")


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
        r = _Reader(value, "tensor")
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
    gate: Mapping[str, Any] = field(default_factory=dict)

    @property
    def id(self) -> str:
        return f"{self.graph}.{self.dialect}.{self.precision}"

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
            "gate": dict(self.gate),
        }

    @staticmethod
    def from_json(value: Any) -> Artifact:
        r = _Reader(value, "artifact")
        return Artifact(
            graph=r.get("graph", str),
            dialect=r.get("dialect", str),
            precision=r.get("precision", str),
            opset=r.get("opset", int),
            file=_file_name(r.get("file", str)),
            data=tuple(_file_name(name) for name in r.list_of("data", str)),
            padding_side=r.get("padding_side", str),
            inputs=tuple(TensorSpec.from_json(t) for t in r.values("inputs")),
            outputs=tuple(TensorSpec.from_json(t) for t in r.values("outputs")),
            aliases=r.texts("aliases"),
            constraints=r.list_of("constraints", str, ()),
            gate=r.object("gate"),
        )


@dataclass(frozen=True)
class Plan:
    """A TensorRT plan and its passport: what made it, and where it runs."""

    built_from: str
    file: str
    engine: str
    version: str
    sms: tuple[str, ...]
    profiles: tuple[Mapping[str, Any], ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "built_from": self.built_from,
            "file": self.file,
            "engine": self.engine,
            "version": self.version,
            "sms": list(self.sms),
            "profiles": [dict(p) for p in self.profiles],
        }

    @staticmethod
    def from_json(value: Any) -> Plan:
        r = _Reader(value, "plan")
        return Plan(
            built_from=r.get("built_from", str),
            file=_file_name(r.get("file", str)),
            engine=r.get("engine", str),
            version=r.get("version", str),
            sms=r.list_of("sms", str),
            profiles=r.list_of("profiles", dict),
        )


@dataclass(frozen=True)
class GenerationDefaults:
    """What decides how a sequence begins and ends."""

    eos: tuple[int, ...] = ()
    bos: int | None = None
    pad: int | None = None
    max_length: int = 1024

    def to_json(self) -> dict[str, Any]:
        return {
            "eos": list(self.eos),
            "bos": self.bos,
            "pad": self.pad,
            "max_length": self.max_length,
        }

    @staticmethod
    def from_json(value: Any) -> GenerationDefaults:
        r = _Reader(value, "generation")
        return GenerationDefaults(
            eos=r.list_of("eos", int, ()),
            bos=r.get("bos", int, None),
            pad=r.get("pad", int, None),
            max_length=r.get("max_length", int),
        )


@dataclass(frozen=True)
class Manifest:
    """Everything manifest.json says."""

    family: str
    task: str
    export_id: str
    config: Mapping[str, Any]
    generation: GenerationDefaults
    tokenizer: Mapping[str, Any]
    files: Mapping[str, FileEntry]
    artifacts: tuple[Artifact, ...]
    plans: tuple[Plan, ...] = ()
    source: Mapping[str, Any] = field(default_factory=dict)
    tools: Mapping[str, str] = field(default_factory=dict)

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
            "generation": self.generation.to_json(),
            "tokenizer": dict(self.tokenizer),
            "files": {
                name: {"sha256": entry.sha256, "bytes": entry.bytes}
                for name, entry in sorted(self.files.items())
            },
            "artifacts": [a.to_json() for a in self.artifacts],
            "plans": [p.to_json() for p in self.plans],
            "source": dict(self.source),
            "tools": dict(self.tools),
        }
        return json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n"

    @staticmethod
    def from_json(text: str) -> Manifest:
        try:
            r = _Reader(json.loads(text), "manifest")
        except (ValueError, RecursionError) as error:  # the latter: nested thousands deep
            raise ManifestError(f"{FILE_NAME} is not valid JSON: {error}") from error
        if r.get("format", int) != FORMAT:
            raise ManifestError(
                f"{FILE_NAME} has format {r.get('format', int)}; this version of PlanForge reads"
                f" format {FORMAT}. Use the version that wrote it, or export again."
            )
        files = {
            _file_name(name): FileEntry(
                _Reader(entry, f"file {name!r}").get("sha256", str),
                _Reader(entry, f"file {name!r}").get("bytes", int),
            )
            for name, entry in r.object("files").items()
        }
        manifest = Manifest(
            family=r.get("family", str),
            task=r.get("task", str),
            export_id=r.get("export_id", str),
            config=r.object("config"),
            generation=GenerationDefaults.from_json(r.object("generation")),
            tokenizer=r.object("tokenizer"),
            files=files,
            artifacts=tuple(Artifact.from_json(a) for a in r.values("artifacts")),
            plans=tuple(Plan.from_json(p) for p in r.values("plans")),
            source=r.object("source"),
            tools=r.texts("tools"),
        )
        manifest.check_files_are_listed()
        return manifest

    def check_files_are_listed(self) -> None:
        """Every file that an artifact, plan or tokenizer names must have an entry with its hash."""
        named = [*(name for a in self.artifacts for name in (a.file, *a.data))]
        named += [p.file for p in self.plans]
        tokenizer_files = _Reader(self.tokenizer, "tokenizer").list_of("files", str)
        if not tokenizer_files:
            raise ManifestError(f"{FILE_NAME}: tokenizer.files is empty")
        named += tokenizer_files
        for name in named:
            if name not in self.files:
                raise ManifestError(f"{FILE_NAME} uses {name!r} without listing its hash under 'files'")


_MISSING: Any = object()


class _Reader:
    """A JSON object read field by field, with errors that name the field."""

    def __init__(self, value: Any, what: str) -> None:
        if not isinstance(value, dict):
            raise ManifestError(f"{FILE_NAME}: {what} must be an object, not {value!r:.60}")
        self.value = value
        self.what = what

    def get(self, name: str, kind: type[T], default: Any = _MISSING) -> T:
        value = self.value.get(name, default)
        if value is default and default is not _MISSING:
            return value  # type: ignore[no-any-return]
        return self.checked(name, value, kind)

    def values(self, name: str) -> Sequence[Any]:
        return self.get(name, list)

    def list_of(self, name: str, kind: type[T], default: Any = _MISSING) -> tuple[T, ...]:
        values: Sequence[Any] = self.get(name, list, default)
        return tuple(self.checked(f"{name}[{i}]", v, kind) for i, v in enumerate(values))

    def object(self, name: str) -> Mapping[str, Any]:
        return self.get(name, dict)

    def texts(self, name: str) -> Mapping[str, str]:
        values: Mapping[str, Any] = self.get(name, dict, {})
        return {key: self.checked(f"{name}[{key!r}]", v, str) for key, v in values.items()}

    def checked(self, name: str, value: Any, kind: type[T]) -> T:
        if not isinstance(value, kind) or isinstance(value, bool):
            got = "missing" if value is _MISSING else repr(value)[:60]
            raise ManifestError(f"{FILE_NAME}: {self.what}.{name} must be {kind.__name__}, but is {got}")
        return value


def _axis(value: Any) -> Axis | int:
    if type(value) is int and value >= 0:
        return value
    if isinstance(value, list) and [type(v) for v in value] == [str, int, int, int]:
        return Axis(*value)
    raise ManifestError(f"{FILE_NAME}: axis must be [name, min, opt, max] or a number, not {value!r:.60}")


def _file_name(name: Any) -> str:
    """A relative POSIX path that stays in the bundle's folder."""
    path = PurePosixPath(str(name))
    if (
        not isinstance(name, str)
        or path.is_absolute()
        or ".." in path.parts
        or not path.parts
        or "\\" in name
        or ":" in name
        or "\0" in name
    ):
        raise IntegrityError(f"{FILE_NAME} names {name!r}, which is not a path inside the bundle")
    return str(path)


def _by_role(specs: Sequence[TensorSpec], role: str, owner: str) -> TensorSpec:
    for spec in specs:
        if spec.role == role:
            return spec
    raise ManifestError(f"artifact {owner} has no tensor with role {role!r}")
