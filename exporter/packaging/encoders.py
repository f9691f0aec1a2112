"""Gives an encoder's graph the outputs that readers of Hugging Face's folders look for, and its config."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from ...runtime.bundle.artifact import Artifact
from ...runtime.bundle.manifest import Manifest
from ..passes.build import Builder
from .graphs import PREFIX, find_value, rename_values, replace_input, replace_output

CLASSES = {
    "masked_lm": "ForMaskedLM",
    "sequence_classification": "ForSequenceClassification",
    "token_classification": "ForTokenClassification",
    "question_answering": "ForQuestionAnswering",
}
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
# By a head's role: its name, and the pipeline of transformers that reads it.
PIPELINES = {
    "masked_lm": "fill-mask",
    "sequence_classification": "text-classification",
    "token_classification": "token-classification",
    "question_answering": "question-answering",
}


def name_outputs_as_hugging_face(graph: ir.Graph, artifact: Artifact, head: str | None) -> None:
    """Keep a head's outputs alone, under the names logits or start_logits and end_logits; or the states.

    A masked_lm predicts every token (B, T, V), as no input says which ones are wanted.
    """
    wanted = [spec.name for spec in artifact.outputs if spec.role.split(".")[0] == head] if head else []
    if not wanted:
        wanted = [spec.name for spec in artifact.outputs if spec.role in ("sentence_embedding",)]
        wanted.append("last_hidden_state")
    for value in list(graph.outputs):
        if value.name not in wanted:
            graph.outputs.remove(value)
    if head == "masked_lm":
        predict_every_token(graph, artifact.output("masked_lm").name)
    if head is not None and len(wanted) == 1:
        rename_values(graph, {wanted[0]: "logits"})


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


def describe_encoder(manifest: Manifest, head: str | None) -> dict[str, Any]:
    """Return config.json of an encoder."""
    defaults = manifest.encoder
    assert defaults is not None
    model_type = manifest.family if manifest.family in CLASS_NAMES else "bert"
    config: dict[str, Any] = {
        "model_type": model_type,
        "architectures": [CLASS_NAMES[model_type] + (CLASSES[head] if head else "Model")],
        "max_position_embeddings": defaults.max_length,
        "pad_token_id": defaults.tokens["pad"],
    }
    if defaults.labels:
        config["id2label"] = {str(number): label for number, label in enumerate(defaults.labels)}
        config["label2id"] = {label: number for number, label in enumerate(defaults.labels)}
    if defaults.problem_type is not None:
        config["problem_type"] = defaults.problem_type
    return config
