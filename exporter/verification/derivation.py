"""Derives everything besides a bundle's graphs from the checkpoint again, and compares it.

Tokenizers, chat template, how texts begin and end, how answers are searched, what results mean, the config,
what the manifest says of each graph.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from ...runtime.apps.check.differences import describe_differences, show_value
from ...runtime.apps.check.outcome import Comparison
from ...runtime.apps.check.texts import FILES, open_text_tokenizers
from ...runtime.bundle.bundle import Bundle
from ...runtime.bundle.export_again import extrapolates, find_max_batch, read_chosen_outputs
from ...runtime.errors import PlanForgeError
from ...runtime.text.chat import TEMPLATE_FILES
from ...runtime.text.piece_tokenizer import PIECES
from ...runtime.text.tokenizer import Tokenizer, parse, read
from ..checkpoints.chat_template import read_chat_template
from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.source import Source
from ..checkpoints.tokenizers.files import find_frames
from ..errors import raise_checkpoint_errors
from ..tracing.recipes import TraceOptions
from .artifacts import compare_artifacts

READING = "reading the files"  # in the place of an engine
WHOSE = "the checkpoint's is"
ADVICE = (
    "the bundle was changed, or the checkpoint was, or an older PlanForge exported it: export the checkpoint"
    " again"
)
# Settings whose values are tokens, which messages spell.
TOKENS = ("eos", "prefix", "bos", "pad", "decoder_start", "source_eos", "forced_bos", "forced_eos")
SOURCE_TOKENS = ("prefix", "source_eos")
OF_A_FITTED_HEAD = ("heads", "labels", "problem_type", "fitted")  # a fit's own, not the checkpoint's


def compare_with_checkpoint(bundle: Bundle, source: Source) -> list[Comparison]:
    """Compare all that is derived from the checkpoint; failures name the actual and the expected value."""
    try:
        with keep_silent():
            derived = derive(bundle, source)
    except PlanForgeError as error:
        return [Comparison.from_error(FILES, READING, "the checkpoint's settings", error)]
    recipes = None if isinstance(derived, ImportedSettings) else derived.recipes
    cases = {
        "chat template": compare_templates(bundle, derived),
        "settings": compare_settings(bundle, derived),
        "artifacts": compare_artifacts(bundle, recipes),
    }
    if not isinstance(derived, ImportedSettings) or derived.has_tokenizer:
        cases = {"tokenizer": compare_tokenizers(bundle, derived), **cases}
    return [make_comparison(case, count, failures) for case, (count, failures) in cases.items()]


def make_comparison(case: str, count: int, failures: Sequence[str]) -> Comparison:
    told = (*failures, ADVICE) if failures else ()
    return Comparison({"settings": count}, {}, told, artifact=FILES, backend=READING, case=case)


@contextlib.contextmanager
def keep_silent() -> Iterator[None]:
    """Drop the warnings of reading a checkpoint, which its export gave."""
    log = logging.getLogger("planforge")
    log.addFilter(is_error)
    try:
        yield
    finally:
        log.removeFilter(is_error)


def is_error(record: logging.LogRecord) -> bool:
    return record.levelno > logging.WARNING


def derive(bundle: Bundle, source: Source) -> Checkpoint:
    """Read the checkpoint again, with the choices that the export was given."""
    manifest = bundle.manifest
    if manifest.source.get("exporter"):
        return ImportedSettings(source, bundle)
    return Checkpoint(
        source,
        find_max_batch(manifest),
        manifest.max_length,
        read_chosen_outputs(manifest),
        extrapolates(manifest),
    )


class ImportedSettings(Checkpoint):
    """The settings of a checkpoint whose graphs another exporter wrote; others are the manifest's."""

    def __init__(self, source: Source, bundle: Bundle) -> None:
        from ...models.folder import read_json
        from ...models.sentence_transformers import read_modules

        manifest = bundle.manifest
        self.source = source
        self.exporter = str(manifest.source["exporter"])
        self.folder = source.folder
        self.family = manifest.family
        self.task = manifest.task
        self.choices = TraceOptions(1, manifest.max_length)
        with raise_checkpoint_errors():
            self.config_json = read_json(source.folder / "config.json")
            self.modules = read_modules(source.folder)
        sentence = None if self.modules is None else self.modules.sentence
        told = {**manifest.config, "sentence": sentence}
        if manifest.encoder is not None:
            told["heads"] = told["output_heads"] = manifest.encoder.heads
        if self.traits.has_sources:
            told["vocab_size"] = manifest.config.get("target_vocab_size")
        self.config: Any = SimpleNamespace(**told)
        # Without one, the export took what transformers had made of the checkpoint's other files.
        self.has_tokenizer = (source.folder / "tokenizer.json").is_file()
        if self.has_tokenizer:
            self.read_tokenizers()
        else:
            self.take_tokenizers(bundle)
        self.generation = self.read_generation()
        self.encoder = self.read_encoder()

    def take_tokenizers(self, bundle: Bundle) -> None:
        """Take the bundle's own tokenizers, for all else that depends on them."""
        recorded = bundle.manifest.tokenizer
        paths = [bundle.path(str(name)) for name in recorded["files"]]
        self.tokenizer_kind = str(recorded["kind"])
        self.tokenizers = open_text_tokenizers(bundle)
        self.tokenizer_files = {path.name: read(path) for path in paths}
        self.frames = find_frames(read(paths[0]), str(paths[0]))
        self.chat_template = None
        if self.traits.continues_texts:
            self.chat_template = read_chat_template([self.folder])


def compare_tokenizers(bundle: Bundle, derived: Checkpoint) -> tuple[int, list[str]]:
    """Compare the tokenizers' files by content, regardless of the library that wrote their JSON."""
    recorded = bundle.manifest.tokenizer
    names = [str(name) for name in recorded["files"]]
    kind = derived.tokenizer_kind
    failures = describe_differences(recorded.get("kind"), kind, f"tokenizer.kind: {WHOSE}")
    if recorded.get("vocab_size") != derived.config.vocab_size:
        failures.append(
            f"tokenizer.vocab_size is {recorded.get('vocab_size')}, {WHOSE} {derived.config.vocab_size}"
        )
    if len(names) != len(derived.tokenizer_files):
        return 1, [*failures, f"{len(names)} tokenizers, {WHOSE} {len(derived.tokenizer_files)}"]
    for name, (stem, data) in zip(names, derived.tokenizer_files.items(), strict=True):
        got = read_plain(read(bundle.path(name)), kind, name)
        expected = read_plain(data, kind, f"{stem}.json of {derived.folder}")
        failures += [f"{name}: {fault}" for fault in describe_differences(got, expected, WHOSE)]
    return 2 + len(names), failures


def read_plain(data: bytes, kind: str, source: str) -> Any:
    """Return the content of a tokenizer.json as the installed version of tokenizers writes it."""
    return json.loads(data if kind == PIECES else parse(data, source).to_str())


def compare_templates(bundle: Bundle, derived: Checkpoint) -> tuple[int, list[str]]:
    """Compare the chat template line by line, and the special tokens that it may name."""
    recorded = bundle.manifest.tokenizer.get("chat_template")
    template = derived.chat_template
    if recorded is None or template is None:
        if recorded is template:
            return 0, []
        if recorded is None:
            return 1, ["there is no chat template, and the checkpoint has one"]
        return 1, [f"{recorded['file']} is there, and the checkpoint has no chat template"]
    failures = []
    for key in TEMPLATE_FILES:
        if (key in recorded) != (key in template.contents):
            whose = "the bundle" if key in recorded else "the checkpoint"
            failures.append(f"tokenizer.chat_template: {whose} alone has a template {key!r}")
        elif key in recorded:
            got = read(bundle.path(str(recorded[key]))).decode(errors="replace")
            failures += describe_different_line(got, template.contents[key].decode(), str(recorded[key]))
    tokens = {"chat_template": {"tokens": recorded.get("tokens")}}
    expected = {"chat_template": {"tokens": dict(template.tokens)}}
    failures += describe_differences(tokens, expected, WHOSE)
    return 2, failures


def describe_different_line(got: str, expected: str, name: str) -> list[str]:
    """Return the first line of a text that differs."""
    if got == expected:
        return []
    lines = got.split("\n"), expected.split("\n")
    for number, (one, other) in enumerate(zip(*lines, strict=False), 1):
        if one != other:
            start = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), len(other))
            begin = max(0, start - 20)
            here, there = (show_value("", text[begin:]) for text in (one, other))
            return [f"{name}, line {number} from character {begin + 1} is {here}, {WHOSE} {there}"]
    return [f"{name} has {len(lines[0])} lines, {WHOSE} of {len(lines[1])}"]


def compare_settings(bundle: Bundle, derived: Checkpoint) -> tuple[int, list[str]]:
    """Compare the family, the task, the defaults of generation or of an encoder, and the config."""
    manifest = bundle.manifest
    got: dict[str, Any] = {"family": manifest.family, "task": manifest.task}
    expected: dict[str, Any] = {"family": derived.family, "task": derived.task}
    for name, ours, theirs in (
        ("generation", manifest.generation, derived.generation),
        ("encoder", manifest.encoder, derived.encoder),
        ("images", manifest.images, derived.images),
        ("likeness", manifest.likeness, derived.likeness),
        ("words", manifest.words, derived.words),
        ("retrieval", manifest.retrieval, derived.retrieval),
    ):
        if ours is not None or theirs is not None:
            got[name] = {} if ours is None else make_plain(dataclasses.asdict(ours))
            expected[name] = {} if theirs is None else make_plain(dataclasses.asdict(theirs))
    for side in (got, expected):
        side.get("encoder", {}).get("roles", {}).pop("ranges", None)  # of vectors: no setting, but measured
    if manifest.encoder is not None and manifest.encoder.fitted is not None:
        for name in OF_A_FITTED_HEAD:
            del got["encoder"][name], expected["encoder"][name]
    if not isinstance(derived, ImportedSettings):
        config = make_plain(dataclasses.asdict(derived.config))
        # Names that an older version did not record do not count as differences.
        got["config"], expected["config"] = keep_shared(make_plain(manifest.config), config)
    failures = describe_differences(got, expected, WHOSE, make_show(bundle))
    return sum(len(part) if isinstance(part, Mapping) else 1 for part in expected.values()), failures


def keep_shared(got: Any, expected: Any) -> tuple[Any, Any]:
    """Return two values with only the names that both of their mappings have."""
    if not isinstance(got, Mapping) or not isinstance(expected, Mapping):
        return got, expected
    shared = {key: keep_shared(got[key], expected[key]) for key in expected if key in got}
    return {key: pair[0] for key, pair in shared.items()}, {key: pair[1] for key, pair in shared.items()}


def make_plain(value: Any) -> Any:
    """Return a value as JSON would return it: tuples become lists."""
    return json.loads(json.dumps(value))


def make_show(bundle: Bundle) -> Any:
    """Return a function that shows a value in a difference: tokens with their spelling."""
    tokenizers = open_text_tokenizers(bundle)
    source = tokenizers[0]
    target = tokenizers[-1]

    def show(path: str, value: Any) -> str:
        part, _, name = path.partition(".")
        name = name.partition("[")[0]
        shown = show_value(path, value)
        is_token = part == "generation" and name in TOKENS
        if not is_token and not (part == "encoder" and name.startswith("tokens")):
            return shown
        spelled = spell(source if name in SOURCE_TOKENS else target, value)
        return f"{shown} ({spelled})" if spelled else shown

    return show


def spell(tokenizer: Tokenizer, value: Any) -> str:
    """Return the spelling of one token or several in the vocabulary; "" for anything else."""
    ids = value if isinstance(value, list) else [value]
    known = [i for i in ids if type(i) is int and 0 <= i < tokenizer.vocab_size]
    return " ".join(repr(tokenizer.spell(i)) for i in known)
