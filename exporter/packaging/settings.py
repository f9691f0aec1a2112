"""A bundle's generation settings under Hugging Face's names, and those that a runtime does not know."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any

from ...runtime.bundle.defaults import GenerationDefaults
from ...runtime.bundle.manifest import Manifest
from .hugging_face import describe_special_tokens

log = logging.getLogger("planforge")

# What every reader does unless it is told otherwise; of other settings None is off.
OFF: dict[str, Any] = {
    "do_sample": False,
    "repetition_penalty": 1.0,
    "num_beams": 1,
    "length_penalty": 1.0,
    "early_stopping": False,
    "min_new_tokens": 0,
    "renormalize_logits": False,
    "bad_words_ids": [],
    "min_length": 0,
    "suppress_tokens": [],
    "begin_suppress_tokens": [],
    "sequence_bias": [],
    "stop_strings": [],
}


def list_settings(manifest: Manifest) -> dict[str, Any]:
    """Return the generation settings of the bundle, which are the checkpoint's, without those that are off.

    But top_k is there wherever tokens are drawn: without it transformers takes 50, and 0 is off.
    """
    defaults = manifest.generation
    assert defaults is not None
    values: dict[str, Any] = {
        "do_sample": defaults.do_sample,
        "temperature": defaults.temperature,
        "top_k": (defaults.top_k or 0) if defaults.do_sample else None,
        "top_p": defaults.top_p,
        "min_p": defaults.min_p,
        "repetition_penalty": defaults.repetition_penalty,
        "num_beams": defaults.num_beams,
        "length_penalty": defaults.length_penalty,
        "early_stopping": defaults.early_stopping,
        "no_repeat_ngram_size": defaults.no_repeat_ngram_size,
        "min_new_tokens": defaults.min_new_tokens,
        "max_new_tokens": defaults.max_new_tokens,
        "renormalize_logits": defaults.renormalize,
        **list_rules(defaults),
    }
    return {name: value for name, value in values.items() if value != OFF.get(name)}


def list_rules(defaults: GenerationDefaults) -> dict[str, Any]:
    """Return a bundle's rules for required and forbidden tokens, and for the end of a sequence."""
    rules = defaults.rules
    decays = rules.decay_factor != 1.0
    return {
        "bad_words_ids": [*([token] for token in defaults.suppressed), *map(list, rules.bad_words)],
        "max_length": defaults.max_total_tokens,
        "min_length": rules.min_length,
        "suppress_tokens": list(rules.suppress_tokens),
        "begin_suppress_tokens": list(rules.begin_suppress_tokens),
        "sequence_bias": [[list(bias.tokens), bias.added] for bias in rules.sequence_bias],
        "exponential_decay_length_penalty": [rules.decay_start, rules.decay_factor] if decays else None,
        "stop_strings": list(defaults.stop),
    }


def describe_generation(manifest: Manifest) -> dict[str, Any]:
    """Return generation_config.json: special tokens, and the checkpoint's sampling, or search."""
    return describe_special_tokens(manifest) | list_settings(manifest)


def warn_about_unknown(runtime: str, settings: Mapping[str, Any], unknown: Collection[str]) -> None:
    """Log which settings a runtime does not know, so that it generates without them."""
    left_out = [f"{name}={value!r:.40}" for name, value in settings.items() if name in unknown]
    if left_out:
        names = ", ".join(left_out)
        log.warning("%s does not support the bundle's settings %s, and ignores them", runtime, names)
