"""Turns a caller's prompt into tokens that fit the context."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from numbers import Integral
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ..bundle.defaults import GenerationDefaults
from ..bundle.manifest import Artifact
from ..errors import ContextLengthError, InputError
from ..text.tokenizer import Tokenizer

log = logging.getLogger("planforge")

Prompt: TypeAlias = str | Sequence[int] | npt.NDArray[np.int64] | npt.NDArray[np.int32]
"""A text, or token ids, which are taken as they are; an array of them has one axis."""

FORMS = "a text, a sequence of token ids, or a sequence of these"


def is_one_prompt(prompt: Any) -> bool:
    """Return whether this is one prompt: a text, an array, or a sequence of token ids alone.

    Raises:
        InputError: it is neither a prompt nor a sequence of prompts.
    """
    if isinstance(prompt, str | np.ndarray):
        return True
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes | bytearray):
        way_out = "; iterate() takes any iterable of prompts" if hasattr(prompt, "__iter__") else ""
        raise InputError(f"prompt must be {FORMS}, not {type(prompt).__name__}{way_out}")
    return len(prompt) > 0 and all(isinstance(token, Integral) for token in prompt)


@contextmanager
def name_prompt(number: int) -> Iterator[None]:
    """Put the number of a prompt, among several, before the message of an error about it."""
    try:
        yield
    except ContextLengthError as error:
        message = f"prompts[{number}]: {error}"
        raise ContextLengthError(message, tokens=error.tokens, limit=error.limit) from error
    except InputError as error:
        raise InputError(f"prompts[{number}]: {error}") from error


class PromptReader:
    """Turns prompts into tokens behind the special ones that begin every prompt.

    Args:
        max_length: the context in tokens.
        vocabulary: how many tokens the model has.
    """

    def __init__(
        self, *, tokenizer: Tokenizer, defaults: GenerationDefaults, max_length: int, vocabulary: int
    ) -> None:
        self.tokenizer = tokenizer
        self.defaults = defaults
        self.max_length = max_length
        self.vocabulary = vocabulary

    def read(self, prompt: Any, parse_special: bool) -> list[int]:
        """Return the tokens of one prompt, which may not be empty."""
        if tokens := self.read_all(prompt, parse_special):
            return self._add_prefix(tokens) if isinstance(prompt, str) else tokens
        if not self.defaults.eos:
            raise InputError("the prompt is empty")
        eos = self.tokenizer.spelling(self.defaults.eos[0])
        way_out = f"to begin from nothing, use {eos!r} with parse_special=True (--parse-special)"
        raise InputError(f"the prompt is empty; {way_out}")

    def read_framed(self, text: Any, parse_special: bool) -> list[int]:
        """Return the tokens of a text that may be empty, or token ids as they are."""
        tokens = self.read_all(text, parse_special)
        return self._add_prefix(tokens) if isinstance(text, str) else tokens

    def read_all(self, prompt: Any, parse_special: bool) -> list[int]:
        """Return a text's own tokens, or token ids as they are.

        Raises:
            InputError: it is neither a text nor token ids of the model.
        """
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt, parse_special=parse_special)
        if isinstance(prompt, np.ndarray):
            if prompt.ndim != 1 or not np.issubdtype(prompt.dtype, np.integer):
                raise InputError(
                    f"an array of shape {prompt.shape} and {prompt.dtype} is no prompt, which has one axis of"
                    " whole numbers; several prompts are a list of arrays"
                )
            prompt = prompt.tolist()
        if not isinstance(prompt, Sequence) or isinstance(prompt, bytes | bytearray):
            raise InputError(
                f"a prompt must be a str or a sequence of token ids, not {type(prompt).__name__}"
            )
        return [self._check_token(token) for token in prompt]

    def fit(self, tokens: list[int], max_new_tokens: int, truncation: str | None) -> tuple[list[int], int]:
        """Return the prompt, or its end if it is to be cut, and how many tokens were dropped.

        Raises:
            ContextLengthError: it leaves no room for an answer, and is not to be cut.
        """
        if truncation is None:
            if len(tokens) < self.max_length:
                return tokens, 0
            raise ContextLengthError(
                f"the prompt has {len(tokens)} tokens; the context holds {self.max_length}, of which one"
                " must be left for the answer. Shorten it, or drop its beginning by truncation='tail'"
                " (--truncation tail)",
                tokens=len(tokens),
                limit=self.max_length - 1,
            )
        keep = self.max_length - min(max_new_tokens, self.max_length // 2)
        if len(tokens) <= keep:
            return tokens, 0
        log.warning("the prompt has %d tokens; its first %d were dropped", len(tokens), len(tokens) - keep)
        prefix = self.defaults.prefix[:keep]
        if tuple(tokens[: len(prefix)]) != prefix:  # a chat template may begin without it
            prefix = ()
        return [*prefix, *tokens[len(tokens) - keep + len(prefix) :]], len(tokens) - keep

    def _add_prefix(self, tokens: list[int]) -> list[int]:
        """Put the special tokens that begin every prompt before these, unless they are there already."""
        prefix = list(self.defaults.prefix)
        return tokens if tokens[: len(prefix)] == prefix else prefix + tokens

    def _check_token(self, token: Any) -> int:
        if not isinstance(token, Integral) or isinstance(token, bool):
            raise InputError(f"a prompt's token ids must be whole numbers, not {type(token).__name__}")
        token_id = int(token)
        if not 0 <= token_id < self.vocabulary:
            raise InputError(
                f"a prompt has the token id {token_id}, but the model's are 0 to {self.vocabulary - 1}; take"
                " the ids from the model's own tokenizer"
            )
        return token_id


def vocabulary_of(artifact: Artifact, tokenizer: Tokenizer) -> int:
    """Return how many tokens the model has; where its graph does not say, as many as its tokenizer."""
    sizes = [spec.axes[-1] for spec in artifact.outputs if spec.role == "logits"]
    fixed = [size for size in sizes if isinstance(size, int)]
    return fixed[0] if fixed else tokenizer.vocab_size
