"""Runs an encoder in PyTorch: our model, transformers', or the graphs that optimum wrote.

T tokens, E hidden size
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ...models.encoder import Encoder
from ...runtime.apps.check.case import Text
from ..errors import VerificationError, shorten_error
from ..imported.signature import STATE_NAMES
from ..reference_model import OnnxGraphs

if TYPE_CHECKING:
    from ..reference_model import ReferenceModel

OF_LOGITS = ("masked_lm", "sequence_classification", "token_classification")


def run_model(model: ReferenceModel, text: Text) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Return every layer's hidden states (1, T, E) of one sequence, and the heads' results.

    Of what is not our model each layer's are the last.
    """
    segments = text.segments or (0,) * len(text.tokens)
    if isinstance(model, OnnxGraphs):
        given = {"input_ids": np.array([text.tokens]), "token_type_ids": np.array([segments])}
        out = {name: torch.from_numpy(array) for name, array in model.run(given).items()}
        return name_results(out, model.layers)
    if not isinstance(model, Encoder):
        return run_hub_model(model, text)
    with torch.no_grad():
        ids = torch.tensor([text.tokens])
        mask = torch.ones_like(ids)
        kinds = torch.tensor([segments]) if model.config.type_vocab_size else None
        states = model.hidden_states(ids, kinds, model.make_attention(mask))
        return states, dict(model.head_outputs(states[-1], mask, ids))


def run_hub_model(model: Any, text: Text) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Return the results of transformers' model for a sequence."""
    given = {"input_ids": torch.tensor([text.tokens])}
    given["attention_mask"] = torch.ones_like(given["input_ids"])
    if any(text.segments):
        given["token_type_ids"] = torch.tensor([text.segments])
    try:
        with torch.no_grad():
            out = model(**given)
    except (IndexError, RuntimeError) as error:  # torch's own
        raise VerificationError(
            f"the model in transformers does not run with {len(text.tokens)} tokens ({shorten_error(error)});"
            " export fewer with --max-length"
        ) from error
    return name_results(out, model.config.num_hidden_layers)


def name_results(
    out: Mapping[str, torch.Tensor], layers: int
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Return the last hidden states (1, T, E), for any layer, and the head's results."""
    if "start_logits" in out:
        return [], {"question_answering": torch.stack([out["start_logits"], out["end_logits"]], dim=-1)}
    if "logits" in out:
        return [], dict.fromkeys(OF_LOGITS, out["logits"])
    return [next(out[name] for name in STATE_NAMES if name in out)] * (layers + 1), {}
