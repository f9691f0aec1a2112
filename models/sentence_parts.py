"""Reads the settings of single modules of a sentence-transformers folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

from .folder import read_json
from .retrieval_vectors import SPLADE_POOLINGS, SpladeConfig, TokenVectorConfig
from .sentence import (
    POOLINGS,
    DenseConfig,
    LayerNormConfig,
    NormalizeConfig,
    SentenceConfig,
    SentenceLayer,
)

TOKENS = "token_embeddings"  # the name of tokens' vectors between modules
TEXT = "sentence_embedding"  # of a text's
SCORES = "scores"  # of a pair's scores
ACTIVATION_NAMES = {"Identity": None, "Tanh": "tanh", "ReLU": "relu", "GELU": "gelu", "SiLU": "silu"}
Modules: TypeAlias = Sequence[tuple[str, Path]]


def read_splade(folder: Path) -> SpladeConfig:
    """Return the settings of a SpladePooling module."""
    config = read_json(folder / "config.json", missing={})
    logs = {"relu": 1, "log1p_relu": 2}
    activation = config.get("activation_function", "relu")
    pooling = config.get("pooling_strategy", "max")
    if activation not in list(logs) or pooling not in list(SPLADE_POOLINGS):
        raise ValueError(
            f"{folder}/config.json sets activation_function={activation!r:.80} and pooling_strategy="
            f"{pooling!r:.80}; supported are {', '.join(logs)}, and {', '.join(SPLADE_POOLINGS)}"
        )
    return SpladeConfig(pooling, logs[activation])


def read_token_vectors(modules: Modules, is_pylate: bool) -> TokenVectorConfig:
    """Return the settings of the modules behind a transformer that make a vector of each token.

    PyLate normalizes without a module. As in sentence-transformers, a Normalize of texts' vectors does
    nothing here.
    """
    layers: list[SentenceLayer] = []
    for kind, path in modules:
        if kind == "Dense":
            layers.append(dense_of(path, TOKENS))
        elif kind == "Normalize" and names_of(path, TEXT) == (TOKENS, TOKENS):
            layers.append(NormalizeConfig())
    return TokenVectorConfig((*layers, NormalizeConfig()) if is_pylate else tuple(layers))


def read_score_tokens(folder: Path) -> tuple[int, int | None]:
    """Return the tokens of a LogitScore module."""
    config = read_json(folder / "config.json")
    yes, no = config.get("true_token_id"), config.get("false_token_id")
    if type(yes) is not int or type(no) not in (int, type(None)):
        raise ValueError(
            f"{folder}/config.json: true_token_id={yes!r:.40} and false_token_id={no!r:.40} must be ids"
        )
    if config.get("module_input_name", "causal_logits") != "causal_logits":
        raise ValueError(f"{folder}/config.json: module_input_name is not 'causal_logits'")
    return yes, no


def read_sentence(modules: Modules) -> SentenceConfig:
    """Return the settings of a Pooling module and those after it, by their kinds and folders."""
    _, pooling = modules[0]
    names, include_prompt = pooling_of(pooling)
    return SentenceConfig(names, read_layers(modules[1:]), include_prompt)


def read_pair_scores(modules: Modules) -> SentenceConfig:
    """Return the settings of a Pooling module and those after it, of which the last makes scores."""
    config = read_sentence(modules[:-1])
    return replace(config, layers=(*config.layers, dense_of(modules[-1][1], TEXT, SCORES)))


def read_layers(modules: Modules) -> tuple[SentenceLayer, ...]:
    """Return the settings of modules that follow where a text has one vector."""
    layers: list[SentenceLayer] = []
    for kind, path in modules:
        if kind == "Dense":
            layers.append(dense_of(path, TEXT))
        elif kind == "LayerNorm":
            layers.append(LayerNormConfig(read_json(path / "config.json").get("dimension", 0)))
        elif kind == "Normalize":
            check_names(path, TEXT)
            layers.append(NormalizeConfig())  # a Dropout does nothing once a model is trained
    return tuple(layers)


def activation_of(path: Path, settings: Mapping[str, Any]) -> str | None:
    """Return the class by which a CrossEncoder turns logits into scores."""
    name = settings.get("activation_fn")
    if name is not None and not isinstance(name, str):
        raise ValueError(f"{path}: activation_fn={name!r:.80} is not a class's name")
    return name


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


def dense_of(folder: Path, read: str, written: str | None = None) -> DenseConfig:
    """Return the settings of a Dense module, by the name of what it reads, and writes if not another."""
    config = read_json(folder / "config.json")
    known = {"in_features", "out_features", "bias", "activation_function"}
    known |= {"module_input_name", "module_output_name"}
    if config.get("use_residual") is False:
        known.add("use_residual")
    if unknown := set(config) - known:
        raise ValueError(f"{folder}/config.json sets {sorted(unknown)}, which is not supported")
    check_names(folder, read, written)
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


def names_of(folder: Path, usual: str) -> tuple[Any, Any]:
    """Return the names of the vectors that a module reads and writes."""
    config = read_json(folder / "config.json", missing={})
    read = config.get("module_input_name") or usual
    return read, config.get("module_output_name") or read


def check_names(folder: Path, read: str, written: str | None = None) -> None:
    """Refuse a Dense or Normalize module that reads or writes other vectors."""
    names = {"module_input_name": read, "module_output_name": written or read}
    for (name, wanted), value in zip(names.items(), names_of(folder, read), strict=True):
        if value != wanted:
            raise ValueError(f"{folder}/config.json sets {name}={value!r}; only {wanted!r} is supported")
