"""Reads sentence-transformers folders: modules.json and the modules that it lists."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PureWindowsPath
from typing import Any

from .folder import read_json, read_json_list
from .sentence import POOLINGS, DenseConfig, SentenceConfig

MODULES = "modules.json"
KINDS = ("Transformer", "Pooling", "Dense", "Normalize")
ORDER = re.compile("Transformer Pooling( Dense)*( Normalize)?")
TOKEN_VECTORS = {  # settings by which the transformer gives its last hidden state, and nothing else
    "transformer_task": "feature-extraction",
    "modality_config": {"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
    "module_output_name": "token_embeddings",
}
ACTIVATION_NAMES = {"Identity": None, "Tanh": "tanh", "ReLU": "relu", "GELU": "gelu", "SiLU": "silu"}


@dataclass(frozen=True)
class SentenceModules:
    """What a sentence-transformers folder adds to its transformer.

    Attributes:
        transformer: the folder of config.json and the weights.
        config: pooling, dense layers, normalization.
        dense_folders: the folders of the dense layers' weights, in order.
        max_seq_length: tokens after which it cuts a text, special ones included; None: the model's.
        prompts: texts to put before a text, by name.
        default_prompt: the name of the prompt that every text gets.
    """

    transformer: Path
    config: SentenceConfig
    dense_folders: tuple[Path, ...] = ()
    max_seq_length: int | None = None
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None


def read_modules(folder: Path) -> SentenceModules | None:
    """Read a sentence-transformers folder; return None where `folder` is a plain checkpoint.

    Raises:
        ValueError: a module, or a setting of one, that we don't implement; names it.
    """
    if not (folder / MODULES).is_file():
        return None
    modules = [module_of(folder, module) for module in read_json_list(folder / MODULES)]
    kinds = [kind for kind, _ in modules]
    if not ORDER.fullmatch(" ".join(kinds)):
        raise ValueError(
            f"{folder / MODULES} lists {', '.join(kinds) or 'nothing'}, in an order that is not supported;"
            " that is Transformer, Pooling, then Dense as often as you like, then perhaps Normalize"
        )
    transformer = modules[0][1]
    pooling = modules[1][1]
    dense_folders = tuple(path for kind, path in modules if kind == "Dense")
    if kinds[-1] == "Normalize":
        check_sentence_only(modules[-1][1], read_json(modules[-1][1] / "config.json", missing={}))
    settings = transformer_settings(transformer)
    prompts, default_prompt = prompts_of(folder)
    return SentenceModules(
        transformer=transformer,
        config=SentenceConfig(
            pooling_of(pooling), tuple(dense_of(path) for path in dense_folders), kinds[-1] == "Normalize"
        ),
        dense_folders=dense_folders,
        max_seq_length=max_seq_length(transformer, settings),
        prompts=prompts,
        default_prompt=default_prompt,
    )


def module_of(folder: Path, module: Any) -> tuple[str, Path]:
    """Return the class name of one entry of modules.json, and its folder, which lies inside `folder`."""
    if not isinstance(module, dict) or not isinstance(module.get("type"), str):
        raise ValueError(f"{folder / MODULES}: an entry is not a module with a type: {module!r:.80}")
    kind = module["type"].rpartition(".")[2]
    # Old: sentence_transformers.models.Pooling; others' classes of these names may do anything.
    if kind not in KINDS or not module["type"].startswith("sentence_transformers."):
        raise ValueError(
            f"{folder / MODULES}: module {module['type']!r} is not supported; known are"
            f" sentence_transformers' {', '.join(KINDS)}"
        )
    path = str(module.get("path") or ".")
    if PureWindowsPath(path).anchor or ".." in PureWindowsPath(path).parts:  # takes / and \ alike
        raise ValueError(f"{folder / MODULES}: path {path!r} leaves the folder")
    return kind, folder / path


def transformer_settings(folder: Path) -> dict[str, Any]:
    """Read sentence_bert_config.json, or the file that old versions wrote instead."""
    for name in ("bert", "distilbert"):
        path = folder / f"sentence_{name}_config.json"
        if settings := read_json(path, missing={}):
            break
    for name, value in TOKEN_VECTORS.items():
        if settings.get(name, value) != value:
            raise ValueError(f"{path} sets {name}={settings[name]!r}; only {value!r} is supported")
    return settings


def max_seq_length(folder: Path, settings: Mapping[str, Any]) -> int | None:
    """Return the tokens after which texts are cut; since version 6 only the tokenizer's config has it."""
    path = folder / "sentence_bert_config.json"
    name = "max_seq_length"
    if settings.get(name) is None:
        path = folder / "tokenizer_config.json"
        name = "model_max_length"
        settings = read_json(path, missing={})
    length = settings.get(name)
    if isinstance(length, float):  # 1e30, of a tokenizer that knows no limit
        return None
    if length is not None and (type(length) is not int or length < 3):
        raise ValueError(f"{path}: {name}={length!r} is no length")
    return length


def prompts_of(folder: Path) -> tuple[dict[str, str], str | None]:
    """Return the prompts by name, and the name of the one that every text gets."""
    path = folder / "config_sentence_transformers.json"
    settings = read_json(path, missing={})
    if settings.get("truncate_dim") is not None:
        raise ValueError(
            f"{path} sets truncate_dim={settings['truncate_dim']!r}, which is not supported; set it to null,"
            " and cut the vectors where you use them"
        )
    prompts = settings.get("prompts") or {}
    default = settings.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise ValueError(f"{path}: prompts must be texts by name, not {prompts!r:.80}")
    if default is not None and (not isinstance(default, str) or default not in prompts):
        raise ValueError(f"{path}: default_prompt_name={default!r} is not one of {sorted(prompts)}")
    return prompts, default


def pooling_of(folder: Path) -> tuple[str, ...]:
    """Return the names of a Pooling module's modes, in the order in which it concatenates them."""
    config = read_json(folder / "config.json")
    if config.get("include_prompt") is False:
        raise ValueError(f"{folder}/config.json sets include_prompt=false, which is not supported")
    if "pooling_mode" in config:
        mode = config["pooling_mode"]
        names = mode if isinstance(mode, list) else [mode]
    else:
        flags = {"cls": "cls_token", "max": "max_tokens", "mean": "mean_tokens"}
        others = ["mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken"]
        flags |= {name.removesuffix("_tokens") if "weighted" in name else name: name for name in others}
        names = [name for name, flag in flags.items() if config.get(f"pooling_mode_{flag}") is True]
    for name in names:
        if name not in list(POOLINGS):  # a list: its members need no hash
            raise ValueError(f"{folder}/config.json: pooling {name!r} is not one of {sorted(POOLINGS)}")
    return tuple(names or ["mean"])


def dense_of(folder: Path) -> DenseConfig:
    config = read_json(folder / "config.json")
    known = {"in_features", "out_features", "bias", "activation_function"}
    known |= {"module_input_name", "module_output_name"}
    if unknown := set(config) - known:
        raise ValueError(f"{folder}/config.json sets {sorted(unknown)}, which is not supported")
    check_sentence_only(folder, config)
    function = str(config.get("activation_function", "torch.nn.Tanh"))
    activation = function.rpartition(".")[2]
    if activation not in ACTIVATION_NAMES or not function.startswith("torch."):
        raise ValueError(
            f"{folder}/config.json: activation_function={function!r} is not one of torch's"
            f" {sorted(ACTIVATION_NAMES)}"
        )
    return DenseConfig(
        in_features=config.get("in_features", 0),
        out_features=config.get("out_features", 0),
        bias=config.get("bias", True),
        activation=ACTIVATION_NAMES[activation],
    )


def check_sentence_only(folder: Path, config: Mapping[str, Any]) -> None:
    """Refuse a Dense or Normalize module that reads or writes vectors of tokens."""
    for name in ("module_input_name", "module_output_name"):
        if config.get(name) not in (None, "sentence_embedding"):
            raise ValueError(
                f"{folder}/config.json sets {name}={config[name]!r}; only 'sentence_embedding' is supported"
            )
