"""Folders of sentence-transformers: modules.json and what it lists around a transformer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from .folder import read_json, read_json_list
from .sentence import POOLINGS, DenseConfig, SentenceConfig

MODULES = "modules.json"
ACTIVATION_NAMES = {"Identity": None, "Tanh": "tanh", "ReLU": "relu", "GELU": "gelu", "SiLU": "silu"}


@dataclass(frozen=True)
class SentenceModules:
    """What a sentence-transformers folder adds to its transformer.

    Attributes:
        transformer: the folder of config.json and the weights.
        config: pooling, dense layers, normalization.
        dense_folders: of the dense layers' weights, in order.
        max_seq_length: tokens after which it cuts a text, special ones included; None: the model's.
        lower_case: whether it lower-cases text before tokenizing.
        prompts: texts to put before a text, by name.
        default_prompt: the name of the prompt that every text gets.
    """

    transformer: Path
    config: SentenceConfig
    dense_folders: tuple[Path, ...] = ()
    max_seq_length: int | None = None
    lower_case: bool = False
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None


def read_modules(folder: Path) -> SentenceModules | None:
    """Reads a sentence-transformers folder; None where `folder` is a plain checkpoint.

    Raises:
        ValueError: a module, or a setting of one, that we don't implement; names it.
    """
    if not (folder / MODULES).is_file():
        return None
    transformer, normalize = folder, False
    pooling: tuple[str, ...] = ()
    dense: list[DenseConfig] = []
    dense_folders: list[Path] = []
    for module in read_json_list(folder / MODULES):
        kind, path = module_of(folder, module)
        if normalize or (kind in ("Dense", "Normalize") and not pooling):
            raise ValueError(f"{folder / MODULES}: {kind} stands in an order that is not supported")
        if kind == "Transformer":
            transformer = path
        elif kind == "Pooling":
            pooling = pooling_of(path)
        elif kind == "Dense":
            dense.append(dense_of(path))
            dense_folders.append(path)
        elif kind == "Normalize":
            normalize = True
        else:
            raise ValueError(
                f"{folder / MODULES}: module {kind!r} is not supported; known are Transformer, Pooling,"
                " Dense and Normalize"
            )
    if not pooling:
        raise ValueError(f"{folder / MODULES} has no Pooling module")
    settings = read_json(transformer / "sentence_bert_config.json", missing={})
    prompts = read_json(folder / "config_sentence_transformers.json", missing={})
    length = settings.get("max_seq_length")
    if length is not None and (type(length) is not int or length < 3):
        raise ValueError(f"{transformer}/sentence_bert_config.json: max_seq_length={length!r} is no length")
    return SentenceModules(
        transformer=transformer,
        config=SentenceConfig(pooling, tuple(dense), normalize),
        dense_folders=tuple(dense_folders),
        max_seq_length=length,
        lower_case=settings.get("do_lower_case") is True,
        prompts={str(k): str(v) for k, v in (prompts.get("prompts") or {}).items()},
        default_prompt=prompts.get("default_prompt_name"),
    )


def module_of(folder: Path, module: Any) -> tuple[str, Path]:
    """The class name of one entry of modules.json, and its folder, which lies inside `folder`."""
    if not isinstance(module, dict) or not isinstance(module.get("type"), str):
        raise ValueError(f"{folder / MODULES}: an entry is not a module with a type: {module!r:.80}")
    path = PurePosixPath(str(module.get("path") or "."))
    if path.is_absolute() or ".." in path.parts:
        raise ValueError(f"{folder / MODULES}: path {str(path)!r} leaves the folder")
    return module["type"].rpartition(".")[2], folder / path


def pooling_of(folder: Path) -> tuple[str, ...]:
    """The names of a Pooling module's modes, in the order in which it puts them side by side."""
    config = read_json(folder / "config.json")
    if config.get("include_prompt") is False:
        raise ValueError(f"{folder}/config.json sets include_prompt=false, which is not supported")
    if "pooling_mode" in config:
        mode = config["pooling_mode"]
        names = [mode] if isinstance(mode, str) else list(mode)
    else:
        flags = {"cls": "cls_token", "max": "max_tokens", "mean": "mean_tokens"}
        others = ["mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken"]
        flags |= {name.removesuffix("_tokens") if "weighted" in name else name: name for name in others}
        names = [name for name, flag in flags.items() if config.get(f"pooling_mode_{flag}") is True]
    for name in names:
        if name not in POOLINGS:
            raise ValueError(f"{folder}/config.json: pooling {name!r} is not one of {sorted(POOLINGS)}")
    return tuple(names or ["mean"])


def dense_of(folder: Path) -> DenseConfig:
    config = read_json(folder / "config.json")
    known = {"in_features", "out_features", "bias", "activation_function"}
    known |= {"module_input_name", "module_output_name"}
    if unknown := set(config) - known:
        raise ValueError(f"{folder}/config.json sets {sorted(unknown)}, which is not supported")
    names = {config.get(f"module_{end}_name", "sentence_embedding") for end in ("input", "output")}
    if names - {"sentence_embedding", None}:
        raise ValueError(f"{folder}/config.json: only the sentence embedding may go through Dense")
    activation = str(config.get("activation_function", "Tanh")).rpartition(".")[2]
    if activation not in ACTIVATION_NAMES:
        raise ValueError(
            f"{folder}/config.json: activation_function {activation!r} is not one of"
            f" {sorted(ACTIVATION_NAMES)}"
        )
    return DenseConfig(
        in_features=config.get("in_features", 0),
        out_features=config.get("out_features", 0),
        bias=config.get("bias", True),
        activation=ACTIVATION_NAMES[activation],
    )
