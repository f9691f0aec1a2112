"""What a checkpoint's generation_config says, as options of a call."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ..bundle.defaults import GenerationDefaults

if TYPE_CHECKING:
    from ..options import GenerationOptions

log = logging.getLogger("planforge")


def checkpoint_options(defaults: GenerationDefaults) -> GenerationOptions:
    """Return the options that a bundle's checkpoint asks for; none of a bundle that keeps nothing of them.

    As with transformers, temperature, top_k, top_p and min_p count only where the checkpoint means its
    tokens to be drawn.
    """
    options: GenerationOptions = {}
    if defaults.max_new_tokens is not None:
        options["max_new_tokens"] = defaults.max_new_tokens
    if defaults.do_sample:
        options["temperature"] = 1.0 if defaults.temperature is None else defaults.temperature
        options["top_k"] = defaults.top_k
        options["top_p"] = defaults.top_p
        options["min_p"] = defaults.min_p
    if defaults.repetition_penalty != 1.0:
        options["repetition_penalty"] = defaults.repetition_penalty
    if defaults.no_repeat_ngram_size is not None:
        options["no_repeat_ngram_size"] = defaults.no_repeat_ngram_size
    return options


def describe_options(options: GenerationOptions) -> str:
    """Return options in one line, such as "temperature=0.7, top_p=0.9"; "greedily" of none that draws."""
    named = ", ".join(f"{name}={value}" for name, value in options.items() if value is not None)
    if "temperature" in options:
        return named
    return f"greedy, {named}" if named else "greedy"


class CheckpointOptions:
    """A checkpoint's options, which the log tells once, when a call first asks for them.

    Args:
        defaults: what the bundle keeps of its generation_config.
    """

    def __init__(self, defaults: GenerationDefaults) -> None:
        self.options = checkpoint_options(defaults)
        self._told = False

    def asked_by(self, given: GenerationOptions) -> GenerationOptions:
        """Return the options, and tell them if a call asks for them that has not been told before."""
        if given.get("generation") == "checkpoint" and not self._told:
            self._told = True
            log.info(
                "options not given are the checkpoint's (generation_config.json): %s",
                describe_options(self.options),
            )
        return self.options
