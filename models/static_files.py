"""Reads tables of rows: of StaticEmbedding, model2vec and SparseStaticEmbedding."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path, PureWindowsPath
from typing import TYPE_CHECKING, Any

import torch

from .folder import FILES, read_json, read_published_shapes, read_published_weights
from .static import StaticConfig

if TYPE_CHECKING:
    from torch import Tensor

    from .sentence_transformers import SentenceModules

ROWS = ("embedding.weight", "embeddings", "weight")  # names of a table: the first two classes', the third's
MOST_TOKENS = 2**24
IDF = "idf.json"  # weights of tokens by their spelling, in place of a table
NAMES = ("model_type", "vocab_size", "hidden_size", "num_attention_heads", "intermediate_size")


def describe_table(modules: SentenceModules) -> tuple[StaticConfig, dict[str, Any]]:
    """Return the settings of a folder's table, and what a config.json would have of them.

    Raises:
        ValueError: there is no table, or its parts do not fit each other; names them.
    """
    folder = modules.transformer
    if modules.sparse is not None and find_idf(folder) is not None:
        rows, width = 1 + max(read_vocabulary(folder).values()), 1
    else:
        shapes = read_published_shapes(folder)
        name = find_table(folder, shapes)
        shape = shapes[name]
        if len(shape) != (1 if modules.sparse is not None else 2):
            raise ValueError(f"{folder}: {name} has the shape {shape}, which is no table of rows")
        rows, width = shapes.get("mapping", shape)[0], 1 if len(shape) == 1 else shape[1]
        if "weights" in shapes and shapes["weights"] != (rows,):
            raise ValueError(
                f"{folder}: weights has the shape {shapes['weights']}, and there are {rows} rows"
            )
    config = StaticConfig(vocab_size=rows, hidden_size=width, **modules.settings)
    return config, {name: getattr(config, name, "static") for name in NAMES}


def find_idf(folder: Path) -> Path | None:
    """Return the file of tokens' weights that a folder has in place of a table.

    As in sentence-transformers it counts where config.json names it as its `path`, which may have been made
    elsewhere; here also where there is no table.
    """
    named = read_json(folder / "config.json", missing={}).get("path")
    if isinstance(named, str) and named.endswith(".json"):
        path = folder / PureWindowsPath(named).name  # takes / and \ alike
        if not path.is_file():
            raise ValueError(
                f"{folder / 'config.json'} sets path={named!r:.200}; put that file into {folder}, as"
                f" {path.name}"
            )
        return path
    has_table = any((folder / name).is_file() for names in FILES for name in names)
    return folder / IDF if (folder / IDF).is_file() and not has_table else None


def find_table(folder: Path, names: Mapping[str, object]) -> str:
    """Return the name of the table among those of a folder's weights."""
    found = [name for name in ROWS if name in names]
    if len(found) != 1 or set(names) - {found[0], "mapping", "weights"}:
        raise ValueError(
            f"{folder} has the weights {sorted(names)}, of which one must be {' or '.join(ROWS)}"
        )
    return found[0]


def read_vocabulary(folder: Path) -> dict[str, int]:
    """Return the ids of a tokenizer.json's tokens, by their spelling."""
    path = folder / "tokenizer.json"
    written = read_json(path)
    model = written.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, list):  # a Unigram's, whose ids are places
        vocabulary = {piece: token for token, (piece, _) in enumerate(vocabulary)}
    if not isinstance(vocabulary, dict) or not vocabulary:
        raise ValueError(f"{path} has no vocabulary")
    try:
        vocabulary |= {token["content"]: token["id"] for token in written.get("added_tokens") or []}
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path}: added_tokens must be a list of tokens with content and id") from error
    bad = [token for token in vocabulary.values() if type(token) is not int or not 0 <= token < MOST_TOKENS]
    if bad:
        raise ValueError(f"{path}: {bad[0]!r:.40} is no token's id; ids are from 0 to {MOST_TOKENS - 1:,}")
    return vocabulary


def read_table(modules: SentenceModules) -> dict[str, Tensor]:
    """Return the table under our name, in fp32: with model2vec's mapping and weights a row for each token."""
    folder = modules.transformer
    if modules.sparse is not None and (path := find_idf(folder)) is not None:
        return {"words.weight": read_idf(path)}
    weights = {name: tensor for _, name, tensor in read_published_weights(folder)}
    table = weights[find_table(folder, weights)]
    if "mapping" in weights:
        places = weights["mapping"].long()
        if places.ndim != 1 or not len(places):
            raise ValueError(
                f"{folder}: mapping has the shape {tuple(places.shape)}; it is a row for each token"
            )
        if not 0 <= int(places.min()) <= int(places.max()) < len(table):
            raise ValueError(f"{folder}: mapping names rows beyond the table's {len(table)}")
        table = table[places]
    table = table.to(torch.float32)
    if "weights" in weights:
        table = table * weights["weights"].to(torch.float32)[:, None]
    return {"words.weight": table.reshape(len(table), -1).contiguous()}


def read_idf(path: Path) -> Tensor:
    """Return the weight (V, 1) of each token; 0 of those that the file does not name."""
    vocabulary = read_vocabulary(path.parent)
    table = torch.zeros(1 + max(vocabulary.values()), 1)
    for spelling, weight in read_json(path).items():
        if spelling not in vocabulary or type(weight) not in (int, float):
            raise ValueError(f"{path}: {spelling!r:.60} with {weight!r:.40} is no token with its weight")
        table[vocabulary[spelling]] = weight
    return table
