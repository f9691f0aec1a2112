"""Generation defaults from a checkpoint's generation_config.json and config.json."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...runtime.bundle.defaults import GenerationDefaults
from ...runtime.decoding.beam import make_search
from ...runtime.decoding.sampling import FLOAT32_MAX
from ...runtime.errors import InputError
from ..errors import CheckpointError

log = logging.getLogger("planforge")

# Settings that change what is generated and that the runtime does not have, with the values that mean "off".
UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "begin_suppress_tokens": (None, []),
    "diversity_penalty": (None, 0.0),
    "do_sample": (None, False),
    "encoder_no_repeat_ngram_size": (None, 0),
    "forced_decoder_ids": (None, []),
    "num_beam_groups": (None, 1),
    "prefix_allowed_tokens_fn": (None,),
    "sequence_bias": (None, []),
}
# The same for language models.
UNSUPPORTED_BY_DECODERS: dict[str, tuple[object, ...]] = {
    "bad_words_ids": (None, []),
    "begin_suppress_tokens": (None, []),
    "epsilon_cutoff": (None, 0.0),
    "eta_cutoff": (None, 0.0),
    "exponential_decay_length_penalty": (None,),
    "forced_bos_token_id": (None,),
    "forced_eos_token_id": (None,),
    "guidance_scale": (None, 1.0),
    "min_length": (None, 0),
    "min_new_tokens": (None, 0),
    "penalty_alpha": (None, 0.0),
    "sequence_bias": (None, []),
    "stop_strings": (None, []),
    "suppress_tokens": (None, []),
    "top_h": (None,),
    "typical_p": (None, 1.0),
    "watermarking_config": (None,),
}
USUAL_TOP_K = 50  # of a checkpoint that samples and has no top_k: transformers' own default
TOKENS = ("bos_token_id", "decoder_start_token_id", "eos_token_id", "pad_token_id")


def merge_settings(config_json: Mapping[str, Any], generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a checkpoint's two files: config.json's only where there is no other.

    transformers reads them the same way, but for the tokens, which old files have in config.json alone.
    """
    if not generation_config:
        return dict(config_json)
    tokens = {name: config_json[name] for name in TOKENS if name in config_json}
    return {**tokens, **{name: value for name, value in generation_config.items() if value is not None}}


class Settings:
    """A checkpoint's generation settings, read field by field."""

    def __init__(self, value: Mapping[str, Any], where: str, vocab_size: int) -> None:
        self.value = value
        self.where = where  # their name in errors
        self.vocab_size = vocab_size  # token ids from here on are left out of lists: no model chooses them

    def read_output_token(self, name: str) -> int | None:
        """Return the id of one token that the model can write; some files have it in a list."""
        found = self.read_tokens(name)
        if len(found) > 1:
            raise CheckpointError(f"{self.where}: {name} is {found}; only one token is supported")
        if found and not 0 <= found[0] < self.vocab_size:
            raise CheckpointError(f"{self.where}: {name}={found[0]} is not in the target's vocabulary")
        return found[0] if found else None

    def read_tokens(self, name: str) -> tuple[int, ...]:
        """Return the ids of a setting that is one token or a list of them."""
        value = self.value.get(name)
        if value is None:
            return ()
        values = value if isinstance(value, list) else [value]
        if not all(type(token) is int for token in values):
            raise CheckpointError(f"{self.where}: {name} is {value!r}, not a token's number")
        return tuple(values)

    def read_integer(self, name: str, meant: str = "an integer") -> int | None:
        """Return an integer; None where it is not set."""
        value = self.value.get(name)
        if value is not None and type(value) is not int:
            raise CheckpointError(f"{self.where}: {name} is {value!r}, not {meant}")
        return value

    def read_number(self, name: str, default: float) -> float:
        """Return a number, or the default where it is None or not set."""
        value = self.value.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise CheckpointError(f"{self.where}: {name} is {value!r}, not a number")
        try:
            return float(value)
        except OverflowError as error:
            raise CheckpointError(f"{self.where}: {name} is {value!r:.40}..., which is too large") from error

    def read_flag(self, name: str) -> bool:
        """Return True or False; False where it is not set."""
        value = self.value.get(name)
        if value not in (None, False, True) or type(value) is int:
            raise CheckpointError(f"{self.where}: {name} is {value!r}, not true or false")
        return bool(value)

    def read_bad_words(self) -> tuple[int, ...]:
        """Return the tokens of bad_words_ids and suppress_tokens."""
        words = self.value.get("bad_words_ids") or []
        if not isinstance(words, list) or not all(isinstance(w, list) and len(w) == 1 for w in words):
            raise CheckpointError(
                f"{self.where}: bad_words_ids is {words!r}; only single tokens are supported"
            )
        found = set(self.read_tokens("suppress_tokens"))
        for (token,) in words:
            if type(token) is not int:
                raise CheckpointError(f"{self.where}: bad_words_ids has {token!r}, not a token's number")
            found.add(token)
        return tuple(sorted(t for t in found if 0 <= t < self.vocab_size))

    def require(self, holds: bool, name: str, value: float, allowed: str) -> None:
        """Refuse a number for which a condition does not hold, as none does for NaN."""
        if not holds:
            raise CheckpointError(
                f"{self.where}: {name} is {value!r}, meant is {allowed}; mend it in generation_config.json"
            )


def read_decoder_defaults(settings: Settings, max_length: int) -> GenerationDefaults:
    """Return the generation defaults of a language model; refuse what transformers would refuse."""
    warn_about_unsupported(settings, UNSUPPORTED_BY_DECODERS)
    max_new_tokens = settings.read_integer("max_new_tokens")
    if max_new_tokens is not None and max_new_tokens < 1:
        raise CheckpointError(f"{settings.where}: max_new_tokens is {max_new_tokens}; it must be at least 1")
    penalty = settings.read_number("repetition_penalty", 1.0)
    settings.require(0.0 < penalty <= FLOAT32_MAX, "repetition_penalty", penalty, "a finite number over 0")
    defaults = replace(
        read_token_defaults(settings, max_length),
        max_new_tokens=max_new_tokens,
        repetition_penalty=penalty,
        no_repeat_ngram_size=max(0, settings.read_integer("no_repeat_ngram_size") or 0) or None,
    )
    if settings.read_flag("do_sample"):
        warn_about_unsupported(settings, {"num_beams": (None, 1)})  # beams draw no tokens here
        return add_sampling(defaults, settings)
    return add_beam_search(defaults, settings)


def add_beam_search(defaults: GenerationDefaults, settings: Settings) -> GenerationDefaults:
    """Return defaults that search with beams, where a checkpoint means that."""
    num_beams = settings.read_integer("num_beams")
    stopping = settings.value.get("early_stopping")
    defaults = replace(
        defaults,
        num_beams=1 if num_beams is None else num_beams,
        length_penalty=settings.read_number("length_penalty", 1.0),
        early_stopping="never" if stopping == "never" else settings.read_flag("early_stopping"),
    )
    try:
        make_search(defaults)
    except InputError as error:
        raise CheckpointError(f"{settings.where}: {error}") from error
    return defaults


def add_sampling(defaults: GenerationDefaults, settings: Settings) -> GenerationDefaults:
    """Return defaults that draw tokens, as transformers' `generate` would by these settings."""
    temperature = settings.read_number("temperature", 1.0)
    settings.require(0.0 < temperature <= FLOAT32_MAX, "temperature", temperature, "a finite number over 0")
    top_k = settings.read_integer("top_k")
    if top_k is None:
        top_k = USUAL_TOP_K
    settings.require(0 <= top_k <= FLOAT32_MAX, "top_k", top_k, "an integer of at least 0")
    top_p = settings.read_number("top_p", 1.0)  # from 1.0 on transformers does not look at it
    settings.require(top_p >= 0.0, "top_p", top_p, "a number from 0 to 1")
    min_p = settings.read_number("min_p", 0.0)
    settings.require(0.0 <= min_p <= 1.0, "min_p", min_p, "a number from 0 to 1")
    if top_p == 0.0:
        top_k = 1  # the likeliest token is all that top_p=0 leaves
    return replace(
        defaults,
        do_sample=True,
        temperature=temperature,
        top_k=top_k or None,
        top_p=top_p if 0.0 < top_p < 1.0 else None,
        min_p=min_p or None,
    )


def warn_about_unsupported(settings: Settings, unsupported: Mapping[str, tuple[object, ...]]) -> None:
    """Log which of a checkpoint's settings change what is generated and are left out."""
    for name, off in unsupported.items():
        if settings.value.get(name) not in off:
            log.warning("%s sets %s=%r, which is left out", settings.where, name, settings.value[name])


def read_token_defaults(settings: Settings, max_length: int) -> GenerationDefaults:
    """Return what every model that generates has: its special tokens and its length."""
    return GenerationDefaults(
        eos=tuple(t for t in settings.read_tokens("eos_token_id") if 0 <= t < settings.vocab_size),
        bos=settings.read_integer("bos_token_id", "a token's number"),
        pad=settings.read_integer("pad_token_id", "a token's number"),
        max_length=max_length,
    )


def read_translation_defaults(settings: Settings, max_length: int) -> GenerationDefaults:
    """Return the generation defaults of an encoder-decoder."""
    basics = read_token_defaults(settings, max_length)
    start = settings.read_output_token("decoder_start_token_id")
    missing = [] if basics.eos else ["eos_token_id"]
    missing += ["decoder_start_token_id"] if start is None else []
    if missing:
        raise CheckpointError(
            f"{settings.where}: {' and '.join(missing)} missing; a translation needs both, in"
            " generation_config.json"
        )
    warn_about_unsupported(settings, UNSUPPORTED)
    # Of the lengths those of new tokens win; the others count the start token.
    least = settings.read_integer("min_new_tokens")
    most = settings.read_integer("max_new_tokens")
    if least is None:
        least = max(0, (settings.read_integer("min_length") or 0) - 1)
    if most is None:
        most = (settings.read_integer("max_length") or max_length + 1) - 1
    defaults = replace(
        basics,
        decoder_start=start,
        forced_bos=settings.read_output_token("forced_bos_token_id"),
        forced_eos=settings.read_output_token("forced_eos_token_id"),
        suppressed=settings.read_bad_words(),
        repetition_penalty=settings.read_number("repetition_penalty", 1.0),
        no_repeat_ngram_size=settings.read_integer("no_repeat_ngram_size") or None,
        min_new_tokens=least,
        max_new_tokens=min(max_length, most),
        renormalize=settings.read_flag("renormalize_logits"),
    )
    return add_beam_search(defaults, settings)
