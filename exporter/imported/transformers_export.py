"""Runs transformers' own exporter in a process of its own, as it replaces parts of torch while it traces."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from ...models.folder import read_json
from ..errors import CheckpointError, ExportError, shorten_error
from ..processes import make_command, run_child
from ..tensorrt.plans import Progress
from .architectures import check_tokenizer, choose_task
from .optimum import MODEL_TYPES

WORKER = "planforge.exporter.imported.transformers_worker"
# The class that reads a checkpoint, and what is traced, by the task; as `load_reference` reads it.
CLASSES = {
    "text2text-generation-with-past": ("AutoModelForSeq2SeqLM", "translator"),
    "text-generation-with-past": ("AutoModelForCausalLM", "decoder"),
    "fill-mask": ("AutoModelForMaskedLM", "encoder"),
    "text-classification": ("AutoModelForSequenceClassification", "encoder"),
    "token-classification": ("AutoModelForTokenClassification", "encoder"),
    "question-answering": ("AutoModelForQuestionAnswering", "encoder"),
    "feature-extraction": ("AutoModel", "encoder"),
}


def export_with_transformers(checkpoint: Path, out: Path, progress: Progress) -> None:
    """Write a model's graphs, config and tokenizer to a folder; code that a checkpoint brings is never run.

    Raises:
        CheckpointError: of a kind, a model_type or files that cannot be exported.
        ExportError: transformers does not trace the model; the message names the module, and the way out.
    """
    class_name, kind = CLASSES[choose_task(checkpoint)]
    refuse_unknown_type(checkpoint)
    check_tokenizer(checkpoint)
    progress("tracing the model of transformers")
    out.mkdir(parents=True, exist_ok=True)
    arguments = [str(checkpoint), class_name, kind, str(out)]
    done = run_child(
        [*make_command(WORKER), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    if done.returncode:
        raise explain_failure(checkpoint, read_last_line(done))


def refuse_unknown_type(checkpoint: Path) -> None:
    """Refuse a checkpoint whose model_type neither PlanForge nor transformers knows."""
    try:
        import transformers
        import transformers.exporters
    except ImportError as error:
        raise ExportError(
            f"{checkpoint}: PlanForge has no model of this kind, and needs transformers 5.23, or newer, to"
            f" trace its own ({shorten_error(error)}): pip install 'transformers>=5.23', on Python 3.11 or"
            " newer"
        ) from error
    kind = read_json(checkpoint / "config.json").get("model_type")
    if kind not in transformers.CONFIG_MAPPING:
        raise CheckpointError(
            f"{checkpoint}: model_type {kind!r} is known neither to PlanForge nor to transformers"
            f" {transformers.__version__}; install a transformers that has it, or add the model to PlanForge"
            " as in docs/add-a-model.md"
        )


def read_last_line(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """Return what a worker said of its error: `reason`, `place` and whether the model was `loaded`."""
    try:
        said = json.loads(done.stdout.strip().splitlines()[-1])
        return {"reason": str(said["reason"]), "place": str(said["place"]), "loaded": bool(said["loaded"])}
    except (ValueError, LookupError, TypeError):
        code = done.returncode
        why = f"signal {-code}" + (": is there enough memory?" if code == -9 else "") if code < 0 else ""
        last = (done.stderr.strip().splitlines() or [""])[-1]
        return {"reason": why or last or f"exit code {code}", "place": "", "loaded": True}


def explain_failure(checkpoint: Path, said: dict[str, Any]) -> Exception:
    """Return the error for a worker that failed: where the model stopped it, and what to do instead."""
    reason = f"{shorten_error(said['reason']):.400}"
    if not said["loaded"]:
        return CheckpointError(f"transformers cannot load {checkpoint}: {reason}")
    kind = read_json(checkpoint / "config.json").get("model_type")
    where = f", in {said['place']}" if said["place"] else ""
    if kind in MODEL_TYPES:
        way = f"optimum-onnx exports {kind} too: --exporter optimum, as in docs/import.md"
    else:
        way = f"optimum-onnx 0.1 does not export {kind} either; add the model as in docs/add-a-model.md"
    return ExportError(f"transformers' model of {checkpoint} cannot be traced{where}: {reason}. {way}")
