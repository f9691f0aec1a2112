"""Reads a package's settings back from its files, as its runtime does, and compares them with the manifest.

Nothing here is shared with what writes the files.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...runtime.apps.check.outcome import Comparison
from ...runtime.apps.check.texts import FILES, open_text_tokenizers
from ...runtime.bundle.artifact import Artifact
from ...runtime.bundle.bundle import Bundle
from ...runtime.bundle.defaults import GenerationDefaults
from ..task_traits import TRAITS
from .check import report
from .sentences import has_layers
from .settings import OFF, list_rules
from .workers.pbtxt import read_pbtxt

CASE = "settings"
# Poolings that sentence-transformers calls otherwise.
POOLINGS = {
    "cls": "cls_token",
    "max": "max_tokens",
    "mean": "mean_tokens",
    "weightedmean": "weightedmean_tokens",
}
# How the names of Hugging Face's classes end, by their heads.
ENDS = {
    "masked_lm": "ForMaskedLM",
    "sequence_classification": "ForSequenceClassification",
    "token_classification": "ForTokenClassification",
    "question_answering": "ForQuestionAnswering",
}


@dataclass(frozen=True)
class Setting:
    """A value in a file of the package, and the same value in the bundle."""

    name: str  # of the file and the value in it
    got: Any
    want: Any


def compare_settings(bundle: Bundle, artifact: Artifact, folder: Path, title: str) -> Comparison:
    """Compare all settings of a package with the bundle's; `artifact` is the graph that decides them."""
    settings = list(list_settings(bundle, artifact, folder))
    failures = [
        f"{setting.name} is {setting.got!r:.200}, the bundle's is {setting.want!r:.200}"
        for setting in settings
        if setting.got != setting.want
    ]
    outcome = report("settings", len(settings), failures)
    return Comparison(artifact=FILES, backend=f"{title}'s files", case=CASE, **vars(outcome))


def list_settings(bundle: Bundle, artifact: Artifact, folder: Path) -> Iterator[Setting]:
    """Yield the settings of all files that a package has, and of those that it should have."""
    configs = sorted(folder.glob("*/config.pbtxt"))
    if configs:  # a Triton repository, which has the bundle itself
        for path in configs:
            yield from list_repository_settings(artifact, path)
        return
    yield from list_tokenizer_settings(bundle, folder)
    genai = folder / "genai_config.json"
    if genai.exists():
        yield from list_genai_settings(bundle, read_json(genai))
        return
    yield from list_config_settings(bundle, read_json(folder / "config.json"))
    encoder = bundle.manifest.encoder
    if encoder is not None and not any(head in ENDS for head in encoder.heads):
        yield from list_sentence_settings(bundle, folder)
    if bundle.manifest.generation is not None:
        values = read_json(folder / "generation_config.json")
        yield from list_generation_settings(bundle.manifest.generation, values)


def read_json(path: Path) -> dict[str, Any]:
    """Return the values of a file; none if it is missing, so that all expected ones are reported."""
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}


def list_tokenizer_settings(bundle: Bundle, folder: Path) -> Iterator[Setting]:
    """Yield the settings of tokenizer_config.json, for a translator also those of its target's."""
    manifest = bundle.manifest
    defaults = manifest.generation or manifest.encoder
    assert defaults is not None
    template = manifest.tokenizer.get("chat_template")
    chat = bundle.path(str(template["file"])).read_text(encoding="utf-8") if template else None
    for number, tokenizer in enumerate(open_text_tokenizers(bundle)):
        place = ("", "target/")[number]
        values = read_json(folder / place / "tokenizer_config.json")

        def setting(name: str, want: Any, place: str = place, values: Any = values) -> Setting:
            return Setting(f"{place}tokenizer_config.json: {name}", values.get(name), want)

        yield setting("padding_side", "left" if TRAITS[manifest.task].continues_texts else "right")
        yield setting("model_max_length", defaults.max_length)
        yield setting("chat_template", chat)
        roles = name_special_tokens(bundle, is_source=number == 0)
        tokens = {f"{role}_token": tokenizer.spell(token) for role, token in roles.items()}
        for name, token in (tokens | dict((template or {}).get("tokens", {}))).items():
            yield setting(name, token)
        if manifest.encoder is not None:
            yield setting("model_input_names", list_inputs(bundle))
        yield from list_tokenizer_parts(bundle, number, place, folder)


def list_inputs(bundle: Bundle) -> list[str]:
    """Return the tokenizer's outputs that an encoder reads."""
    roles = {spec.role for artifact in bundle.manifest.artifacts for spec in artifact.inputs}
    segments = ["token_type_ids"] if "segments" in roles else []
    return ["input_ids", *segments, "attention_mask"]


def list_tokenizer_parts(bundle: Bundle, number: int, place: str, folder: Path) -> Iterator[Setting]:
    """Yield the parts of tokenizer.json by their hashes; transformers.js has a normalizer of its own."""
    file = bundle.path(str(bundle.manifest.tokenizer["files"][number]))
    values = read_json(folder / place / "tokenizer.json")
    wanted = json.loads(file.read_bytes())
    own = {"normalizer"} if (folder / "onnx").is_dir() else set()
    for part in sorted((wanted.keys() | values.keys()) - own):
        yield Setting(
            f"{place}tokenizer.json: {part}", hash_json(values.get(part)), hash_json(wanted.get(part))
        )


def hash_json(value: Any) -> str:
    """Return the first digits of a hash of a value's JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]


def name_special_tokens(bundle: Bundle, *, is_source: bool) -> dict[str, int]:
    """Return the ids of a tokenizer's special tokens, by what Hugging Face calls their roles."""
    manifest = bundle.manifest
    if manifest.encoder is not None:
        return dict(manifest.encoder.tokens)
    defaults = manifest.generation
    assert defaults is not None
    end = defaults.eos[0] if defaults.eos else None
    if TRAITS[manifest.task].has_sources and is_source:
        end = defaults.source_eos
    ids = {"bos": defaults.bos, "eos": end, "pad": find_padding(defaults)}
    return {role: token for role, token in ids.items() if token is not None}


def find_padding(defaults: GenerationDefaults) -> int:
    """Return the token that fills rows: the end token where there is no padding token."""
    if defaults.pad is not None:
        return defaults.pad
    return defaults.eos[0] if defaults.eos else 0


def list_config_settings(bundle: Bundle, values: Mapping[str, Any]) -> Iterator[Setting]:
    """Yield the settings of config.json: an encoder's classes, and the end tokens of a decoder."""
    manifest = bundle.manifest
    if manifest.encoder is not None:
        labels = {str(number): label for number, label in enumerate(manifest.encoder.labels)}
        by_label = {label: int(number) for number, label in labels.items()}
        wanted = {
            "id2label": labels or None,
            "label2id": by_label or None,
            "problem_type": manifest.encoder.problem_type,
            "pad_token_id": manifest.encoder.tokens.get("pad"),
            "max_position_embeddings": manifest.encoder.max_length,
        }
        for name, want in wanted.items():
            yield Setting(f"config.json: {name}", values.get(name), want)
        (architecture,) = values.get("architectures", [""])
        head = next((head for head in manifest.encoder.heads if head in ENDS), None)
        yield Setting(
            "config.json: the end of architectures", find_end(architecture), ENDS.get(head or "", "Model")
        )
        return
    assert manifest.generation is not None
    length = "n_positions" if values.get("model_type") == "gpt2" else "max_position_embeddings"
    yield Setting(f"config.json: {length}", values.get(length), manifest.max_length)
    ends = list(manifest.generation.eos)
    yield Setting("config.json: eos_token_id", as_list(values.get("eos_token_id")), ends)


def find_end(architecture: str) -> str:
    """Return the ending of a class's name: that of its head, or "Model"."""
    return (
        architecture[architecture.find("For") :] if "For" in architecture else architecture[-len("Model") :]
    )


def list_sentence_settings(bundle: Bundle, folder: Path) -> Iterator[Setting]:
    """Yield the settings of a text's vector, for an encoder without a head; dense layers are left out."""
    defaults = bundle.manifest.encoder
    assert defaults is not None
    values = read_json(folder / "config_sentence_transformers.json")
    file = "config_sentence_transformers.json"
    yield Setting(f"{file}: prompts", values.get("prompts"), dict(defaults.prompts))
    yield Setting(f"{file}: default_prompt_name", values.get("default_prompt_name"), defaults.default_prompt)
    if has_layers(bundle.manifest):
        return
    modules = folder / "modules.json"
    listed = json.loads(modules.read_text(encoding="utf-8")) if modules.exists() else []
    kinds = [module["type"].rpartition(".")[2] for module in listed]
    normalizing = ["Normalize"] if defaults.normalize else []
    yield Setting("modules.json", kinds, ["Transformer", "Pooling", *normalizing])
    pooling = read_json(folder / "1_Pooling" / "config.json")
    included = pooling.get("include_prompt", True)
    yield Setting("1_Pooling/config.json: include_prompt", included, defaults.include_prompt)
    flags = {name.removeprefix("pooling_mode_") for name, on in pooling.items() if on is True}
    flags.discard("include_prompt")
    wanted = {POOLINGS.get(name, name) for name in defaults.pooling.split("+")}
    yield Setting("1_Pooling/config.json", sorted(flags), sorted(wanted))


def list_generation_settings(defaults: GenerationDefaults, values: Mapping[str, Any]) -> Iterator[Setting]:
    """Yield generation_config.json's settings, with transformers' defaults for those that it lacks."""
    wanted = {
        "bos_token_id": (None, defaults.bos),
        "decoder_start_token_id": (None, defaults.decoder_start),
        "forced_bos_token_id": (None, defaults.forced_bos),
        "forced_eos_token_id": (None, defaults.forced_eos),
        "pad_token_id": (None, find_padding(defaults)),
        "max_new_tokens": (None, defaults.max_new_tokens),
        "min_new_tokens": (0, defaults.min_new_tokens or 0),
        "renormalize_logits": (False, defaults.renormalize),
        "do_sample": (False, defaults.do_sample),
        "num_beams": (1, defaults.num_beams),
        "length_penalty": (1.0, defaults.length_penalty),
        "early_stopping": (False, defaults.early_stopping),
        "no_repeat_ngram_size": (0, defaults.no_repeat_ngram_size or 0),
        "repetition_penalty": (1.0, defaults.repetition_penalty),
    }
    if defaults.do_sample:
        wanted |= {
            "temperature": (1.0, or_else(defaults.temperature, 1.0)),
            "top_k": (50, defaults.top_k or 0),
            "top_p": (1.0, or_else(defaults.top_p, 1.0)),
            "min_p": (None, defaults.min_p),
        }
    file = "generation_config.json"
    for name, (otherwise, want) in wanted.items():
        yield Setting(f"{file}: {name}", values.get(name, otherwise), want)
    yield Setting(f"{file}: eos_token_id", as_list(values.get("eos_token_id")), list(defaults.eos))
    for name, want in list_rules(defaults).items():
        yield Setting(f"{file}: {name}", values.get(name, OFF.get(name)), want)


def list_genai_settings(bundle: Bundle, values: Mapping[str, Any]) -> Iterator[Setting]:
    """Yield genai_config.json's settings, with onnxruntime-genai's defaults for those that it lacks."""
    manifest = bundle.manifest
    defaults = manifest.generation
    assert defaults is not None
    model = values.get("model", {})
    search = values.get("search", {})
    sampled = [
        ("search", "temperature", search.get("temperature", 1.0), or_else(defaults.temperature, 1.0)),
        ("search", "top_k", search.get("top_k", 50), or_else(defaults.top_k, 0)),
        ("search", "top_p", search.get("top_p", 1.0), or_else(defaults.top_p, 1.0)),
    ]
    ngram = defaults.no_repeat_ngram_size or 0
    for section, name, got, want in (
        *(sampled if defaults.do_sample else []),
        ("model", "pad_token_id", model.get("pad_token_id"), find_padding(defaults)),
        ("model", "bos_token_id", model.get("bos_token_id"), or_else(defaults.bos, find_padding(defaults))),
        ("search", "length_penalty", search.get("length_penalty", 1.0), defaults.length_penalty),
        ("search", "early_stopping", search.get("early_stopping", True), defaults.early_stopping is True),
        ("search", "no_repeat_ngram_size", search.get("no_repeat_ngram_size", 0), ngram),
        ("model", "eos_token_id", as_list(model.get("eos_token_id")), list(defaults.eos)),
        ("model", "context_length", model.get("context_length"), manifest.max_length),
        ("search", "max_length", search.get("max_length"), manifest.max_length),
        ("search", "do_sample", search.get("do_sample", False), defaults.do_sample),
        ("search", "num_beams", search.get("num_beams", 1), defaults.num_beams),
        ("search", "repetition_penalty", search.get("repetition_penalty", 1.0), defaults.repetition_penalty),
    ):
        yield Setting(f"genai_config.json: {section}.{name}", got, want)


def or_else(value: Any, otherwise: Any) -> Any:
    """Return a value, or another one where it is not set."""
    return otherwise if value is None else value


def as_list(value: Any) -> list[Any]:
    """Return the ids of a setting that may be one id, several or none."""
    if value is None:
        return []
    return list(value) if isinstance(value, list) else [value]


def list_repository_settings(artifact: Artifact, path: Path) -> Iterator[Setting]:
    """Yield the batch and precision settings of a model's config.pbtxt; running it checks the rest."""
    config = read_pbtxt(path.read_text(encoding="utf-8"))
    name = f"{path.parent.name}/config.pbtxt"
    streams = config.get("model_transaction_policy", {}).get("decoupled", False)
    parameters = {entry["key"]: entry["value"]["string_value"] for entry in config.get("parameters", ())}
    is_graph = (path.parent / "1" / "model.onnx").exists()
    batch = 0 if is_graph or parameters.get("task") == "generate" else artifact.axis("batch").max
    yield Setting(f"{name}: max_batch_size", config.get("max_batch_size", 0), batch)
    if not is_graph:
        yield Setting(f"{name}: decoupled", streams, parameters.get("task") == "generate")
        is_batched = "dynamic_batching" in config
        yield Setting(f"{name}: dynamic_batching", is_batched, parameters.get("task") != "generate")
        yield Setting(f"{name}: backend", parameters.get("backend"), "auto")
        kinds = [group.get("kind") for group in config.get("instance_group", ())]
        yield Setting(f"{name}: instance_group", kinds, ["KIND_CPU"])
        optional = [one["name"] for one in config.get("input", ()) if one.get("optional")]
        yield Setting(f"{name}: OPTIONS is optional", "OPTIONS" in optional, True)
        yield Setting(f"{name}: precision", parameters.get("precision"), artifact.precision)
