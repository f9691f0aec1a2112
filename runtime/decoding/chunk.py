"""The chunks of an answer, and the stream that they come in."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from threading import Event
from typing import Any, Literal, TypeAlias, overload

import numpy as np
import numpy.typing as npt

# The ids of a place's likeliest tokens, their log-probabilities, and whether the text begins there.
Likeliest: TypeAlias = tuple[npt.NDArray[np.int64], npt.NDArray[np.float64], bool]
FinishReason: TypeAlias = Literal["eos", "stop", "length", "context", "cancelled"]
"""Why an answer ended: an end token, a stop string, max_new_tokens, a full context, or the caller."""


@dataclass(frozen=True)
class Usage:
    """How many tokens an answer took.

    Attributes:
        prompt_tokens: tokens that the model read, after the prompt was cut if it was.
        completion_tokens: new tokens so far, an end token included.
    """

    prompt_tokens: int
    completion_tokens: int

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True)
class TopLogprob:
    """One of the likeliest tokens at a position.

    Attributes:
        token_id: the token.
        text: what it adds to the text, with the space before a word; a special one as it is spelled. Part of
            a character is U+FFFD.
        logprob: under the model itself, before temperature and the like.
    """

    token_id: int
    text: str
    logprob: float


class TopLogprobs(Sequence[tuple[TopLogprob, ...]]):
    """The likeliest tokens of each place, which become objects when they are read.

    A long answer has hundreds of thousands: Python's garbage collector would look at each again and again.
    """

    def __init__(self, places: Sequence[Likeliest], spell: Callable[[int, bool], str]) -> None:
        self._places = places
        self._spell = spell

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, index: int) -> tuple[TopLogprob, ...]: ...
    @overload
    def __getitem__(self, index: slice) -> TopLogprobs: ...
    def __getitem__(self, index: int | slice) -> tuple[TopLogprob, ...] | TopLogprobs:
        if isinstance(index, slice):
            return TopLogprobs(self._places[index], self._spell)
        ids, logprobs, begins = self._places[index]
        pairs = zip(ids.tolist(), logprobs.tolist(), strict=True)
        return tuple(TopLogprob(token, self._spell(token, begins), logprob) for token, logprob in pairs)

    def __add__(self, other: Sequence[tuple[TopLogprob, ...]]) -> tuple[tuple[TopLogprob, ...], ...]:
        return (*self, *other)

    def __radd__(self, other: Sequence[tuple[TopLogprob, ...]]) -> tuple[tuple[TopLogprob, ...], ...]:
        return (*other, *self)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TopLogprobs | tuple) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))

    def __reduce__(self) -> Any:
        return tuple, (tuple(self),)  # a copy in another process needs no tokenizer


@dataclass(frozen=True)
class Chunk:
    """What one step added to an answer; prints as its text.

    Text never ends inside a character, nor holds part of a stop string. So it may be empty although there
    are new tokens, and come with later ones.

    Attributes:
        text: what may be shown now, without special tokens or the stop string.
        token_ids: the new tokens; none where a cancelled answer ends without a further step.
        logprobs: of each new token under the model itself; empty with logprobs=False and of a translation.
        top_logprobs: of each new token's place the likeliest tokens, the likeliest first; empty unless
            asked for.
        finish_reason: None but on the last chunk, which always has it.
        usage: tokens of the prompt and new ones so far.
        index: which of the call's prompts this belongs to.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    top_logprobs: Sequence[tuple[TopLogprob, ...]]
    finish_reason: FinishReason | None
    usage: Usage
    index: int = 0

    def __str__(self) -> str:
        return self.text


OnToken: TypeAlias = Callable[[Chunk], bool | None]


def report_chunk(
    next_chunk: Callable[[], Chunk], cancel: Callable[[], None], on_token: OnToken | None
) -> Chunk:
    """Return what came since the last chunk, after a caller's callback has seen it.

    Returning True from the callback ends the answer by `cancel`; then the returned chunk is its last.
    """
    chunk = next_chunk()
    if on_token is None or on_token(chunk) is not True or chunk.finish_reason is not None:
        return chunk
    cancel()
    rest = next_chunk()
    return replace(chunk, text=chunk.text + rest.text, finish_reason=rest.finish_reason)


class TextStream(Iterator[Chunk]):
    """The chunks of one answer, each as soon as it is there.

    May be abandoned at any point; `close` frees the cache at once. A call of `cancel` ends the answer in
    order: what was held back comes as a last chunk.

    Args:
        make_chunks: makes the chunks. Before each step it looks at the event that it is given, and ends with
            a chunk whose finish_reason is "cancelled" if that is set.

    Example:
        >>> stream = model.stream("And it came to pass", max_new_tokens=60)
        >>> for chunk in stream:
        ...     print(chunk, end="", flush=True)
        ...     if "king" in chunk.text:
        ...         stream.cancel()
        >>> chunk.finish_reason
        'cancelled'
    """

    def __init__(self, make_chunks: Callable[[Event], Generator[Chunk, None, None]]) -> None:
        self._cancelled = Event()
        self._chunks = make_chunks(self._cancelled)

    def __next__(self) -> Chunk:
        return next(self._chunks)

    def cancel(self) -> None:
        """End the answer before its next step; the last chunk says "cancelled". Safe from any thread."""
        self._cancelled.set()

    def close(self) -> None:
        """End the stream without a last chunk and free what it holds. Closing twice is fine."""
        self._chunks.close()
