"""The tokens of a row so far, kept as an array, so that no step converts all of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, overload

import numpy as np
import numpy.typing as npt


class TokenHistory(Sequence[int]):
    """A growing sequence of token ids; `np.asarray` of it copies nothing."""

    def __init__(self, tokens: Iterable[int]) -> None:
        self._room: npt.NDArray[np.int64] = np.array([*tokens], np.int64)
        self._length = len(self._room)

    def append(self, token: int) -> None:
        if self._length == len(self._room):
            self._room = np.concatenate([self._room, np.empty(max(64, self._length), np.int64)])
        self._room[self._length] = token
        self._length += 1

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        found: int | list[int] = self._room[: self._length][index].tolist()
        return found

    def __iter__(self) -> Iterator[int]:
        return iter(self[:])

    def __len__(self) -> int:
        return self._length

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        return np.array(self._room[: self._length], dtype, copy=copy)
