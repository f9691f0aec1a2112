"""The checked options of one call of `TextGenerator`, in one frozen object."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from ..decoding.beam import Search
from ..decoding.chunk import OnToken
from ..decoding.sampling import Sampling, check_integer
from ..errors import InputError
from ..options import (
    BatchGenerationOptions,
    GenerationOptions,
    ProgressOption,
    check_choice,
    check_options,
    check_whole,
    option_names,
)

TRUNCATIONS = (None, "tail")
SPECULATIVE = (None, "prompt-lookup")
SOURCES_OF_DEFAULTS = (None, "checkpoint")
BEAMS = ("num_beams", "length_penalty", "early_stopping")
DRAWING = ("temperature", "top_k", "top_p", "min_p")
SWITCHES = ("ignore_eos", "parse_special", "reuse_prompt", "logprobs")


@dataclass(frozen=True)
class GenerationRequest:
    """The options of a call, as `GenerationOptions` says what they mean.

    Attributes:
        sampling: those that decide how a token is chosen.
        search: how beams are searched, from the options that say so; None without beams.

    Raises:
        InputError: one of them cannot be used.
    """

    sampling: Sampling
    max_new_tokens: int = 64
    stop: str | Sequence[str] | None = None
    ignore_eos: bool = False
    truncation: Literal["tail"] | None = None
    parse_special: bool = False
    speculative: Literal["prompt-lookup"] | None = None
    reuse_prompt: bool = False
    num_beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    n_best: int = 1
    logprobs: bool = True
    top_logprobs: int = 0
    on_token: OnToken | None = None
    progress: ProgressOption = False
    batch_size: int | None = None
    search: Search | None = None

    def __post_init__(self) -> None:
        check_whole("max_new_tokens", self.max_new_tokens, 1)
        check_choice("truncation", self.truncation, TRUNCATIONS)
        check_choice("speculative", self.speculative, SPECULATIVE)
        for name in SWITCHES:
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise InputError(f"{name}={value!r:.80} must be True or False")
        check_integer("top_logprobs", self.top_logprobs, 0, "0 gives none")
        if self.on_token is not None and not callable(self.on_token):
            raise InputError(f"on_token={self.on_token!r:.80} must be a function that takes a chunk, or None")

    @property
    def one_by_one(self) -> bool:
        """Whether several prompts run one after the other instead of as a batch."""
        return self.speculative is not None or self.reuse_prompt

    def options_without_beams(self) -> list[tuple[str, Any]]:
        """Return the options that are set and that beams do not take, with their values."""
        sampling = self.sampling
        drawing = () if sampling.greedy else DRAWING
        values = {name: getattr(sampling, name) for name in (*drawing, "logit_bias", "logits_processor")}
        for name in ("stop", "speculative", "reuse_prompt", "top_logprobs", "on_token"):
            values[name] = getattr(self, name)
        given = [(name, value) for name, value in values.items() if value]
        if sampling.seed is not None:  # 0 is one too
            given.append(("seed", sampling.seed))
        return given


def resolve_request(
    options: GenerationOptions,
    checkpoint: GenerationOptions,
    *,
    streams: bool = False,
    several: bool = False,
) -> GenerationRequest:
    """Return a call's request: the options given, before the checkpoint's, before the defaults.

    Options of the checkpoint give way where they do not go with those that are given: its beams to drawn
    tokens, streams and what else beams do not take, its drawing to beams.

    Args:
        options: as the caller gave them; one that is given wins, also as None.
        checkpoint: what the checkpoint's generation_config says; counts with generation="checkpoint".
        streams: whether the answer is asked for piece by piece.
        several: whether the call takes several prompts, and with them progress and batch_size.

    Raises:
        InputError: there is no such option, or its value cannot be used.
    """
    check_options(options, option_names(BatchGenerationOptions if several else GenerationOptions))
    given: dict[str, Any] = dict(options)
    source = given.pop("generation", None)
    check_choice("generation", source, SOURCES_OF_DEFAULTS)
    request = make_request(given)
    if source is None:
        return request
    left_out: Sequence[str] = ()
    if request.num_beams != 1:
        left_out = DRAWING
    elif streams or request.options_without_beams():
        left_out = BEAMS
    usual = {name: value for name, value in checkpoint.items() if name not in left_out}
    return make_request({**usual, **given})


def make_request(options: Mapping[str, Any]) -> GenerationRequest:
    """Return the request that options make, some of which are those of `Sampling`."""
    names = {field.name for field in fields(Sampling)}
    sampling = Sampling(**{name: value for name, value in options.items() if name in names})
    return GenerationRequest(
        sampling=sampling, **{name: value for name, value in options.items() if name not in names}
    )
