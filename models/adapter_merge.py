"""Merges an adapter into its base model: writes a checkpoint's folder that holds the sum."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from .adapters import TRANSPOSED_TYPES, Adapter, ModuleChange, change_bias, change_weight
from .derived_folder import copy_other_files, write_shards
from .folder import read_json, read_published_shapes, read_published_weights

# Classes of transformers by what an adapter says that it is for.
HEADS = {
    "SEQ_CLS": "ForSequenceClassification",
    "TOKEN_CLS": "ForTokenClassification",
    "QUESTION_ANS": "ForQuestionAnswering",
}
STEM = re.compile(r"(\w+?)(?:For[A-Z]\w*|LMHeadModel|Model)?")
EMBEDDINGS = tuple(
    f"{name}.weight" for name in ("embed_tokens", "wte", "word_embeddings", "embed_in", "tokens_embed")
)
HEAD = "lm_head.weight"
SCORES = ("score.weight", "classifier.weight", "out_proj.weight")  # of classes


class Merge:
    """The names by which a base model's files call what an adapter changes."""

    def __init__(self, base: Path, adapter: Adapter) -> None:
        self.base = base
        self.adapter = adapter
        self.config = read_json(base / "config.json")
        self.shapes = read_published_shapes(base)
        self.is_transposed = self.config.get("model_type") in TRANSPOSED_TYPES
        self.changes = {self.require(module): change for module, change in adapter.changes.items()}
        self.tensors = {self.find(name) or name: tensor for name, tensor in adapter.tensors.items()}
        self.check_tensors()

    def require(self, module: str) -> str:
        """Return the base's name of a module that the adapter changes."""
        found = self.find(f"{module}.weight")
        if found is None:
            raise ValueError(
                f"{self.adapter.folder} changes {module}, which {self.base} has not: it is of another base"
                f" model ({self.adapter.settings.get('base_model_name_or_path') or 'not named'})"
            )
        return found.removesuffix(".weight")

    def find(self, name: str) -> str | None:
        """Return the base's name of a tensor, which may have fewer or more of the outer modules in front."""
        inner = name
        while inner:
            if inner in self.shapes:
                return inner
            inner = inner.partition(".")[2] if inner.count(".") > 1 else ""
        outer = [one for one in self.shapes if one.endswith(f".{name}")]
        return outer[0] if len(outer) == 1 else None

    def check_tensors(self) -> None:
        """Refuse whole tensors of another shape than the base's, and unknown ones that are no head's."""
        kept = self.adapter.settings.get("modules_to_save") or []
        for name, tensor in self.tensors.items():
            own = self.shapes.get(name)
            if own is None and not any(f".{module}." in f".{name}" for module in kept) and name != HEAD:
                raise ValueError(f"{self.adapter.folder} has {name}, which {self.base} has not")
            is_table = name.endswith((*EMBEDDINGS, HEAD))
            if own is not None and own[is_table:] != tuple(tensor.shape)[is_table:]:
                raise ValueError(
                    f"{self.adapter.folder}: {name} is {list(tensor.shape)}, but {list(own)} in {self.base}:"
                    " it is of another base model"
                )

    def list_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the merged model's weights; those that the adapter leaves alone as they are published."""
        biases = {f"{module}.bias": change for module, change in self.changes.items()}
        weights = {f"{module}.weight": change for module, change in self.changes.items()}
        seen = set()
        # RoBERTa's classifier has its own in the place of the base's pooler.
        without = "pooler." if any("classifier.dense" in name for name in self.tensors) else None
        for _, name, tensor in read_published_weights(self.base):
            if without is not None and without in name:
                continue
            new = self.tensors.get(name, tensor)
            if (change := weights.get(name)) is not None:
                new = self.change(name, new, change)
            elif (change := biases.get(name)) is not None:
                changed = change_bias(new, change)
                new = new if changed is None else changed
            seen.add(name)
            yield name, new
            if self.unties and name.endswith(EMBEDDINGS):
                yield from self.add_own_head(name, tensor, seen)
        for name, tensor in self.tensors.items():
            if name not in seen:
                yield name, tensor
        for name, change in biases.items():
            if name not in seen and (bias := change_bias(None, change)) is not None:
                yield name, bias

    def change(self, name: str, weight: Tensor, change: ModuleChange) -> Tensor:
        """Return a weight with the adapter in it."""
        try:
            return change_weight(weight, change, self.is_transposed)
        except ValueError as error:
            raise ValueError(
                f"{self.adapter.folder}: {name} of {self.base} cannot be changed: {error}; the adapter is of"
                " another base model"
            ) from error

    @property
    def unties(self) -> bool:
        """Tell whether the adapter changes only one of an embedding and the head that shares its weight."""
        is_tied = self.config.get("tie_word_embeddings", True) and HEAD not in self.shapes
        if not is_tied or self.adapter.settings.get("ensure_weight_tying"):
            return False
        return self.changes_embedding != self.changes_head

    @property
    def changes_embedding(self) -> bool:
        """Tell whether the adapter changes the embedding."""
        return any(name.endswith(EMBEDDINGS) for name in self.list_changed())

    @property
    def changes_head(self) -> bool:
        """Tell whether the adapter changes the head that gives logits of the vocabulary."""
        return any(name.endswith(HEAD) for name in self.list_changed())

    def list_changed(self) -> list[str]:
        """Return the names of all weights that the adapter changes."""
        return [*self.tensors, *(f"{module}.weight" for module in self.changes)]

    def add_own_head(self, name: str, table: Tensor, seen: set[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield the head that shared the embedding's weight, where the adapter has none of its own."""
        if not self.changes_head and HEAD not in self.shapes:
            seen.add(HEAD)
            yield HEAD, table.clone()

    def make_config(self) -> dict[str, Any]:
        """Return the merged model's config.json."""
        config = dict(self.config)
        if self.unties:
            config["tie_word_embeddings"] = False
        sizes = {len(t) for name, t in self.tensors.items() if name.endswith((*EMBEDDINGS, HEAD))}
        if len(sizes) == 1:
            config["vocab_size"] = sizes.pop()
        self.add_head(config)
        return config

    def add_head(self, config: dict[str, Any]) -> None:
        """Name the class of a head that the adapter brings, and its labels."""
        ending = HEADS.get(str(self.adapter.settings.get("task_type")))
        match = STEM.fullmatch((config.get("architectures") or [""])[0])
        if ending is None or match is None or match[0].endswith(ending):
            return
        config["architectures"] = [match[1] + ending]
        rows = [len(tensor) for name, tensor in self.tensors.items() if name.endswith(SCORES)]
        if rows and ending != HEADS["QUESTION_ANS"]:
            config["id2label"] = {str(index): f"LABEL_{index}" for index in range(rows[0])}
            config["label2id"] = {f"LABEL_{index}": index for index in range(rows[0])}


def merge_adapter(base: Path, adapter: Adapter, out: Path) -> None:
    """Write a checkpoint's folder that holds a base model with an adapter in it.

    What the adapter changes is in fp32, the rest in the base's types. The tokenizer is the adapter's, where
    its folder has one, else the base's.

    Raises:
        ValueError: the adapter is of another base model; names the module, and the shapes.
    """
    merge = Merge(base, adapter)
    copy_other_files(base, adapter.folder, out)
    write_shards(merge.list_weights(), out)
    (out / "config.json").write_text(json.dumps(merge.make_config(), indent=2), encoding="utf-8")
