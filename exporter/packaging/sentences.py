"""Writes the files by which sentence-transformers makes one vector from an encoder's hidden states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...runtime.bundle.manifest import Manifest
from .hugging_face import write_json

# The ends of a Pooling module's flags, by the names that a bundle has for poolings.
FLAGS = {
    "cls": "cls_token",
    "max": "max_tokens",
    "mean": "mean_tokens",
    "mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "weightedmean": "weightedmean_tokens",
    "lasttoken": "lasttoken",
}


def write_sentence_files(manifest: Manifest, folder: Path) -> None:
    """Write prompts, pooling and length; for a model with further layers, prompts alone."""
    defaults = manifest.encoder
    assert defaults is not None
    prompts = {"prompts": dict(defaults.prompts), "default_prompt_name": defaults.default_prompt}
    write_json(folder / "config_sentence_transformers.json", prompts)
    if has_layers(manifest):
        return
    modules = {"Transformer": "", "Pooling": "1_Pooling"}
    if defaults.normalize:
        modules["Normalize"] = "2_Normalize"
    for path in modules.values():
        (folder / path).mkdir(exist_ok=True)
    write_json(folder / "modules.json", list_modules(modules))
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": defaults.max_length})
    write_json(folder / "1_Pooling/config.json", describe_pooling(manifest))


def has_layers(manifest: Manifest) -> bool:
    """Return whether pooling is followed by more than a Normalize, which a package does not contain."""
    sentence = manifest.config.get("sentence") or {}
    layers = sentence.get("layers", ())
    kinds = [layer["kind"] for layer in layers]
    return bool(sentence.get("dense")) or kinds not in ([], ["normalize"])


def list_modules(paths: dict[str, str]) -> list[dict[str, Any]]:
    """Return modules.json, of the paths of modules by their classes."""
    return [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for number, (kind, path) in enumerate(paths.items())
    ]


def describe_pooling(manifest: Manifest) -> dict[str, Any]:
    """Return the config of the module that pools; several poolings are put side by side."""
    defaults = manifest.encoder
    assert defaults is not None
    wanted = defaults.pooling.split("+")
    flags = {f"pooling_mode_{flag}": name in wanted for name, flag in FLAGS.items()}
    config = {"word_embedding_dimension": manifest.config["hidden_size"], **flags}
    return config if defaults.include_prompt else config | {"include_prompt": False}
