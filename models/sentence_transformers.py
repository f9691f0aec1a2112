"""Reads sentence-transformers folders: modules.json and the modules that it lists."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PureWindowsPath
from typing import Any

from .folder import read_json, read_json_list
from .sentence import (
    POOLINGS,
    DenseConfig,
    LayerNormConfig,
    NormalizeConfig,
    SentenceConfig,
    SentenceLayer,
)

MODULES = "modules.json"
KINDS = ("Transformer", "Pooling", "Dense", "LayerNorm", "Dropout", "Normalize")
ORDER = re.compile("Transformer( Pooling( Dense| LayerNorm| Dropout| Normalize)*)?")
TOKEN_VECTORS = {  # settings by which the transformer gives its last hidden state, and nothing else
    "transformer_task": "feature-extraction",
    "modality_config": {"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
    "module_output_name": "token_embeddings",
}
CLASS_LOGITS = {  # settings by which it gives the logits of its classes: a CrossEncoder
    "transformer_task": "sequence-classification",
    "modality_config": {"text": {"method": "forward", "method_output_name": "logits"}},
    "module_output_name": "scores",
}
ACTIVATION_NAMES = {"Identity": None, "Tanh": "tanh", "ReLU": "relu", "GELU": "gelu", "SiLU": "silu"}


@dataclass(frozen=True)
class SentenceModules:
    """The additions of a sentence-transformers folder to its transformer.

    Attributes:
        transformer: the folder of config.json and the weights.
        config: pooling, and the layers after it; None of a CrossEncoder, which scores texts.
        dense_folders: the folders of the dense layers' weights, in order.
        norm_folders: those of the LayerNorm modules' weights.
        max_seq_length: tokens after which it cuts a text, special ones included; None: the model's.
        prompts: texts to put before a text, by name.
        default_prompt: the name of the prompt that every text gets.
        activation: the class by which a CrossEncoder makes scores of logits; None where the folder does not
            say.
    """

    transformer: Path
    config: SentenceConfig | None
    dense_folders: tuple[Path, ...] = ()
    norm_folders: tuple[Path, ...] = ()
    max_seq_length: int | None = None
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    activation: str | None = None


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
            f"{folder / MODULES} lists {', '.join(kinds) or 'nothing'}, an order that is not supported;"
            " supported is Transformer alone (a CrossEncoder), or Transformer, Pooling, then any of Dense,"
            " LayerNorm, Dropout and Normalize"
        )
    transformer = modules[0][1]
    is_scorer = kinds == ["Transformer"]
    settings = transformer_settings(transformer, CLASS_LOGITS if is_scorer else TOKEN_VECTORS)
    if is_scorer and settings.get("transformer_task") != CLASS_LOGITS["transformer_task"]:
        raise ValueError(
            f"{folder / MODULES} lists a Transformer alone; add a Pooling to embed texts, or for a"
            " CrossEncoder a transformer_task in sentence_bert_config.json"
        )
    file = folder / "config_sentence_transformers.json"
    root_settings = read_json(file, missing={})
    prompts, default_prompt = prompts_of(file, root_settings)
    return SentenceModules(
        transformer=transformer,
        config=None if is_scorer else read_sentence(modules[1:]),
        dense_folders=tuple(path for kind, path in modules if kind == "Dense"),
        norm_folders=tuple(path for kind, path in modules if kind == "LayerNorm"),
        max_seq_length=max_seq_length(transformer, settings),
        prompts=prompts,
        default_prompt=default_prompt,
        activation=activation_of(file, root_settings),
    )


def read_sentence(modules: Sequence[tuple[str, Path]]) -> SentenceConfig:
    """Return the settings of a Pooling module and those after it, by their kinds and folders."""
    _, pooling = modules[0]
    layers: list[SentenceLayer] = []
    for kind, path in modules[1:]:
        if kind == "Dense":
            layers.append(dense_of(path))
        elif kind == "LayerNorm":
            layers.append(LayerNormConfig(read_json(path / "config.json").get("dimension", 0)))
        elif kind == "Normalize":
            check_sentence_only(path, read_json(path / "config.json", missing={}))
            layers.append(NormalizeConfig())  # a Dropout does nothing once a model is trained
    names, include_prompt = pooling_of(pooling)
    return SentenceConfig(names, tuple(layers), include_prompt)


def activation_of(path: Path, settings: Mapping[str, Any]) -> str | None:
    """Return the class by which a CrossEncoder turns logits into scores."""
    name = settings.get("activation_fn")
    if name is not None and not isinstance(name, str):
        raise ValueError(f"{path}: activation_fn={name!r:.80} is not a class's name")
    return name


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


def transformer_settings(folder: Path, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Read sentence_bert_config.json, or the file that old versions wrote instead; refuse other settings."""
    for name in ("bert", "distilbert"):
        path = folder / f"sentence_{name}_config.json"
        if settings := read_json(path, missing={}):
            break
    for name, value in wanted.items():
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
        raise ValueError(f"{path}: {name}={length!r} must be an integer of at least 3")
    return length


def prompts_of(path: Path, settings: Mapping[str, Any]) -> tuple[dict[str, str], str | None]:
    """Return the prompts by name, and the name of the one that every text gets."""
    if settings.get("truncate_dim") is not None:
        raise ValueError(
            f"{path} sets truncate_dim={settings['truncate_dim']!r}, which is not supported; set it to null,"
            " and cut the vectors where you use them"
        )
    prompts = settings.get("prompts") or {}
    default = settings.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise ValueError(f"{path}: prompts must be an object of strings, not {prompts!r:.80}")
    if default is not None and (not isinstance(default, str) or default not in prompts):
        raise ValueError(f"{path}: default_prompt_name={default!r} is not one of {sorted(prompts)}")
    return prompts, default


def pooling_of(folder: Path) -> tuple[tuple[str, ...], bool]:
    """Return a Pooling module's modes, in the order in which it concatenates them, and include_prompt."""
    config = read_json(folder / "config.json")
    include_prompt = config.get("include_prompt", True)
    if not isinstance(include_prompt, bool):
        raise ValueError(f"{folder}/config.json: include_prompt={include_prompt!r:.80} is not true or false")
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
    return tuple(names or ["mean"]), include_prompt


def dense_of(folder: Path) -> DenseConfig:
    config = read_json(folder / "config.json")
    known = {"in_features", "out_features", "bias", "activation_function"}
    known |= {"module_input_name", "module_output_name"}
    if config.get("use_residual") is False:
        known.add("use_residual")
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
