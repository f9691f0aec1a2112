"""What one generate call was asked for, and one of its prompts while it is answered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np

from ..backends.backend import Array
from ..decoding.candidates import choose_tokens
from ..decoding.sampling import Sampling
from ..errors import InputError
from ..text.stream import StopStrings
from ..text.tokenizer import Tokenizer

FinishReason: TypeAlias = Literal["eos", "stop", "length", "context"]
SPECULATIVE = ("prompt-lookup",)


@dataclass(frozen=True)
class Asked:
    """The options of `TextGenerator.generate`, which says what they mean.

    Raises:
        InputError: one of them cannot be used.
    """

    sampling: Sampling
    max_new_tokens: int
    stop: str | Sequence[str] | None = None
    truncate: str | None = None
    parse_special: bool = False
    speculative: str | None = None
    reuse_prompt: bool = False

    @classmethod
    def of(cls, max_new_tokens: int, options: Mapping[str, Any]) -> Asked:
        """Sorts the options of a call into these and those of `Sampling`."""
        own = [name for name in cls.__dataclass_fields__ if name not in ("sampling", "max_new_tokens")]
        known = [*Sampling.__dataclass_fields__, *own]
        if unknown := sorted(set(options) - set(known)):
            raise InputError(f"unknown option {unknown}; there are {', '.join(known)}")
        sampling = Sampling(**{name: value for name, value in options.items() if name not in own})
        return cls(sampling, max_new_tokens, **{name: options[name] for name in own if name in options})

    def __post_init__(self) -> None:
        most = self.max_new_tokens
        if not isinstance(most, int) or isinstance(most, bool) or most < 1:
            raise InputError(f"max_new_tokens={most!r} must be a whole number of at least 1")
        if self.truncate not in (None, "left"):
            raise InputError(f"truncate={self.truncate!r} must be None or 'left'")
        if self.speculative not in (None, *SPECULATIVE):
            raise InputError(
                f"speculative={self.speculative!r} must be None or one of {', '.join(map(repr, SPECULATIVE))}"
            )
        if not isinstance(self.reuse_prompt, bool):
            raise InputError(f"reuse_prompt={self.reuse_prompt!r} must be True or False")

    @property
    def one_by_one(self) -> bool:
        """Whether several prompts run one after the other instead of as a batch."""
        return self.speculative is not None or self.reuse_prompt


class Row:
    """One prompt being answered."""

    def __init__(self, tokenizer: Tokenizer, prompt: list[int], cut: int, room: int, asked: Asked) -> None:
        self.prompt = prompt
        self.cut = cut  # tokens that the prompt lost at its beginning
        self.reused = 0  # tokens of the prompt that were in a cache already
        self.drafted = self.accepted = 0
        self.history = list(prompt)  # and the answer, as it grows
        self.limit = asked.max_new_tokens
        self.room = room
        self.stop = StopStrings(asked.stop)
        self.stream = tokenizer.stream()
        self.vocab_size = tokenizer.vocab_size
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.pieces: list[str] = []
        self.finish_reason: FinishReason | None = None

    @property
    def most_left(self) -> int:
        """New tokens that may still come."""
        return min(self.limit, self.room) - len(self.token_ids)

    def add(self, token: int, logprob: float, eos: Sequence[int]) -> None:
        """Takes the next token; the last of `pieces` is the text that may be shown now."""
        self.history.append(token)
        self.token_ids.append(token)
        self.logprobs.append(logprob)
        # A model may have more rows than its tokenizer has tokens; those beyond spell nothing.
        piece = self.stop.push(self.stream.push(token) if token < self.vocab_size else "")
        if self.stop.found is not None:
            self.finish_reason = "stop"
        elif token in eos:
            self.finish_reason = "eos"
        elif len(self.token_ids) == self.limit:
            self.finish_reason = "length"
        elif len(self.token_ids) == self.room:
            self.finish_reason = "context"
        if self.finish_reason is not None:
            if self.stop.found is None:
                piece += self.stop.push(self.stream.finish())
            if self.stop.found is not None:  # the last bytes completed one
                self.finish_reason = "stop"
            piece += self.stop.finish()
        self.pieces.append(piece)

    def accept(
        self,
        drafts: Sequence[int],
        scores: Array,
        sampling: Sampling,
        generator: np.random.Generator,
        eos: Sequence[int],
    ) -> int:
        """Takes the tokens that the model chooses, up to the first that is no draft or ends the row.

        Each is chosen after those before it, with the draws it would have had one at a time.

        Args:
            drafts: k tokens that the model was given behind the row's last.
            scores: (1 + k, ...) that follow that one and each of them.

        Returns:
            How many drafts were right.
        """
        right = 0
        for row, draft in zip(scores, [*drafts, None], strict=True):
            tokens, logprobs = choose_tokens(row[None], [self.history], sampling, [generator])
            self.add(int(tokens[0]), float(logprobs[0]), eos)
            right += self.history[-1] == draft
            if self.history[-1] != draft or self.finish_reason is not None:
                break
        self.drafted += len(drafts)
        self.accepted += right
        return right
