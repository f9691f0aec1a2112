"""A model repository for NVIDIA's Triton server."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from ...runtime.bundle.artifact import Artifact, TensorSpec
from ...runtime.bundle.bundle import Bundle
from ...runtime.bundle.json_reader import FILE_NAME
from ...runtime.errors import InputError
from ..task_traits import TRAITS
from .folder import write_graph
from .graphs import read_graph
from .links import FilePlacer

MODEL = Path(__file__).with_name("triton_models") / "model.py"
TYPES = {
    "float32": "TYPE_FP32",
    "float16": "TYPE_FP16",
    "int64": "TYPE_INT64",
    "int32": "TYPE_INT32",
    "bool": "TYPE_BOOL",
}
# The task of an encoder, as `TextEncoder.iterate` names it, by its head; without one it embeds.
TASKS = {
    "sequence_classification": "classify",
    "token_classification": "tag",
    "masked_lm": "fill_mask",
    "question_answering": "answer",
    "next_sentence": "next_sentence",
}
OF_PAIRS = ("answer", "next_sentence")  # tasks that need the input CONTEXT, a second text
OF_BOTH = ("classify", "rank")  # that take it; "rank" without it is "classify"
QUEUE_MICROSECONDS = 500  # that a request may wait for others to share its batch


def write(bundle: Bundle, artifacts: Sequence[Artifact], folder: Path, placer: FilePlacer) -> None:
    """Write the model that takes texts, and for an encoder its graph as a separate model."""
    name = name_model(bundle)
    decides = artifacts[-1]  # a decoder, where there are two
    version = folder / name / "1"
    version.mkdir(parents=True)
    shutil.copyfile(MODEL, version / "model.py")
    for file in (FILE_NAME, *bundle.manifest.files):
        placer.place(bundle.folder / file, version / "bundle" / file)
    config = describe_text_model(bundle, decides, name)
    (folder / name / "config.pbtxt").write_text(config, encoding="utf-8")
    if bundle.manifest.encoder is not None:
        graph = f"{name}_graph"
        write_graph(
            bundle,
            decides,
            read_graph(bundle, decides),
            folder / graph / "1" / "model.onnx",
            "model.onnx.data",
            placer,
        )
        (folder / graph / "config.pbtxt").write_text(describe_graph(decides, graph), encoding="utf-8")


def name_model(bundle: Bundle) -> str:
    """Return the name of the model that takes texts: that of the bundle's folder."""
    return re.sub(r"[^A-Za-z0-9_.-]", "_", bundle.folder.resolve().name)


def choose_task(bundle: Bundle) -> str:
    """Return the task of the model that takes texts; refuse an encoder whose heads do not apply to texts."""
    manifest = bundle.manifest
    if manifest.encoder is None:
        return "generate" if TRAITS[manifest.task].continues_texts else "translate"
    heads = manifest.encoder.heads
    if not heads:
        return "embed"
    task = next((name for head, name in TASKS.items() if head in heads), None)
    if task is None:
        raise InputError(
            f"{bundle.folder} has the heads {', '.join(heads)}; packages for Triton support one of"
            f" {', '.join(TASKS)}, or no head, to embed texts"
        )
    one_score = task == "classify" and len(manifest.encoder.labels) == 1
    return "rank" if one_score else task


def describe_text_model(bundle: Bundle, artifact: Artifact, name: str) -> str:
    """Return config.pbtxt of the model that takes texts."""
    task = choose_task(bundle)
    inputs = [("TEXT", "TYPE_STRING", [1], False), ("OPTIONS", "TYPE_STRING", [1], True)]
    if task in OF_PAIRS or task in OF_BOTH:
        inputs.append(("CONTEXT", "TYPE_STRING", [1], task in OF_BOTH))
    outputs = {
        "generate": [
            ("TEXT", "TYPE_STRING", [1]),
            ("TOKEN_IDS", "TYPE_INT64", [-1]),
            ("FINISH_REASON", "TYPE_STRING", [1]),
        ],
        "translate": [("TEXT", "TYPE_STRING", [1])],
        "embed": [("EMBEDDING", "TYPE_FP32", [-1])],
    }.get(task, [("RESULT", "TYPE_STRING", [1])])
    batched = task != "generate"
    lines = [f'name: "{name}"', 'backend: "python"']
    # A generator's requests meet in the runtime, between any two steps.
    lines.append(f"max_batch_size: {artifact.axis('batch').max if batched else 0}")
    if batched:
        lines.append(f"dynamic_batching {{ max_queue_delay_microseconds: {QUEUE_MICROSECONDS} }}")
    else:
        lines.append("model_transaction_policy { decoupled: true }")
    lines += [write_tensor("input", *tensor) for tensor in inputs]
    lines += [write_tensor("output", *tensor) for tensor in outputs]
    lines.append("instance_group [{ kind: KIND_CPU, count: 1 }]")
    parameters = {"task": task, "precision": artifact.precision, "backend": "auto"}
    return "\n".join([*lines, *write_parameters(parameters)]) + "\n"


def describe_graph(artifact: Artifact, name: str) -> str:
    """Return config.pbtxt of an encoder's graph, which ONNX Runtime's backend runs."""
    lines = [f'name: "{name}"', 'backend: "onnxruntime"', "max_batch_size: 0"]
    lines += [write_spec("input", spec) for spec in artifact.inputs]
    lines += [write_spec("output", spec) for spec in artifact.outputs]
    return "\n".join(lines) + "\n"


def write_spec(kind: str, spec: TensorSpec) -> str:
    """Return the entry of a graph's input or output; a dynamic axis is -1."""
    dims = [axis if isinstance(axis, int) else -1 for axis in spec.axes]
    return write_tensor(kind, spec.name, TYPES[spec.dtype], dims)


def write_tensor(kind: str, name: str, type_name: str, dims: Sequence[int], optional: bool = False) -> str:
    """Return an entry of config.pbtxt."""
    extra = ", optional: true" if optional else ""
    numbers = ", ".join(map(str, dims))
    return f'{kind} [{{ name: "{name}", data_type: {type_name}, dims: [{numbers}]{extra} }}]'


def write_parameters(values: Mapping[str, str]) -> list[str]:
    """Return the entries of the parameters that model.py reads."""
    return [
        f'parameters {{ key: "{key}", value: {{ string_value: "{value}" }} }}'
        for key, value in values.items()
    ]
