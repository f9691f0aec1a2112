"""Generation defaults from a checkpoint's generation_config.json and config.json."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...runtime.bundle.defaults import GenerationDefaults, SequenceBias, TokenRules
from ...runtime.decoding.beam import make_search
from ...runtime.decoding.checks import FLOAT32_MAX
from ...runtime.errors import InputError
from ..errors import CheckpointError

log = logging.getLogger("planforge")

# Settings that change what is generated and that the runtime does not have, with the values that mean "off".
UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "diversity_penalty": (None, 0.0),
    "do_sample": (None, False),
    "encoder_no_repeat_ngram_size": (None, 0),
    "encoder_repetition_penalty": (None, 1.0),
    "forced_decoder_ids": (None, []),
    "num_beam_groups": (None, 1),
    "prefix_allowed_tokens_fn": (None,),
    "stop_strings": (None, []),
}
# The same for language models.
UNSUPPORTED_BY_DECODERS: dict[str, tuple[object, ...]] = {
    "encoder_no_repeat_ngram_size": (None, 0),
    "encoder_repetition_penalty": (None, 1.0),
    "epsilon_cutoff": (None, 0.0),
    "eta_cutoff": (None, 0.0),
    "forced_bos_token_id": (None,),
    "forced_eos_token_id": (None,),
    "guidance_scale": (None, 1.0),
    "penalty_alpha": (None, 0.0),
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
            raise CheckpointError(f"{self.where}: {name} is {value!r}, not a token id")
        return tuple(values)

    def read_integer(self, name: str, expected: str = "an integer") -> int | None:
        """Return an integer; None where it is not set."""
        value = self.value.get(name)
        if value is not None and type(value) is not int:
            raise CheckpointError(f"{self.where}: {name} is {value!r}, not {expected}")
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

    def read_known(self, name: str) -> tuple[int, ...]:
        """Return the tokens of a setting that the model has, in order."""
        return tuple(sorted({token for token in self.read_tokens(name) if self.has(token)}))

    def has(self, token: int) -> bool:
        return 0 <= token < self.vocab_size

    def read_sequence(self, name: str, value: object) -> tuple[int, ...]:
        """Return the tokens of a sequence that a setting lists."""
        if not isinstance(value, list) or not value or not all(type(token) is int for token in value):
            raise CheckpointError(f"{self.where}: {name} has {value!r:.60}, not a list of token ids")
        return tuple(value)

    def read_list(self, name: str) -> list[Any]:
        """Return a setting that is a list; none where it is not set."""
        value = self.value.get(name)
        if value is not None and not isinstance(value, list):
            raise CheckpointError(f"{self.where}: {name} is {value!r:.60}, not a list")
        return value or []

    def read_words(self) -> list[tuple[int, ...]]:
        """Return the sequences of bad_words_ids, without those with a token that no model chooses."""
        words = [self.read_sequence("bad_words_ids", word) for word in self.read_list("bad_words_ids")]
        return sorted({word for word in words if all(map(self.has, word))})

    def read_biases(self) -> tuple[SequenceBias, ...]:
        """Return sequence_bias, a list of [tokens, number]; of one sequence the last counts."""
        name = "sequence_bias"
        biases = {}
        for pair in self.read_list(name):
            if not isinstance(pair, list) or len(pair) != 2 or type(pair[1]) not in (int, float):
                raise CheckpointError(f"{self.where}: {name} has {pair!r:.60}, not [[token ids], bias]")
            sequence = self.read_sequence(name, pair[0])
            self.require(abs(pair[1]) <= FLOAT32_MAX, name, pair[1], "a finite number; bad_words_ids forbids")
            if all(map(self.has, sequence)):
                biases[sequence] = float(pair[1])
        return tuple(SequenceBias(sequence, added) for sequence, added in biases.items())

    def read_decay(self) -> tuple[int, float]:
        """Return exponential_decay_length_penalty: where it begins, and its factor; 1.0 is none."""
        name = "exponential_decay_length_penalty"
        pair = self.read_list(name)
        if not pair:
            return 0, 1.0
        if len(pair) != 2 or type(pair[0]) is not int or type(pair[1]) not in (int, float):
            raise CheckpointError(f"{self.where}: {name} is {pair!r:.60}, not [start, factor]")
        self.require(pair[0] >= 0, name, pair[0], "a count of tokens from 0")
        self.require(0 < pair[1] <= FLOAT32_MAX, name, pair[1], "a finite factor over 0")
        return pair[0], float(pair[1])

    def read_rules(self) -> TokenRules:
        """Return the rules of tokens that every model that generates may have."""
        decay_start, decay_factor = self.read_decay()
        return TokenRules(
            bad_words=tuple(word for word in self.read_words() if len(word) > 1),
            suppress_tokens=self.read_known("suppress_tokens"),
            begin_suppress_tokens=self.read_known("begin_suppress_tokens"),
            sequence_bias=self.read_biases(),
            decay_start=decay_start,
            decay_factor=decay_factor,
        )

    def read_stop_strings(self) -> tuple[str, ...]:
        """Return the texts that end an answer."""
        value = self.value.get("stop_strings")
        texts = [value] if isinstance(value, str) else self.read_list("stop_strings")
        if not all(isinstance(text, str) and text for text in texts):
            raise CheckpointError(f"{self.where}: stop_strings is {value!r:.60}, not a list of strings")
        return tuple(texts)

    def require(self, holds: bool, name: str, value: float, allowed: str) -> None:
        """Refuse a number for which a condition does not hold, as none does for NaN."""
        if not holds:
            raise CheckpointError(
                f"{self.where}: {name} is {value!r}, expected {allowed}; correct it in generation_config.json"
            )


def read_decoder_defaults(settings: Settings, max_length: int) -> GenerationDefaults:
    """Return the generation defaults of a language model; refuse what transformers would refuse."""
    warn_about_unsupported(settings, UNSUPPORTED_BY_DECODERS)
    penalty = settings.read_number("repetition_penalty", 1.0)
    settings.require(0.0 < penalty <= FLOAT32_MAX, "repetition_penalty", penalty, "a finite number over 0")
    defaults = replace(
        read_token_defaults(settings, max_length),
        repetition_penalty=penalty,
        no_repeat_ngram_size=max(0, settings.read_integer("no_repeat_ngram_size") or 0) or None,
        stop=settings.read_stop_strings(),
        renormalize=settings.read_flag("renormalize_logits"),
    )
    defaults = add_lengths(defaults, settings)
    if settings.read_flag("do_sample"):
        warn_about_unsupported(settings, {"num_beams": (None, 1)})  # beams draw no tokens here
        return add_sampling(defaults, settings)
    defaults = add_beam_search(defaults, settings)
    if defaults.num_beams > 1:
        warn_about_unsupported(settings, {"stop_strings": (None, [])})
        return replace(defaults, stop=())
    return defaults


def add_lengths(defaults: GenerationDefaults, settings: Settings) -> GenerationDefaults:
    """Return a language model's defaults with its lengths: those of new tokens win, as in transformers."""
    least = settings.read_integer("min_new_tokens")
    most = settings.read_integer("max_new_tokens")
    total = settings.read_integer("max_length")
    if most is not None and most < 1:
        raise CheckpointError(f"{settings.where}: max_new_tokens is {most}; it must be at least 1")
    if most is None and total is not None and total < 2:
        raise CheckpointError(
            f"{settings.where}: max_length is {total}; it counts the prompt too, and must be at least 2"
        )
    shortest = 0 if least is not None else max(0, settings.read_integer("min_length") or 0)
    return replace(
        defaults,
        max_new_tokens=most,
        max_total_tokens=total if most is None else None,
        min_new_tokens=max(0, least or 0),
        rules=replace(defaults.rules, min_length=shortest),
    )


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
        top_k = 1  # top_p=0 leaves only the likeliest token
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
            log.warning("%s sets %s=%r, which is ignored", settings.where, name, settings.value[name])


def read_token_defaults(settings: Settings, max_length: int) -> GenerationDefaults:
    """Return the settings of all models that generate: special and suppressed tokens, and the length."""
    return GenerationDefaults(
        eos=tuple(t for t in settings.read_tokens("eos_token_id") if 0 <= t < settings.vocab_size),
        bos=settings.read_integer("bos_token_id", "a token's number"),
        pad=settings.read_integer("pad_token_id", "a token's number"),
        max_length=max_length,
        suppressed=tuple(word[0] for word in settings.read_words() if len(word) == 1),
        rules=settings.read_rules(),
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
        repetition_penalty=settings.read_number("repetition_penalty", 1.0),
        no_repeat_ngram_size=settings.read_integer("no_repeat_ngram_size") or None,
        min_new_tokens=least,
        max_new_tokens=min(max_length, most),
        renormalize=settings.read_flag("renormalize_logits"),
    )
    return add_beam_search(defaults, settings)
