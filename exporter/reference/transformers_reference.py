"""The same model in transformers, for verification; any version of transformers that knows it will do.

T tokens, E hidden size, N outputs and K inputs of a linear layer
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import CheckpointError, VerificationError, shorten_error
from ..imported.folder import has_weights, read_folder
from ..imported.signature import STATE_NAMES
from ..task_traits import TRAITS

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ...runtime.bundle.defaults import EncoderDefaults
    from ...runtime.text.long_text import Piece
    from .model import ReferenceModel

AUTO_MODELS = {  # by the first head
    "masked_lm": "AutoModelForMaskedLM",
    "question_answering": "AutoModelForQuestionAnswering",
    "sequence_classification": "AutoModelForSequenceClassification",
    "token_classification": "AutoModelForTokenClassification",
}
OF_LOGITS = ("masked_lm", "sequence_classification", "token_classification")


def load_reference(folder: Path, task: str, encoder: EncoderDefaults | None) -> ReferenceModel:
    """Return transformers' model in fp32, for the first head or else the task; or the folder's graphs."""
    if not has_weights(folder):
        from .onnx_reference import OnnxGraphs

        return OnnxGraphs(read_folder(folder))
    try:
        import transformers
        from transformers.utils import logging as progress
    except ImportError as error:
        raise VerificationError(
            "an imported model is read with transformers too: pip install transformers"
        ) from error
    import torch

    progress.disable_progress_bar()
    heads = () if encoder is None else encoder.heads
    auto = getattr(transformers, AUTO_MODELS[heads[0]] if heads else TRAITS[task].auto_model)
    try:
        model = auto.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True, trust_remote_code=False, use_safetensors=True
        )
    except Exception as error:  # transformers raises whatever a file brings it to
        raise CheckpointError(f"transformers cannot load {folder}: {shorten_error(error)}") from error
    replace_conv1d(model)
    module: nn.Module = model.eval().requires_grad_(False)
    return module


def replace_conv1d(model: nn.Module) -> None:
    """Replace GPT-2's Conv1D, whose weight is transposed, by linear layers, so all weights are (N, K)."""
    from torch.nn import Linear, Parameter
    from transformers.pytorch_utils import Conv1D

    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, Conv1D):
                linear = Linear(*child.weight.shape)
                linear.weight = Parameter(child.weight.T.contiguous())
                linear.bias = child.bias
                setattr(module, name, linear)


def run_encoder(model: Any, piece: Piece) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Return the last hidden states (1, T, E) of one sequence, for any layer, and the head's results."""
    import torch

    from . import onnx_reference

    if isinstance(model, onnx_reference.OnnxGraphs):
        return onnx_reference.run_encoder(model, piece)
    with torch.no_grad():
        given = {"input_ids": torch.tensor([piece.ids]), "attention_mask": torch.ones(1, len(piece)).long()}
        if any(piece.segments):
            given["token_type_ids"] = torch.tensor([piece.segments])
        try:
            out = model(**given)
        except (IndexError, RuntimeError) as error:  # torch's own
            raise VerificationError(
                f"the model in transformers does not run with {len(piece)} tokens ({shorten_error(error)});"
                " export fewer with --max-length"
            ) from error
    return name_results(out, model.config.num_hidden_layers)


def name_results(out: Mapping[str, Tensor], layers: int) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Return the last hidden states (1, T, E), for any layer, and the head's results."""
    import torch

    if "start_logits" in out:
        return [], {"question_answering": torch.stack([out["start_logits"], out["end_logits"]], dim=-1)}
    if "logits" in out:
        return [], dict.fromkeys(OF_LOGITS, out["logits"])
    return [next(out[name] for name in STATE_NAMES if name in out)] * (layers + 1), {}
