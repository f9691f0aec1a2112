"""Tiny encoders with heads: a random checkpoint, its bundle, opened, and what transformers makes of it."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from planforge.exporter import export
from planforge.exporter.checkpoints.checkpoint import Checkpoint
from planforge.exporter.checkpoints.source import Source
from planforge.runtime import TextEncoder
from planforge.runtime.backends.backend import Array

from .models import tiny_bert, write_wordpiece


@dataclass(frozen=True)
class Case:
    """One model twice.

    Attributes:
        folder: the checkpoint.
        reference: transformers' model of it.
        tokenizer: transformers' too.
        model: the opened bundle.
    """

    folder: Path
    reference: Any
    tokenizer: Any
    model: TextEncoder

    def reference_as(self, architecture: str) -> Any:
        """The same weights in another class of transformers, with one of the heads."""
        return getattr(transformers, architecture).from_pretrained(self.folder).float().eval()

    def pipeline(self, task: str, **options: Any) -> Any:
        """transformers' own pipeline on the reference."""
        defaults: dict[str, Any] = {"model": self.reference, "tokenizer": self.tokenizer, "device": "cpu"}
        build: Any = transformers.pipeline  # its overloads know no task whose name is a variable
        return build(task, **defaults | options)

    def logits(self, ids: list[int], segments: list[int] | None = None, reference: Any = None) -> Any:
        """What the reference makes of one sequence: its outputs, without the batch axis, as arrays."""
        inputs = {"input_ids": torch.tensor([ids])}
        if segments is not None:
            inputs["token_type_ids"] = torch.tensor([segments])
        with torch.inference_mode():
            outputs = (reference or self.reference)(**inputs)
        return {name: value[0].numpy() for name, value in outputs.items()}

    def with_config(self, folder: Path, **changes: Any) -> TextEncoder:
        """The opened bundle with the defaults that another config.json gives; `folder` gets that one."""
        shutil.copytree(self.folder, folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changes))
        defaults = Checkpoint(Source("folder", str(folder), folder)).encoder
        assert defaults is not None
        return TextEncoder(self.model.encoder, self.model.tokenizer, defaults)

    def ids(self, text: str) -> list[int]:
        """transformers' token ids of a text, special ones left out; [MASK] is a token."""
        ids: list[int] = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    def windows(
        self, text: str, before: str | None = None, stride: int = 16
    ) -> list[tuple[int, list[int], list[int]]]:
        """Windows over a text, after a first one if there is: where each starts, its ids, its segments."""
        cls = self.tokenizer.cls_token_id
        sep = self.tokenizer.sep_token_id
        head = [cls] if before is None else [cls, *self.ids(before), sep]
        ids = self.ids(text)
        room = self.model.defaults.max_length - len(head) - 1
        starts = [*range(0, len(ids) - room, room - stride), max(0, len(ids) - room)]
        kind = 0 if before is None else 1
        bodies = [[*ids[start : start + room], sep] for start in starts]
        return [
            (start, [*head, *body], [0] * len(head) + [kind] * len(body))
            for start, body in zip(starts, bodies, strict=True)
        ]


def opened(folder: Path, architecture: str, **config: Any) -> Case:
    """A random checkpoint of an architecture, exported into `folder` and opened; close its model."""
    checkpoint = folder / "checkpoint"
    bundle = folder / "bundle"
    write_wordpiece(checkpoint)
    reference = tiny_bert(checkpoint, architecture, **config)
    export(checkpoint, bundle, precision=["fp32"], target=["cpu"], verify=False)
    tokenizer = transformers.BertTokenizer.from_pretrained(checkpoint)
    return Case(checkpoint, reference, tokenizer, TextEncoder.load(bundle))


def save_tiny_encoder(folder: Path, kind: str) -> None:
    """Write a random encoder of one of transformers' kinds, and BERT's tokenizer."""
    tiny_bert(folder)
    write_wordpiece(folder)
    transformers.BertTokenizer.from_pretrained(folder).save_pretrained(folder)  # its class stands there now
    vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
    sizes = {
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "max_position_embeddings": 68,
        "pad_token_id": 0,
        "initializer_range": 0.3,
    }
    own = {"local_attention": 8} if kind == "ModernBert" else {"type_vocab_size": 1}
    transformers.set_seed(0)
    config = getattr(transformers, f"{kind}Config")(**sizes, **own)
    getattr(transformers, f"{kind}Model")(config).save_pretrained(folder)


def softmax(logits: Array) -> Array:
    shares: Array = torch.tensor(logits).double().softmax(-1).numpy()
    return shares


def sigmoid(logits: Array) -> Array:
    shares: Array = torch.tensor(logits).double().sigmoid().numpy()
    return shares
