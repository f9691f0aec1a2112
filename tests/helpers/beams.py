"""transformers' beam search, as the answers here have it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def search_beams(
    reference: Any, prompt: Sequence[int], **options: Any
) -> list[tuple[tuple[int, ...], float]]:
    """Token ids and scores of each hypothesis, the best first.

    Args:
        reference: a decoder of transformers.
        prompt: its token ids.
        options: those of `generate` here.
    """
    translated: dict[str, Any] = {
        **options,
        "num_return_sequences": options.get("n_best", 1),
        "pad_token_id": 0,
    }
    translated.pop("n_best", None)
    eos = reference.generation_config.eos_token_id
    ends = {eos} if isinstance(eos, int) else set(eos)
    if translated.pop("ignore_eos", False):
        translated["eos_token_id"] = None
        ends = set()
    how: dict[str, Any] = {"return_dict_in_generate": True, "output_scores": True, "do_sample": False}
    ids = torch.tensor([list(prompt)])
    out = reference.generate(ids, attention_mask=torch.ones_like(ids), **how, **translated)
    found = []
    for sequence, score in zip(out.sequences[:, len(prompt) :].tolist(), out.sequences_scores, strict=True):
        last = next((place for place, token in enumerate(sequence) if token in ends), len(sequence) - 1)
        found.append((tuple(sequence[: last + 1]), float(score)))
    return found
