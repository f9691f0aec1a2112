"""A checkpoint's generation_config as options of a call."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from ..bundle.defaults import GenerationDefaults
from .request import BEAMS, DRAWING, GenerationRequest

if TYPE_CHECKING:
    from ..options import GenerationOptions

log = logging.getLogger("planforge")


def checkpoint_options(defaults: GenerationDefaults) -> GenerationOptions:
    """Return the options that a bundle's checkpoint asks for; none of a bundle that keeps nothing of them.

    As with transformers, temperature, top_k, top_p and min_p count only where the checkpoint means its
    tokens to be drawn, and num_beams, length_penalty and early_stopping only where it does not.
    """
    options: GenerationOptions = {}
    if defaults.max_new_tokens is not None:
        options["max_new_tokens"] = defaults.max_new_tokens
    if defaults.do_sample:
        options["temperature"] = 1.0 if defaults.temperature is None else defaults.temperature
        options["top_k"] = defaults.top_k
        options["top_p"] = defaults.top_p
        options["min_p"] = defaults.min_p
    elif defaults.num_beams > 1:
        options["num_beams"] = defaults.num_beams
        options["length_penalty"] = defaults.length_penalty
        stopping = defaults.early_stopping
        options["early_stopping"] = "never" if stopping == "never" else bool(stopping)
    if defaults.repetition_penalty != 1.0:
        options["repetition_penalty"] = defaults.repetition_penalty
    if defaults.no_repeat_ngram_size is not None:
        options["no_repeat_ngram_size"] = defaults.no_repeat_ngram_size
    return options


def describe_request(request: GenerationRequest) -> str:
    """Return how a call chooses its tokens, such as "temperature=0.7, top_p=0.9, max_new_tokens=64"."""
    sampling = request.sampling
    named: dict[str, Any] = {}
    if request.num_beams > 1:
        named |= {name: getattr(request, name) for name in BEAMS}
    elif not sampling.greedy:
        named |= {name: getattr(sampling, name) for name in DRAWING}
    if sampling.repetition_penalty != 1.0:
        named["repetition_penalty"] = sampling.repetition_penalty
    named["no_repeat_ngram_size"] = sampling.no_repeat_ngram_size
    named["max_new_tokens"] = request.max_new_tokens
    listed = ", ".join(f"{name}={value}" for name, value in named.items() if value is not None)
    return f"greedy, {listed}" if request.num_beams == 1 and sampling.greedy else listed


class CheckpointOptions:
    """A checkpoint's options, and a line in the log that tells once what they come to.

    Args:
        defaults: what the bundle keeps of its generation_config.
    """

    def __init__(self, defaults: GenerationDefaults) -> None:
        self.options = checkpoint_options(defaults)
        self._told = False

    def tell(self, request: GenerationRequest) -> None:
        """Log the options in force of the first call that takes the checkpoint's."""
        if not self._told:
            self._told = True
            log.info(
                "options not given are the checkpoint's (generation_config.json); in force are: %s",
                describe_request(request),
            )
