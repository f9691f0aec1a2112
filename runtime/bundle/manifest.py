"""manifest.json: what a bundle holds, as frozen dataclasses that read and write plain JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ..errors import ManifestError
from .artifact import DTYPES, SLOTS, Artifact, Axis, TensorSpec
from .defaults import EncoderDefaults, GenerationDefaults
from .image_defaults import ImageDefaults, LikenessDefaults, PromptDefaults
from .json_reader import FILE_NAME, Reader, check_file_name, parse_json
from .plan import Plan, PlanWeight
from .retrieval_defaults import RetrievalDefaults
from .word_defaults import WordDefaults

__all__ = ["DTYPES", "SLOTS", "Artifact", "Axis", "FileEntry", "Manifest", "Plan", "PlanWeight", "TensorSpec"]

FORMAT = 1
MAX_BYTES = 16 * 2**20


@dataclass(frozen=True)
class FileEntry:
    sha256: str
    bytes: int


@dataclass(frozen=True)
class Manifest:
    """The content of manifest.json.

    An encoder has `encoder`, a model of pictures `images`, one that compares pictures with texts `likeness`,
    word vectors `words`, others have `generation`, and one that reads neighbours `retrieval` too.
    `explanations` are the graphs that `explain` runs; they share the weights of those in fp32.
    """

    family: str
    task: str
    export_id: str
    config: Mapping[str, Any]
    tokenizer: Mapping[str, Any]
    files: Mapping[str, FileEntry]
    artifacts: tuple[Artifact, ...]
    generation: GenerationDefaults | None = None
    encoder: EncoderDefaults | None = None
    images: ImageDefaults | None = None
    likeness: LikenessDefaults | None = None
    words: WordDefaults | None = None
    retrieval: RetrievalDefaults | None = None
    explanations: tuple[Artifact, ...] = ()
    plans: tuple[Plan, ...] = ()
    default_precision: str | None = None  # what load() takes; the first artifact's where it is None
    default_backend: str | None = None  # the engine that ran it, where "auto" would take another
    source: Mapping[str, Any] = field(default_factory=dict)
    tools: Mapping[str, str] = field(default_factory=dict)

    @property
    def max_length(self) -> int:
        """The most tokens of one sequence."""
        defaults = self.generation or self.encoder or self.prompts or self.words
        assert defaults is not None  # from_json sees to it
        return defaults.max_length

    @property
    def prompts(self) -> PromptDefaults | None:
        """Return how texts are read that belong to pictures; None of other models."""
        return self.images or self.likeness

    def artifact(self, artifact_id: str) -> Artifact:
        graphs = (*self.artifacts, *self.explanations)
        for artifact in graphs:
            if artifact.id == artifact_id:
                return artifact
        raise ManifestError(f"the bundle has no artifact {artifact_id!r}; it has {[a.id for a in graphs]}")

    def to_json(self) -> str:
        value: dict[str, Any] = {
            "format": FORMAT,
            "family": self.family,
            "task": self.task,
            "export_id": self.export_id,
            "config": dict(self.config),
            "generation": None if self.generation is None else asdict(self.generation),
            "encoder": None if self.encoder is None else asdict(self.encoder),
            "images": None if self.images is None else asdict(self.images),
            "likeness": None if self.likeness is None else asdict(self.likeness),
            "words": None if self.words is None else asdict(self.words),
            "retrieval": None if self.retrieval is None else asdict(self.retrieval),
            "tokenizer": dict(self.tokenizer),
            "files": {name: vars(entry) for name, entry in sorted(self.files.items())},
            "artifacts": [a.to_json() for a in self.artifacts],
            "explanations": [a.to_json() for a in self.explanations] or None,
            "plans": [p.to_json() for p in self.plans],
            "default_precision": self.default_precision,
            "default_backend": self.default_backend,
            "source": dict(self.source),
            "tools": dict(self.tools),
        }
        known = {name: part for name, part in value.items() if part is not None}
        return json.dumps(known, indent=1, ensure_ascii=False, allow_nan=False) + "\n"

    @staticmethod
    def from_json(text: str) -> Manifest:
        try:
            r = Reader(parse_json(text), "manifest")
        except (ValueError, RecursionError) as error:  # the latter: nested thousands deep
            raise ManifestError(f"{FILE_NAME} is not valid JSON: {error}") from error
        if r.get("format", int) != FORMAT:
            raise ManifestError(
                f"{FILE_NAME} has format {r.get('format', int)}; this version of PlanForge reads"
                f" format {FORMAT}. Use the version that wrote it, or export again."
            )
        files = {}
        for name, value in r.get("files", dict).items():
            entry = Reader(value, f"file {name!r}")
            files[check_file_name(name)] = FileEntry(entry.get("sha256", str), entry.get("bytes", int))
        others = {"encoder", "images", "likeness", "words"} & set(r.value)
        manifest = Manifest(
            family=r.get("family", str),
            task=r.get("task", str),
            export_id=r.get("export_id", str),
            config=r.get("config", dict),
            generation=None if others else GenerationDefaults.from_json(r.get("generation", dict)),
            encoder=EncoderDefaults.from_json(r.get("encoder", dict)) if "encoder" in others else None,
            images=ImageDefaults.from_json(r.get("images", dict)) if "images" in others else None,
            likeness=LikenessDefaults.from_json(r.get("likeness", dict)) if "likeness" in others else None,
            words=WordDefaults.from_json(r.get("words", dict)) if "words" in others else None,
            retrieval=RetrievalDefaults.from_json(r.get("retrieval", dict))
            if "retrieval" in r.value
            else None,
            tokenizer=r.get("tokenizer", dict),
            files=files,
            artifacts=tuple(Artifact.from_json(a) for a in r.get("artifacts", list)),
            explanations=tuple(Artifact.from_json(a) for a in r.get("explanations", list, [])),
            plans=tuple(Plan.from_json(p) for p in r.get("plans", list)),
            default_precision=r.get("default_precision", str, None),
            default_backend=r.get("default_backend", str, None),
            source=r.get("source", dict),
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

    def count_weight_bytes(self, *artifacts: Artifact) -> int:
        """Return the size of these graphs' weights in bytes, each file once."""
        return sum(self.files[name].bytes for name in {name for a in artifacts for name in a.data})

    def list_graph_files(self) -> list[str]:
        """Return the names of all files of graphs, their weights and plans; shared ones several times."""
        graphs = (*self.artifacts, *self.explanations)
        named = [name for a in graphs for name in (a.file, *a.data)]
        return named + [name for p in self.plans for name in (*p.list_files(), *(w.file for w in p.weights))]

    def check_files_are_listed(self) -> None:
        """Refuse a manifest that names a file, such as an artifact's, without listing its hash."""
        named = self.list_graph_files()
        if self.encoder is not None and self.encoder.fitted is not None:
            named.append(self.encoder.fitted.file)
        tokenizer_files = Reader(self.tokenizer, "tokenizer").list_of("files", str)
        if not tokenizer_files:
            raise ManifestError(f"{FILE_NAME}: tokenizer.files is empty")
        named += tokenizer_files
        if "chat_template" in self.tokenizer:
            template = Reader(self.tokenizer["chat_template"], "tokenizer.chat_template")
            named.append(template.get("file", str))
            if "tool_use" in template.value:
                named.append(template.get("tool_use", str))
        for name in named:
            if name not in self.files:
                raise ManifestError(f"{FILE_NAME} uses {name!r} without listing its hash under 'files'")
