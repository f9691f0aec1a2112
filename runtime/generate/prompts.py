"""What a prompt is, and how many tokens a model has for it."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ..bundle.manifest import Artifact
from ..errors import InputError
from ..text.tokenizer import Tokenizer

Prompt: TypeAlias = str | Sequence[int] | npt.NDArray[np.int64] | npt.NDArray[np.int32]
"""A text, or token ids, which are taken as they are; an array of them has one axis."""


def is_one_prompt(prompt: Any) -> bool:
    """Return whether this is one prompt: a text, an array, or a sequence of token ids alone."""
    if isinstance(prompt, str | np.ndarray):
        return True
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes | bytearray):
        way_out = "; iterate() takes any iterable of prompts" if hasattr(prompt, "__iter__") else ""
        raise InputError(
            "prompt must be a text, a sequence of token ids, or a sequence of these, not"
            f" {type(prompt).__name__}{way_out}"
        )
    return len(prompt) > 0 and all(isinstance(token, Integral) for token in prompt)


def count_vocabulary(artifact: Artifact, tokenizer: Tokenizer) -> int:
    """Return how many tokens the model has; where its graph does not say, as many as its tokenizer."""
    sizes = (spec.axes[-1] for spec in artifact.outputs if spec.role == "logits")
    return next((size for size in sizes if isinstance(size, int)), tokenizer.vocab_size)
