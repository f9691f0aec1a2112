"""The tokens of a row so far, as a list and as an array, so that no step converts all of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt


class TokenHistory(list[int]):
    """A list of token ids that only grows; `np.asarray` of it converts those that are new since the last.

    Attributes:
        prompt_length: how many there were at the beginning.
    """

    def __init__(self, tokens: Iterable[int]) -> None:
        super().__init__(tokens)
        self.prompt_length = len(self)
        self._room = np.empty(0, np.int64)
        self._converted = 0

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        length = len(self)
        if length > len(self._room):
            self._room = np.concatenate([self._room, np.empty(length + 64, np.int64)])
        self._room[self._converted : length] = self[self._converted :]
        self._converted = length
        tokens = self._room[:length]
        return np.asarray(tokens, dtype) if copy is None else np.array(tokens, dtype, copy=copy)
