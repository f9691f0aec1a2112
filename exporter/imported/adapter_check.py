"""Compares weights with an adapter in them with those that peft gets of the same folders."""

from __future__ import annotations

import logging
import warnings
from typing import Any

from ...models.adapter_merge import Merge
from ...models.adapters import WAY_OUT, read_adapter
from ...models.checkpoint import describe
from ...models.folder import read_published_weights
from ...models.weights import read_weights
from ..checkpoints.source import Source, merge_into
from ..errors import CheckpointError, VerificationError, raise_checkpoint_errors, shorten_error
from .architectures import choose_task
from .transformers_export import CLASSES

log = logging.getLogger("planforge")

# Of a weight's largest number. Both add r products of fp32 to each, in an order of their own: 512 products,
# as many as any rank, lose at most 512 * 2^-24 of the largest.
TOLERANCE = 512 * 2.0**-24
# Classes by what an adapter is for; of others the base's own.
CLASSES_OF_ADAPTERS = {
    "SEQ_CLS": "AutoModelForSequenceClassification",
    "TOKEN_CLS": "AutoModelForTokenClassification",
    "QUESTION_ANS": "AutoModelForQuestionAnswering",
    "CAUSAL_LM": "AutoModelForCausalLM",
    "SEQ_2_SEQ_LM": "AutoModelForSeq2SeqLM",
    "FEATURE_EXTRACTION": "AutoModel",
}


def compare_with_peft(source: Source) -> None:
    """Compare every weight that an adapter changes; a warning says if peft is not installed.

    Raises:
        VerificationError: a weight differs from peft's; names the worst.
    """
    try:
        import peft
    except ImportError:
        log.warning("the merged weights are not compared with those of peft: pip install peft")
        return
    assert source.base is not None and source.adapter is not None
    theirs = merge_with_peft(peft, source)
    with raise_checkpoint_errors():
        merge = Merge(source.base.folder, read_adapter(source.adapter))
    changed = {*merge.list_changed(), *(f"{module}.bias" for module in merge.changes)}
    worst = (0.0, "")
    compared = 0
    for _, name, ours in read_published_weights(source.folder):
        if name not in changed:
            continue
        if (other := find_tensor(theirs, name)) is None:
            raise VerificationError(f"{name} is not among the weights that peft merged; {WAY_OUT}")
        compared += 1
        gap = float((ours.float() - other).abs().max() / other.abs().max().clamp(min=1e-30))
        worst = max(worst, (gap, name))
    if worst[0] > TOLERANCE or not compared:
        raise VerificationError(
            f"{worst[1] or source.adapter}: merged weights differ from peft's by {worst[0]:.1e} of the"
            f" largest. Please report it; {WAY_OUT}"
        )
    log.info("%d merged weights are those of peft %s", compared, peft.__version__)


def compare_tables(source: Source) -> None:
    """Compare the adapters that stay beside a model with the same ones, each merged into it, and with peft.

    Raises:
        VerificationError: the weight that a table makes differs from the merged one; names the worst.
    """
    assert source.base is not None
    with raise_checkpoint_errors():
        beside = read_weights(describe(source.folder))
    for slot, (name, place) in enumerate(source.adapters.items(), 1):
        merged_source = merge_into(source.base, place)
        compare_with_peft(merged_source)
        with raise_checkpoint_errors():
            merged = read_weights(describe(merged_source.folder))
        worst = (0.0, "")
        for weight, wanted in merged.items():
            path = weight.removesuffix(".weight")
            made = beside[weight]
            if (a := beside.get(f"{path}.adapters.a")) is not None:
                rank = len(a) // (len(source.adapters) + 1)
                rows = slice(slot * rank, (slot + 1) * rank)
                made = made + beside[f"{path}.adapters.b"][rows].T @ a[rows]
            gap = float((made - wanted).abs().max() / wanted.abs().max().clamp(min=1e-30))
            worst = max(worst, (gap, weight))
        if worst[0] > TOLERANCE:
            raise VerificationError(
                f"{worst[1]} with the adapter {name} beside it differs from the merged weight by"
                f" {worst[0]:.1e} of the largest. Please report it; {WAY_OUT}"
            )


def merge_with_peft(peft: Any, source: Source) -> dict[str, Any]:
    """Return the weights of transformers' model in fp32 after peft merged the adapter into them."""
    import torch
    import transformers

    assert source.base is not None and source.adapter is not None
    settings = read_adapter(source.adapter).settings
    name = (
        CLASSES_OF_ADAPTERS.get(str(settings.get("task_type"))) or CLASSES[choose_task(source.base.folder)][0]
    )
    more: dict[str, Any] = {}
    if "Classification" in name:
        config = transformers.AutoConfig.from_pretrained(source.folder, local_files_only=True)
        more["num_labels"] = config.num_labels
    load = getattr(transformers, name).from_pretrained
    more |= {"dtype": torch.float32, "local_files_only": True, "use_safetensors": True}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # peft calls what transformers advises against
            config = peft.PeftConfig.from_pretrained(source.adapter, local_files_only=True)
            config.task_type = None  # a task's class of peft generates text, which is not asked for
            base = load(source.base.folder, **more)
            model = peft.PeftModel.from_pretrained(base, source.adapter, config=config)
            merged = model.merge_and_unload()
    except Exception as error:  # whatever the files bring transformers or peft to
        raise CheckpointError(
            f"peft cannot load {source.adapter} for {source.base.folder}: {shorten_error(error)}"
        ) from error
    return dict(merged.state_dict())


def find_tensor(tensors: dict[str, Any], name: str) -> Any:
    """Return the tensor of a name, which may have outer modules in front; None where there is none."""
    if name in tensors:
        return tensors[name]
    found = [one for one in tensors if one.endswith(f".{name}")]
    return tensors[found[0]] if len(found) == 1 else None
