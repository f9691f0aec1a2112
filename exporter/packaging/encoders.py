"""Gives an encoder's graph the outputs and the config that readers of Hugging Face's folders expect."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import onnx_ir as ir

from ...runtime.bundle.artifact import Artifact
from ...runtime.bundle.manifest import Manifest
from ...runtime.errors import InputError
from ..passes.build import Builder
from ..task_traits import CLASS_ENDS
from .graphs import PREFIX, find_value, rename_values, replace_input, replace_output

log = logging.getLogger("planforge")

EMBEDDING = "sentence_embedding"  # an output's role, and its name
# How the classes of families begin that all readers know; another encoder is called a BERT, whose inputs
# and outputs it has.
CLASS_NAMES = {
    "bert": "Bert",
    "distilbert": "DistilBert",
    "roberta": "Roberta",
    "xlm-roberta": "XLMRoberta",
    "electra": "Electra",
    "mpnet": "MPNet",
    "modernbert": "ModernBert",
}


SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")


def check_heads(manifest: Manifest, title: str) -> None:
    """Refuse an encoder whose heads have no class in Hugging Face; warn of a further head left out.

    One whose pairs a chat template writes is refused too: those readers would take two texts.
    """
    assert manifest.encoder is not None
    if manifest.encoder.pairs is not None:
        raise InputError(
            f"{title} does not write pairs by the model's chat template; package it with --for triton"
        )
    unknown = [head for head in manifest.encoder.heads if head not in CLASS_ENDS]
    if not unknown:
        return
    if find_head(manifest) is None:
        raise InputError(f"{title} does not support the head {unknown[0]}; package it with --for triton")
    log.warning("%s does not support both heads: the package leaves out %s", title, ", ".join(unknown))


def find_head(manifest: Manifest) -> str | None:
    """Return the role of an encoder's head; None where it embeds texts."""
    assert manifest.encoder is not None
    return next((head for head in manifest.encoder.heads if head in CLASS_ENDS), None)


def name_class(manifest: Manifest) -> str:
    """Return the end of the class that has a head, such as "ForMaskedLM"; "" where there is none."""
    head = find_head(manifest)
    return CLASS_ENDS[head] if head else ""


def name_outputs(manifest: Manifest, artifact: Artifact, *, embedding: bool) -> dict[str, str]:
    """Return a package's names of an encoder's outputs, by the bundle's; the others are left out.

    They are a head's logits, or start_logits and end_logits; else the states, and with `embedding` that of
    the text, if there is one.
    """
    head = find_head(manifest)
    if head is None:
        states = f"hidden.{count_states(artifact)}"
        wanted = {states: "last_hidden_state"} | ({EMBEDDING: EMBEDDING} if embedding else {})
        return {spec.name: wanted[spec.role] for spec in artifact.outputs if spec.role in wanted}
    names = [spec.name for spec in artifact.outputs if spec.role.split(".")[0] == head]
    return {name: "logits" if len(names) == 1 else name for name in names}


def count_states(artifact: Artifact) -> int:
    """Return the number of the last layer whose states are an output."""
    layers = [
        spec.role.removeprefix("hidden.") for spec in artifact.outputs if spec.role.startswith("hidden.")
    ]
    return max(map(int, layers), default=0)


def convert_encoder(
    graph: ir.Graph, manifest: Manifest, artifact: Artifact, *, embedding: bool = False
) -> None:
    """Keep the outputs of an encoder that others read, under their names.

    A masked_lm predicts every token (B, T, V), as no input says which ones are wanted.
    """
    names = name_outputs(manifest, artifact, embedding=embedding)
    for value in list(graph.outputs):
        if value.name not in names:
            graph.outputs.remove(value)
    if find_head(manifest) == "masked_lm":
        predict_every_token(graph, artifact.output("masked_lm").name)
    rename_values(graph, names)


def predict_every_token(graph: ir.Graph, name: str) -> None:
    """Compute a head over all tokens, (B, T, V) in place of (N, V) of the rows that an input chooses."""
    ids = graph.inputs[0]
    add = Builder(graph, graph[0], PREFIX)
    shape = add("Shape", ids)  # (2,) B and T
    rows = add("Range", 0, add("Size", ids), 1)
    replace_input(graph, "logit_rows", rows)
    logits = find_value(graph.outputs, name)
    assert logits is not None and logits.shape is not None and ids.shape is not None
    width = logits.shape[-1]
    add = Builder(graph, None, PREFIX)
    parts = add("Reshape", logits, add("Concat", shape, np.array([width]), axis=0))
    replace_output(graph, logits, parts, ir.Shape([*ids.shape, width]))


def describe_encoder(manifest: Manifest) -> dict[str, Any]:
    """Return config.json of an encoder."""
    defaults = manifest.encoder
    assert defaults is not None
    model_type = manifest.family if manifest.family in CLASS_NAMES else "bert"
    config: dict[str, Any] = {
        "model_type": model_type,
        "architectures": [CLASS_NAMES[model_type] + (name_class(manifest) or "Model")],
        "max_position_embeddings": defaults.max_length,
        "pad_token_id": defaults.tokens.get("pad"),
    }
    config |= {name: manifest.config[name] for name in SIZES if name in manifest.config}
    if defaults.labels:
        config["id2label"] = {str(number): label for number, label in enumerate(defaults.labels)}
        config["label2id"] = {label: number for number, label in enumerate(defaults.labels)}
    if defaults.problem_type is not None:
        config["problem_type"] = defaults.problem_type
    return config
