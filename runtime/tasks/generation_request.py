"""What one call of `TextGenerator` is asked for: its options, checked, in one frozen object."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from ..decoding.beam import Search
from ..decoding.sampling import Sampling, check_integer
from ..errors import InputError
from ..options import GenerationOptions, ProgressOption, check_choice, check_options, option_names
from .chunk import Chunk

TRUNCATIONS = (None, "tail")
SPECULATIVE = (None, "prompt-lookup")
SOURCES_OF_DEFAULTS = (None, "checkpoint")
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
    on_token: Callable[[Chunk], bool | None] | None = None
    progress: ProgressOption = False
    batch_size: int | None = None
    search: Search | None = None

    def __post_init__(self) -> None:
        most = self.max_new_tokens
        if not isinstance(most, int) or isinstance(most, bool) or most < 1:
            raise InputError(f"max_new_tokens={most!r} must be a whole number of at least 1")
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


def resolve_request(options: GenerationOptions, checkpoint: GenerationOptions) -> GenerationRequest:
    """Return what a call is asked for: the options given, before the checkpoint's, before the defaults.

    Args:
        options: as the caller gave them; one that is given wins, also as None.
        checkpoint: what the checkpoint's generation_config says; counts with generation="checkpoint".

    Raises:
        InputError: there is no such option, or its value cannot be used.
    """
    check_options(options, option_names(GenerationOptions))
    chosen: dict[str, Any] = dict(options)
    source = chosen.pop("generation", None)
    check_choice("generation", source, SOURCES_OF_DEFAULTS)
    if source == "checkpoint":
        chosen = {**checkpoint, **chosen}
    names = {field.name for field in fields(Sampling)}
    sampling = Sampling(**{name: value for name, value in chosen.items() if name in names})
    return GenerationRequest(
        sampling=sampling, **{name: value for name, value in chosen.items() if name not in names}
    )
