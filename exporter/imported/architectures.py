"""What a checkpoint's config.json says of its architecture, which transformers or optimum exports."""

from __future__ import annotations

from pathlib import Path

from ...models.folder import read_json
from ...models.refusals import refuse_kind, refuse_quantized
from ..errors import CheckpointError, raise_checkpoint_errors
from .folder import read_architecture

TOKENIZERS = ("tokenizer.json", "vocab.json", "vocab.txt", "*.model", "*.spm")
# What is exported of an architecture, by the end of its name, as optimum calls it.
TASKS = {
    "T5WithLMHeadModel": "text2text-generation-with-past",  # what T5 was called
    "ForCausalLM": "text-generation-with-past",
    "LMHeadModel": "text-generation-with-past",
    "ForConditionalGeneration": "text2text-generation-with-past",
    "MTModel": "text2text-generation-with-past",
    "ForMaskedLM": "fill-mask",
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": "question-answering",
    "ForPreTraining": "feature-extraction",
    "Model": "feature-extraction",
}


def choose_task(checkpoint: Path) -> str:
    """Return the task to export a checkpoint for, by its config.json; or refuse it."""
    with raise_checkpoint_errors():
        config = read_json(checkpoint / "config.json")
        refuse_kind(checkpoint, config, with_optimum=True)
        refuse_quantized(checkpoint, config)
    if "auto_map" in config:
        raise CheckpointError(
            f"{checkpoint}: config.json refers to custom code (auto_map), which is never run; remove auto_map"
            " if transformers supports the model without it"
        )
    name = read_architecture(config)
    named = config.get("architectures")
    task = next((task for end, task in TASKS.items() if name.endswith(end)), None)
    if task is None:
        raise CheckpointError(
            f"{checkpoint}: config.json's architectures is {named!r}; supported are those that end in"
            f" {', '.join(TASKS)}"
        )
    check_weights(checkpoint, name)
    return "feature-extraction" if (checkpoint / "modules.json").is_file() else task


def check_tokenizer(checkpoint: Path) -> None:
    """Refuse a checkpoint without a tokenizer."""
    if not any(any(checkpoint.glob(pattern)) for pattern in TOKENIZERS):
        raise CheckpointError(f"{checkpoint} has no tokenizer file: add one of {', '.join(TOKENIZERS)}")


def check_weights(checkpoint: Path, architecture: str) -> None:
    """Refuse a checkpoint without safetensors."""
    if any((checkpoint / name).is_file() for name in ("model.safetensors", "model.safetensors.index.json")):
        return
    if any(checkpoint.glob("*.onnx")):
        raise CheckpointError(f"{checkpoint} has graphs and no weights: planforge import {checkpoint}")
    pickles = sorted(path.name for path in checkpoint.glob("*.bin"))
    only = f", only {pickles[0]}, a pickle, which is never read" if pickles else ""
    raise CheckpointError(
        f'{checkpoint} has no model.safetensors{only}; convert it: python -c "from transformers import'
        f" {architecture} as M; M.from_pretrained('MODEL').save_pretrained('FOLDER')\", and copy the"
        " tokenizer's files"
    )


def has_reference_model(checkpoint: Path) -> bool:
    """Tell whether PlanForge exports a checkpoint itself; also true where config.json does not say."""
    from ...models.families import FAMILIES

    folder = checkpoint if (checkpoint / "config.json").is_file() else checkpoint / "0_Transformer"
    try:
        config = read_json(folder / "config.json", missing={})
    except ValueError:
        return True
    kind = config.get("model_type")
    if not isinstance(kind, str):
        return True
    # The way through optimum knows what to do with graphs alone.
    only_graphs = any(folder.glob("*.onnx")) and not any(folder.glob("*.safetensors"))
    return kind in FAMILIES and not only_graphs
