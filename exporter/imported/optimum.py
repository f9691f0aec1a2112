"""Runs optimum's exporter in a process of its own, and in its own Python environment where needed."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from ...models.folder import read_json
from ..errors import ExportError
from ..processes import run_child
from ..tensorrt.plans import Progress
from .architectures import check_tokenizer, choose_task

VENV = "optimum-venv"
ENVIRONMENT = (
    f"python3 -m venv {VENV}, then {VENV}/bin/pip install optimum-onnx onnxruntime sentencepiece protobuf"
    " 'transformers<4.58'"
)
# Settings of rope_parameters, and their names in transformers before 5.
ROPE_SETTINGS = {
    "rope_theta": ("rope_theta", "rotary_emb_base"),
    "partial_rotary_factor": ("partial_rotary_factor", "rotary_pct"),
}
FULL = "full_attention"
SLIDING = "sliding_attention"
# What optimum-onnx 0.1 exports of models that read text.
MODEL_TYPES = (
    "albert", "arcee", "bart", "bert", "big_bird", "bigbird_pegasus", "blenderbot", "blenderbot-small",
    "bloom", "camembert", "codegen", "cohere", "convbert", "data2vec-text", "deberta", "deberta-v2",
    "distilbert", "electra", "esm", "falcon", "flaubert", "gemma", "gemma2", "gemma3_text", "glm", "gpt2",
    "gpt_bigcode", "gpt_neo", "gpt_neox", "gpt_oss", "gptj", "granite", "helium", "ibert", "internlm2",
    "layoutlm", "lilt", "llama", "longformer", "longt5", "m2m_100", "marian", "markuplm", "mbart",
    "megatron-bert", "mistral", "mobilebert", "modernbert", "mpnet", "mpt", "mt5", "nemotron",
    "nystromformer", "olmo", "olmo2", "opt", "pegasus", "phi", "phi3", "qwen2", "qwen3", "rembert",
    "roberta", "roformer", "smollm3", "splinter", "squeezebert", "stablelm", "t5", "xlm", "xlm-roberta",
)  # fmt: skip


def export_with_optimum(checkpoint: Path, out: Path, python: str | None, progress: Progress) -> None:
    """Write a model's graphs and tokenizer to a folder; code that a checkpoint brings is never run."""
    check_tokenizer(checkpoint)
    progress("exporting with optimum")
    task = choose_task(checkpoint)
    if python is None and importlib.util.find_spec("optimum") is None:
        kind = read_json(checkpoint / "config.json", missing={}).get("model_type", "this model")
        by = "is exported by optimum" if kind in MODEL_TYPES else "may be exported by a newer optimum"
        raise ExportError(
            f"{kind} {by}, which is not installed here, as it needs transformers < 4.58:"
            f" {ENVIRONMENT}; then pass --optimum-python {VENV}/bin/python"
        )
    if python is not None and os.path.isdir(python):  # the environment's folder
        python = os.path.join(python, "bin", "python")
    if python is not None and os.path.dirname(python):
        python = os.path.abspath(python)  # a link stays one: it is how Python finds its environment
    command = [python or sys.executable, "-m", "optimum.commands.optimum_cli", "export", "onnx"]
    with tempfile.TemporaryDirectory(prefix="planforge-checkpoint-") as folder:
        readable = write_for_transformers_4(checkpoint.resolve(), Path(folder, "checkpoint"))
        command += ["--model", str(readable), "--task", task, "--no-post-process", str(out.resolve())]
        try:
            done = run_child(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                cwd=out.parent,
                env={**os.environ, "TMPDIR": folder},  # its leftovers are removed with ours
            )
        except OSError as error:
            raise ExportError(f"{command[0]} cannot be run: {error.strerror}") from error
    if done.returncode:
        said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        if missing := re.search(r"No module named '([\w.]+)'", said):
            raise ExportError(f"{command[0]} has no {missing[1]}: {ENVIRONMENT}")
        raise ExportError(f"optimum does not export {checkpoint}: {said}")


def write_for_transformers_4(checkpoint: Path, copy: Path) -> Path:
    """Return the checkpoint, or a folder of its files with a config.json for transformers before 5.

    Those versions ignore rope_parameters, and take the default for each of them without a warning. That
    folder is made as `copy`, if it is needed.
    """
    config = read_json(checkpoint / "config.json")
    known = name_as_before_5(config.get("rope_parameters"))
    if not known:
        return checkpoint
    copy.mkdir()
    for entry in checkpoint.iterdir():
        if entry.name == "config.json":
            continue
        try:
            (copy / entry.name).symlink_to(entry)
        except OSError:  # a system that allows no links
            if entry.is_file():
                shutil.copy2(entry, copy / entry.name)
    (copy / "config.json").write_text(json.dumps(config | known), encoding="utf-8")
    return copy


def name_as_before_5(given: Any) -> dict[str, Any]:
    """Return the settings of rope_parameters by their names in transformers before 5.

    None are returned where kinds of layers differ by more than rope_theta, which verification finds.
    """
    if not isinstance(given, dict):
        return {}
    if given.keys() == {FULL, SLIDING}:  # Gemma 3
        local = given[SLIDING]
        if isinstance(local, dict) and local.get("rope_type", "default") == "default":
            return name_as_before_5(given[FULL]) | {"rope_local_base_freq": local.get("rope_theta")}
    if any(isinstance(value, dict) for value in given.values()):
        return {}
    scaling = {k: v for k, v in given.items() if k not in ROPE_SETTINGS}
    known = {name: given[k] for k, names in ROPE_SETTINGS.items() if k in given for name in names}
    kind = scaling.get("rope_type", "default")
    if kind == "longrope":  # older versions take only these
        known["original_max_position_embeddings"] = scaling.get("original_max_position_embeddings")
        scaling = {"type": kind} | {k: v for k, v in scaling.items() if k in ("short_factor", "long_factor")}
    if kind != "default":
        known["rope_scaling"] = scaling
    return known
